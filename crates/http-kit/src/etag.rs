//! Entity tags: the version of a row, in `ETag`, `If-Match` and `If-None-Match`. A change of a version that is no
//! longer current is rejected (412), and a request for a version that the client already has is answered with 304.
//!
//! A version alone is not enough: a standby that is promoted may lack the last changes, and their versions are then
//! assigned again to other content. So a tag also contains the time of the change, in microseconds.

use axum::extract::FromRequestParts;
use chrono::{DateTime, Utc};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};

use crate::header::{malformed_header, single_header};
use crate::problem::Problem;

/// The accepted form of `If-Match` and `If-None-Match`, as a regular expression: `*`, or tags in quotes, joined by commas.
/// It agrees with [`is_tag`].
pub(crate) const PATTERN: &str = r#"^(\*|(W/)?"[!#-+\--~]*"( *, *(W/)?"[!#-+\--~]*")*)$"#;

/// Returns the tag of a version that was made at this time.
pub fn of(version: i64, changed_at: DateTime<Utc>) -> HeaderValue {
    quoted(&unique(version, changed_at))
}

/// Returns the tag of a version together with a value that changes without a new version, such as a count.
/// `If-None-Match` compares both; `If-Match` compares only the version.
pub fn with_extra(version: i64, changed_at: DateTime<Utc>, extra: impl std::fmt::Display) -> HeaderValue {
    quoted(&format!("{}.{extra}", unique(version, changed_at)))
}

/// Returns the tag of a response without a version: equal responses have equal tags.
pub fn of_content(body: &str) -> HeaderValue {
    let digest = runtime::secret::digest(body);
    quoted(&digest[..8].iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

/// A version and the time of its change, which together never repeat.
fn unique(version: i64, changed_at: DateTime<Utc>) -> String {
    format!("{version}.{:x}", changed_at.timestamp_micros())
}

fn quoted(text: &str) -> HeaderValue {
    // Letters, digits, dots and quotes are always valid in a header.
    HeaderValue::try_from(format!("\"{text}\"")).unwrap_or_else(|_| HeaderValue::from_static("\"\""))
}

/// The versions in `If-Match`: the change is valid only for these.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IfMatch(Option<Tags>);

/// The versions in `If-None-Match`: the client already has these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IfNoneMatch(Option<Tags>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Tags {
    Any,
    /// Each with its quotes, and with `W/` if it is weak.
    Listed(Vec<String>),
}

impl IfMatch {
    /// Fails with 412 if `If-Match` is present and does not contain this version. The number of a version alone is not enough,
    /// because it may be assigned again.
    pub fn check(&self, version: i64, changed_at: DateTime<Utc>) -> Result<(), Problem> {
        let unique = unique(version, changed_at);
        let is_current = match &self.0 {
            None | Some(Tags::Any) => true,
            // RFC 9110: a weak tag never matches in `If-Match`.
            Some(Tags::Listed(tags)) => {
                let with_extra = format!("\"{unique}.");
                tags.iter().any(|tag| quoted(&unique) == tag.as_str() || tag.starts_with(&with_extra))
            }
        };
        if is_current {
            return Ok(());
        }
        let detail = format!(
            "the current version is \"{unique}\": get it again, then repeat the change with its ETag in If-Match"
        );
        Err(Problem::new(StatusCode::PRECONDITION_FAILED, "stale", detail))
    }
}

impl IfNoneMatch {
    /// Returns true if the client already has the representation with this tag.
    pub fn matches(&self, current: &HeaderValue) -> bool {
        match &self.0 {
            None => false,
            Some(Tags::Any) => true,
            Some(Tags::Listed(tags)) => tags.iter().any(|tag| current == tag.trim_start_matches("W/")),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for IfMatch {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<IfMatch, Problem> {
        tags(&parts.headers, &header::IF_MATCH).map(IfMatch)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for IfNoneMatch {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<IfNoneMatch, Problem> {
        tags(&parts.headers, &header::IF_NONE_MATCH).map(IfNoneMatch)
    }
}

fn tags(headers: &HeaderMap, name: &HeaderName) -> Result<Option<Tags>, Problem> {
    let Some(text) = single_header(headers, name)? else { return Ok(None) };
    if text.trim() == "*" {
        return Ok(Some(Tags::Any));
    }
    // Splitting at commas is safe, because no tag of this server contains one.
    let tags: Vec<String> = text.split(',').map(|tag| tag.trim().to_owned()).filter(|tag| !tag.is_empty()).collect();
    if tags.is_empty() || !tags.iter().all(|tag| is_tag(tag)) {
        return Err(malformed_header(name, "must be an ETag exactly as it was returned, with its quotes, or *"));
    }
    Ok(Some(Tags::Listed(tags)))
}

fn is_tag(text: &str) -> bool {
    let quoted = text.strip_prefix("W/").unwrap_or(text);
    let opaque = quoted.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    opaque.is_some_and(|opaque| opaque.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: &str) -> Result<Option<Tags>, Problem> {
        let headers = HeaderMap::from_iter([(header::IF_MATCH, HeaderValue::from_str(value).unwrap())]);
        tags(&headers, &header::IF_MATCH)
    }

    /// 10 microseconds after the epoch, which is `a` in a tag.
    fn at() -> DateTime<Utc> {
        DateTime::from_timestamp_micros(10).unwrap()
    }

    #[test]
    fn a_change_applies_only_to_the_listed_versions() {
        let permits = |value: &str, version| IfMatch(read(value).unwrap()).check(version, at()).is_ok();
        assert!(permits("\"7.a\"", 7) && permits("\"6.a\", \"7.a\"", 7) && permits("*", 7));
        assert!(!permits("\"7\"", 7), "the number that the body shows may belong to two versions");
        assert!(!permits("\"7.a\"", 8) && !permits("W/\"7.a\"", 7) && !permits("\"77.a\"", 7));
        assert!(IfMatch(None).check(7, at()).is_ok());
        let refused = IfMatch(read("\"1\"").unwrap()).check(2, at()).unwrap_err();
        assert_eq!(refused.status(), StatusCode::PRECONDITION_FAILED);
    }

    #[test]
    fn a_version_that_was_assigned_again_has_another_tag() {
        let (lost, other) = (of(7, at()), of(7, at() + chrono::TimeDelta::microseconds(1)));
        let tag = lost.to_str().unwrap();
        assert!(IfMatch(read(tag).unwrap()).check(7, at() + chrono::TimeDelta::microseconds(1)).is_err());
        assert!(IfNoneMatch(read(tag).unwrap()).matches(&lost) && !IfNoneMatch(read(tag).unwrap()).matches(&other));
        assert!(of_content("a") == of_content("a") && of_content("a") != of_content("b"));
    }

    #[test]
    fn if_none_match_compares_weakly() {
        let has = |value: &str, version| IfNoneMatch(read(value).unwrap()).matches(&of(version, at()));
        assert!(has("\"7.a\"", 7) && has("W/\"7.a\"", 7) && has("\"1\",\"7.a\"", 7) && has("*", 7));
        assert!(!has("\"7.a\"", 8) && !has("\"7\"", 7) && !IfNoneMatch(None).matches(&of(7, at())));
    }

    #[test]
    fn an_extra_value_matters_to_if_none_match_only() {
        let tag = with_extra(7, at(), 3).to_str().unwrap().to_owned();
        let permits = |value: &str, version| IfMatch(read(value).unwrap()).check(version, at()).is_ok();
        assert!(permits(&tag, 7) && permits("\"7.a.4\"", 7));
        assert!(!permits(&tag, 8) && !permits("W/\"7.a.3\"", 7) && !permits("\"7.4\"", 7));
        let copy = IfNoneMatch(read(&tag).unwrap());
        assert!(copy.matches(&with_extra(7, at(), 3)));
        assert!(!copy.matches(&with_extra(7, at(), 4)) && !copy.matches(&with_extra(8, at(), 3)));
    }

    #[test]
    fn malformed_tags_are_rejected() {
        for bad in ["7", "\"7", "", "\"7\" 8", "\"", "\"7\"8\"", "\"7 8\"", "W/W/\"7\""] {
            assert_eq!(read(bad).unwrap_err().status(), StatusCode::BAD_REQUEST, "{bad}");
        }
    }
}

//! Entity tags: the version of a row, in `ETag`, `If-Match` and `If-None-Match`. A change of a version that is no
//! longer current is rejected (412), and a request for a version that the client already has is answered with 304.

use axum::extract::FromRequestParts;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};

use crate::extract::single_header;
use crate::problem::{FieldError, Location, Problem};

/// Returns the tag of a version.
pub fn of(version: i64) -> HeaderValue {
    // Digits and quotes are always valid in a header.
    HeaderValue::try_from(format!("\"{version}\"")).unwrap_or_else(|_| HeaderValue::from_static("\"\""))
}

/// Returns the tag of a version together with a value that changes without a new version, such as a count.
/// `If-None-Match` compares both; `If-Match` compares only the version.
pub fn with_extra(version: i64, extra: impl std::fmt::Display) -> HeaderValue {
    HeaderValue::try_from(format!("\"{version}.{extra}\"")).unwrap_or_else(|_| HeaderValue::from_static("\"\""))
}

/// The versions in `If-Match`: the change is valid only for these.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    /// Fails with 412 if `If-Match` is present and does not contain this version.
    pub fn check(&self, version: i64) -> Result<(), Problem> {
        let is_current = match &self.0 {
            None | Some(Tags::Any) => true,
            // RFC 9110: a weak tag never matches in `If-Match`.
            Some(Tags::Listed(tags)) => {
                let with_extra = format!("\"{version}.");
                tags.iter().any(|tag| of(version) == tag.as_str() || tag.starts_with(&with_extra))
            }
        };
        if is_current {
            return Ok(());
        }
        let detail = format!("the current version is \"{version}\": get it again, then repeat the change");
        Err(Problem::new(StatusCode::PRECONDITION_FAILED, "stale", detail))
    }
}

impl IfNoneMatch {
    /// Returns true if the client already has this version.
    pub fn matches(&self, version: i64) -> bool {
        self.matches_tag(&of(version))
    }

    /// Returns true if the client already has the representation with this tag.
    pub fn matches_tag(&self, current: &HeaderValue) -> bool {
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
    let is_quoted = |tag: &String| {
        let opaque = tag.trim_start_matches("W/");
        opaque.len() >= 2 && opaque.starts_with('"') && opaque.ends_with('"')
    };
    if tags.is_empty() || !tags.iter().all(is_quoted) {
        let detail = "must be an ETag exactly as it was returned, with its quotes, or *";
        let field = FieldError::at(Location::Header, format!("/{name}"), detail);
        return Err(Problem::bad_request("malformed-header", format!("{name}: {detail}")).with_errors(vec![field]));
    }
    Ok(Some(Tags::Listed(tags)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: &str) -> Result<Option<Tags>, Problem> {
        let headers = HeaderMap::from_iter([(header::IF_MATCH, HeaderValue::from_str(value).unwrap())]);
        tags(&headers, &header::IF_MATCH)
    }

    #[test]
    fn a_change_applies_only_to_the_listed_versions() {
        let permits = |value: &str, version| IfMatch(read(value).unwrap()).check(version).is_ok();
        assert!(permits("\"7\"", 7) && permits("\"6\", \"7\"", 7) && permits("*", 7));
        assert!(!permits("\"7\"", 8) && !permits("W/\"7\"", 7) && !permits("\"77\"", 7));
        assert!(IfMatch(None).check(7).is_ok());
        assert_eq!(IfMatch(read("\"1\"").unwrap()).check(2).unwrap_err().status(), StatusCode::PRECONDITION_FAILED);
    }

    #[test]
    fn if_none_match_compares_weakly() {
        let has = |value: &str, version| IfNoneMatch(read(value).unwrap()).matches(version);
        assert!(has("\"7\"", 7) && has("W/\"7\"", 7) && has("\"1\",\"7\"", 7) && has("*", 7));
        assert!(!has("\"7\"", 8) && !IfNoneMatch(None).matches(7));
    }

    #[test]
    fn an_extra_value_matters_to_if_none_match_only() {
        let tag = with_extra(7, 3).to_str().unwrap().to_owned();
        assert!(IfMatch(read(&tag).unwrap()).check(7).is_ok() && IfMatch(read("\"7.4\"").unwrap()).check(7).is_ok());
        assert!(
            IfMatch(read(&tag).unwrap()).check(8).is_err() && IfMatch(read("W/\"7.3\"").unwrap()).check(7).is_err()
        );
        let copy = IfNoneMatch(read(&tag).unwrap());
        assert!(
            copy.matches_tag(&with_extra(7, 3))
                && !copy.matches_tag(&with_extra(7, 4))
                && !copy.matches_tag(&with_extra(8, 3))
        );
    }

    #[test]
    fn malformed_tags_are_rejected() {
        for bad in ["7", "\"7", "", "\"7\" 8", "\""] {
            assert_eq!(read(bad).unwrap_err().status(), StatusCode::BAD_REQUEST, "{bad}");
        }
    }
}

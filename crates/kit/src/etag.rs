//! Entity tags: a row's version. Who changes what somebody else has changed meanwhile is told so (412), and who asks for
//! what they have already is told that, too (304).

use axum::extract::FromRequestParts;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};

use crate::extract::single_header;
use crate::problem::{FieldError, Place, Problem};

/// The tag of this version.
pub fn of(version: i64) -> HeaderValue {
    // Digits and quotes are always a header's value.
    HeaderValue::try_from(format!("\"{version}\"")).unwrap_or_else(|_| HeaderValue::from_static("\"\""))
}

/// The tag of this version, where something beside it is shown, too, that changes without one: a count. Who has the tag has
/// both as they are; who makes a change with it means the version alone.
pub fn beside(version: i64, shown: impl std::fmt::Display) -> HeaderValue {
    HeaderValue::try_from(format!("\"{version}.{shown}\"")).unwrap_or_else(|_| HeaderValue::from_static("\"\""))
}

/// The versions that `If-Match` names: the change is for these only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IfMatch(Option<Tags>);

/// The versions that `If-None-Match` names: the caller has these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IfNoneMatch(Option<Tags>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Tags {
    Any,
    /// With their quotes, and `W/` if they are weak.
    These(Vec<String>),
}

impl IfMatch {
    /// 412 unless the change is for this version, or for any.
    pub fn check(&self, version: i64) -> Result<(), Problem> {
        let is_meant = match &self.0 {
            None | Some(Tags::Any) => true,
            // A weak tag is never enough to change something.
            Some(Tags::These(tags)) => {
                let beside = format!("\"{version}.");
                tags.iter().any(|tag| of(version) == tag.as_str() || tag.starts_with(&beside))
            }
        };
        if is_meant {
            return Ok(());
        }
        let detail = format!("this was changed meanwhile, to \"{version}\": get it again, and decide again");
        Err(Problem::new(StatusCode::PRECONDITION_FAILED, "stale", detail))
    }
}

impl IfNoneMatch {
    /// Whether the caller has this version.
    pub fn has(&self, version: i64) -> bool {
        self.has_tag(&of(version))
    }

    /// Whether the caller has what this tag is of.
    pub fn has_tag(&self, current: &HeaderValue) -> bool {
        match &self.0 {
            None => false,
            Some(Tags::Any) => true,
            Some(Tags::These(tags)) => tags.iter().any(|tag| current == tag.trim_start_matches("W/")),
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
    // No tag of ours has a comma inside.
    let tags: Vec<String> = text.split(',').map(|tag| tag.trim().to_owned()).filter(|tag| !tag.is_empty()).collect();
    let is_quoted = |tag: &String| {
        let opaque = tag.trim_start_matches("W/");
        opaque.len() >= 2 && opaque.starts_with('"') && opaque.ends_with('"')
    };
    if tags.is_empty() || !tags.iter().all(is_quoted) {
        let detail = "takes an ETag as it came, with its quotes, or *";
        let field = FieldError::at(Place::Header, format!("/{name}"), detail);
        return Err(Problem::bad_request("malformed-header", format!("{name}: {detail}")).with_errors(vec![field]));
    }
    Ok(Some(Tags::These(tags)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: &str) -> Result<Option<Tags>, Problem> {
        let headers = HeaderMap::from_iter([(header::IF_MATCH, HeaderValue::from_str(value).unwrap())]);
        tags(&headers, &header::IF_MATCH)
    }

    #[test]
    fn a_change_is_for_the_versions_that_are_named() {
        let permits = |value: &str, version| IfMatch(read(value).unwrap()).check(version).is_ok();
        assert!(permits("\"7\"", 7) && permits("\"6\", \"7\"", 7) && permits("*", 7));
        assert!(!permits("\"7\"", 8) && !permits("W/\"7\"", 7) && !permits("\"77\"", 7));
        assert!(IfMatch(None).check(7).is_ok());
        assert_eq!(IfMatch(read("\"1\"").unwrap()).check(2).unwrap_err().status(), StatusCode::PRECONDITION_FAILED);
    }

    #[test]
    fn a_copy_is_known_by_its_tag_also_a_weak_one() {
        let has = |value: &str, version| IfNoneMatch(read(value).unwrap()).has(version);
        assert!(has("\"7\"", 7) && has("W/\"7\"", 7) && has("\"1\",\"7\"", 7) && has("*", 7));
        assert!(!has("\"7\"", 8) && !IfNoneMatch(None).has(7));
    }

    #[test]
    fn what_is_shown_beside_a_version_makes_another_copy_but_not_another_version() {
        let tag = beside(7, 3).to_str().unwrap().to_owned();
        assert!(IfMatch(read(&tag).unwrap()).check(7).is_ok() && IfMatch(read("\"7.4\"").unwrap()).check(7).is_ok());
        assert!(
            IfMatch(read(&tag).unwrap()).check(8).is_err() && IfMatch(read("W/\"7.3\"").unwrap()).check(7).is_err()
        );
        let copy = IfNoneMatch(read(&tag).unwrap());
        assert!(copy.has_tag(&beside(7, 3)) && !copy.has_tag(&beside(7, 4)) && !copy.has_tag(&beside(8, 3)));
    }

    #[test]
    fn what_is_no_tag_is_refused() {
        for bad in ["7", "\"7", "", "\"7\" 8", "\""] {
            assert_eq!(read(bad).unwrap_err().status(), StatusCode::BAD_REQUEST, "{bad}");
        }
    }
}

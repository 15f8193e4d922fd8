//! Reads headers of requests, and the 400 for a malformed one.

use http::{HeaderMap, HeaderName};

use crate::problem::{FieldError, Location, Problem};

/// Returns the text of a header, or None if it is absent. Fails with 400 if the header is repeated or not printable
/// ASCII.
pub(crate) fn single_header<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, Problem> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => value.to_str().map(Some).map_err(|_| malformed_header(name, "must be printable ASCII")),
        (Some(_), Some(_)) => Err(malformed_header(name, "must not be repeated")),
    }
}

/// Returns the 400 for a malformed header.
pub(crate) fn malformed_header(name: &HeaderName, detail: &str) -> Problem {
    let field = FieldError::at(Location::Header, format!("/{name}"), detail);
    Problem::bad_request("malformed-header", format!("{name}: {detail}")).with_errors(vec![field])
}

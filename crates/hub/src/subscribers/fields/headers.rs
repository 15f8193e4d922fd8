//! The headers that every webhook of a subscriber has.

use std::collections::BTreeMap;

use http_kit::extract::escape_pointer;
use http_kit::field::{Field, FieldChecks, FieldErrors, error};
use serde_json::json;
use utoipa::openapi::schema::{AdditionalProperties, Object, Schema, Type};
use utoipa::openapi::{ObjectBuilder, RefOr};
use utoipa::{PartialSchema, ToSchema};

use super::{HIDDEN_VALUE, has_same_origin};
use crate::subscribers::domain::SubscriberSettings;

/// The headers of deliveries: names and values.
pub(super) struct CustomHeaders;

/// The headers of a subscriber before a change.
pub(super) enum StoredHeaders<'a> {
    Reusable(&'a [(String, String)]),
    /// The URL gets another origin. The stored values must not be sent there: a caller that may change a subscriber could read
    /// them by changing its URL, although no response shows them.
    OfAnotherOrigin,
}

impl<'a> StoredHeaders<'a> {
    /// `url` is the URL after the change; None if it is invalid.
    pub(super) fn of(old: Option<&'a SubscriberSettings>, url: Option<&str>) -> StoredHeaders<'a> {
        let Some(old) = old else { return StoredHeaders::Reusable(&[]) };
        if url.is_none_or(|url| has_same_origin(url, &old.url)) || old.headers.is_empty() {
            StoredHeaders::Reusable(&old.headers)
        } else {
            StoredHeaders::OfAnotherOrigin
        }
    }
}

pub(super) fn check_headers_field(
    checks: &mut FieldChecks<'_, SubscriberSettings>,
    field: Field<BTreeMap<String, String>>,
    stored: &StoredHeaders<'_>,
) -> Option<Vec<(String, String)>> {
    let (pointer, old) = ("/headers", |old: &SubscriberSettings| old.headers.clone());
    match (field, stored) {
        (Field::Absent, StoredHeaders::OfAnotherOrigin) => {
            let detail = "must be sent together with a `url` of another scheme, host or port: the stored values are not \
                          sent to another receiver. Give the headers with their values, or {} for none";
            checks.check(pointer, Field::Given(()), old, None, |()| Err(error(detail)))
        }
        (field, stored) => checks.check(pointer, field, old, Some(Vec::new()), |given| check_headers(given, stored)),
    }
}

/// Returns the headers with lower-case names. A value of [`HIDDEN_VALUE`] is replaced by the stored one.
fn check_headers(
    mut given: BTreeMap<String, String>,
    stored: &StoredHeaders<'_>,
) -> Result<Vec<(String, String)>, FieldErrors> {
    let pointer = |name: &str| match name {
        "" => String::new(),
        name => format!("/{}", escape_pointer(name)),
    };
    let stored_value = |name: &str| match stored {
        StoredHeaders::Reusable(stored) => {
            let found = stored.iter().find(|(stored, _)| stored.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value).ok_or("none is stored: give a value")
        }
        StoredHeaders::OfAnotherOrigin => {
            Err("it is not sent to another receiver, and the `url` gets another scheme, host or port: give the value")
        }
    };
    let mut errors = Vec::new();
    for (name, value) in given.iter_mut().filter(|(_, value)| *value == HIDDEN_VALUE) {
        match stored_value(name) {
            Ok(stored) => value.clone_from(stored),
            Err(reason) => {
                errors.push((pointer(name), format!("`{HIDDEN_VALUE}` leaves a stored value unchanged, but {reason}")))
            }
        }
    }
    let checked = webhook_client::headers::check(&given).map_err(|refused| {
        refused.into_iter().map(|refused| (pointer(&refused.name), refused.detail)).collect::<FieldErrors>()
    });
    match checked {
        Ok(_) if !errors.is_empty() => Err(errors),
        Ok(_) => Ok(given.into_iter().map(|(name, value)| (name.to_ascii_lowercase(), value)).collect()),
        Err(refused) => Err(errors.into_iter().chain(refused).collect()),
    }
}

impl PartialSchema for CustomHeaders {
    fn schema() -> RefOr<Schema> {
        let text = |pattern: &str| ObjectBuilder::new().schema_type(Type::String).pattern(Some(pattern)).build();
        let mut headers = Object::with_type(Type::Object);
        headers.property_names = Some(Box::new(text("^[A-Za-z0-9!#$%&'*+.^_`|~-]+$").into()));
        let value = RefOr::T(Schema::from(text(r"^([!-~]([\t -~]*[!-~])?)?$")));
        headers.additional_properties = Some(Box::new(AdditionalProperties::RefOr(value)));
        headers.max_properties = Some(20);
        headers.example = Some(json!({"authorization": "Bearer 123"}));
        headers.into()
    }
}

impl ToSchema for CustomHeaders {}

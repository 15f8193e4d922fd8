//! The fields with which a caller creates or changes a subscriber. All of them are checked, and every invalid one is
//! reported.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use kit::field::{Field, FieldChecks, FieldErrors, Whole, check_each, error, printable};
use kit::problem::FieldError;
use serde::Deserialize;
use serde_json::json;
use utoipa::openapi::schema::{AdditionalProperties, Object, Schema, Type};
use utoipa::openapi::{ObjectBuilder, RefOr};
use utoipa::{PartialSchema, ToSchema};

use crate::client::Client;
use crate::domain::{EventTypes, Filter, Format, OnExhausted, SubscriberSettings, check_pointer};
use crate::headers;
use crate::signature::{SecretKind, SigningSecret};
use crate::target::Target;

const NAME_CHARS_MAX: usize = 100;
/// Patterns in `event_types`.
const EVENT_TYPES_MAX: usize = 100;
/// Bytes of a filter as JSON.
const FILTER_BYTES_MAX: usize = 16 * 1024;
/// Entries in `retry_backoff_seconds`, and so retries of a message.
const RETRIES_MAX: usize = 20;
const BACKOFF_SECONDS: RangeInclusive<i64> = 1..=86_400;
const BACKOFF_DEFAULT: [u32; 3] = [5, 30, 300];
/// Entries in `retry_statuses`.
const STATUSES_MAX: usize = 100;
/// 2xx is not among them: a delivered message is not retried.
const STATUSES: RangeInclusive<i64> = 300..=599;
const TIMEOUT_MS: RangeInclusive<i64> = 100..=60_000;
const TIMEOUT_MS_DEFAULT: u32 = 10_000;
const IN_FLIGHT: RangeInclusive<i64> = 1..=1_000;
const IN_FLIGHT_DEFAULT: u32 = 50;
const RATE: RangeInclusive<i64> = 1..=100_000;
/// Shown instead of a header's value. When a caller sends it back, the stored value stays.
pub(crate) const HIDDEN_VALUE: &str = "***";

/// The settings of a subscriber. An absent field stays unchanged, or has its default in a new subscriber. Null resets a
/// field to its default.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = SubscriberFields)]
pub(crate) struct SubscriberFields {
    /// A name for display.
    #[serde(default)]
    #[schema(value_type = String, format = "line", max_length = 100, example = "billing")]
    name: Field<String>,
    /// The URL that receives the webhooks, http or https. Its addresses must be public unless the operator allows their
    /// network (`hub.allowed_networks`), and the operator may limit the ports (`hub.allowed_ports`). When the scheme, the
    /// host or the port changes and the subscriber has `headers`, these must be sent anew in the same request.
    #[serde(default)]
    #[schema(value_type = String, pattern = r"^[Hh][Tt][Tt][Pp][Ss]?://\S+$", max_length = 2000, example = "https://example.com/webhooks")]
    url: Field<String>,
    /// The event types to send: an exact type, all types below a prefix (`order.*`), or all types (`*`).
    #[serde(default)]
    #[schema(value_type = Vec<EventTypes>, min_items = 1, max_items = 100, example = json!(["order.*"]))]
    event_types: Field<Vec<String>>,
    /// Conditions on the payload. Only events that meet all of them are sent. Null: every event is sent.
    #[serde(default)]
    #[schema(value_type = Option<Filter>)]
    filter: Field<Filter>,
    /// A JSON pointer into the payload. Messages with the same value there form a lane and are sent one after the
    /// other. Null: the `ordering_key` of the event defines the lane.
    #[serde(default)]
    #[schema(value_type = Option<String>, pattern = "^/([^~]|~[01])*$", max_length = 200, example = "/customer/id")]
    ordering_key: Field<String>,
    /// The pause in seconds before each retry. After the last retry fails, the message becomes a dead letter.
    #[serde(default)]
    #[schema(value_type = Option<Vec<BackoffSeconds>>, max_items = 20, default = json!([5, 30, 300]))]
    retry_backoff_seconds: Field<Vec<Whole>>,
    /// HTTP statuses after which a message is retried, in addition to 429 and 5xx.
    #[serde(default)]
    #[schema(value_type = Option<Vec<RetryStatus>>, max_items = 100, default = json!([]), example = json!([409]))]
    retry_statuses: Field<Vec<Whole>>,
    /// What happens to a lane when one of its messages becomes a dead letter: it continues (`skip`), or waits until the
    /// dead letter is retried or given up (`block`).
    #[serde(default)]
    #[schema(value_type = Option<OnExhausted>, default = "skip")]
    on_exhausted: Field<OnExhausted>,
    /// The time for one attempt in milliseconds, from resolving the host name to the last byte of the response.
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 100, maximum = 60000, default = 10000)]
    timeout_ms: Field<Whole>,
    /// The number of requests to this subscriber at the same time.
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 1, maximum = 1000, default = 50)]
    max_in_flight: Field<Whole>,
    /// The number of requests per second. Null: no limit.
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 1, maximum = 100000)]
    rate_limit_per_second: Field<Whole>,
    /// Headers that each delivery carries. Their values are stored encrypted and shown as `***`. Sending `***` back
    /// leaves a value unchanged, except in a request that changes the scheme, host or port of the `url`: it must give all
    /// values, or `{}` for no headers, because stored values are not sent to another receiver.
    #[serde(default)]
    #[schema(value_type = Option<CustomHeaders>)]
    headers: Field<BTreeMap<String, String>>,
    /// The format of the request body.
    #[serde(default)]
    #[schema(value_type = Option<Format>, default = "raw")]
    format: Field<Format>,
    /// Whether events become messages for this subscriber. Events that arrive while it is inactive are not sent later.
    #[serde(default)]
    #[schema(value_type = Option<bool>, default = true)]
    is_active: Field<bool>,
    /// The secret that signs deliveries: `whsec_` and 24 to 64 bytes in base64, or `whsk_` and an ed25519 key pair in
    /// base64. Accepted only when the subscriber is created. If it is absent, a secret is generated.
    #[serde(default)]
    #[schema(value_type = Option<String>, pattern = "^(whsec_|whsk_)[A-Za-z0-9+/]+={0,2}$", write_only)]
    secret: Field<String>,
    /// The kind of secret to generate. Accepted only when the subscriber is created.
    #[serde(default)]
    #[schema(value_type = Option<SignatureKind>, default = "v1")]
    signature: Field<SignatureKind>,
}

/// Describes the [`SubscriberFields`] of a change: all but those that only a new subscriber accepts.
pub(crate) struct ChangedSubscriberFields;

/// The seconds before a retry.
#[derive(ToSchema)]
#[schema(value_type = i64, minimum = 1, maximum = 86400)]
#[expect(dead_code, reason = "it only describes the items of a list")]
struct BackoffSeconds(i64);

/// An HTTP status after which a message is retried.
#[derive(ToSchema)]
#[schema(value_type = i64, minimum = 300, maximum = 599)]
#[expect(dead_code, reason = "it only describes the items of a list")]
struct RetryStatus(i64);

/// The headers of deliveries: names and values.
struct CustomHeaders;

/// The [`SubscriberFields`] of a new subscriber, of which `name`, `url` and `event_types` are required.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub(crate) struct NewSubscriberFields(pub(crate) SubscriberFields);

/// The kind of signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, serde::Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SignatureKind {
    /// HMAC-SHA256: the receiver knows the same secret.
    V1,
    /// Ed25519: the receiver knows only the public key.
    V1a,
}

/// Checks one field of a body. The pointer in the error, the field and the setting have the same name. A setting
/// without a default is required.
macro_rules! setting {
    ($checks:ident, $fields:ident.$name:ident, $default:expr, $check:expr) => {
        $checks.check(concat!("/", stringify!($name)), $fields.$name, |old| Clone::clone(&old.$name), $default, $check)
    };
}

impl SubscriberFields {
    /// Returns the settings that result from the fields. `old` is None for a new subscriber. Fails with every invalid
    /// field.
    pub(crate) fn into_settings(
        self,
        old: Option<&SubscriberSettings>,
        client: &Client,
    ) -> Result<SubscriberSettings, Vec<FieldError>> {
        let fields = self;
        let mut checks = FieldChecks::new(old);
        let in_range = |range| move |value| check_number(value, range);
        let name = setting!(checks, fields.name, None, check_name);
        let url = setting!(checks, fields.url, None, |url| check_url(url, client));
        let event_types = setting!(checks, fields.event_types, None, check_event_types);
        let filter = setting!(checks, fields.filter, Some(None), check_filter);
        let ordering_key = setting!(checks, fields.ordering_key, Some(None), check_ordering_key);
        let retry_backoff_seconds =
            setting!(checks, fields.retry_backoff_seconds, Some(BACKOFF_DEFAULT.to_vec()), check_backoff);
        let retry_statuses = setting!(checks, fields.retry_statuses, Some(Vec::new()), check_statuses);
        let timeout_ms = setting!(checks, fields.timeout_ms, Some(TIMEOUT_MS_DEFAULT), in_range(TIMEOUT_MS));
        let max_in_flight = setting!(checks, fields.max_in_flight, Some(IN_FLIGHT_DEFAULT), in_range(IN_FLIGHT));
        let rate_limit_per_second =
            setting!(checks, fields.rate_limit_per_second, Some(None), |rate| check_number(rate, RATE).map(Some));
        let headers = check_headers_field(&mut checks, fields.headers, &StoredHeaders::of(old, url.as_deref()));
        let on_exhausted = setting!(checks, fields.on_exhausted, Some(OnExhausted::Skip), Ok);
        let format = setting!(checks, fields.format, Some(Format::Raw), Ok);
        let is_active = setting!(checks, fields.is_active, Some(true), Ok);
        let settings = || {
            Some(SubscriberSettings {
                name: name?,
                url: url?,
                event_types: event_types?,
                filter: filter?,
                ordering_key: ordering_key?,
                retry_backoff_seconds: retry_backoff_seconds?,
                retry_statuses: retry_statuses?,
                on_exhausted: on_exhausted?,
                timeout_ms: timeout_ms?,
                max_in_flight: max_in_flight?,
                rate_limit_per_second: rate_limit_per_second?,
                headers: headers?,
                format: format?,
                is_active: is_active?,
            })
        };
        settings().ok_or_else(|| checks.into_errors())
    }

    /// Returns the given secret for a new subscriber, or generates one.
    pub(crate) fn signing_secret(&self) -> Result<SigningSecret, FieldError> {
        let kind = match self.signature {
            Field::Given(SignatureKind::V1) => Some(SecretKind::Symmetric),
            Field::Given(SignatureKind::V1a) => Some(SecretKind::Ed25519),
            Field::Absent | Field::Null => None,
        };
        let Field::Given(text) = &self.secret else {
            return Ok(SigningSecret::generate(kind.unwrap_or(SecretKind::Symmetric)));
        };
        let secret = SigningSecret::parse(text).map_err(|error| FieldError::body("/secret", error))?;
        match kind.is_none_or(|kind| kind == secret.kind()) {
            true => Ok(secret),
            false => Err(FieldError::body("/signature", "does not match the given secret: omit it")),
        }
    }

    /// Returns an error for each given field that only a new subscriber accepts.
    pub(crate) fn creation_only_errors(&self) -> Vec<FieldError> {
        let given = |is_absent: bool, pointer| {
            let detail = "is accepted only when a subscriber is created; use `rotate-secret` for a new secret";
            (!is_absent).then(|| FieldError::body(pointer, detail))
        };
        let secret = given(matches!(self.secret, Field::Absent), "/secret");
        secret.into_iter().chain(given(matches!(self.signature, Field::Absent), "/signature")).collect()
    }
}

fn check_name(name: String) -> Result<String, FieldErrors> {
    printable(&name, NAME_CHARS_MAX).map_err(error)?;
    Ok(name)
}

fn check_url(url: String, client: &Client) -> Result<String, FieldErrors> {
    let target = Target::parse(&url, false).map_err(error)?;
    client.vet_target(&target).map_err(|refused| error(refused.to_string()))?;
    Ok(url)
}

fn check_event_types(patterns: Vec<String>) -> Result<Vec<EventTypes>, FieldErrors> {
    if !(1..=EVENT_TYPES_MAX).contains(&patterns.len()) {
        return Err(error(format!("must be a list of 1 to {EVENT_TYPES_MAX} types")));
    }
    check_each(patterns, EventTypes::try_from)
}

fn check_filter(filter: Filter) -> Result<Option<Filter>, FieldErrors> {
    filter.check().map_err(|error| vec![error])?;
    let bytes = serde_json::to_vec(&filter).map_or(usize::MAX, |text| text.len());
    if bytes > FILTER_BYTES_MAX {
        return Err(error(format!("must be at most {FILTER_BYTES_MAX} bytes of JSON")));
    }
    Ok(Some(filter).filter(|Filter(conditions)| !conditions.is_empty()))
}

fn check_ordering_key(pointer: String) -> Result<Option<String>, FieldErrors> {
    check_pointer(&pointer).map_err(error)?;
    Ok(Some(pointer))
}

fn check_backoff(list: Vec<Whole>) -> Result<Vec<u32>, FieldErrors> {
    check_numbers(&list, RETRIES_MAX, BACKOFF_SECONDS)
}

fn check_statuses(list: Vec<Whole>) -> Result<Vec<u16>, FieldErrors> {
    Ok(check_numbers(&list, STATUSES_MAX, STATUSES)?.into_iter().map(|status| status as u16).collect())
}

fn check_numbers(list: &[Whole], count_max: usize, range: RangeInclusive<i64>) -> Result<Vec<u32>, FieldErrors> {
    if list.len() > count_max {
        return Err(error(format!("must be a list of at most {count_max} numbers")));
    }
    check_each(list.to_vec(), |number| {
        check_number(number, range.clone()).map_err(|errors| errors.into_iter().map(|(_, detail)| detail).collect())
    })
}

fn check_number(Whole(number): Whole, range: RangeInclusive<i64>) -> Result<u32, FieldErrors> {
    let fits = u32::try_from(number).ok().filter(|_| range.contains(&number));
    fits.ok_or_else(|| error(format!("must be a number from {} to {}", range.start(), range.end())))
}

/// The headers of a subscriber before a change.
enum StoredHeaders<'a> {
    Reusable(&'a [(String, String)]),
    /// The URL gets another origin. The stored values must not be sent there: whoever may change a subscriber could read
    /// them by changing its URL, although no response shows them.
    OfAnotherOrigin,
}

impl<'a> StoredHeaders<'a> {
    /// `url` is the URL after the change; None if it is invalid.
    fn of(old: Option<&'a SubscriberSettings>, url: Option<&str>) -> StoredHeaders<'a> {
        let Some(old) = old else { return StoredHeaders::Reusable(&[]) };
        let origin = |url: &str| Target::parse(url, false).ok().map(|target| target.origin().clone());
        let is_same =
            url.is_none_or(|url| url == old.url || origin(url).is_some_and(|new| Some(new) == origin(&old.url)));
        match is_same || old.headers.is_empty() {
            true => StoredHeaders::Reusable(&old.headers),
            false => StoredHeaders::OfAnotherOrigin,
        }
    }
}

fn check_headers_field(
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
        name => format!("/{}", name.replace('~', "~0").replace('/', "~1")),
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
    let checked = headers::check(&given).map_err(|refused| {
        refused.into_iter().map(|refused| (pointer(&refused.name), refused.detail)).collect::<FieldErrors>()
    });
    match checked {
        Ok(_) if !errors.is_empty() => Err(errors),
        Ok(_) => Ok(given.into_iter().map(|(name, value)| (name.to_ascii_lowercase(), value)).collect()),
        Err(refused) => Err(errors.into_iter().chain(refused).collect()),
    }
}

impl PartialSchema for NewSubscriberFields {
    fn schema() -> RefOr<Schema> {
        let mut schema = SubscriberFields::schema();
        if let RefOr::T(Schema::Object(object)) = &mut schema {
            object.required = ["name", "url", "event_types"].map(str::to_owned).to_vec();
            let url = "https://example.com/webhooks";
            object.example = Some(json!({"name": "billing", "url": url, "event_types": ["order.*"]}));
        }
        schema
    }
}

impl ToSchema for NewSubscriberFields {
    fn name() -> std::borrow::Cow<'static, str> {
        "NewSubscriber".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        SubscriberFields::schemas(schemas);
    }
}

impl PartialSchema for ChangedSubscriberFields {
    fn schema() -> RefOr<Schema> {
        let mut schema = SubscriberFields::schema();
        if let RefOr::T(Schema::Object(object)) = &mut schema {
            object.properties.retain(|name, _| !["secret", "signature"].contains(&name.as_str()));
            object.example = Some(json!({"name": "billing", "retry_backoff_seconds": [5, 30, 300]}));
        }
        schema
    }
}

impl ToSchema for ChangedSubscriberFields {
    fn name() -> std::borrow::Cow<'static, str> {
        "SubscriberFields".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        SubscriberFields::schemas(schemas);
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

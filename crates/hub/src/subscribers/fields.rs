//! The fields with which a caller creates or changes a subscriber. All of them are checked, and every invalid one is
//! reported.

mod auth;
mod headers;
pub(crate) mod retry;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use chrono::{DateTime, Utc};
use http_kit::field::{Field, FieldChecks, FieldErrors, Whole, error, printable};
use http_kit::problem::FieldError;
use serde::Deserialize;
use serde_json::json;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;
use utoipa::{PartialSchema, ToSchema};

use self::auth::{AuthFields, check_auth_field};
use self::headers::{CustomHeaders, StoredHeaders, check_headers_field};
pub(crate) use self::retry::RetryRuleMap;
use webhook_client::signature::{SecretKind, SigningSecret};
use webhook_client::{Client, Target};

use self::retry::{BackoffSeconds, check_backoff_fields, check_rules};
use crate::deliveries::domain::{Batch, Format, OnExhausted, RetryAction, RetryRules, RetrySchedule};
use crate::directory::domain::{EventTypes, Filter};
use crate::directory::fields::{check_event_types, check_filter, check_ordering_key};
use crate::replays::fields::BackfillFields;
use crate::subscribers::domain::SubscriberSettings;

const NAME_CHARS_MAX: usize = 100;
const TIMEOUT_MS: RangeInclusive<i64> = 100..=60_000;
const TIMEOUT_MS_DEFAULT: u32 = 10_000;
const IN_FLIGHT: RangeInclusive<i64> = 1..=1_000;
const IN_FLIGHT_DEFAULT: u32 = 50;
const RATE: RangeInclusive<i64> = 1..=100_000;
const BATCH_MAX: RangeInclusive<i64> = 1..=100;
const BATCH_WAIT_MS: RangeInclusive<i64> = 0..=5_000;
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
    /// The pause in seconds before each retry. After the last retry fails, the message becomes a dead letter. Give this list
    /// or a `retry_schedule`, not both.
    #[serde(default)]
    #[schema(value_type = Option<Vec<BackoffSeconds>>, max_items = 20, default = json!([5, 30, 300]))]
    retry_backoff_seconds: Field<Vec<Whole>>,
    /// The name of a list of pauses, instead of `retry_backoff_seconds`: `short` is 5 s, 30 s, 5 min; `patient` is 5 s, 5 min,
    /// 30 min, 2 h, 5 h, 10 h, 10 h.
    #[serde(default)]
    #[schema(value_type = Option<RetrySchedule>, default = "short")]
    retry_schedule: Field<RetrySchedule>,
    /// What happens after a status, or after each status of a class: `retry`, `dead_letter` or, for a single 4xx status,
    /// `disable` (dead letter, and the subscriber is switched off). The rule of a status precedes that of its class. Without
    /// a rule, 429 and 5xx are retried, 410 disables, and all others become dead letters. 2xx is always a delivery.
    #[serde(default)]
    #[schema(value_type = Option<RetryRuleMap>, default = json!({}))]
    retry_rules: Field<BTreeMap<String, RetryAction>>,
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
    /// Sends several messages in one request, whose body is a JSON array. Null: each message has a separate request.
    #[serde(default)]
    #[schema(value_type = Option<BatchFields>)]
    batch: Field<BatchFields>,
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
    /// The credentials that the endpoint requires besides the signature: an access token by OAuth 2 client credentials
    /// (`oauth2`), or a client certificate (`mtls`). Secrets are stored encrypted and shown as `***`. Sending `***` back leaves
    /// one unchanged, except together with another `url` or `token_url`. Null: none.
    #[serde(default)]
    #[schema(value_type = Option<AuthFields>)]
    auth: Field<AuthFields>,
    /// The format of the request body.
    #[serde(default)]
    #[schema(value_type = Option<Format>, default = "raw")]
    format: Field<Format>,
    /// Whether the endpoint has to prove that it wants the webhooks: nothing is sent until it has answered a challenge. Asked
    /// when this is set, and when the scheme, the host or the port of the `url` changes. The operator can require it
    /// (`hub.verify_endpoints`).
    #[serde(default)]
    #[schema(value_type = Option<bool>, default = false)]
    verify_endpoint: Field<bool>,
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
    /// Sends what was posted before, in the order of the lanes and before all events that are posted from now on. Accepted
    /// only when the subscriber is created.
    #[serde(default)]
    #[schema(value_type = Option<BackfillFields>)]
    backfill: Field<BackfillFields>,
}

/// Several messages in one request.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = SubscriberBatch)]
struct BatchFields {
    /// The number of messages in a request, at most. A request body has about 1 MB at most.
    #[schema(value_type = i64, minimum = 1, maximum = 100)]
    max: Whole,
    /// How long messages wait for others to fill the request, in milliseconds.
    #[schema(value_type = Option<i64>, minimum = 0, maximum = 5000, default = 0)]
    wait_ms: Option<Whole>,
}

/// Describes the [`SubscriberFields`] of a change: all but those that only a new subscriber accepts.
pub(crate) struct ChangedSubscriberFields;

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
        now: DateTime<Utc>,
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
            check_backoff_fields(&mut checks, fields.retry_backoff_seconds, fields.retry_schedule);
        let retry_rules = setting!(checks, fields.retry_rules, Some(RetryRules::default()), check_rules);
        let timeout_ms = setting!(checks, fields.timeout_ms, Some(TIMEOUT_MS_DEFAULT), in_range(TIMEOUT_MS));
        let max_in_flight = setting!(checks, fields.max_in_flight, Some(IN_FLIGHT_DEFAULT), in_range(IN_FLIGHT));
        let rate_limit_per_second =
            setting!(checks, fields.rate_limit_per_second, Some(None), |rate| check_number(rate, RATE).map(Some));
        let batch = setting!(checks, fields.batch, Some(None), |batch| check_batch(&batch).map(Some));
        let headers = check_headers_field(&mut checks, fields.headers, &StoredHeaders::of(old, url.as_deref()));
        let auth = check_auth_field(&mut checks, fields.auth, old, url.as_deref(), headers.as_deref(), client, now);
        let on_exhausted = setting!(checks, fields.on_exhausted, Some(OnExhausted::Skip), Ok);
        let format = setting!(checks, fields.format, Some(Format::Raw), Ok);
        let verify_endpoint = setting!(checks, fields.verify_endpoint, Some(false), Ok);
        let is_active = setting!(checks, fields.is_active, Some(true), Ok);
        let settings = || {
            Some(SubscriberSettings {
                name: name?,
                url: url?,
                event_types: event_types?,
                filter: filter?,
                ordering_key: ordering_key?,
                retry_backoff_seconds: retry_backoff_seconds?,
                retry_rules: retry_rules?,
                on_exhausted: on_exhausted?,
                timeout_ms: timeout_ms?,
                max_in_flight: max_in_flight?,
                rate_limit_per_second: rate_limit_per_second?,
                headers: headers?,
                auth: auth?,
                format: format?,
                batch: batch?,
                verify_endpoint: verify_endpoint?,
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
        if kind.is_none_or(|kind| kind == secret.kind()) {
            Ok(secret)
        } else {
            Err(FieldError::body("/signature", "does not match the given secret: omit it"))
        }
    }

    /// The requested backfill of a new subscriber.
    pub(crate) fn extract_backfill(&mut self) -> Option<BackfillFields> {
        match std::mem::take(&mut self.backfill) {
            Field::Given(backfill) => Some(backfill),
            Field::Absent | Field::Null => None,
        }
    }

    /// Returns an error for each given field that only a new subscriber accepts.
    pub(crate) fn creation_only_errors(&self) -> Vec<FieldError> {
        let given = |is_absent: bool, pointer| {
            let detail = "is accepted only when a subscriber is created; use `rotate-secret` for a new secret";
            (!is_absent).then(|| FieldError::body(pointer, detail))
        };
        let secret = given(matches!(self.secret, Field::Absent), "/secret");
        let backfill = (!matches!(self.backfill, Field::Absent)).then(|| {
            let detail = "is accepted only when a subscriber is created; send POST /hub/v1/replays for a replay";
            FieldError::body("/backfill", detail)
        });
        let signature = given(matches!(self.signature, Field::Absent), "/signature");
        secret.into_iter().chain(signature).chain(backfill).collect()
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

fn check_batch(BatchFields { max, wait_ms }: &BatchFields) -> Result<Batch, FieldErrors> {
    let below = |name: &str, checked: Result<u32, FieldErrors>| {
        checked.map_err(|errors| {
            errors.into_iter().map(|(_, detail)| (format!("/{name}"), detail)).collect::<FieldErrors>()
        })
    };
    let max = below("max", check_number(*max, BATCH_MAX));
    let wait_ms = below("wait_ms", check_number(wait_ms.unwrap_or(Whole(0)), BATCH_WAIT_MS));
    match (max, wait_ms) {
        (Ok(max), Ok(wait_ms)) => Ok(Batch { max, wait_ms }),
        (max, wait_ms) => Err(max.err().into_iter().chain(wait_ms.err()).flatten().collect()),
    }
}

fn check_number(Whole(number): Whole, range: RangeInclusive<i64>) -> Result<u32, FieldErrors> {
    let fits = u32::try_from(number).ok().filter(|_| range.contains(&number));
    fits.ok_or_else(|| error(format!("must be a number from {} to {}", range.start(), range.end())))
}

/// Whether two URLs have the same scheme, host and port. False if one of them is invalid, unless they are equal.
pub(crate) fn has_same_origin(url: &str, other: &str) -> bool {
    let origin = |url: &str| Target::parse(url, false).ok().map(|target| target.origin().clone());
    url == other || origin(url).is_some_and(|origin_of_url| Some(origin_of_url) == origin(other))
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
            object.properties.retain(|name, _| !["secret", "signature", "backfill"].contains(&name.as_str()));
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

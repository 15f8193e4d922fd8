//! What a caller wants a subscriber to be: each field checked, and every one that is wrong named.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use kit::field::{Field, Settling, Wrong, each, one, printable};
use kit::problem::FieldError;
use serde::Deserialize;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;
use utoipa::{PartialSchema, ToSchema};

use crate::client::Client;
use crate::domain::{EventTypes, Filter, Format, OnExhausted, SubscriberSettings, check_pointer};
use crate::headers;
use crate::signature::{SecretKind, SigningSecret};
use crate::target::Target;

const NAME_CHARS_MAX: usize = 100;
const EVENT_TYPES_MAX: usize = 100;
const FILTER_BYTES_MAX: usize = 16 * 1024;
const RETRIES_MAX: usize = 20;
const BACKOFF_SECONDS: RangeInclusive<i64> = 1..=86_400;
const BACKOFF_DEFAULT: [u32; 3] = [5, 30, 300];
const STATUSES_MAX: usize = 100;
/// What succeeds is not tried again.
const STATUSES: RangeInclusive<i64> = 300..=599;
const TIMEOUT_MS: RangeInclusive<i64> = 100..=60_000;
const IN_FLIGHT: RangeInclusive<i64> = 1..=1_000;
const RATE: RangeInclusive<i64> = 1..=100_000;
/// What a header's value is shown as; given back, it means what there is.
pub(crate) const HIDDEN: &str = "***";

/// Absent is unchanged, or the default of a new subscriber; null is the default, or none.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = SubscriberFields)]
pub(crate) struct Fields {
    /// For people.
    #[serde(default)]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 100, example = "billing")]
    name: Field<String>,
    /// Where to send. It must be public, unless an operator allows its network.
    #[serde(default)]
    #[schema(value_type = Option<String>, max_length = 2000, example = "https://example.com/webhooks")]
    url: Field<String>,
    /// Exact, or all below (`order.*`), or all (`*`).
    #[serde(default)]
    #[schema(value_type = Option<Vec<String>>, min_items = 1, max_items = 100, example = json!(["order.*"]))]
    event_types: Field<Vec<String>>,
    /// Conditions on the payload that must all hold. Null: none.
    #[serde(default)]
    #[schema(value_type = Option<Filter>, max_items = 20)]
    filter: Field<Filter>,
    /// A JSON pointer into the payload: messages with the same value there are sent one after the other. Null: the
    /// `ordering_key` that an event comes with.
    #[serde(default)]
    #[schema(value_type = Option<String>, max_length = 200, example = "/customer/id")]
    ordering_key: Field<String>,
    /// How long to wait after each failure; when they are used up the message is given up.
    #[serde(default)]
    #[schema(value_type = Option<Vec<i64>>, max_items = 20, default = json!([5, 30, 300]))]
    retry_backoff_seconds: Field<Vec<i64>>,
    /// Statuses to try again besides 429 and 5xx.
    #[serde(default)]
    #[schema(value_type = Option<Vec<i64>>, max_items = 100, default = json!([]), example = json!([409]))]
    retry_statuses: Field<Vec<i64>>,
    /// Whether those behind a message that was given up go on, or wait until it is retried.
    #[serde(default)]
    #[schema(value_type = Option<OnExhausted>, default = "skip")]
    on_exhausted: Field<OnExhausted>,
    /// From looking up the name to the last byte of the answer.
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 100, maximum = 60000, default = 10000)]
    timeout_ms: Field<i64>,
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 1, maximum = 1000, default = 50)]
    max_in_flight: Field<i64>,
    /// Null: no limit.
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 1, maximum = 100000)]
    rate_limit_per_second: Field<i64>,
    /// Sent along. Values are never shown again: they read `***`, and `***` given back keeps what there is.
    #[serde(default)]
    #[schema(value_type = Option<BTreeMap<String, String>>)]
    headers: Field<BTreeMap<String, String>>,
    #[serde(default)]
    #[schema(value_type = Option<Format>, default = "raw")]
    format: Field<Format>,
    /// For one that is not, no messages are made.
    #[serde(default)]
    #[schema(value_type = Option<bool>, default = true)]
    is_active: Field<bool>,
    /// To sign with: `whsec_` and 24 to 64 bytes in base64, or `whsk_` and an ed25519 key pair in base64. Only when it is
    /// made; we make one when it is absent.
    #[serde(default)]
    #[schema(value_type = Option<String>, write_only)]
    secret: Field<String>,
    /// Which kind of secret to make. Only when it is made.
    #[serde(default)]
    #[schema(value_type = Option<SignatureKind>, default = "v1")]
    signature: Field<SignatureKind>,
}

/// [`Fields`], some of them required.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub(crate) struct NewFields(pub(crate) Fields);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, serde::Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SignatureKind {
    /// HMAC-SHA256: the receiver knows the same secret.
    V1,
    /// Ed25519: the receiver knows the public key only.
    V1a,
}

impl Fields {
    /// The settings as they are to be; `old` is None for a new subscriber.
    pub(crate) fn settle(
        self,
        old: Option<&SubscriberSettings>,
        client: &Client,
    ) -> Result<SubscriberSettings, Vec<FieldError>> {
        let mut to = Settling::of(old);
        let kept = old.map(|old| old.headers.clone()).unwrap_or_default();
        let number = |range| move |value| within(value, range);
        let name = to.be("/name", self.name, |old| old.name.clone(), None, name);
        let url = to.be("/url", self.url, |old| old.url.clone(), None, |url| vetted(url, client));
        let types = to.be("/event_types", self.event_types, |old| old.event_types.clone(), None, event_types);
        let filter = to.be("/filter", self.filter, |old| old.filter.clone(), Some(None), filter);
        let ordering_key =
            to.be("/ordering_key", self.ordering_key, |old| old.ordering_key.clone(), Some(None), pointer_to);
        let backoff = to.be(
            "/retry_backoff_seconds",
            self.retry_backoff_seconds,
            |old| old.retry_backoff_seconds.clone(),
            Some(BACKOFF_DEFAULT.to_vec()),
            backoff_of,
        );
        let statuses = to.be(
            "/retry_statuses",
            self.retry_statuses,
            |old| old.retry_statuses.clone(),
            Some(Vec::new()),
            statuses_of,
        );
        let timeout = to.be("/timeout_ms", self.timeout_ms, |old| old.timeout_ms, Some(10_000), number(TIMEOUT_MS));
        let in_flight =
            to.be("/max_in_flight", self.max_in_flight, |old| old.max_in_flight, Some(50), number(IN_FLIGHT));
        let rate = to.be(
            "/rate_limit_per_second",
            self.rate_limit_per_second,
            |old| old.rate_limit_per_second,
            Some(None),
            |rate| within(rate, RATE).map(Some),
        );
        let headers = to.be(
            "/headers",
            self.headers,
            |old| old.headers.clone(),
            Some(Vec::new()),
            |given| headers_of(given, &kept),
        );
        let skip = Some(OnExhausted::Skip);
        let on_exhausted = to.be("/on_exhausted", self.on_exhausted, |old| old.on_exhausted, skip, Ok);
        let format = to.be("/format", self.format, |old| old.format, Some(Format::Raw), Ok);
        let is_active = to.be("/is_active", self.is_active, |old| old.is_active, Some(true), Ok);
        let all = || {
            Some(SubscriberSettings {
                name: name?,
                url: url?,
                event_types: types?,
                filter: filter?,
                ordering_key: ordering_key?,
                retry_backoff_seconds: backoff?,
                retry_statuses: statuses?,
                on_exhausted: on_exhausted?,
                timeout_ms: timeout?,
                max_in_flight: in_flight?,
                rate_limit_per_second: rate?,
                headers: headers?,
                format: format?,
                is_active: is_active?,
            })
        };
        all().ok_or_else(|| to.into_wrong())
    }

    /// What a new subscriber's deliveries are to be signed with.
    pub(crate) fn secret(&self) -> Result<SigningSecret, FieldError> {
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
            false => Err(FieldError::body("/signature", "is not what the given secret is for: leave it out")),
        }
    }

    /// What may be said only of a new subscriber, and was said of another.
    pub(crate) fn said_too_late(&self) -> Vec<FieldError> {
        let given = |is_absent: bool, pointer| {
            let detail = "is chosen when a subscriber is made; `rotate-secret` makes another secret of the same kind";
            (!is_absent).then(|| FieldError::body(pointer, detail))
        };
        let secret = given(matches!(self.secret, Field::Absent), "/secret");
        secret.into_iter().chain(given(matches!(self.signature, Field::Absent), "/signature")).collect()
    }
}

fn name(name: String) -> Result<String, Wrong> {
    printable(&name, NAME_CHARS_MAX).map_err(one)?;
    Ok(name)
}

fn vetted(url: String, client: &Client) -> Result<String, Wrong> {
    let target = Target::parse(&url, false).map_err(one)?;
    client.vet_target(&target).map_err(|refused| one(refused.to_string()))?;
    Ok(url)
}

fn event_types(patterns: Vec<String>) -> Result<Vec<EventTypes>, Wrong> {
    if !(1..=EVENT_TYPES_MAX).contains(&patterns.len()) {
        return Err(one(format!("takes 1 to {EVENT_TYPES_MAX} types")));
    }
    each(patterns, EventTypes::try_from)
}

fn filter(filter: Filter) -> Result<Option<Filter>, Wrong> {
    filter.check().map_err(|wrong| vec![wrong])?;
    let bytes = serde_json::to_vec(&filter).map_or(usize::MAX, |text| text.len());
    if bytes > FILTER_BYTES_MAX {
        return Err(one(format!("takes at most {FILTER_BYTES_MAX} bytes of JSON")));
    }
    Ok(Some(filter).filter(|Filter(conditions)| !conditions.is_empty()))
}

fn pointer_to(pointer: String) -> Result<Option<String>, Wrong> {
    check_pointer(&pointer).map_err(one)?;
    Ok(Some(pointer))
}

fn backoff_of(list: Vec<i64>) -> Result<Vec<u32>, Wrong> {
    numbers(&list, RETRIES_MAX, BACKOFF_SECONDS)
}

fn statuses_of(list: Vec<i64>) -> Result<Vec<u16>, Wrong> {
    Ok(numbers(&list, STATUSES_MAX, STATUSES)?.into_iter().map(|status| status as u16).collect())
}

fn numbers(list: &[i64], count_max: usize, range: RangeInclusive<i64>) -> Result<Vec<u32>, Wrong> {
    if list.len() > count_max {
        return Err(one(format!("takes at most {count_max} numbers")));
    }
    each(list.to_vec(), |number| {
        within(number, range.clone()).map_err(|wrong| wrong.into_iter().map(|(_, detail)| detail).collect())
    })
}

fn within(number: i64, range: RangeInclusive<i64>) -> Result<u32, Wrong> {
    let fits = u32::try_from(number).ok().filter(|_| range.contains(&number));
    fits.ok_or_else(|| one(format!("takes a number from {} to {}", range.start(), range.end())))
}

fn headers_of(mut given: BTreeMap<String, String>, kept: &[(String, String)]) -> Result<Vec<(String, String)>, Wrong> {
    let pointer = |name: &str| match name {
        "" => String::new(),
        name => format!("/{}", name.replace('~', "~0").replace('/', "~1")),
    };
    let mut wrong = Vec::new();
    for (name, value) in given.iter_mut().filter(|(_, value)| *value == HIDDEN) {
        match kept.iter().find(|(kept, _)| kept.eq_ignore_ascii_case(name)) {
            Some((_, kept)) => value.clone_from(kept),
            None => wrong.push((pointer(name), format!("`{HIDDEN}` keeps the value that there is, and there is none"))),
        }
    }
    let checked = headers::check(&given).map_err(|refused| {
        refused.into_iter().map(|refused| (pointer(&refused.name), refused.detail)).collect::<Wrong>()
    });
    match checked {
        Ok(_) if !wrong.is_empty() => Err(wrong),
        Ok(_) => Ok(given.into_iter().map(|(name, value)| (name.to_ascii_lowercase(), value)).collect()),
        Err(refused) => Err(wrong.into_iter().chain(refused).collect()),
    }
}

impl PartialSchema for NewFields {
    fn schema() -> RefOr<Schema> {
        let mut schema = Fields::schema();
        if let RefOr::T(Schema::Object(object)) = &mut schema {
            object.required = ["name", "url", "event_types"].map(str::to_owned).to_vec();
        }
        schema
    }
}

impl ToSchema for NewFields {
    fn name() -> std::borrow::Cow<'static, str> {
        "NewSubscriber".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        Fields::schemas(schemas);
    }
}

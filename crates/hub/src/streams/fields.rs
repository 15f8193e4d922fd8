//! The fields with which a caller creates, changes and reads a stream. Every invalid one is reported.

use std::ops::RangeInclusive;

use chrono::{DateTime, TimeDelta, Utc};
use http_kit::field::{Field, FieldChecks, Whole};
use http_kit::problem::FieldError;
use serde::Deserialize;
use serde_json::json;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;
use utoipa::{PartialSchema, ToSchema};

use crate::directory::domain::{EventTypes, Filter};
use crate::directory::fields::{check_event_types, check_filter, check_ordering_key};
use crate::events::view::message::EventIdParam;
use crate::streams::domain::StreamSettings;

/// Characters of the name of a stream or a reader.
const NAME_CHARS_MAX: usize = 100;
const MESSAGES: RangeInclusive<i64> = 1..=1_000;
const MESSAGES_DEFAULT: i64 = 100;
/// A response must begin within the time limit of a request, which is 30 s by default.
const WAIT_MS: RangeInclusive<i64> = 0..=25_000;
const LEASE_SECONDS: RangeInclusive<i64> = 5..=300;
const LEASE_SECONDS_DEFAULT: i64 = 30;
pub(crate) const NAME_PATTERN: &str = "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$";

/// The name of a stream or of a reader.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct StreamName(pub(crate) String);

/// A name that is not valid.
#[derive(Debug, thiserror::Error)]
#[error("must have 1 to {NAME_CHARS_MAX} letters, digits, `.`, `_` and `-`, and start with a letter or digit")]
pub(crate) struct InvalidStreamName;

impl TryFrom<String> for StreamName {
    type Error = InvalidStreamName;

    fn try_from(name: String) -> Result<StreamName, InvalidStreamName> {
        let is_alphanumeric = |byte: u8| byte.is_ascii_alphanumeric();
        let is_valid = name.len() <= NAME_CHARS_MAX
            && name.bytes().next().is_some_and(is_alphanumeric)
            && name.bytes().all(|byte| is_alphanumeric(byte) || matches!(byte, b'.' | b'_' | b'-'));
        if is_valid { Ok(StreamName(name)) } else { Err(InvalidStreamName) }
    }
}

/// The settings of a stream. An absent field stays unchanged, or has its default in a new stream. Null resets a field to its
/// default.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = StreamFields, example = json!({"event_types": ["order.*"]}))]
pub(crate) struct StreamFields {
    /// The event types that the stream contains: an exact type, all types below a prefix (`order.*`), or all types (`*`).
    #[serde(default)]
    #[schema(value_type = Vec<EventTypes>, min_items = 1, max_items = 100, example = json!(["order.*"]))]
    event_types: Field<Vec<String>>,
    /// Conditions on the payload. The stream contains only events that meet all of them. Null: every event.
    #[serde(default)]
    #[schema(value_type = Option<Filter>)]
    filter: Field<Filter>,
    /// A JSON pointer into the payload. Events with the same value there are read one after the other. Null: the
    /// `ordering_key` of the event defines the lane.
    #[serde(default)]
    #[schema(value_type = Option<String>, pattern = "^/([^~]|~[01])*$", max_length = 200, example = "/customer/id")]
    ordering_key: Field<String>,
}

/// The fields of a new stream.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewStreamFields {
    pub(crate) name: StreamName,
    #[serde(default)]
    event_types: Field<Vec<String>>,
    #[serde(default)]
    filter: Field<Filter>,
    #[serde(default)]
    ordering_key: Field<String>,
}

impl NewStreamFields {
    /// Returns the name and the other fields.
    pub(crate) fn into_parts(self) -> (StreamName, StreamFields) {
        let NewStreamFields { name, event_types, filter, ordering_key } = self;
        (name, StreamFields { event_types, filter, ordering_key })
    }
}

impl StreamFields {
    /// Returns the settings that result from the fields. `old` is None for a new stream. Fails with every invalid field.
    pub(crate) fn into_settings(self, old: Option<&StreamSettings>) -> Result<StreamSettings, Vec<FieldError>> {
        let mut checks = FieldChecks::new(old);
        let event_types =
            checks.check("/event_types", self.event_types, |old| old.event_types.clone(), None, check_event_types);
        let filter = checks.check("/filter", self.filter, |old| old.filter.clone(), Some(None), check_filter);
        let pointer = |old: &StreamSettings| old.ordering_key.clone();
        let ordering_key = checks.check("/ordering_key", self.ordering_key, pointer, Some(None), check_ordering_key);
        let settings =
            || Some(StreamSettings { event_types: event_types?, filter: filter?, ordering_key: ordering_key? });
        settings().ok_or_else(|| checks.into_errors())
    }
}

/// A pull.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = StreamPull, example = json!({"reader": "worker-1", "max": 100, "wait_ms": 0}))]
pub(crate) struct PullFields {
    /// The name of the reader, unique among the processes that read the stream.
    #[schema(value_type = String, pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", max_length = 100)]
    pub(crate) reader: StreamName,
    /// The number of messages at most.
    #[schema(value_type = Option<i64>, minimum = 1, maximum = 1000, default = 100)]
    max: Option<Whole>,
    /// How long to wait for a message if there is none, in milliseconds.
    #[schema(value_type = Option<i64>, minimum = 0, maximum = 25000, default = 0)]
    wait_ms: Option<Whole>,
    /// How long the reader has its parts without another pull.
    #[schema(value_type = Option<i64>, minimum = 5, maximum = 300, default = 30)]
    lease_seconds: Option<Whole>,
    /// The `cursor` of an earlier pull, to acknowledge it first.
    #[schema(max_length = 2000)]
    pub(crate) acknowledge: Option<String>,
}

/// The limits of a pull.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PullLimits {
    pub(crate) max: i64,
    pub(crate) wait: std::time::Duration,
    pub(crate) lease: TimeDelta,
}

impl PullFields {
    /// Fails with every number that is out of range.
    pub(crate) fn limits(&self) -> Result<PullLimits, Vec<FieldError>> {
        let mut errors = Vec::new();
        let mut number = |pointer: &str, field: Option<Whole>, range: RangeInclusive<i64>, default: i64| {
            let Whole(number) = field.unwrap_or(Whole(default));
            if !range.contains(&number) {
                let detail = format!("must be a number from {} to {}", range.start(), range.end());
                errors.push(FieldError::body(pointer, detail));
            }
            number
        };
        let max = number("/max", self.max, MESSAGES, MESSAGES_DEFAULT);
        let wait = number("/wait_ms", self.wait_ms, WAIT_MS, 0);
        let lease = number("/lease_seconds", self.lease_seconds, LEASE_SECONDS, LEASE_SECONDS_DEFAULT);
        let wait = std::time::Duration::from_millis(wait.unsigned_abs());
        if errors.is_empty() { Ok(PullLimits { max, wait, lease: TimeDelta::seconds(lease) }) } else { Err(errors) }
    }
}

/// What a reader has processed.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = StreamAcknowledgement, example = json!({"reader": "worker-1", "cursor": "AUbW…"}))]
pub(crate) struct AcknowledgeFields {
    #[schema(value_type = String, pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", max_length = 100)]
    pub(crate) reader: StreamName,
    /// The `cursor` of a pull: everything that it returned is processed.
    #[schema(max_length = 2000)]
    pub(crate) cursor: String,
}

/// A reader that stops.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = StreamRelease, example = json!({"reader": "worker-1"}))]
pub(crate) struct ReleaseFields {
    #[schema(value_type = String, pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", max_length = 100)]
    pub(crate) reader: StreamName,
}

/// Where a stream continues: exactly one of `time`, `event_id` and `position`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = StreamSeek, example = json!({"position": "oldest"}))]
pub(crate) struct SeekFields {
    /// Continue with the first event that was posted at this time or later.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    time: Option<DateTime<Utc>>,
    /// Continue after this event, which is in the stream.
    #[schema(value_type = Option<String>, example = "evt_01890a5d-ac96-774b-bcce-b302099a8057")]
    event_id: Option<EventIdParam>,
    #[schema(inline)]
    position: Option<StreamEnd>,
    /// Whether to end the leases of readers. Without it, a seek is refused while there are any.
    #[serde(default)]
    pub(crate) force: bool,
}

/// An end of a stream.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum StreamEnd {
    /// After everything that the stream contains now.
    Newest,
    /// Before everything that is retained.
    Oldest,
}

/// Where a stream continues.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SeekTarget {
    Time(DateTime<Utc>),
    Event(uuid::Uuid),
    End(StreamEnd),
}

impl SeekFields {
    /// Fails unless there is exactly one target.
    pub(crate) fn target(&self) -> Result<SeekTarget, Vec<FieldError>> {
        let targets = [
            self.position.map(|end| ("/position", SeekTarget::End(end))),
            self.time.map(|time| ("/time", SeekTarget::Time(time))),
            self.event_id.map(|EventIdParam(id)| ("/event_id", SeekTarget::Event(id))),
        ];
        let given: Vec<_> = targets.into_iter().flatten().collect();
        match given.as_slice() {
            [(_, target)] => Ok(*target),
            [] => Err(vec![FieldError::body("/position", "is required, or `time` or `event_id` instead")]),
            [_, others @ ..] => {
                let detail = "only one of `time`, `event_id` and `position` is accepted: omit the others";
                Err(others.iter().map(|(pointer, _)| FieldError::body(*pointer, detail)).collect())
            }
        }
    }
}

impl PartialSchema for NewStreamFields {
    fn schema() -> RefOr<Schema> {
        let mut schema = StreamFields::schema();
        if let RefOr::T(Schema::Object(object)) = &mut schema {
            let name = utoipa::openapi::ObjectBuilder::new()
                .schema_type(utoipa::openapi::schema::Type::String)
                .pattern(Some(NAME_PATTERN))
                .max_length(Some(NAME_CHARS_MAX))
                .description(Some("The name in the path of the stream. It does not change."));
            object.properties.insert("name".to_owned(), name.into());
            object.required = ["name", "event_types"].map(str::to_owned).to_vec();
            object.example = Some(json!({"name": "orders", "event_types": ["order.*"]}));
        }
        schema
    }
}

impl ToSchema for NewStreamFields {
    fn name() -> std::borrow::Cow<'static, str> {
        "NewStream".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        StreamFields::schemas(schemas);
    }
}

/// The error of a cursor that is not one of this stream.
pub(crate) fn invalid_cursor(pointer: &str) -> FieldError {
    FieldError::body(pointer, "must be the `cursor` of a pull of this stream, unchanged")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_pull_out_of_range_are_named_together() {
        let body = json!({"reader": "a", "max": 0, "wait_ms": 25_001, "lease_seconds": 4});
        let fields: PullFields = serde_json::from_value(body).unwrap();
        let errors: Vec<String> = fields.limits().unwrap_err().into_iter().map(|error| error.pointer).collect();
        assert_eq!(errors, ["/max", "/wait_ms", "/lease_seconds"]);
        let fields: PullFields = serde_json::from_value(json!({"reader": "a"})).unwrap();
        let limits = fields.limits().unwrap();
        assert_eq!((limits.max, limits.wait.as_millis(), limits.lease.num_seconds()), (100, 0, 30));
    }

    #[test]
    fn a_seek_has_one_target() {
        let target = |body| serde_json::from_value::<SeekFields>(body).unwrap().target();
        assert!(matches!(target(json!({"position": "newest"})), Ok(SeekTarget::End(StreamEnd::Newest))));
        assert_eq!(target(json!({})).unwrap_err()[0].pointer, "/position");
        let two = target(json!({"position": "newest", "time": "2026-01-01T00:00:00Z"}));
        assert_eq!(two.unwrap_err()[0].pointer, "/time");
    }

    #[test]
    fn names_fit_into_a_path() {
        for good in ["orders", "order.paid", "Worker-1_b", &"x".repeat(100)] {
            assert!(StreamName::try_from(good.to_owned()).is_ok(), "{good}");
        }
        for bad in ["", ".", "-x", "a b", "a/b", "é", &"x".repeat(101)] {
            assert!(StreamName::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }
}

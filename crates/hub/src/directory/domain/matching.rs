//! Which events match a subscriber, and in which lane they are sent.
//!
//! Fan-out does this for each event and each subscriber, so its cost is bounded whatever a tenant configures and posts.

use std::borrow::Cow;
use std::fmt::{self, Write};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use utoipa::openapi::schema::{AdditionalProperties, SchemaType, Type};
use utoipa::openapi::{ArrayBuilder, ObjectBuilder, OneOfBuilder, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// A pattern of event types: an exact type, `order.*` for all types below `order`, or `*` for all types but those of the hub
/// itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, example = "order.*", pattern = r"^(\*|[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*(\.\*)?)$", max_length = 200)]
pub(crate) struct EventTypes(String);

/// Conditions on the payload, which must all be true.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
#[schema(as = EventFilter, value_type = Vec<Condition>, max_items = 20)]
pub(crate) struct Filter(pub(crate) Vec<Condition>);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Condition {
    /// A JSON pointer into the payload.
    pub(crate) pointer: String,
    pub(crate) op: Op,
    /// The value to compare with: for `in` a list, for `exists` true or false.
    pub(crate) value: Value,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Op {
    Eq,
    Ne,
    In,
    Gt,
    Gte,
    Lt,
    Lte,
    StartsWith,
    Exists,
}

/// One alternative for each kind of value that the operators compare with.
impl PartialSchema for Condition {
    fn schema() -> RefOr<Schema> {
        let of_type = |types: &[Type]| ObjectBuilder::new().schema_type(SchemaType::Array(types.to_vec()));
        let any = || ObjectBuilder::new().schema_type(SchemaType::AnyValue);
        let list = ArrayBuilder::new().items(any());
        let alternatives: [(&[&str], RefOr<Schema>); 5] = [
            (&["eq", "ne"], any().into()),
            (&["in"], list.into()),
            (&["gt", "gte", "lt", "lte"], of_type(&[Type::Number, Type::String]).into()),
            (&["starts_with"], of_type(&[Type::String]).into()),
            (&["exists"], of_type(&[Type::Boolean]).into()),
        ];
        let pointer = || {
            let text = ObjectBuilder::new().schema_type(Type::String).pattern(Some("^/([^~]|~[01])*$"));
            text.max_length(Some(POINTER_CHARS_MAX)).description(Some("A JSON pointer into the payload."))
        };
        let one_of = alternatives.into_iter().fold(OneOfBuilder::new(), |one_of, (operators, value)| {
            let operator = ObjectBuilder::new().schema_type(Type::String).enum_values(Some(operators.iter().copied()));
            let condition = ObjectBuilder::new()
                .property("pointer", pointer())
                .property("op", operator)
                .property("value", value)
                .required("pointer")
                .required("op")
                .required("value")
                .additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(false)));
            one_of.item(condition)
        });
        let description = "A condition on the payload: the value at `pointer`, compared by `op` with `value`.";
        one_of.description(Some(description)).into()
    }
}

impl ToSchema for Condition {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("FilterCondition")
    }
}

const CONDITIONS_MAX: usize = 20;
/// JSON values in all conditions together. In memory, each takes many times the bytes of its JSON.
const FILTER_VALUES_MAX: usize = 1_000;
const POINTER_CHARS_MAX: usize = 200;
const EVENT_TYPE_BYTES_MAX: usize = 200;
/// A longer lane name is replaced by its SHA-256 digest.
const LANE_CHARS_MAX: usize = 255;
/// The part of a value that names a lane, in bytes of text or of JSON: values that begin alike share a lane.
const LANE_VALUE_BYTES_MAX: usize = 4 * 1024;

/// A pattern that is not valid.
#[derive(Debug, thiserror::Error)]
#[error(
    "`{0}` is not a valid event type: use parts of letters, digits and `_`, joined by dots, with `*` as the last part for all types below"
)]
pub(crate) struct InvalidEventTypes(String);

/// A text that is not a JSON pointer, or is too long.
#[derive(Debug, thiserror::Error)]
#[error("must be a JSON pointer such as `/customer/id`, of at most {POINTER_CHARS_MAX} characters")]
pub(crate) struct InvalidPointer;

impl TryFrom<String> for EventTypes {
    type Error = InvalidEventTypes;

    fn try_from(pattern: String) -> Result<EventTypes, InvalidEventTypes> {
        let plain =
            |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let exact = |types: &str| types.split('.').all(plain);
        let is_valid = pattern == "*" || exact(pattern.strip_suffix(".*").unwrap_or(&pattern));
        if is_valid && pattern.len() <= EVENT_TYPE_BYTES_MAX {
            Ok(EventTypes(pattern))
        } else {
            Err(InvalidEventTypes(pattern))
        }
    }
}

impl From<EventTypes> for String {
    fn from(types: EventTypes) -> String {
        types.0
    }
}

impl EventTypes {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn include(&self, event_type: &str) -> bool {
        match self.0.strip_suffix('*') {
            // Receivers of all events of a tenant do not expect those of the hub.
            Some("") => !event_type.is_empty() && !is_reserved(event_type),
            Some(prefix) => event_type.len() > prefix.len() && event_type.starts_with(prefix),
            None => self.0 == event_type,
        }
    }
}

/// Whether only the hub itself posts events of this type: `hub`, and all types below it.
pub(crate) fn is_reserved(event_type: &str) -> bool {
    event_type.split('.').next() == Some("hub")
}

impl Filter {
    /// Checks the conditions. Fails with a JSON pointer to the invalid part and with what is accepted there.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
        if self.0.len() > CONDITIONS_MAX {
            return Err((String::new(), format!("must have at most {CONDITIONS_MAX} conditions")));
        }
        for (at, condition) in self.0.iter().enumerate() {
            check_pointer(&condition.pointer).map_err(|error| (format!("/{at}/pointer"), error.to_string()))?;
            let (is_valid, accepted) = match condition.op {
                Op::Eq | Op::Ne => (true, ""),
                Op::In => (condition.value.is_array(), "must be a list for `in`"),
                Op::Gt | Op::Gte | Op::Lt | Op::Lte => (
                    condition.value.is_number() || condition.value.is_string(),
                    "must be a number or a string for a comparison",
                ),
                Op::StartsWith => (condition.value.is_string(), "must be a string for `starts_with`"),
                Op::Exists => (condition.value.is_boolean(), "must be true or false for `exists`"),
            };
            if !is_valid {
                return Err((format!("/{at}/value"), accepted.to_owned()));
            }
        }
        match self.0.iter().map(|condition| count_values(&condition.value)).sum::<usize>() {
            count if count > FILTER_VALUES_MAX => Err((
                String::new(),
                format!("must compare with at most {FILTER_VALUES_MAX} values in all conditions together, not {count}"),
            )),
            _ => Ok(()),
        }
    }

    pub(crate) fn matches(&self, payload: &Value) -> bool {
        self.0.iter().all(|condition| condition.is_true(payload))
    }
}

impl Condition {
    fn is_true(&self, payload: &Value) -> bool {
        let found = value_at(payload, &self.pointer);
        let Some(found) = found else {
            return match self.op {
                Op::Exists => self.value == Value::Bool(false),
                Op::Ne => true,
                Op::Eq | Op::In | Op::Gt | Op::Gte | Op::Lt | Op::Lte | Op::StartsWith => false,
            };
        };
        match self.op {
            Op::Exists => self.value == Value::Bool(true),
            Op::Eq => is_equal(found, &self.value),
            Op::Ne => !is_equal(found, &self.value),
            Op::In => self.value.as_array().is_some_and(|list| list.iter().any(|value| is_equal(found, value))),
            Op::Gt => compare(found, &self.value).is_some_and(|order| order.is_gt()),
            Op::Gte => compare(found, &self.value).is_some_and(|order| order.is_ge()),
            Op::Lt => compare(found, &self.value).is_some_and(|order| order.is_lt()),
            Op::Lte => compare(found, &self.value).is_some_and(|order| order.is_le()),
            Op::StartsWith => match (found.as_str(), self.value.as_str()) {
                (Some(found), Some(prefix)) => found.starts_with(prefix),
                (_, None) | (None, _) => false,
            },
        }
    }
}

/// The number of JSON values in this one, itself included.
fn count_values(value: &Value) -> usize {
    1 + match value {
        Value::Array(values) => values.iter().map(count_values).sum(),
        Value::Object(fields) => fields.values().map(count_values).sum::<usize>(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

/// Like [`Value::pointer`], which allocates memory for each part of the pointer.
fn value_at<'a>(payload: &'a Value, pointer: &str) -> Option<&'a Value> {
    pointer.split('/').skip(1).try_fold(payload, |value, part| match value {
        Value::Object(fields) => fields.get(&*unescaped(part)),
        Value::Array(values) => values.get(index(part)?),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    })
}

fn unescaped(part: &str) -> Cow<'_, str> {
    if part.contains('~') { part.replace("~1", "/").replace("~0", "~").into() } else { part.into() }
}

/// The index in an array: digits without a leading zero.
fn index(part: &str) -> Option<usize> {
    let is_canonical = part == "0" || !part.starts_with(['0', '+']);
    part.parse().ok().filter(|_| is_canonical)
}

/// Equality of JSON values, where 1 and 1.0 are equal.
fn is_equal(one: &Value, other: &Value) -> bool {
    match (one.as_f64(), other.as_f64()) {
        (Some(_), Some(_)) => compare(one, other).is_some_and(|order| order.is_eq()),
        _ => one == other,
    }
}

/// The order of two numbers or two strings; None for anything else.
fn compare(one: &Value, other: &Value) -> Option<std::cmp::Ordering> {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => match (one.as_i64(), other.as_i64()) {
            (Some(one), Some(other)) => Some(one.cmp(&other)),
            _ => one.as_f64()?.partial_cmp(&other.as_f64()?),
        },
        (Value::String(one), Value::String(other)) => Some(one.cmp(other)),
        _ => None,
    }
}

/// Checks a JSON pointer that is not empty.
pub(crate) fn check_pointer(pointer: &str) -> Result<(), InvalidPointer> {
    let has_valid_escapes = pointer.split('~').skip(1).all(|rest| rest.starts_with('0') || rest.starts_with('1'));
    if pointer.starts_with('/') && pointer.chars().count() <= POINTER_CHARS_MAX && has_valid_escapes {
        Ok(())
    } else {
        Err(InvalidPointer)
    }
}

/// The name of the lane: the value in the payload. None if it is missing or null; such a message waits for no other.
pub(crate) fn lane_at(payload: &Value, pointer: &str) -> Option<String> {
    let mut start = ValueStart::default();
    match value_at(payload, pointer)? {
        Value::Null => return None,
        Value::String(text) => start.add(text.as_bytes()),
        // An error means that the rest of the value was not written.
        other => drop(write!(start, "{other}")),
    }
    // PostgreSQL does not store NUL in text.
    let is_name = |text: &str| {
        !start.is_cut && !text.is_empty() && !text.contains('\0') && text.chars().count() <= LANE_CHARS_MAX
    };
    match std::str::from_utf8(&start.bytes) {
        Ok(text) if is_name(text) => Some(text.to_owned()),
        Ok(_) | Err(_) => Some(Sha256::digest(&start.bytes).iter().map(|byte| format!("{byte:02x}")).collect()),
    }
}

/// The first [`LANE_VALUE_BYTES_MAX`] bytes of a value.
#[derive(Default)]
struct ValueStart {
    bytes: Vec<u8>,
    is_cut: bool,
}

impl ValueStart {
    fn add(&mut self, bytes: &[u8]) {
        let room = LANE_VALUE_BYTES_MAX - self.bytes.len();
        self.bytes.extend_from_slice(&bytes[..bytes.len().min(room)]);
        self.is_cut |= bytes.len() > room;
    }
}

impl Write for ValueStart {
    /// Fails when the value is longer, so that the rest is not serialised.
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.add(text.as_bytes());
        if self.is_cut { Err(fmt::Error) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn types_are_exact_or_a_prefix() {
        let includes = |pattern: &str, event: &str| EventTypes::try_from(pattern.to_owned()).unwrap().include(event);
        assert!(includes("order.paid", "order.paid") && !includes("order.paid", "order.paid.twice"));
        assert!(includes("order.*", "order.paid") && includes("order.*", "order.item.added"));
        assert!(!includes("order.*", "order") && !includes("order.*", "orders.paid"));
        assert!(includes("*", "anything.at.all") && includes("*", "hubs.all"));
        assert!(!includes("*", "hub.message.dead"), "only on purpose");
        assert!(includes("hub.*", "hub.message.dead") && includes("hub.message.dead", "hub.message.dead"));
        for bad in ["", "order.", ".order", "order*", "order.*.paid", "order paid", "**", "é"] {
            assert!(EventTypes::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn conditions_compare_values_of_the_same_type() {
        let payload = json!({"amount": 10, "country": "CH", "tags": ["a"], "user": {"vip": true}, "nothing": null});
        let matches = |pointer: &str, op: &str, value: Value| {
            let condition = json!([{"pointer": pointer, "op": op, "value": value}]);
            let filter: Filter = serde_json::from_value(condition).unwrap();
            filter.check().unwrap();
            filter.matches(&payload)
        };
        assert!(matches("/amount", "eq", json!(10.0)) && !matches("/amount", "ne", json!(10)));
        assert!(matches("/amount", "gte", json!(10)) && !matches("/amount", "gt", json!(10)));
        assert!(matches("/amount", "lt", json!(10.5)) && matches("/amount", "lte", json!(10)));
        assert!(!matches("/amount", "gt", json!("1")), "a string is not a number");
        assert!(matches("/country", "in", json!(["DE", "CH"])) && !matches("/country", "in", json!([])));
        assert!(matches("/country", "starts_with", json!("C")));
        assert!(matches("/user/vip", "eq", json!(true)) && matches("/tags/0", "eq", json!("a")));
        assert!(matches("/nothing", "exists", json!(true)) && matches("/missing", "exists", json!(false)));
        assert!(matches("/missing", "ne", json!(1)) && !matches("/missing", "eq", json!(null)));
        let bad: Filter = serde_json::from_value(json!([{"pointer": "amount", "op": "eq", "value": 1}])).unwrap();
        assert!(bad.check().is_err());
    }

    #[test]
    fn the_lane_is_named_by_a_value_of_the_payload() {
        let payload = json!({"id": 7, "name": "x", "none": null, "long": "y".repeat(300), "nul": "a\0b"});
        assert_eq!(lane_at(&payload, "/id").as_deref(), Some("7"));
        assert_eq!(lane_at(&payload, "/name").as_deref(), Some("x"));
        assert_eq!(lane_at(&payload, "/none"), None);
        assert_eq!(lane_at(&payload, "/missing"), None);
        for hashed in ["/long", "/nul"] {
            assert_eq!(lane_at(&payload, hashed).unwrap().len(), 64);
        }
    }
    #[test]
    fn pointers_are_followed_as_the_standard_says() {
        let payload = json!({"": 1, "a": {"b/c": [2, {"~": 3}], "~1": 4}, "0": [5], "deep": [[[6]]]});
        let pointers =
            ["/", "/a/b~1c/0", "/a/b~1c/1/~0", "/a/~01", "/0/0", "/deep/0/0/0", "/a", "/a/b~1c/01", "/a/b~1c/+1"];
        for pointer in pointers.into_iter().chain(["/a/b~1c/2", "/a/b~1c/-", "/deep/0/0/0/0", "/x", "/a/", "//"]) {
            assert_eq!(value_at(&payload, pointer), payload.pointer(pointer), "{pointer}");
        }
        assert_eq!(value_at(&payload, "/a/b~1c/1/~0"), Some(&json!(3)));
    }

    #[test]
    fn a_filter_compares_with_a_bounded_number_of_values() {
        let filter = |count: usize| Filter(vec![condition("/a", Op::In, json!(vec![1; count]))]);
        assert_eq!(filter(FILTER_VALUES_MAX - 1).check(), Ok(()));
        assert!(filter(FILTER_VALUES_MAX).check().unwrap_err().1.contains("at most 1000 values"));
        let nested = |depth: usize| (1..depth).fold(json!({}), |inner, _| json!({ "a": [inner] }));
        assert_eq!(count_values(&nested(3)), 5);
    }

    #[test]
    fn values_that_begin_alike_share_a_lane_however_long_they_are() {
        let lane = |value: &Value| lane_at(&json!({ "key": value }), "/key").unwrap();
        let text = |length: usize, end: &str| json!("x".repeat(length) + end);
        let list = |length: usize, end: u64| Value::Array([vec![json!(7); length], vec![json!(end)]].concat());
        for (short, long) in [(text(4_000, "a"), text(4_000, "b")), (list(2_000, 1), list(2_000, 2))] {
            assert_ne!(lane(&short), lane(&long));
        }
        for (one, other) in [(text(4_096, "a"), text(200_000, "b")), (list(2_048, 1), list(100_000, 2))] {
            assert_eq!((lane(&one), lane(&one).len()), (lane(&other), 64));
        }
        assert_eq!(lane(&json!({"b": [1, 2], "a": "é"})), r#"{"a":"é","b":[1,2]}"#);
        assert_eq!(lane(&json!("é".repeat(255))), "é".repeat(255));
    }

    fn condition(pointer: &str, op: Op, value: Value) -> Condition {
        Condition { pointer: pointer.to_owned(), op, value }
    }
}

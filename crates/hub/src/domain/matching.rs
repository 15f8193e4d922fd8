//! Which events match a subscriber, and in which lane they are sent.

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
pub struct EventTypes(String);

/// Conditions on the payload, which must all be true.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
#[schema(value_type = Vec<Condition>, max_items = 20)]
pub struct Filter(pub Vec<Condition>);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Condition {
    /// A JSON pointer into the payload.
    pub pointer: String,
    pub op: Op,
    /// The value to compare with: for `in` a list, for `exists` true or false.
    pub value: Value,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
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

impl ToSchema for Condition {}

const CONDITIONS_MAX: usize = 20;
const POINTER_CHARS_MAX: usize = 200;
const EVENT_TYPE_BYTES_MAX: usize = 200;
/// A longer lane name is replaced by its SHA-256 digest.
const LANE_CHARS_MAX: usize = 255;

impl TryFrom<String> for EventTypes {
    type Error = String;

    fn try_from(pattern: String) -> Result<EventTypes, String> {
        let plain =
            |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let exact = |types: &str| types.split('.').all(plain);
        let is_valid = pattern == "*" || exact(pattern.strip_suffix(".*").unwrap_or(&pattern));
        match is_valid && pattern.len() <= EVENT_TYPE_BYTES_MAX {
            true => Ok(EventTypes(pattern)),
            false => Err(format!(
                "`{pattern}` is no event type: use parts of letters, digits and `_`, joined by dots, with `*` as the last part for all types below"
            )),
        }
    }
}

impl From<EventTypes> for String {
    fn from(types: EventTypes) -> String {
        types.0
    }
}

impl EventTypes {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn include(&self, event_type: &str) -> bool {
        match self.0.strip_suffix('*') {
            // Receivers of all events of a tenant do not expect those of the hub.
            Some("") => !event_type.is_empty() && !is_reserved(event_type),
            Some(prefix) => event_type.len() > prefix.len() && event_type.starts_with(prefix),
            None => self.0 == event_type,
        }
    }
}

/// Whether only the hub itself posts events of this type: `hub`, and all types below it.
pub fn is_reserved(event_type: &str) -> bool {
    event_type.split('.').next() == Some("hub")
}

impl Filter {
    /// Checks the conditions. Fails with a JSON pointer to the invalid part and with what is accepted there.
    pub fn check(&self) -> Result<(), (String, String)> {
        if self.0.len() > CONDITIONS_MAX {
            return Err((String::new(), format!("must have at most {CONDITIONS_MAX} conditions")));
        }
        for (at, condition) in self.0.iter().enumerate() {
            check_pointer(&condition.pointer).map_err(|error| (format!("/{at}/pointer"), error))?;
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
        Ok(())
    }

    pub fn matches(&self, payload: &Value) -> bool {
        self.0.iter().all(|condition| condition.is_true(payload))
    }
}

impl Condition {
    fn is_true(&self, payload: &Value) -> bool {
        let found = payload.pointer(&self.pointer);
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

/// Checks a JSON pointer that is not empty. Fails with what is accepted.
pub fn check_pointer(pointer: &str) -> Result<(), String> {
    let has_valid_escapes = pointer.split('~').skip(1).all(|rest| rest.starts_with('0') || rest.starts_with('1'));
    match pointer.starts_with('/') && pointer.chars().count() <= POINTER_CHARS_MAX && has_valid_escapes {
        true => Ok(()),
        false => {
            Err(format!("must be a JSON pointer such as `/customer/id`, of at most {POINTER_CHARS_MAX} characters"))
        }
    }
}

/// The name of the lane: the value in the payload. None if it is missing or null; such a message waits for no other.
pub fn lane_at(payload: &Value, pointer: &str) -> Option<String> {
    let text = match payload.pointer(pointer)? {
        Value::Null => return None,
        Value::String(text) => text.clone(),
        other @ (Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => other.to_string(),
    };
    // PostgreSQL does not store NUL in text.
    match text.chars().count() > LANE_CHARS_MAX || text.contains('\0') || text.is_empty() {
        true => {
            let digest = Sha256::digest(text.as_bytes());
            Some(digest.iter().map(|byte| format!("{byte:02x}")).collect())
        }
        false => Some(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
        assert!(!matches("/amount", "gt", json!("1")), "a string is no number");
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
}

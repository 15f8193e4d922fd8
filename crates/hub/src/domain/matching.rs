//! What an event must be like to be sent to a subscriber, and in which lane.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

/// An exact type, or `order.*` for all below `order`, or `*` for all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, example = "order.*")]
pub struct EventTypes(String);

/// Conditions on the payload that must all hold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct Filter(pub Vec<Condition>);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Condition {
    /// Where in the payload: a JSON pointer.
    #[schema(example = "/amount")]
    pub pointer: String,
    pub op: Op,
    /// What it is compared with; for `in` a list, for `exists` true or false.
    pub value: Value,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
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

const CONDITIONS_MAX: usize = 20;
const POINTER_CHARS_MAX: usize = 200;
/// A longer key is known by its digest.
const LANE_CHARS_MAX: usize = 255;

impl TryFrom<String> for EventTypes {
    type Error = String;

    fn try_from(pattern: String) -> Result<EventTypes, String> {
        let plain =
            |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let exact = |types: &str| types.split('.').all(plain);
        let is_good = pattern == "*" || exact(pattern.strip_suffix(".*").unwrap_or(&pattern));
        match is_good && pattern.len() <= 200 {
            true => Ok(EventTypes(pattern)),
            false => Err(format!(
                "`{pattern}` is no event type: it takes letters, digits and _ in parts joined by dots, with `*` as the last part for all below"
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
            Some(prefix) => event_type.len() > prefix.len() && event_type.starts_with(prefix),
            None => self.0 == event_type,
        }
    }
}

impl Filter {
    /// What is wrong with it, if anything: where, and what it takes.
    pub fn check(&self) -> Result<(), (String, String)> {
        if self.0.len() > CONDITIONS_MAX {
            return Err((String::new(), format!("takes at most {CONDITIONS_MAX} conditions")));
        }
        for (at, condition) in self.0.iter().enumerate() {
            check_pointer(&condition.pointer).map_err(|error| (format!("/{at}/pointer"), error))?;
            let (fits, takes) = match condition.op {
                Op::Eq | Op::Ne => (true, ""),
                Op::In => (condition.value.is_array(), "`in` takes a list"),
                Op::Gt | Op::Gte | Op::Lt | Op::Lte => (
                    condition.value.is_number() || condition.value.is_string(),
                    "a comparison takes a number or a text",
                ),
                Op::StartsWith => (condition.value.is_string(), "`starts_with` takes a text"),
                Op::Exists => (condition.value.is_boolean(), "`exists` takes true or false"),
            };
            if !fits {
                return Err((format!("/{at}/value"), takes.to_owned()));
            }
        }
        Ok(())
    }

    pub fn holds(&self, payload: &Value) -> bool {
        self.0.iter().all(|condition| condition.holds(payload))
    }
}

impl Condition {
    fn holds(&self, payload: &Value) -> bool {
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
            Op::Eq => same(found, &self.value),
            Op::Ne => !same(found, &self.value),
            Op::In => self.value.as_array().is_some_and(|list| list.iter().any(|value| same(found, value))),
            Op::Gt => compared(found, &self.value).is_some_and(|order| order.is_gt()),
            Op::Gte => compared(found, &self.value).is_some_and(|order| order.is_ge()),
            Op::Lt => compared(found, &self.value).is_some_and(|order| order.is_lt()),
            Op::Lte => compared(found, &self.value).is_some_and(|order| order.is_le()),
            Op::StartsWith => match (found.as_str(), self.value.as_str()) {
                (Some(found), Some(prefix)) => found.starts_with(prefix),
                (_, None) | (None, _) => false,
            },
        }
    }
}

/// 1 and 1.0 are the same.
fn same(one: &Value, other: &Value) -> bool {
    match (one.as_f64(), other.as_f64()) {
        (Some(_), Some(_)) => compared(one, other).is_some_and(|order| order.is_eq()),
        _ => one == other,
    }
}

/// Numbers with numbers and texts with texts; anything else is not comparable.
fn compared(one: &Value, other: &Value) -> Option<std::cmp::Ordering> {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => match (one.as_i64(), other.as_i64()) {
            (Some(one), Some(other)) => Some(one.cmp(&other)),
            _ => one.as_f64()?.partial_cmp(&other.as_f64()?),
        },
        (Value::String(one), Value::String(other)) => Some(one.cmp(other)),
        _ => None,
    }
}

/// A JSON pointer: empty, or beginning with a slash.
pub fn check_pointer(pointer: &str) -> Result<(), String> {
    let escapes_are_good = pointer.split('~').skip(1).all(|rest| rest.starts_with('0') || rest.starts_with('1'));
    match pointer.starts_with('/') && pointer.chars().count() <= POINTER_CHARS_MAX && escapes_are_good {
        true => Ok(()),
        false => Err(format!("takes a JSON pointer such as `/customer/id`, of at most {POINTER_CHARS_MAX} characters")),
    }
}

/// The lane that a value in the payload means; None without one: a message that waits for no other.
pub fn lane_at(payload: &Value, pointer: &str) -> Option<String> {
    let text = match payload.pointer(pointer)? {
        Value::Null => return None,
        Value::String(text) => text.clone(),
        other @ (Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => other.to_string(),
    };
    // NUL is no text for PostgreSQL.
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
        assert!(includes("*", "anything.at.all"));
        for bad in ["", "order.", ".order", "order*", "order.*.paid", "order paid", "**", "é"] {
            assert!(EventTypes::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn conditions_hold_or_do_not() {
        let payload = json!({"amount": 10, "country": "CH", "tags": ["a"], "user": {"vip": true}, "nothing": null});
        let holds = |pointer: &str, op: &str, value: Value| {
            let condition = json!([{"pointer": pointer, "op": op, "value": value}]);
            let filter: Filter = serde_json::from_value(condition).unwrap();
            filter.check().unwrap();
            filter.holds(&payload)
        };
        assert!(holds("/amount", "eq", json!(10.0)) && !holds("/amount", "ne", json!(10)));
        assert!(holds("/amount", "gte", json!(10)) && !holds("/amount", "gt", json!(10)));
        assert!(holds("/amount", "lt", json!(10.5)) && holds("/amount", "lte", json!(10)));
        assert!(!holds("/amount", "gt", json!("1")), "a text is no number");
        assert!(holds("/country", "in", json!(["DE", "CH"])) && !holds("/country", "in", json!([])));
        assert!(holds("/country", "starts_with", json!("C")));
        assert!(holds("/user/vip", "eq", json!(true)) && holds("/tags/0", "eq", json!("a")));
        assert!(holds("/nothing", "exists", json!(true)) && holds("/missing", "exists", json!(false)));
        assert!(holds("/missing", "ne", json!(1)) && !holds("/missing", "eq", json!(null)));
        let bad: Filter = serde_json::from_value(json!([{"pointer": "amount", "op": "eq", "value": 1}])).unwrap();
        assert!(bad.check().is_err());
    }

    #[test]
    fn a_lane_is_what_the_payload_says() {
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

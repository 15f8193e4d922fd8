//! Who is sent what, and what an answer means. Nothing here waits, and nothing here looks at a clock.

use std::time::Duration;

use chrono::{DateTime, Utc};
use kit::auth::Tenant;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;
use uuid::Uuid;

/// Who asked for webhooks, and how they are to be sent.
#[derive(Debug, Clone, PartialEq)]
pub struct Subscriber {
    pub id: Uuid,
    pub tenant: Tenant,
    pub version: i64,
    pub settings: SubscriberSettings,
    /// Messages wait.
    pub paused_at: Option<DateTime<Utc>>,
    /// Why it was switched off, if it was not its owner who did that.
    pub inactive_reason: Option<String>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

/// What a subscriber is sent, and in which lanes.
#[derive(Debug, Clone, PartialEq)]
pub struct Interest {
    pub subscriber: Uuid,
    pub tenant: Tenant,
    pub event_types: Vec<EventTypes>,
    pub filter: Option<Filter>,
    pub ordering_key: Option<String>,
    pub is_active: bool,
}

/// What its owner chooses.
#[derive(Debug, Clone, PartialEq)]
pub struct SubscriberSettings {
    pub name: String,
    pub url: String,
    pub event_types: Vec<EventTypes>,
    pub filter: Option<Filter>,
    /// A JSON pointer into the payload: messages with the same value there keep their order.
    pub ordering_key: Option<String>,
    pub retry_backoff_seconds: Vec<u32>,
    /// Besides those that are tried again anyway.
    pub retry_statuses: Vec<u16>,
    pub on_exhausted: OnExhausted,
    pub timeout_ms: u32,
    pub max_in_flight: u32,
    pub rate_limit_per_second: Option<u32>,
    pub headers: Vec<(String, String)>,
    pub format: Format,
    /// None are made for one that is not.
    pub is_active: bool,
}

/// An exact type, or `order.*` for all below `order`, or `*` for all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, example = "order.*")]
pub struct EventTypes(String);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnExhausted {
    /// The lane goes on without the message.
    Skip,
    /// The lane waits until someone retries the message.
    Block,
}

/// What is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The payload, byte for byte.
    Raw,
    /// Standard Webhooks: `{type, timestamp, data}`.
    Standard,
    /// CloudEvents, structured: `{specversion, id, source, type, time, data}`.
    Cloudevents,
}

impl OnExhausted {
    pub const ALL: [OnExhausted; 2] = [OnExhausted::Skip, OnExhausted::Block];

    pub fn as_str(self) -> &'static str {
        match self {
            OnExhausted::Skip => "skip",
            OnExhausted::Block => "block",
        }
    }

    pub fn named(name: &str) -> Option<OnExhausted> {
        OnExhausted::ALL.into_iter().find(|one| one.as_str() == name)
    }
}

impl Format {
    pub const ALL: [Format; 3] = [Format::Raw, Format::Standard, Format::Cloudevents];

    pub fn as_str(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Standard => "standard",
            Format::Cloudevents => "cloudevents",
        }
    }

    pub fn named(name: &str) -> Option<Format> {
        Format::ALL.into_iter().find(|one| one.as_str() == name)
    }
}

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

impl Subscriber {
    /// As it is now, without what is secret: for who looks at a dead letter later.
    pub fn snapshot(&self) -> Value {
        let settings = &self.settings;
        json!({
            "id": self.id,
            "name": settings.name,
            "url": settings.url,
            "event_types": settings.event_types,
            "filter": settings.filter,
            "ordering_key": settings.ordering_key,
            "retry_backoff_seconds": settings.retry_backoff_seconds,
            "retry_statuses": settings.retry_statuses,
            "on_exhausted": settings.on_exhausted,
            "timeout_ms": settings.timeout_ms,
            "max_in_flight": settings.max_in_flight,
            "rate_limit_per_second": settings.rate_limit_per_second,
            "format": settings.format,
            "version": self.version,
        })
    }
}

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

/// What became of an event for a subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Delivered,
    /// It is still to be sent.
    Pending,
    /// It is tried again.
    Failed,
    /// It was given up: a dead letter has it.
    Dead,
    /// The subscriber's filter did not let it through.
    Filtered,
    /// The subscriber was switched off.
    Inactive,
}

impl Outcome {
    pub const ALL: [Outcome; 6] =
        [Outcome::Delivered, Outcome::Pending, Outcome::Failed, Outcome::Dead, Outcome::Filtered, Outcome::Inactive];

    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Delivered => "delivered",
            Outcome::Pending => "pending",
            Outcome::Failed => "failed",
            Outcome::Dead => "dead",
            Outcome::Filtered => "filtered",
            Outcome::Inactive => "inactive",
        }
    }

    pub fn named(name: &str) -> Option<Outcome> {
        Outcome::ALL.into_iter().find(|one| one.as_str() == name)
    }

    /// Whether nothing more becomes of it by itself.
    pub fn is_final(self) -> bool {
        match self {
            Outcome::Delivered | Outcome::Dead | Outcome::Filtered | Outcome::Inactive => true,
            Outcome::Pending | Outcome::Failed => false,
        }
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why a message was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Reason {
    /// All its retries failed.
    Exhausted,
    /// An answer that is not worth a retry.
    Refused,
    /// 410.
    Gone,
    /// Somebody moved it.
    Manual,
    /// It waited for too long.
    Expired,
}

impl Reason {
    pub const ALL: [Reason; 5] = [Reason::Exhausted, Reason::Refused, Reason::Gone, Reason::Manual, Reason::Expired];

    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Exhausted => "exhausted",
            Reason::Refused => "refused",
            Reason::Gone => "gone",
            Reason::Manual => "manual",
            Reason::Expired => "expired",
        }
    }

    pub fn named(name: &str) -> Option<Reason> {
        Reason::ALL.into_iter().find(|one| one.as_str() == name)
    }
}

/// What a subscriber's answer means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Delivered,
    /// It may go better another time.
    Retry,
    /// It will not go better.
    Refused,
    /// 410: nobody wants anything there any more.
    Gone,
}

/// `status` is None when there was no answer.
pub fn verdict(status: Option<u16>, retry_statuses: &[u16]) -> Verdict {
    match status {
        None => Verdict::Retry,
        Some(200..=299) => Verdict::Delivered,
        Some(status) if retry_statuses.contains(&status) => Verdict::Retry,
        Some(410) => Verdict::Gone,
        Some(429 | 500..=599) => Verdict::Retry,
        Some(_) => Verdict::Refused,
    }
}

/// How long to wait after so many failures; None: no more. `chance` from 0 to 1 spreads those that failed together.
pub fn backoff(schedule: &[u32], failures: u32, chance: f64) -> Option<Duration> {
    let seconds = *schedule.get(failures.checked_sub(1)? as usize)?;
    Some(Duration::from_secs_f64(f64::from(seconds) * (1.0 + 0.2 * chance.clamp(0.0, 1.0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_decision_matrix() {
        for status in 100..=599 {
            let expected = match status {
                200..=299 => Verdict::Delivered,
                410 => Verdict::Gone,
                429 | 500..=599 => Verdict::Retry,
                _ => Verdict::Refused,
            };
            assert_eq!(verdict(Some(status), &[]), expected, "{status}");
        }
        assert_eq!(verdict(None, &[]), Verdict::Retry);
        assert_eq!(verdict(Some(409), &[409]), Verdict::Retry);
        assert_eq!(verdict(Some(410), &[410]), Verdict::Retry);
        assert_eq!(verdict(Some(204), &[204]), Verdict::Delivered);
    }

    #[test]
    fn the_fourth_failure_is_the_last() {
        let seconds = |failures| backoff(&[5, 30, 300], failures, 0.0).map(|pause| pause.as_secs());
        assert_eq!([1, 2, 3, 4].map(seconds), [Some(5), Some(30), Some(300), None]);
        assert_eq!(backoff(&[10], 1, 1.0), Some(Duration::from_secs(12)));
        assert_eq!(backoff(&[], 1, 0.0), None);
    }

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

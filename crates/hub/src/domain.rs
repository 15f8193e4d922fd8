//! Who is sent what, and what an answer means. Nothing here waits, and nothing here looks at a clock.

mod matching;
mod outcome;

use chrono::{DateTime, Utc};
use kit::auth::Tenant;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;
use uuid::Uuid;

pub use self::matching::{Condition, EventTypes, Filter, Op, check_pointer, lane_at};
pub use self::outcome::{Outcome, Reason, Verdict, backoff, verdict};

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
    /// When it was made.
    pub since: DateTime<Utc>,
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

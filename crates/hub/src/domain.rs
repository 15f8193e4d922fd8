//! Subscribers, which events match them, and what a response means. No I/O, no async, no clock.

mod matching;
mod outcome;

use chrono::{DateTime, Utc};
use kit::auth::Tenant;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use strum::{EnumString, IntoStaticStr};
use utoipa::ToSchema;
use uuid::Uuid;

pub use self::matching::{Condition, EventTypes, Filter, Op, check_pointer, lane_at};
pub use self::outcome::{EventStatus, FanOutProgress, Outcome, Reason, Verdict, backoff, verdict};

/// A webhook endpoint of a tenant, and how to send to it.
#[derive(Debug, Clone, PartialEq)]
pub struct Subscriber {
    pub id: Uuid,
    pub tenant: Tenant,
    pub version: i64,
    pub settings: SubscriberSettings,
    /// Set while the subscriber is paused: its messages are stored and not sent.
    pub paused_at: Option<DateTime<Utc>>,
    /// Why the hub switched it off; None if its owner did.
    pub inactive_reason: Option<String>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

/// What fan-out needs to know about a subscriber: which events match it, and their lanes.
#[derive(Debug, Clone, PartialEq)]
pub struct Interest {
    pub subscriber: Uuid,
    pub tenant: Tenant,
    pub event_types: Vec<EventTypes>,
    pub filter: Option<Filter>,
    pub ordering_key: Option<String>,
    pub is_active: bool,
    /// When the subscriber was created.
    pub since: DateTime<Utc>,
}

/// The settings that the owner of a subscriber chooses.
#[derive(Debug, Clone, PartialEq)]
pub struct SubscriberSettings {
    pub name: String,
    pub url: String,
    pub event_types: Vec<EventTypes>,
    pub filter: Option<Filter>,
    /// A JSON pointer into the payload: messages with the same value there form a lane.
    pub ordering_key: Option<String>,
    pub retry_backoff_seconds: Vec<u32>,
    /// Statuses that are retried in addition to the default ones.
    pub retry_statuses: Vec<u16>,
    pub on_exhausted: OnExhausted,
    pub timeout_ms: u32,
    pub max_in_flight: u32,
    pub rate_limit_per_second: Option<u32>,
    pub headers: Vec<(String, String)>,
    pub format: Format,
    /// No messages are created for a subscriber that is switched off.
    pub is_active: bool,
}

/// What happens to a lane when its head becomes a dead letter after its last retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum OnExhausted {
    /// The lane continues with the next message.
    Skip,
    /// The lane waits until an operator retries or dead-letters the message.
    Block,
}

/// The format of the request body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Format {
    /// The payload, byte for byte.
    Raw,
    /// Standard Webhooks: `{type, timestamp, data}`.
    Standard,
    /// CloudEvents in structured mode: `{specversion, id, source, type, time, data}`.
    Cloudevents,
}

impl OnExhausted {
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// None if the name is unknown.
    pub fn named(name: &str) -> Option<OnExhausted> {
        name.parse().ok()
    }
}

impl Format {
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// None if the name is unknown.
    pub fn named(name: &str) -> Option<Format> {
        name.parse().ok()
    }
}

impl Subscriber {
    /// The current settings without headers and secrets, to be stored with a dead letter.
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

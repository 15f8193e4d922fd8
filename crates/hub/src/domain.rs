//! Subscribers and streams, which events match them, and what a response means. No I/O, no async, no clock.

mod auth;
mod matching;
mod outcome;
mod replay;
mod retry;
mod stream;

use chrono::{DateTime, Utc};
use kit::auth::Tenant;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use strum::{EnumString, IntoStaticStr};
use utoipa::ToSchema;
use uuid::Uuid;

pub use self::auth::{AuthKind, ClientCertificate, EndpointAuth, OAuth2Credentials};
pub use self::matching::{Condition, EventTypes, Filter, Op, check_pointer, is_reserved, lane_at};
pub use self::outcome::{EventOutcome, EventStatus, FanOutProgress, Outcome, Reason};
pub use self::replay::{Backfill, ReplayAction, ReplayKind, ReplayMode, ReplaySelection, ReplayState};
pub use self::retry::{RetryAction, RetryRules, RetrySchedule, StatusPattern, Verdict, backoff, verdict};
pub use self::stream::{
    Assignment, InUse, LeaseLost, PARTS, Part, READERS_MAX, ReadRange, Reader, Stream, StreamCursor, StreamSettings,
    TooManyReaders, part_of,
};

/// A webhook endpoint of a tenant, and how to send to it.
#[derive(Debug, Clone, PartialEq)]
pub struct Subscriber {
    pub id: Uuid,
    pub tenant: Tenant,
    pub version: i64,
    pub settings: SubscriberSettings,
    /// Set while the subscriber is paused: its messages are stored and not sent.
    pub paused_at: Option<DateTime<Utc>>,
    /// Set until the endpoint has answered a challenge: messages are stored and not sent.
    pub unverified_since: Option<DateTime<Utc>>,
    /// Why the hub switched it off; None if its owner did.
    pub inactive_reason: Option<String>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

/// What fan-out needs to know about a subscriber or a stream: which events match it, and their lanes.
#[derive(Debug, Clone, PartialEq)]
pub struct Interest {
    /// The id of the subscriber or stream.
    pub subscriber: Uuid,
    pub is_stream: bool,
    pub tenant: Tenant,
    pub event_types: Vec<EventTypes>,
    pub filter: Option<Filter>,
    pub ordering_key: Option<String>,
    pub is_active: bool,
    /// When the subscriber or stream was created.
    pub since: DateTime<Utc>,
    /// Set if the subscriber was created with a backfill.
    pub backfill: Option<Backfill>,
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
    pub retry_rules: RetryRules,
    pub on_exhausted: OnExhausted,
    pub timeout_ms: u32,
    pub max_in_flight: u32,
    pub rate_limit_per_second: Option<u32>,
    pub headers: Vec<(String, String)>,
    /// What the endpoint requires besides the signature.
    pub auth: Option<EndpointAuth>,
    pub format: Format,
    /// None: each message is sent in a request of its own.
    pub batch: Option<Batch>,
    /// Whether each new origin of the URL has to answer a challenge.
    pub verify_endpoint: bool,
    /// No messages are created for a subscriber that is switched off.
    pub is_active: bool,
}

/// Several messages in one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
pub struct Batch {
    /// The number of messages in a request, at most.
    pub max: u32,
    /// How long messages wait for others, in milliseconds.
    pub wait_ms: u32,
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
            "retry_statuses": settings.retry_rules.retried_statuses(),
            "retry_rules": settings.retry_rules,
            "on_exhausted": settings.on_exhausted,
            "timeout_ms": settings.timeout_ms,
            "max_in_flight": settings.max_in_flight,
            "rate_limit_per_second": settings.rate_limit_per_second,
            "format": settings.format,
            "batch": settings.batch,
            "auth": settings.auth.as_ref().map(EndpointAuth::kind),
            "version": self.version,
        })
    }
}

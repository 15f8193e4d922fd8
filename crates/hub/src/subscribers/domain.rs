//! A webhook endpoint of a tenant, and the settings that its owner chooses.

use chrono::{DateTime, Utc};
use pillarbox::log::Tenant;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::deliveries::domain::{Batch, EndpointAuth, Format, OnExhausted, RetryRules};
use crate::directory::domain::{EventTypes, Filter};
use crate::rows::{BatchColumns, Unsigned, UnsignedList};

/// A webhook endpoint of a tenant, and how to send to it.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub(crate) struct Subscriber {
    pub(crate) id: Uuid,
    #[sqlx(try_from = "String")]
    pub(crate) tenant: Tenant,
    pub(crate) version: i64,
    #[sqlx(flatten)]
    pub(crate) settings: SubscriberSettings,
    /// Set while the subscriber is paused: its messages are stored and not sent.
    pub(crate) paused_at: Option<DateTime<Utc>>,
    /// Set until the endpoint has answered a challenge: messages are stored and not sent.
    pub(crate) unverified_since: Option<DateTime<Utc>>,
    /// Why the hub switched it off; None if its owner did.
    pub(crate) inactive_reason: Option<String>,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) updated_at: DateTime<Utc>,
}

/// The settings that the owner of a subscriber chooses.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub(crate) struct SubscriberSettings {
    pub(crate) name: String,
    pub(crate) url: String,
    pub(crate) event_types: Vec<EventTypes>,
    #[sqlx(json(nullable))]
    pub(crate) filter: Option<Filter>,
    /// A JSON pointer into the payload: messages with the same value there form a lane.
    pub(crate) ordering_key: Option<String>,
    #[sqlx(try_from = "UnsignedList")]
    pub(crate) retry_backoff_seconds: Vec<u32>,
    #[sqlx(json)]
    pub(crate) retry_rules: RetryRules,
    #[sqlx(try_from = "&'a str")]
    pub(crate) on_exhausted: OnExhausted,
    #[sqlx(try_from = "i32")]
    pub(crate) timeout_ms: u32,
    #[sqlx(try_from = "i32")]
    pub(crate) max_in_flight: u32,
    #[sqlx(try_from = "Unsigned")]
    pub(crate) rate_limit_per_second: Option<u32>,
    /// Encrypted in the database, as is `auth`: the store fills both.
    #[sqlx(skip)]
    pub(crate) headers: Vec<(String, String)>,
    /// What the endpoint requires besides the signature.
    #[sqlx(skip)]
    pub(crate) auth: Option<EndpointAuth>,
    #[sqlx(try_from = "&'a str")]
    pub(crate) format: Format,
    /// None: each message is sent in a separate request.
    #[sqlx(flatten, try_from = "BatchColumns")]
    pub(crate) batch: Option<Batch>,
    /// Whether each new origin of the URL has to answer a challenge.
    pub(crate) verify_endpoint: bool,
    /// No messages are created for a subscriber that is switched off.
    pub(crate) is_active: bool,
}

impl Subscriber {
    /// The current settings without headers and secrets, to be stored with a dead letter.
    pub(crate) fn snapshot(&self) -> Value {
        let settings = &self.settings;
        json!({
            "id": self.id,
            "name": settings.name,
            "url": settings.url,
            "event_types": settings.event_types,
            "filter": settings.filter,
            "ordering_key": settings.ordering_key,
            "retry_backoff_seconds": settings.retry_backoff_seconds,
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

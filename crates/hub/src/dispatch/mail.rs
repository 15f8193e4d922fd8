//! What is sent, and to whom.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use http::HeaderMap;
use mailbox::handler::trace_of;
use mailbox::log::Message;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::domain::{Format, OnExhausted};
use crate::fanout::SOURCE;
use crate::signature::SigningSecret;
use crate::store;
use crate::target::Target;

/// What is sent, the same for all subscribers.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) id: Uuid,
    /// Who says it: `hub` if it was posted here, or a service.
    pub(crate) source: String,
    pub(crate) topic: String,
    pub(crate) at: DateTime<Utc>,
    pub(crate) payload: Bytes,
    pub(crate) traceparent: Option<String>,
}

/// An event as a dead letter keeps it.
#[derive(Serialize, Deserialize)]
pub(crate) struct Snapshot {
    event_id: Uuid,
    event_type: String,
    #[serde(default = "posted_here")]
    source: String,
    created_at: DateTime<Utc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traceparent: Option<String>,
    payload: Box<RawValue>,
}

/// Who it is sent to, and how.
#[derive(Debug)]
pub(crate) struct Recipient {
    pub(crate) id: Uuid,
    pub(crate) tenant: String,
    pub(crate) version: i64,
    /// Neither paused nor switched off.
    pub(crate) is_open: bool,
    pub(crate) target: Target,
    pub(crate) headers: HeaderMap,
    /// The newest first, each with when it ends.
    pub(crate) secrets: Vec<(SigningSecret, Option<DateTime<Utc>>)>,
    pub(crate) format: Format,
    pub(crate) timeout: Duration,
    pub(crate) max_in_flight: usize,
    pub(crate) rate: Option<u32>,
    pub(crate) backoff: Vec<u32>,
    pub(crate) retry_statuses: Vec<u16>,
    pub(crate) on_exhausted: OnExhausted,
    /// For dead letters: without what is secret.
    pub(crate) snapshot: Value,
}

/// A message for one subscriber.
#[derive(Debug, Clone)]
pub(crate) struct Mail {
    pub(crate) n: i64,
    pub(crate) lane: Option<Arc<str>>,
    pub(crate) seq: Option<i64>,
    /// None: the log no longer has it.
    pub(crate) event: Option<Arc<Event>>,
}

impl Event {
    pub(crate) fn of(message: &Message) -> Event {
        Event {
            id: message.message_id,
            source: message.source.clone(),
            topic: message.topic.clone(),
            at: message.at,
            payload: Bytes::copy_from_slice(message.payload.get().as_bytes()),
            traceparent: trace_of(message).map(|trace| trace.to_string()),
        }
    }

    pub(crate) fn again(snapshot: Snapshot) -> Event {
        Event {
            id: snapshot.event_id,
            source: snapshot.source,
            topic: snapshot.event_type,
            at: snapshot.created_at,
            payload: Bytes::copy_from_slice(snapshot.payload.get().as_bytes()),
            traceparent: snapshot.traceparent,
        }
    }

    /// The text of a [`Snapshot`], with the payload byte for byte.
    pub(crate) fn snapshot(&self) -> String {
        let payload = std::str::from_utf8(&self.payload).unwrap_or("null");
        let snapshot = Snapshot {
            event_id: self.id,
            event_type: self.topic.clone(),
            source: self.source.clone(),
            created_at: self.at,
            traceparent: self.traceparent.clone(),
            payload: RawValue::from_string(payload.to_owned()).unwrap_or_default(),
        };
        serde_json::to_string(&snapshot).unwrap_or_default()
    }
}

/// A dead letter from before services' messages were sent.
fn posted_here() -> String {
    SOURCE.as_str().to_owned()
}

impl Recipient {
    pub(crate) fn of(known: store::subscriber::Known) -> Result<Recipient, String> {
        let store::subscriber::Known { subscriber, secrets, .. } = known;
        let snapshot = subscriber.snapshot();
        let settings = subscriber.settings;
        // It was checked when it was given; a stricter setting since then is found when it is sent to.
        let target = Target::parse(&settings.url, false).map_err(|error| format!("{}: url {error}", subscriber.id))?;
        let headers = crate::headers::check(&settings.headers.into_iter().collect())
            .map_err(|refused| format!("{}: {} of its headers are refused", subscriber.id, refused.len()))?;
        Ok(Recipient {
            id: subscriber.id,
            tenant: subscriber.tenant.as_str().to_owned(),
            version: subscriber.version,
            is_open: settings.is_active && subscriber.paused_at.is_none(),
            target,
            headers,
            secrets,
            format: settings.format,
            timeout: Duration::from_millis(settings.timeout_ms.into()),
            max_in_flight: settings.max_in_flight as usize,
            rate: settings.rate_limit_per_second,
            backoff: settings.retry_backoff_seconds,
            retry_statuses: settings.retry_statuses,
            on_exhausted: settings.on_exhausted,
            snapshot,
        })
    }
}

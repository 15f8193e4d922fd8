use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use contracts::EventId;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::domain::{EventTypes, Filter, Format, OnExhausted, Subscriber};
use crate::fields::{HIDDEN, SignatureKind};
use crate::signature::{SecretKind, SigningSecret};
use crate::store::subscriber::Known;

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Subscriber)]
pub(crate) struct SubscriberView {
    id: Uuid,
    name: String,
    url: String,
    event_types: Vec<EventTypes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    filter: Option<Filter>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ordering_key: Option<String>,
    retry_backoff_seconds: Vec<u32>,
    retry_statuses: Vec<u16>,
    on_exhausted: OnExhausted,
    timeout_ms: u32,
    max_in_flight: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    rate_limit_per_second: Option<u32>,
    /// Their names; the values are not shown.
    #[schema(example = json!({"authorization": "***"}))]
    headers: BTreeMap<String, &'static str>,
    format: Format,
    is_active: bool,
    /// Why it was switched off, if it was not you who did that.
    #[serde(skip_serializing_if = "Option::is_none")]
    inactive_reason: Option<String>,
    /// Since when its messages wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    paused_at: Option<DateTime<Utc>>,
    /// Its `ETag`, too.
    version: i64,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

/// What deliveries are signed with, but for the secret itself.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SecretView {
    signature: SignatureKind,
    /// What a receiver verifies `v1a` with.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "whpk_...")]
    public_key: Option<String>,
    /// Nothing is signed with it from then on.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SubscriberWithSecrets {
    #[serde(flatten)]
    subscriber: SubscriberView,
    /// The newest first.
    secrets: Vec<SecretView>,
    /// Its headers and secrets cannot be opened with the keys that this instance has, and are missing here: its messages
    /// wait. It can be deleted.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    unopened: bool,
}

/// The only answer that shows a secret.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SubscriberWithSecret {
    #[serde(flatten)]
    subscriber: SubscriberWithSecrets,
    /// What deliveries are signed with from now on. It is not shown again.
    #[schema(example = "whsec_...")]
    secret: String,
}

impl From<&Subscriber> for SubscriberView {
    fn from(subscriber: &Subscriber) -> SubscriberView {
        let settings = subscriber.settings.clone();
        SubscriberView {
            id: subscriber.id,
            name: settings.name,
            url: settings.url,
            event_types: settings.event_types,
            filter: settings.filter,
            ordering_key: settings.ordering_key,
            retry_backoff_seconds: settings.retry_backoff_seconds,
            retry_statuses: settings.retry_statuses,
            on_exhausted: settings.on_exhausted,
            timeout_ms: settings.timeout_ms,
            max_in_flight: settings.max_in_flight,
            rate_limit_per_second: settings.rate_limit_per_second,
            headers: settings.headers.into_iter().map(|(name, _)| (name, HIDDEN)).collect(),
            format: settings.format,
            is_active: settings.is_active,
            inactive_reason: subscriber.inactive_reason.clone(),
            paused_at: subscriber.paused_at,
            version: subscriber.version,
            created_at: subscriber.created_at,
            updated_at: subscriber.updated_at,
        }
    }
}

impl From<&Known> for SubscriberWithSecrets {
    fn from(known: &Known) -> SubscriberWithSecrets {
        let view = |(secret, expires_at): &(SigningSecret, Option<DateTime<Utc>>)| SecretView {
            signature: match secret.kind() {
                SecretKind::Symmetric => SignatureKind::V1,
                SecretKind::Ed25519 => SignatureKind::V1a,
            },
            public_key: secret.public(),
            expires_at: *expires_at,
        };
        SubscriberWithSecrets {
            subscriber: SubscriberView::from(&known.subscriber),
            secrets: known.secrets.iter().map(view).collect(),
            unopened: known.unopened.is_some(),
        }
    }
}

impl SubscriberWithSecret {
    pub(crate) fn revealing(known: &Known, secret: &SigningSecret) -> SubscriberWithSecret {
        SubscriberWithSecret { subscriber: known.into(), secret: secret.to_text() }
    }
}

/// What came of a test.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TestResult {
    #[schema(value_type = String)]
    pub(crate) event_id: EventId,
    /// Whether a delivery would be one.
    pub(crate) delivered: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
    pub(crate) latency_ms: u64,
    /// How the answer begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) excerpt: Option<String>,
    /// What kind of failure: `status`, or why there was no answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) detail: Option<String>,
}

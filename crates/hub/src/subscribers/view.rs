//! Subscribers in API responses, and the result of a test delivery.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use contracts::EventId;
use http::StatusCode;
use http::header::ETAG;
use http_kit::etag;
use http_kit::idempotency::StoredResponse;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;
use uuid::Uuid;
use webhook_client::signature::{SecretKind, SigningSecret};

use crate::deliveries::attempt_result::AttemptResult;
use crate::deliveries::domain::{AuthKind, Batch, EndpointAuth, Format, OnExhausted, RetryRules, RetrySchedule};
use crate::directory::domain::{EventTypes, Filter};
use crate::subscribers::domain::Subscriber;
use crate::subscribers::fields::retry::RetryRuleMap;
use crate::subscribers::fields::{HIDDEN_VALUE, SignatureKind};
use crate::subscribers::store::StoredSubscriber;

/// A subscriber: a URL that receives webhooks.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Subscriber)]
pub(crate) struct SubscriberView {
    id: Uuid,
    name: String,
    url: String,
    event_types: Vec<EventTypes>,
    /// Conditions on the payload that must all be met. Absent: every event is sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    filter: Option<Filter>,
    /// The JSON pointer into the payload that defines the lane. Absent: the `ordering_key` of the event defines it.
    #[serde(skip_serializing_if = "Option::is_none")]
    ordering_key: Option<String>,
    /// The pause in seconds before each retry.
    retry_backoff_seconds: Vec<u32>,
    /// The name of these pauses. Absent: they have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_schedule: Option<RetrySchedule>,
    /// What happens after a status, or after the statuses of a class, instead of the default.
    #[schema(value_type = RetryRuleMap)]
    retry_rules: RetryRules,
    on_exhausted: OnExhausted,
    /// The time for one attempt in milliseconds.
    timeout_ms: u32,
    /// The number of requests at the same time.
    max_in_flight: u32,
    /// The number of requests per second. Absent: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    rate_limit_per_second: Option<u32>,
    /// The headers that each delivery carries. Their values are not shown.
    #[schema(example = json!({"authorization": "***"}))]
    headers: BTreeMap<String, &'static str>,
    /// The credentials that the endpoint requires, without their secrets.
    #[serde(skip_serializing_if = "Option::is_none")]
    auth: Option<AuthView>,
    format: Format,
    /// Several messages in one request. Absent: each message has a separate request.
    #[serde(skip_serializing_if = "Option::is_none")]
    batch: Option<Batch>,
    /// Whether events become messages for this subscriber.
    is_active: bool,
    /// Why the hub deactivated the subscriber. Absent if a request did, or if the subscriber is active.
    #[serde(skip_serializing_if = "Option::is_none")]
    inactive_reason: Option<String>,
    /// Since when the subscriber is paused. Its messages wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    paused_at: Option<DateTime<Utc>>,
    /// Whether each new scheme, host or port of the `url` has to answer a challenge.
    verify_endpoint: bool,
    /// Since when the endpoint has to answer a challenge. Messages wait until it does. Absent: it is verified, or need not be.
    #[serde(skip_serializing_if = "Option::is_none")]
    unverified_since: Option<DateTime<Utc>>,
    /// Grows with each change. The `ETag` is made of it.
    version: i64,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

/// Credentials without their secrets.
#[derive(Debug, Default, Serialize, ToSchema)]
#[schema(as = SubscriberAuthDetails)]
struct AuthView {
    #[serde(rename = "type")]
    kind: Option<AuthKind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    client_id: Option<String>,
    /// Not shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "***")]
    client_secret: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scope: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    audience: Option<String>,
    /// As PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    certificate: Option<String>,
    /// Not shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "***")]
    private_key: Option<&'static str>,
}

impl From<EndpointAuth> for AuthView {
    fn from(auth: EndpointAuth) -> AuthView {
        let kind = Some(auth.kind());
        match auth {
            EndpointAuth::Oauth2(credentials) => AuthView {
                kind,
                token_url: Some(credentials.token_url),
                client_id: Some(credentials.client_id),
                client_secret: Some(HIDDEN_VALUE),
                scope: credentials.scope,
                audience: credentials.audience,
                ..AuthView::default()
            },
            EndpointAuth::Mtls(pair) => AuthView {
                kind,
                certificate: Some(pair.certificate),
                private_key: Some(HIDDEN_VALUE),
                ..AuthView::default()
            },
        }
    }
}

/// A signing secret without the secret itself.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = SubscriberSecret)]
pub(crate) struct SecretView {
    signature: SignatureKind,
    /// The key with which a receiver verifies `v1a` signatures.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "whpk_...")]
    public_key: Option<String>,
    /// From then on, deliveries are not signed with this secret. Absent: it is the current secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<DateTime<Utc>>,
}

/// A subscriber and a description of its signing secrets.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SubscriberWithSecrets {
    #[serde(flatten)]
    subscriber: SubscriberView,
    /// Newest first.
    secrets: Vec<SecretView>,
    /// True if the headers and secrets cannot be decrypted with the keys of this installation. They are missing here,
    /// and the subscriber's messages wait. The subscriber can be deleted.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    unopened: bool,
    /// False in the response 202 to a change that a dispatcher has not confirmed in time. Absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    effective: Option<bool>,
}

/// Whether a change holds for all dispatchers.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = SubscriberChange)]
pub(crate) struct ChangeView {
    effective: bool,
}

/// The response 202 to a change that is stored, but that a dispatcher has not confirmed in time.
pub(crate) fn not_yet_effective(response: StoredResponse) -> StoredResponse {
    match serde_json::from_slice::<Map<String, Value>>(response.body()) {
        Ok(mut body) => {
            body.insert("effective".to_owned(), Value::Bool(false));
            response.with_body(StatusCode::ACCEPTED, &body)
        }
        // The response to a deletion has no body.
        Err(_) => response.with_body(StatusCode::ACCEPTED, &ChangeView { effective: false }),
    }
}

/// A subscriber and its new secret. No other response contains a secret.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SubscriberWithSecret {
    #[serde(flatten)]
    subscriber: SubscriberWithSecrets,
    /// The secret that signs deliveries from now on. It is not shown again.
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
            retry_schedule: RetrySchedule::of(&settings.retry_backoff_seconds),
            retry_backoff_seconds: settings.retry_backoff_seconds,
            retry_rules: settings.retry_rules,
            on_exhausted: settings.on_exhausted,
            timeout_ms: settings.timeout_ms,
            max_in_flight: settings.max_in_flight,
            rate_limit_per_second: settings.rate_limit_per_second,
            headers: settings.headers.into_iter().map(|(name, _)| (name, HIDDEN_VALUE)).collect(),
            auth: settings.auth.map(AuthView::from),
            format: settings.format,
            batch: settings.batch,
            is_active: settings.is_active,
            inactive_reason: subscriber.inactive_reason.clone(),
            paused_at: subscriber.paused_at,
            verify_endpoint: settings.verify_endpoint,
            unverified_since: subscriber.unverified_since,
            version: subscriber.version,
            created_at: subscriber.created_at,
            updated_at: subscriber.updated_at,
        }
    }
}

impl From<&StoredSubscriber> for SubscriberWithSecrets {
    fn from(stored: &StoredSubscriber) -> SubscriberWithSecrets {
        let view = |(secret, expires_at): &(SigningSecret, Option<DateTime<Utc>>)| SecretView {
            signature: match secret.kind() {
                SecretKind::Symmetric => SignatureKind::V1,
                SecretKind::Ed25519 => SignatureKind::V1a,
            },
            public_key: secret.public_key(),
            expires_at: *expires_at,
        };
        SubscriberWithSecrets {
            subscriber: SubscriberView::from(&stored.subscriber),
            secrets: stored.secrets.iter().map(view).collect(),
            unopened: stored.undecryptable.is_some(),
            effective: None,
        }
    }
}

impl SubscriberWithSecrets {
    /// The response that shows a subscriber.
    pub(crate) fn response(stored: &StoredSubscriber) -> StoredResponse {
        StoredResponse::json(StatusCode::OK, &SubscriberWithSecrets::from(stored))
            .with_header(ETAG, etag::of(stored.subscriber.version, stored.subscriber.updated_at))
    }
}

impl SubscriberWithSecret {
    /// The response that shows a subscriber and its new secret.
    pub(crate) fn response(status: StatusCode, stored: &StoredSubscriber, secret: &SigningSecret) -> StoredResponse {
        StoredResponse::json(status, &SubscriberWithSecret { subscriber: stored.into(), secret: secret.to_text() })
            .with_header(ETAG, etag::of(stored.subscriber.version, stored.subscriber.updated_at))
    }
}

/// The result of a challenge.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct VerificationResult {
    /// Whether the endpoint has answered with the challenge, now or earlier.
    pub(crate) verified: bool,
    /// The HTTP status. Absent: there was no response, or no challenge was necessary.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    /// The kind of failure: `status`, `challenge` (another answer), or why there was no response.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    /// The failure in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
}

impl VerificationResult {
    pub(crate) fn verified() -> VerificationResult {
        VerificationResult { verified: true, status: None, error: None, detail: None }
    }

    pub(crate) fn failed(result: AttemptResult) -> VerificationResult {
        VerificationResult { verified: false, status: result.status, error: result.error, detail: result.detail }
    }
}

/// The result of a test delivery.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TestResult {
    #[schema(value_type = String)]
    pub(crate) event_id: EventId,
    /// Whether the response counts as a delivery (2xx).
    pub(crate) delivered: bool,
    /// The HTTP status. Absent: there was no response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
    pub(crate) latency_ms: u64,
    /// The beginning of the response body.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) excerpt: Option<String>,
    /// The kind of failure: `status`, or why there was no response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<&'static str>,
    /// The failure in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) detail: Option<String>,
}

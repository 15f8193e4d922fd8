//! Managing subscribers and their secrets, and sending a test delivery.

pub(crate) mod verification;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use contracts::EventId;
use http::header::LOCATION;
use http::{HeaderValue, StatusCode};
use http_kit::auth::Principal;
use http_kit::etag::IfMatch;
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::problem::Problem;
use pillarbox::log::Tenant;
use pillarbox::log::{lock_tenant, post};
use serde_json::json;
use service::idempotency::StoreResponse;
use sqlx::PgConnection;
use uuid::Uuid;
use webhook_client::signature::{SecretKind, SigningSecret};

use crate::deliveries::attempt::{attempt, attempt_batch};
use crate::deliveries::attempt_result::AttemptResult;
use crate::deliveries::domain::{Reason, Verdict};
use crate::deliveries::message::{EVENT_SOURCE, HubEvent, HubMessage};
use crate::deliveries::recipient::Recipient;
use crate::deliveries::system_event::SYSTEM_SOURCE;
use crate::error::Error;
use crate::replays::flow::insert_backfill;
use crate::subscribers::domain::Subscriber;
use crate::subscribers::fields::{SubscriberFields, has_same_origin};
use crate::subscribers::recipient::recipient_of;
use crate::subscribers::store;
use crate::subscribers::store::{StoredSubscriber, SubscriberFilter};
use crate::subscribers::view::{SubscriberWithSecret, SubscriberWithSecrets, TestResult, not_yet_effective};
use crate::{Hub, deliveries};

/// Active secrets per subscriber, and so signatures per delivery.
const SECRETS_MAX: usize = 5;
/// Time for a test delivery. It is below the default time limit of a request, 30 s.
pub(super) const TEST_TIME_MAX: Duration = Duration::from_secs(20);
const TEST_TYPE: &str = "hub.test";

/// A request to change one subscriber.
pub(crate) struct ChangeRequest {
    pub(crate) tenant: Tenant,
    pub(crate) id: Uuid,
    pub(crate) if_match: IfMatch,
    pub(crate) identity: Option<RequestIdentity>,
}

/// Creates a subscriber, and its backfill if one is requested. The response contains its secret. Fails if a field is invalid or
/// the tenant has too many subscribers.
pub(crate) async fn create(
    hub: &Arc<Hub>,
    (tenant, by): (Tenant, Principal),
    mut fields: SubscriberFields,
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let now = hub.clock.now();
    let (owner, unverified) = (tenant.clone(), Arc::new(OnceLock::new()));
    let created = unverified.clone();
    let response = hub
        .run_once(identity, StoreResponse::WithoutBody, |tx, hub| {
            Box::pin(async move {
                let backfill = fields.extract_backfill();
                let (stored, secret) = insert(tx, &hub, &tenant, fields, now).await?;
                if let Some(backfill) = &backfill {
                    insert_backfill(tx, &tenant, (stored.subscriber.id, backfill), by.to_string(), now).await?;
                }
                if stored.subscriber.unverified_since.is_some() {
                    let _ = created.set(stored.subscriber.id);
                }
                let location = HeaderValue::try_from(format!("/hub/v1/subscribers/{}", stored.subscriber.id))
                    .map_err(|error| Problem::internal(&error))?;
                let response = SubscriberWithSecret::response(StatusCode::CREATED, &stored, &secret);
                Ok(response.with_header(LOCATION, location).shown_once(next_step(stored.subscriber.id)))
            })
        })
        .await?;
    if let Some(id) = unverified.get() {
        verification::start(hub, owner, *id);
    }
    Ok(response)
}

/// How a caller continues who has lost a response with a secret.
fn next_step(subscriber: Uuid) -> String {
    format!(
        "subscriber {subscriber} exists; for a new secret, send POST /hub/v1/subscribers/{subscriber}/rotate-secret with a \
         new Idempotency-Key"
    )
}

async fn insert(
    tx: &mut PgConnection,
    hub: &Hub,
    tenant: &Tenant,
    fields: SubscriberFields,
    now: DateTime<Utc>,
) -> Result<(StoredSubscriber, SigningSecret), Error> {
    let secret = fields.signing_secret();
    let (settings, secret) = match (fields.into_settings(None, hub.clients.of(tenant.as_str()), now), secret) {
        (Ok(settings), Ok(secret)) => (settings, secret),
        (settings, secret) => {
            let errors = settings.err().into_iter().flatten().chain(secret.err());
            return Err(Error::Invalid(errors.collect()));
        }
    };
    let subscriber = Subscriber {
        id: Uuid::now_v7(),
        tenant: tenant.clone(),
        version: 1,
        unverified_since: (settings.verify_endpoint || hub.verify_endpoints).then_some(now),
        settings,
        paused_at: None,
        inactive_reason: None,
        created_at: now,
        updated_at: now,
    };
    let own_max = lock_tenant(tx, tenant).await?.ok_or_else(|| Error::NoTenant(tenant.as_str().to_owned()))?;
    let (subscribers_max, limit_name) = match own_max {
        Some(own_max) => (own_max.unsigned_abs(), "the tenant's own `subscribers_max`"),
        None => (hub.limits.subscribers_max, "`hub.subscribers_max`"),
    };
    store::insert(tx, &hub.cipher, &subscriber).await?;
    // Counted after the insert, which locks the row of the directory: concurrent requests are counted one after the other.
    if store::count(tx, tenant).await? > i64::from(subscribers_max) {
        return Err(Error::TooManySubscribers(subscribers_max, limit_name));
    }
    store::add_secret(tx, &hub.cipher, subscriber.id, &secret, now).await?;
    tracing::info!(subscriber = %subscriber.id, tenant = tenant.as_str(), "created a subscriber");
    Ok((find(tx, hub, tenant, subscriber.id).await?, secret))
}

/// Returns a subscriber.
pub(crate) async fn show(hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<StoredSubscriber, Error> {
    find(&mut *hub.db.acquire().await?, hub, tenant, id).await
}

/// Returns subscribers newest first, those with ids below `before`.
pub(crate) async fn list(
    hub: &Hub,
    tenant: &Tenant,
    filter: &SubscriberFilter,
    (before, limit): (Option<Uuid>, u32),
) -> Result<Vec<StoredSubscriber>, Error> {
    Ok(store::list(&mut *hub.db.acquire().await?, &hub.cipher, tenant, filter, (before, limit)).await?)
}

/// Changes the given fields. Fails if one of them is invalid, or if the URL gets another origin and the headers are not sent
/// anew. An endpoint that has to be verified gets a challenge.
pub(crate) async fn update(
    hub: &Arc<Hub>,
    request: ChangeRequest,
    fields: SubscriberFields,
) -> Result<StoredResponse, Problem> {
    let (tenant, id, is_asked) = (request.tenant.clone(), request.id, Arc::new(AtomicBool::new(false)));
    let asks = is_asked.clone();
    let response = change(hub, request, move |subscriber, hub, now| {
        let mut errors = fields.creation_only_errors();
        let (old, client) = (&subscriber.settings, hub.clients.of(subscriber.tenant.as_str()));
        let settings = match fields.into_settings(Some(old), client, now) {
            Ok(settings) if errors.is_empty() => settings,
            settings => {
                errors.extend(settings.err().into_iter().flatten());
                return Err(Error::Invalid(errors));
            }
        };
        if settings == *old {
            return Ok(false);
        }
        if settings.is_active != old.is_active {
            // The owner decides from now on, so the hub's reason no longer applies.
            subscriber.inactive_reason = None;
        }
        if !(settings.verify_endpoint || hub.verify_endpoints) {
            subscriber.unverified_since = None;
        } else if !has_same_origin(&settings.url, &old.url) || (settings.verify_endpoint && !old.verify_endpoint) {
            subscriber.unverified_since = Some(now);
            asks.store(true, Ordering::Relaxed);
        }
        subscriber.settings = settings;
        Ok(true)
    })
    .await?;
    if is_asked.load(Ordering::Relaxed) {
        verification::start(hub, tenant, id);
    }
    Ok(response)
}

/// Pauses a subscriber: its messages wait. A paused subscriber stays unchanged.
pub(crate) async fn pause(hub: &Arc<Hub>, request: ChangeRequest) -> Result<StoredResponse, Problem> {
    change(hub, request, |subscriber, _, now| {
        let is_new = subscriber.paused_at.is_none();
        subscriber.paused_at.get_or_insert(now);
        Ok(is_new)
    })
    .await
}

/// Ends a pause: the messages that wait are sent. It does not activate an inactive subscriber, which is a matter of
/// `update`.
pub(crate) async fn resume(hub: &Arc<Hub>, request: ChangeRequest) -> Result<StoredResponse, Problem> {
    change(hub, request, |subscriber, _, _| Ok(subscriber.paused_at.take().is_some())).await
}

/// Deletes a subscriber. Messages that wait for it are not sent.
pub(crate) async fn delete(hub: &Arc<Hub>, request: ChangeRequest) -> Result<StoredResponse, Problem> {
    let ChangeRequest { tenant, id, if_match, identity } = request;
    let deleted = hub
        .run_once(identity.as_ref(), StoreResponse::WithBody, |tx, _| {
            Box::pin(async move {
                let version = store::lock_version(tx, &tenant, id).await.map_err(Error::from)?;
                let (version, updated_at) = version.ok_or(Error::NoSubscriber)?;
                if_match.check(version, updated_at)?;
                store::delete(tx, &tenant, id).await.map_err(Error::from)?;
                tracing::info!(subscriber = %id, tenant = tenant.as_str(), "deleted a subscriber");
                Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
            })
        })
        .await;
    Ok(when_effective(hub, deleted?).await)
}

/// Generates a new secret. The response contains it. Earlier secrets expire after `overlap`, or earlier if they already
/// expire.
pub(crate) async fn rotate_secret(
    hub: &Arc<Hub>,
    request: ChangeRequest,
    overlap: TimeDelta,
) -> Result<StoredResponse, Problem> {
    let now = hub.clock.now();
    let ChangeRequest { tenant, id, if_match, identity } = request;
    let rotated = hub
        .run_once(identity.as_ref(), StoreResponse::WithoutBody, |tx, hub| {
            Box::pin(async move {
                let stored = lock(tx, &hub, &tenant, id, &if_match).await?;
                let (stored, secret) = add_secret(tx, &hub, stored, (overlap, now)).await?;
                tracing::info!(subscriber = %id, "rotated a subscriber's secret");
                Ok(SubscriberWithSecret::response(StatusCode::OK, &stored, &secret).shown_once(next_step(id)))
            })
        })
        .await;
    Ok(when_effective(hub, rotated?).await)
}

async fn add_secret(
    tx: &mut PgConnection,
    hub: &Hub,
    mut stored: StoredSubscriber,
    (overlap, now): (TimeDelta, DateTime<Utc>),
) -> Result<(StoredSubscriber, SigningSecret), Error> {
    let active = stored.active_secrets(now);
    if overlap > TimeDelta::zero() && active >= SECRETS_MAX {
        return Err(Error::TooManySecrets(active));
    }
    let id = stored.subscriber.id;
    let kind = stored.secrets.first().map_or(SecretKind::Symmetric, |(secret, _)| secret.kind());
    let secret = SigningSecret::generate(kind);
    store::expire_secrets(tx, id, now + overlap, now).await?;
    store::add_secret(tx, &hub.cipher, id, &secret, now).await?;
    save(tx, hub, &mut stored, now).await?;
    Ok((find(tx, hub, &stored.subscriber.tenant, id).await?, secret))
}

/// Sends one event at once and returns the result: the example of an event type, if one is given. It bypasses the log and the
/// subscriber's queue.
pub(crate) async fn test(
    hub: &Hub,
    tenant: &Tenant,
    id: Uuid,
    event_type: Option<String>,
) -> Result<TestResult, Error> {
    // `show` returns its connection to the pool before the request is sent.
    let stored = check_decrypted(show(hub, tenant, id).await?)?;
    let mut recipient = sendable(stored)?;
    recipient.timeout = recipient.timeout.min(TEST_TIME_MAX);
    let (event_id, now) = (Uuid::now_v7(), hub.clock.now());
    let (topic, payload) = match event_type {
        Some(name) => {
            let example = crate::event_types::flow::example(hub, tenant, &name).await?;
            (name, example.get().to_owned())
        }
        None => {
            let payload = json!({"message": "This is a test from Pillarbox.", "subscriber_id": id, "sent_at": now});
            (TEST_TYPE.to_owned(), payload.to_string())
        }
    };
    let (source, payload) = (EVENT_SOURCE.as_str().to_owned(), payload.into());
    let event = HubEvent {
        id: event_id,
        source: source.into(),
        topic,
        key: None,
        at: now,
        payload,
        traceparent: None,
        headers: BTreeMap::new(),
    };
    let message =
        HubMessage { n: 0, lane: None, seq: None, attempts_before: 0, replay: None, event: Some(Arc::new(event)) };
    let client = hub.clients.of(tenant.as_str());
    let result = match recipient.batch {
        None => attempt(client, &recipient, &message, &hub.clock, None).await,
        Some(_) => attempt_batch(client, &recipient, &[message], &hub.clock, None).await,
    };
    let result = result.unwrap_or_else(|| AttemptResult::not_sent(Reason::Manual, "it was not sent"));
    Ok(TestResult {
        event_id: EventId(event_id),
        delivered: result.verdict == Verdict::Delivered,
        status: result.status,
        latency_ms: result.latency.as_millis() as u64,
        excerpt: result.excerpt,
        error: result.error,
        detail: result.detail,
    })
}

/// Locks the subscriber, applies `change` to it, and saves it if `change` returns true. Waits until the change is effective.
async fn change<C>(hub: &Arc<Hub>, request: ChangeRequest, change: C) -> Result<StoredResponse, Problem>
where
    C: FnOnce(&mut Subscriber, &Hub, DateTime<Utc>) -> Result<bool, Error> + Send + 'static,
{
    let now = hub.clock.now();
    let ChangeRequest { tenant, id, if_match, identity } = request;
    let changed = hub
        .run_once(identity.as_ref(), StoreResponse::WithBody, |tx, hub| {
            Box::pin(async move {
                let mut stored = lock(tx, &hub, &tenant, id, &if_match).await?;
                let was_disabled = stored.subscriber.inactive_reason.is_some();
                if change(&mut stored.subscriber, &hub, now)? {
                    save(tx, &hub, &mut stored, now).await?;
                    if was_disabled && stored.subscriber.settings.is_active {
                        let report = {
                            let subscriber = &stored.subscriber;
                            deliveries::system_event::enabled(
                                &subscriber.tenant,
                                subscriber.id,
                                &subscriber.settings.name,
                                now,
                            )
                        };
                        post(tx, &SYSTEM_SOURCE, &report).await.map_err(Error::from)?;
                    }
                }
                Ok(SubscriberWithSecrets::response(&stored))
            })
        })
        .await;
    Ok(when_effective(hub, changed?).await)
}

/// Waits until no dispatcher uses an older version of any subscriber, also if this request has changed nothing or is a
/// repeat: the request that made the change may not have waited for its end. After `hub.change_wait_ms` the response says
/// that the change is not effective yet.
async fn when_effective(hub: &Hub, response: StoredResponse) -> StoredResponse {
    let is_effective =
        !response.status().is_success() || hub.directory.wait_until_applied(&hub.db, hub.change_time_max).await;
    if is_effective { response } else { not_yet_effective(response) }
}

async fn find(db: &mut PgConnection, hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<StoredSubscriber, Error> {
    store::find(db, &hub.cipher, tenant, id).await?.ok_or(Error::NoSubscriber)
}

/// Returns the subscriber with its row locked. Fails if it does not exist, has another version than `if_match`, or
/// cannot be decrypted.
async fn lock(
    tx: &mut PgConnection,
    hub: &Hub,
    tenant: &Tenant,
    id: Uuid,
    if_match: &IfMatch,
) -> Result<StoredSubscriber, Error> {
    let stored = store::lock(tx, &hub.cipher, tenant, id).await?.ok_or(Error::NoSubscriber)?;
    if_match.check(stored.subscriber.version, stored.subscriber.updated_at).map_err(Error::Stale)?;
    check_decrypted(stored)
}

/// The recipient of a stored subscriber, also if it is not active.
fn sendable(stored: StoredSubscriber) -> Result<Recipient, Error> {
    let recipient = recipient_of(stored.subscriber, stored.secrets);
    recipient.map_err(|error| Error::InvalidSubscriber(error.to_string()))
}

/// Fails if the headers and secrets cannot be decrypted: saving the subscriber would lose them.
pub(super) fn check_decrypted(stored: StoredSubscriber) -> Result<StoredSubscriber, Error> {
    match stored.undecryptable {
        None => Ok(stored),
        Some(_) => Err(Error::Undecryptable),
    }
}

async fn save(
    tx: &mut PgConnection,
    hub: &Hub,
    stored: &mut StoredSubscriber,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    stored.subscriber.version += 1;
    stored.subscriber.updated_at = now;
    Ok(store::update(tx, &hub.cipher, &stored.subscriber).await?)
}

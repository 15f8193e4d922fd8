//! Managing subscribers and their secrets, and sending a test delivery.

pub(crate) mod verification;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use contracts::EventId;
use http_kit::auth::Principal;
use http_kit::etag::IfMatch;
use pillarbox::log::Tenant;
use pillarbox::log::{lock_tenant, post};
use serde_json::json;
use sqlx::{PgConnection, Postgres, Transaction};
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
use crate::subscribers::view::TestResult;
use crate::{Hub, deliveries};

/// Active secrets per subscriber, and so signatures per delivery.
const SECRETS_MAX: usize = 5;
/// Time for a test delivery. It is below the default time limit of a request, 30 s.
pub(super) const TEST_TIME_MAX: Duration = Duration::from_secs(20);
const TEST_TYPE: &str = "hub.test";

/// The subscriber to change, and the version that it must have.
pub(crate) struct SubscriberTarget {
    pub(crate) tenant: Tenant,
    pub(crate) id: Uuid,
    pub(crate) if_match: IfMatch,
}

/// Creates a subscriber, and its backfill if one is requested. Returns it with its secret. Fails if a field is invalid or the
/// tenant has too many subscribers.
pub(crate) async fn create(
    tx: &mut Transaction<'_, Postgres>,
    hub: &Hub,
    tenant: &Tenant,
    by: Principal,
    mut fields: SubscriberFields,
    now: DateTime<Utc>,
) -> Result<(StoredSubscriber, SigningSecret), Error> {
    let backfill = fields.extract_backfill();
    let (stored, secret) = insert(tx, hub, tenant, fields, now).await?;
    if let Some(backfill) = &backfill {
        insert_backfill(tx, tenant, stored.subscriber.id, backfill, by.to_string(), now).await?;
    }
    Ok((stored, secret))
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
    before: Option<Uuid>,
    limit: u32,
) -> Result<Vec<StoredSubscriber>, Error> {
    Ok(store::list(&mut *hub.db.acquire().await?, &hub.cipher, tenant, filter, before, limit).await?)
}

/// A subscriber after a change.
pub(crate) struct UpdatedSubscriber {
    pub(crate) stored: StoredSubscriber,
    /// The change demands that the endpoint is verified.
    pub(crate) needs_verification: bool,
}

/// Changes the given fields. Fails if one of them is invalid, or if the URL gets another origin and the headers are not sent
/// anew.
pub(crate) async fn update(
    tx: &mut Transaction<'_, Postgres>,
    hub: &Hub,
    target: &SubscriberTarget,
    fields: SubscriberFields,
    now: DateTime<Utc>,
) -> Result<UpdatedSubscriber, Error> {
    let mut stored = lock(tx, hub, target).await?;
    let mut errors = fields.creation_only_errors();
    let (old, client) = (&stored.subscriber.settings, hub.clients.of(target.tenant.as_str()));
    let settings = match fields.into_settings(Some(old), client, now) {
        Ok(settings) if errors.is_empty() => settings,
        settings => {
            errors.extend(settings.err().into_iter().flatten());
            return Err(Error::Invalid(errors));
        }
    };
    if settings == *old {
        return Ok(UpdatedSubscriber { stored, needs_verification: false });
    }
    let has_other_endpoint = !has_same_origin(&settings.url, &old.url);
    let must_verify = settings.verify_endpoint || hub.verify_endpoints;
    let needs_verification = must_verify && (has_other_endpoint || (settings.verify_endpoint && !old.verify_endpoint));
    let is_switched = settings.is_active != old.is_active;
    let subscriber = &mut stored.subscriber;
    if needs_verification {
        subscriber.unverified_since = Some(now);
    } else if !must_verify {
        subscriber.unverified_since = None;
    }
    subscriber.settings = settings;
    // The owner decides from now on, so the hub's reason no longer applies.
    let was_disabled = is_switched && subscriber.inactive_reason.take().is_some();
    save(tx, hub, &mut stored, now).await?;
    if was_disabled && stored.subscriber.settings.is_active {
        let Subscriber { tenant, id, settings, .. } = &stored.subscriber;
        let report = deliveries::system_event::enabled(tenant, *id, &settings.name, now);
        post(tx, &SYSTEM_SOURCE, &report).await?;
    }
    Ok(UpdatedSubscriber { stored, needs_verification })
}

/// Pauses a subscriber, so that its messages wait, or ends its pause. It does not activate an inactive subscriber, which is a
/// matter of [`update`].
pub(crate) async fn set_paused(
    tx: &mut Transaction<'_, Postgres>,
    hub: &Hub,
    target: &SubscriberTarget,
    is_paused: bool,
    now: DateTime<Utc>,
) -> Result<StoredSubscriber, Error> {
    let mut stored = lock(tx, hub, target).await?;
    if stored.subscriber.paused_at.is_some() != is_paused {
        stored.subscriber.paused_at = is_paused.then_some(now);
        save(tx, hub, &mut stored, now).await?;
    }
    Ok(stored)
}

/// Deletes a subscriber. Messages that wait for it are not sent.
pub(crate) async fn delete(tx: &mut PgConnection, target: &SubscriberTarget) -> Result<(), Error> {
    let SubscriberTarget { tenant, id, if_match } = target;
    let (version, updated_at) = store::lock_version(tx, tenant, *id).await?.ok_or(Error::NoSubscriber)?;
    if_match.check(version, updated_at).map_err(Error::Stale)?;
    store::delete(tx, tenant, *id).await?;
    tracing::info!(subscriber = %id, tenant = tenant.as_str(), "deleted a subscriber");
    Ok(())
}

/// Generates a new secret and returns it. Earlier secrets expire after `overlap`, or earlier if they already expire.
pub(crate) async fn rotate_secret(
    tx: &mut PgConnection,
    hub: &Hub,
    target: &SubscriberTarget,
    overlap: TimeDelta,
    now: DateTime<Utc>,
) -> Result<(StoredSubscriber, SigningSecret), Error> {
    let stored = lock(tx, hub, target).await?;
    let rotated = add_secret(tx, hub, stored, overlap, now).await?;
    tracing::info!(subscriber = %target.id, "rotated a subscriber's secret");
    Ok(rotated)
}

async fn add_secret(
    tx: &mut PgConnection,
    hub: &Hub,
    mut stored: StoredSubscriber,
    overlap: TimeDelta,
    now: DateTime<Utc>,
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

async fn find(db: &mut PgConnection, hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<StoredSubscriber, Error> {
    store::find(db, &hub.cipher, tenant, id).await?.ok_or(Error::NoSubscriber)
}

/// Returns the subscriber with its row locked. Fails if it does not exist, has another version than the request demands, or
/// cannot be decrypted.
async fn lock(tx: &mut PgConnection, hub: &Hub, target: &SubscriberTarget) -> Result<StoredSubscriber, Error> {
    let stored = store::lock(tx, &hub.cipher, &target.tenant, target.id).await?.ok_or(Error::NoSubscriber)?;
    target.if_match.check(stored.subscriber.version, stored.subscriber.updated_at).map_err(Error::Stale)?;
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

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use contracts::EventId;
use kit::auth::Tenant;
use kit::etag::IfMatch;
use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::Hub;
use crate::dispatch::deliver::deliver;
use crate::dispatch::{Event, Mail, Recipient};
use crate::domain::{Subscriber, Verdict};
use crate::error::Error;
use crate::fanout::SOURCE;
use crate::fields::Fields;
use crate::signature::{SecretKind, SigningSecret};
use crate::store::subscriber::{self as store, Known, Which};
use crate::view::TestResult;

/// Of a tenant: all of them are in the memory of whoever fans out.
const SUBSCRIBERS_MAX: i64 = 10_000;
const SECRETS_MAX: usize = 5;
/// A request is answered within 30 s unless it is set otherwise.
const TEST_TIME_MAX: Duration = Duration::from_secs(20);
const TEST_TYPE: &str = "hub.test";

/// The second value is what its deliveries are signed with.
pub(crate) async fn create(
    tx: &mut PgConnection,
    hub: &Hub,
    tenant: &Tenant,
    fields: Fields,
    now: DateTime<Utc>,
) -> Result<(Known, SigningSecret), Error> {
    let secret = fields.secret();
    let (settings, secret) = match (fields.settle(None, &hub.client), secret) {
        (Ok(settings), Ok(secret)) => (settings, secret),
        (settings, secret) => {
            let wrong = settings.err().into_iter().flatten().chain(secret.err());
            return Err(Error::Invalid(wrong.collect()));
        }
    };
    if store::count(tx, tenant).await? >= SUBSCRIBERS_MAX {
        return Err(Error::TooManySubscribers(SUBSCRIBERS_MAX));
    }
    let subscriber = Subscriber {
        id: Uuid::now_v7(),
        tenant: tenant.clone(),
        version: 1,
        settings,
        paused_at: None,
        inactive_reason: None,
        created_at: now,
        updated_at: now,
    };
    store::insert(tx, &hub.seal, &subscriber).await?;
    store::add_secret(tx, &hub.seal, subscriber.id, &secret, now).await?;
    tracing::info!(subscriber = %subscriber.id, tenant = tenant.as_str(), "made a subscriber");
    Ok((found(tx, hub, tenant, subscriber.id).await?, secret))
}

pub(crate) async fn show(hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<Known, Error> {
    found(&mut *hub.db.acquire().await?, hub, tenant, id).await
}

/// Newest first, behind `before`.
pub(crate) async fn list(
    hub: &Hub,
    tenant: &Tenant,
    which: &Which,
    (before, limit): (Option<Uuid>, u32),
) -> Result<Vec<Known>, Error> {
    Ok(store::list(&mut *hub.db.acquire().await?, &hub.seal, tenant, which, (before, limit)).await?)
}

/// Fields that are absent stay.
pub(crate) async fn update(
    tx: &mut PgConnection,
    hub: &Hub,
    (tenant, id): (&Tenant, Uuid),
    if_match: &IfMatch,
    fields: Fields,
    now: DateTime<Utc>,
) -> Result<Known, Error> {
    let mut known = locked(tx, hub, tenant, id, if_match).await?;
    let mut wrong = fields.said_too_late();
    let old = &known.subscriber.settings;
    let settings = match fields.settle(Some(old), &hub.client) {
        Ok(settings) if wrong.is_empty() => settings,
        settings => {
            wrong.extend(settings.err().into_iter().flatten());
            return Err(Error::Invalid(wrong));
        }
    };
    if settings == *old {
        return Ok(known);
    }
    if settings.is_active != old.is_active {
        // From now on it is its owner who did that.
        known.subscriber.inactive_reason = None;
    }
    known.subscriber.settings = settings;
    save(tx, hub, &mut known, now).await?;
    Ok(known)
}

/// Its messages wait. One that is paused stays so, since when it was.
pub(crate) async fn pause(
    tx: &mut PgConnection,
    hub: &Hub,
    (tenant, id): (&Tenant, Uuid),
    if_match: &IfMatch,
    now: DateTime<Utc>,
) -> Result<Known, Error> {
    let mut known = locked(tx, hub, tenant, id, if_match).await?;
    if known.subscriber.paused_at.is_none() {
        known.subscriber.paused_at = Some(now);
        save(tx, hub, &mut known, now).await?;
    }
    Ok(known)
}

/// Its messages go on. One that is switched off stays so: that is another thing, and an update's.
pub(crate) async fn resume(
    tx: &mut PgConnection,
    hub: &Hub,
    (tenant, id): (&Tenant, Uuid),
    if_match: &IfMatch,
    now: DateTime<Utc>,
) -> Result<Known, Error> {
    let mut known = locked(tx, hub, tenant, id, if_match).await?;
    if known.subscriber.paused_at.take().is_some() {
        save(tx, hub, &mut known, now).await?;
    }
    Ok(known)
}

/// What was to be sent to it goes nowhere any more.
pub(crate) async fn delete(
    tx: &mut PgConnection,
    (tenant, id): (&Tenant, Uuid),
    if_match: &IfMatch,
) -> Result<(), Error> {
    let version = store::lock_version(tx, tenant, id).await?.ok_or(Error::NoSubscriber)?;
    if_match.check(version).map_err(Error::Stale)?;
    store::delete(tx, tenant, id).await?;
    tracing::info!(subscriber = %id, tenant = tenant.as_str(), "deleted a subscriber");
    Ok(())
}

/// A new secret; those before it sign for `overlap` yet, or end when they were to end anyway.
pub(crate) async fn rotate(
    tx: &mut PgConnection,
    hub: &Hub,
    (tenant, id): (&Tenant, Uuid),
    if_match: &IfMatch,
    (overlap, now): (TimeDelta, DateTime<Utc>),
) -> Result<(Known, SigningSecret), Error> {
    let mut known = locked(tx, hub, tenant, id, if_match).await?;
    let live = known.secrets_at(now).len();
    if overlap > TimeDelta::zero() && live >= SECRETS_MAX {
        return Err(Error::TooManySecrets(live));
    }
    let kind = known.secrets.first().map_or(SecretKind::Symmetric, |(secret, _)| secret.kind());
    let secret = SigningSecret::generate(kind);
    store::end_secrets(tx, id, now + overlap, now).await?;
    store::add_secret(tx, &hub.seal, id, &secret, now).await?;
    save(tx, hub, &mut known, now).await?;
    tracing::info!(subscriber = %id, "rotated a subscriber's secret");
    Ok((found(tx, hub, tenant, id).await?, secret))
}

/// Sends one event at once, beside the log and whatever waits, and says what came of it.
pub(crate) async fn test(hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<TestResult, Error> {
    // Its connection goes back before anything is sent.
    let known = opened(show(hub, tenant, id).await?)?;
    let mut recipient = Recipient::of(known).map_err(Error::Unusable)?;
    recipient.timeout = recipient.timeout.min(TEST_TIME_MAX);
    let (event_id, now) = (Uuid::now_v7(), hub.clock.now());
    let payload = json!({"message": "This is a test from Pillarbox.", "subscriber_id": id, "sent_at": now});
    let (source, topic, payload) = (SOURCE.as_str().to_owned(), TEST_TYPE.to_owned(), payload.to_string().into());
    let event = Event { id: event_id, source, topic, at: now, payload, traceparent: None };
    let mail = Mail { n: 0, lane: None, seq: None, event: Some(Arc::new(event)) };
    let came = deliver(&hub.client, &recipient, &mail, &hub.clock).await;
    Ok(TestResult {
        event_id: EventId(event_id),
        delivered: came.verdict == Verdict::Delivered,
        status: came.status,
        latency_ms: came.latency.as_millis() as u64,
        excerpt: came.excerpt,
        error: came.error,
        detail: came.detail,
    })
}

async fn found(db: &mut PgConnection, hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<Known, Error> {
    store::find(db, &hub.seal, tenant, id).await?.ok_or(Error::NoSubscriber)
}

async fn locked(
    tx: &mut PgConnection,
    hub: &Hub,
    tenant: &Tenant,
    id: Uuid,
    if_match: &IfMatch,
) -> Result<Known, Error> {
    let known = store::lock(tx, &hub.seal, tenant, id).await?.ok_or(Error::NoSubscriber)?;
    if_match.check(known.subscriber.version).map_err(Error::Stale)?;
    opened(known)
}

/// What cannot be opened can be kept only as it is.
fn opened(known: Known) -> Result<Known, Error> {
    match known.unopened {
        None => Ok(known),
        Some(_) => Err(Error::Unopened),
    }
}

async fn save(tx: &mut PgConnection, hub: &Hub, known: &mut Known, now: DateTime<Utc>) -> Result<(), Error> {
    known.subscriber.version += 1;
    known.subscriber.updated_at = now;
    Ok(store::update(tx, &hub.seal, &known.subscriber).await?)
}

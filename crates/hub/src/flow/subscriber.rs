use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use contracts::EventId;
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use kit::auth::Tenant;
use kit::etag::IfMatch;
use serde_json::json;
use serde_json::value::to_raw_value;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::Hub;
use crate::client::Outgoing;
use crate::content::{Content, Event, content};
use crate::domain::{Subscriber, Verdict, verdict};
use crate::error::Error;
use crate::fields::Fields;
use crate::headers;
use crate::signature::{SecretKind, SigningSecret, WEBHOOK_ID, WEBHOOK_SIGNATURE, WEBHOOK_TIMESTAMP, sign};
use crate::store::subscriber::{self as store, Known, Which};
use crate::target::Target;
use crate::view::TestResult;

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
    hub: &Hub,
    (tenant, id): (&Tenant, Uuid),
    if_match: &IfMatch,
) -> Result<(), Error> {
    locked(tx, hub, tenant, id, if_match).await?;
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
    let known = show(hub, tenant, id).await?;
    let settings = &known.subscriber.settings;
    let target = Target::parse(&settings.url, false).map_err(|detail| Error::field("/url", detail))?;
    let (now, event_id) = (hub.clock.now(), EventId(Uuid::now_v7()));
    let payload = json!({"message": "This is a test from Pillarbox.", "subscriber_id": id, "sent_at": now});
    let payload = to_raw_value(&payload).map_err(|error| Error::Database(sqlx::Error::Encode(error.into())))?;
    let event = Event { id: event_id, event_type: TEST_TYPE, at: now, payload: &payload };
    let Content { content_type, body } = content(settings.format, event);
    let given = headers::check(&settings.headers.iter().cloned().collect());
    let mut headers: HeaderMap = given.unwrap_or_default();
    let (name, timestamp) = (event_id.to_string(), now.timestamp());
    headers.insert(WEBHOOK_SIGNATURE, sign(&known.secrets_at(now), &name, timestamp, &body));
    headers.insert(WEBHOOK_TIMESTAMP, timestamp.into());
    if let Ok(name) = name.try_into() {
        headers.insert(WEBHOOK_ID, name);
    }
    headers.insert(CONTENT_TYPE, content_type);
    let timeout = Duration::from_millis(settings.timeout_ms.into()).min(TEST_TIME_MAX);
    let started = Instant::now();
    let delivery = hub.client.post(Outgoing { target: &target, headers, body, timeout }).await;
    let latency_ms = started.elapsed().as_millis() as u64;
    let status = delivery.as_ref().ok().map(|answer| answer.status.as_u16());
    let delivered = verdict(status, &settings.retry_statuses) == Verdict::Delivered;
    let failure = delivery.as_ref().err();
    Ok(TestResult {
        event_id,
        delivered,
        status,
        latency_ms,
        error: failure.map(|failure| failure.class),
        detail: failure.map(|failure| failure.text.clone()),
        excerpt: delivery.ok().map(|answer| answer.excerpt),
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
    Ok(known)
}

async fn save(tx: &mut PgConnection, hub: &Hub, known: &mut Known, now: DateTime<Utc>) -> Result<(), Error> {
    known.subscriber.version += 1;
    known.subscriber.updated_at = now;
    Ok(store::update(tx, &hub.seal, &known.subscriber).await?)
}

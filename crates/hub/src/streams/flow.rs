//! Managing streams, and seeking in them.

pub(crate) mod pull;

use chrono::{DateTime, Days, NaiveTime, Utc};
use http_kit::etag::IfMatch;
use pillarbox::log::Tenant;
use pillarbox::operations::browse;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::Hub;
use crate::error::Error;
use crate::streams::domain::Stream;
use crate::streams::fields::{SeekTarget, StreamEnd, StreamFields, StreamName};
use crate::streams::store;
use crate::streams::store::LockedStream;
use crate::streams::store::messages::StreamMessage;
use crate::streams::view::StreamWithState;

/// Streams of a tenant. Fan-out adds a row for each stream that an event matches.
pub(crate) const STREAMS_MAX: i64 = 100;
/// Days without content that a seek to the oldest message passes over.
const EMPTY_DAYS_MAX: u32 = 400;

/// The stream to change, and the version that it must have.
pub(crate) struct StreamTarget {
    pub(crate) tenant: Tenant,
    pub(crate) name: StreamName,
    pub(crate) if_match: IfMatch,
}

/// Creates a stream. It contains the events that are posted from now on.
pub(crate) async fn create(
    tx: &mut PgConnection,
    tenant: Tenant,
    (StreamName(name), fields): (StreamName, StreamFields),
    now: DateTime<Utc>,
) -> Result<Stream, Error> {
    let settings = fields.into_settings(None).map_err(Error::Invalid)?;
    let id = Uuid::now_v7();
    let stream = Stream { id, tenant, name, version: 1, settings, created_at: now, updated_at: now };
    if !store::insert(tx, &stream).await? {
        return Err(Error::StreamExists);
    }
    // Counted after the insert, which locks the row of the directory.
    if store::count(tx, &stream.tenant).await? > STREAMS_MAX {
        return Err(Error::TooManyStreams(STREAMS_MAX));
    }
    tracing::info!(stream = %id, name = stream.name, tenant = stream.tenant.as_str(), "created a stream");
    Ok(stream)
}

/// Returns the streams of a tenant in the order of their names, those after `after`.
pub(crate) async fn list(hub: &Hub, tenant: &Tenant, after: Option<String>, limit: u32) -> Result<Vec<Stream>, Error> {
    Ok(store::list(&mut *hub.db.acquire().await?, tenant, after, limit).await?)
}

/// Returns a stream with its positions, its lag and its readers.
pub(crate) async fn show(hub: &Hub, tenant: &Tenant, name: &StreamName) -> Result<StreamWithState, Error> {
    let db = &mut *hub.db.acquire().await?;
    let found = store::show_parts(db, tenant, &name.0).await?.ok_or(Error::NoStream)?;
    let lag = store::lag(db, found.stream.id).await?;
    Ok(StreamWithState::new(found, &lag))
}

/// Changes which events the stream contains from now on. Its messages stay.
pub(crate) async fn update(
    tx: &mut PgConnection,
    target: &StreamTarget,
    fields: StreamFields,
    now: DateTime<Utc>,
) -> Result<Stream, Error> {
    let mut stream = lock(tx, target).await?;
    let settings = fields.into_settings(Some(&stream.settings)).map_err(Error::Invalid)?;
    if settings != stream.settings {
        (stream.settings, stream.version, stream.updated_at) = (settings, stream.version + 1, now);
        store::update(tx, &stream).await?;
    }
    Ok(stream)
}

/// Deletes a stream with its positions and readers.
pub(crate) async fn delete(tx: &mut PgConnection, target: &StreamTarget) -> Result<(), Error> {
    // Before the row of the stream, as pulls do.
    store::lock_parts(tx, &target.tenant, &target.name.0).await?;
    let stream = lock(tx, target).await?;
    store::delete(tx, stream.id).await?;
    tracing::info!(stream = %stream.id, name = stream.name, tenant = stream.tenant.as_str(), "deleted a stream");
    Ok(())
}

/// Moves the positions of all parts. Fails while readers have leases, unless `force`, which ends them. Returns the id of the
/// stream and its new state.
pub(crate) async fn seek(
    tx: &mut PgConnection,
    tenant: &Tenant,
    name: &StreamName,
    target: SeekTarget,
    force: bool,
) -> Result<(Uuid, StreamWithState), Error> {
    let locked = store::lock_parts(tx, tenant, &name.0).await?.ok_or(Error::NoStream)?;
    let (stream, n) = (locked.stream.id, position_of(tx, &locked, target).await?);
    let mut moved = locked.assignment.clone();
    moved.seek(n, locked.now, force).map_err(|in_use| Error::StreamInUse(in_use.0))?;
    store::save_assignment(tx, stream, &locked.assignment, &moved).await?;
    tracing::info!(%stream, ?target, n, "moved the position of a stream");
    let lag = store::lag(tx, stream).await?;
    Ok((stream, StreamWithState::new(LockedStream { assignment: moved, ..locked }, &lag)))
}

/// The number after which the stream continues. Numbers are those of all parts.
async fn position_of(db: &mut PgConnection, locked: &LockedStream, target: SeekTarget) -> Result<i64, Error> {
    let stream = &locked.stream;
    let lapsed = |time: DateTime<Utc>| locked.dropped_before.filter(|dropped| time < *dropped);
    match target {
        SeekTarget::Time(time) => match lapsed(time) {
            Some(dropped) => Err(Error::PositionLapsed(format!(": all from before {dropped} are dropped"))),
            None => {
                let first = store::messages::first_since(&mut *db, stream.id, time).await?;
                before(db, first).await
            }
        },
        SeekTarget::Event(id) => {
            let event = browse::find(&mut *db, id).await?;
            let event = event.filter(|event| event.tenant == stream.tenant.as_str()).ok_or(Error::NoEvent)?;
            match store::messages::of_event(db, stream.id, event.log_ref()).await? {
                Some(n) => Ok(n),
                None if lapsed(event.at).is_some() => {
                    Err(Error::PositionLapsed(format!(": the event was posted at {}", event.at)))
                }
                None => Err(Error::EventNotInStream),
            }
        }
        SeekTarget::End(StreamEnd::Newest) => Ok(store::messages::newest(db).await?),
        SeekTarget::End(StreamEnd::Oldest) => {
            let oldest = oldest(db, stream.id).await?;
            before(db, oldest).await
        }
    }
}

/// The position before a message; the newest one without a message.
async fn before(db: &mut PgConnection, message: Option<StreamMessage>) -> Result<i64, Error> {
    match message {
        Some(message) => Ok(message.n - 1),
        None => Ok(store::messages::newest(db).await?),
    }
}

/// The oldest message whose content the log still has. The log may have dropped a day just before the stream does.
async fn oldest(db: &mut PgConnection, stream: Uuid) -> Result<Option<StreamMessage>, Error> {
    let mut since = DateTime::UNIX_EPOCH;
    for _ in 0..EMPTY_DAYS_MAX {
        let Some(found) = store::messages::first_since(&mut *db, stream, since).await? else { return Ok(None) };
        if !browse::load_names(&mut *db, &[found.log_ref]).await?.is_empty() {
            return Ok(Some(found));
        }
        since = (found.log_ref.at.date_naive() + Days::new(1)).and_time(NaiveTime::MIN).and_utc();
    }
    Ok(None)
}

/// Returns the stream with its row locked. Fails if it does not exist or has another version than
/// the request demands.
async fn lock(tx: &mut PgConnection, target: &StreamTarget) -> Result<Stream, Error> {
    let stream = store::lock_settings(tx, &target.tenant, &target.name.0).await?.ok_or(Error::NoStream)?;
    target.if_match.check(stream.version, stream.updated_at).map_err(Error::Stale)?;
    Ok(stream)
}

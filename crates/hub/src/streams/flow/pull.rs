//! Reading a stream: pulls, acknowledgements and the end of a reader.
//!
//! A pull decides in one short transaction, with the parts of its stream locked: it acknowledges, renews the lease, claims
//! parts, and records what it hands out. The content is read from the log afterwards, and a pull that waits has no connection.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use http_kit::auth::Caller;
use http_kit::page::{PAGE_BYTES_MAX, PageScope};
use pillarbox::log::Tenant;
use pillarbox::log::{LogRef, load_up_to};
use uuid::Uuid;

use crate::Hub;
use crate::error::Error;
use crate::streams::domain::{Assignment, READERS_MAX, StreamCursor};
use crate::streams::fields::{PullLimits, StreamName, invalid_cursor};
use crate::streams::store;
use crate::streams::store::messages::StreamMessage;
use crate::streams::view::{PulledView, StreamItem};

/// The pause before a pull that waits tries again to get parts that others have.
const PARTS_PAUSE: Duration = Duration::from_secs(1);
/// A pull that waits renews its lease when this part of it has passed.
const RENEWALS_PER_LEASE: i32 = 3;
/// Messages whose content is read at a time.
const CONTENT_CHUNK: usize = 50;

/// What one transaction of a pull has decided.
struct Pulled {
    stream: Uuid,
    messages: Vec<StreamMessage>,
    assignment: Assignment,
    parts: Vec<i16>,
    lease_until: DateTime<Utc>,
    /// The reader has fewer parts than its share.
    is_waiting_for_parts: bool,
}

/// A reader of a stream of a tenant.
pub(crate) struct ReaderOf<'a> {
    pub(crate) tenant: &'a Tenant,
    pub(crate) stream: &'a StreamName,
    pub(crate) reader: &'a StreamName,
}

/// Returns the next messages of the reader's parts. Waits for one if there is none.
pub(crate) async fn pull(
    hub: &Hub,
    caller: &Caller,
    of: &ReaderOf<'_>,
    limits: PullLimits,
    acknowledge: Option<&str>,
) -> Result<PulledView, Error> {
    let deadline = Instant::now() + limits.wait;
    let stream = store::find(&mut *hub.db.acquire().await?, of.tenant, &of.stream.0).await?.ok_or(Error::NoStream)?.id;
    let acknowledge = acknowledge.map(|cursor| parse_cursor(hub, stream, cursor, "/acknowledge")).transpose()?;
    let mut waiter = hub.stream_waiters.register(stream);
    let mut acknowledge = acknowledge.as_ref();
    loop {
        waiter.begin_read();
        let pulled = decide(hub, of, limits, acknowledge.take()).await?;
        let left = deadline.saturating_duration_since(Instant::now());
        if !pulled.messages.is_empty() || left.is_zero() {
            return with_content(hub, pulled).await;
        }
        let renewal = (limits.lease / RENEWALS_PER_LEASE).to_std().unwrap_or(PARTS_PAUSE);
        let pause = if pulled.is_waiting_for_parts { PARTS_PAUSE } else { renewal };
        let is_running = waiter.wait(caller, pause.min(left)).await.map_err(|_| Error::TooManyPulls)?;
        if !is_running {
            return with_content(hub, pulled).await;
        }
    }
}

/// One transaction: acknowledges, renews the lease, claims parts, and hands out messages.
async fn decide(
    hub: &Hub,
    of: &ReaderOf<'_>,
    limits: PullLimits,
    acknowledge: Option<&StreamCursor>,
) -> Result<Pulled, Error> {
    let reader = &of.reader.0;
    let mut tx = hub.db.begin().await?;
    let locked = store::lock_parts(&mut tx, of.tenant, &of.stream.0).await?.ok_or(Error::NoStream)?;
    // The request was checked when it arrived; it may have waited since then.
    if locked.is_tenant_suspended {
        return Err(Error::Suspended(of.tenant.clone()));
    }
    let (stream, mut after) = (locked.stream.id, locked.assignment.clone());
    if let Some(cursor) = acknowledge {
        after.acknowledge(reader, cursor).map_err(|_| Error::LeaseLost)?;
    }
    let parts_before = after.parts_of(reader).count();
    let is_new = !after.live_readers(locked.now).any(|live| live.name == *reader);
    after.join(reader, locked.now, limits.lease).map_err(|_| Error::TooManyReaders(READERS_MAX))?;
    if let Some(part) = after.lapsed_part(reader) {
        return Err(Error::PositionLapsed(format!(" (part {part})")));
    }
    let messages = store::messages::read(&mut tx, stream, &after.readable(reader, locked.now), limits.max).await?;
    after.hand_out(messages.iter().map(|message| (message.part, message.n)));
    store::save_assignment(&mut tx, stream, &locked.assignment, &after).await?;
    tx.commit().await?;
    let parts: Vec<i16> = after.parts_of(reader).map(|part| part.part).collect();
    if is_new || parts.len() < parts_before {
        // Readers of this process that wait give up parts for a new reader, or claim those that this one has given up.
        hub.stream_waiters.wake(&[stream]);
    }
    let is_waiting_for_parts = after.is_waiting_for_parts(reader, locked.now);
    let lease_until = locked.now + limits.lease;
    Ok(Pulled { stream, messages, assignment: after, parts, lease_until, is_waiting_for_parts })
}

/// Reads the content of the messages from the log, until it is too much for one response. Fails if retention has dropped the
/// content of a message: a message is never returned without it.
async fn with_content(hub: &Hub, pulled: Pulled) -> Result<PulledView, Error> {
    let Pulled { stream, messages, mut assignment, parts, lease_until, .. } = pulled;
    let (mut items, mut returned, mut bytes) = (Vec::new(), Vec::new(), 0);
    for chunk in messages.chunks(CONTENT_CHUNK) {
        if bytes >= PAGE_BYTES_MAX {
            break;
        }
        let log_refs: Vec<LogRef> = chunk.iter().map(|message| message.log_ref).collect();
        let content = load_up_to(&mut *hub.db.acquire().await?, &log_refs, PAGE_BYTES_MAX - bytes).await?;
        let is_cut = content.len() < chunk.len();
        for (message, logged) in chunk.iter().zip(content) {
            let Some(logged) = logged else {
                return Err(Error::PositionLapsed(format!(": the content of {} is dropped", message.log_ref.at)));
            };
            bytes += logged.payload.get().len();
            returned.push((message.part, message.n));
            items.push(StreamItem::new(message.clone(), &logged));
        }
        if is_cut {
            break;
        }
    }
    // The cursor acknowledges what is returned. The rest comes with the next pull.
    let cursor = assignment.hand_out(returned.into_iter());
    Ok(PulledView { items, cursor: cursor_scope(hub, stream).cursor(&cursor), parts, lease_until })
}

/// Acknowledges everything that a pull has returned. Fails and changes nothing if the reader no longer has the parts.
pub(crate) async fn acknowledge(hub: &Hub, of: &ReaderOf<'_>, cursor: &str) -> Result<(), Error> {
    let mut tx = hub.db.begin().await?;
    let locked = store::lock_parts(&mut tx, of.tenant, &of.stream.0).await?.ok_or(Error::NoStream)?;
    let (stream, mut after) = (locked.stream.id, locked.assignment.clone());
    let cursor = parse_cursor(hub, stream, cursor, "/cursor")?;
    after.acknowledge(&of.reader.0, &cursor).map_err(|_| Error::LeaseLost)?;
    store::save_assignment(&mut tx, stream, &locked.assignment, &after).await?;
    Ok(tx.commit().await?)
}

/// Ends the lease of a reader, so that others can have its parts at once.
pub(crate) async fn release(hub: &Hub, of: &ReaderOf<'_>) -> Result<(), Error> {
    let mut tx = hub.db.begin().await?;
    let locked = store::lock_parts(&mut tx, of.tenant, &of.stream.0).await?.ok_or(Error::NoStream)?;
    let (stream, mut after) = (locked.stream.id, locked.assignment.clone());
    after.release_reader(&of.reader.0);
    store::save_assignment(&mut tx, stream, &locked.assignment, &after).await?;
    tx.commit().await?;
    hub.stream_waiters.wake(&[stream]);
    Ok(())
}

/// The scope of the cursors of a stream. A stream that is created again with the same name has another id.
fn cursor_scope(hub: &Hub, stream: Uuid) -> PageScope<'_> {
    PageScope::of_owner(&hub.cursor_key, "hub stream", stream, &())
}

fn parse_cursor(hub: &Hub, stream: Uuid, cursor: &str, pointer: &str) -> Result<StreamCursor, Error> {
    let invalid = || Error::Invalid(vec![invalid_cursor(pointer)]);
    cursor_scope(hub, stream).position(Some(cursor)).ok().flatten().ok_or_else(invalid)
}

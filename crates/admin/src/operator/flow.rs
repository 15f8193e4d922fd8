//! The operator's actions. An action that takes a connection runs in the caller's
//! transaction; one that takes a pool opens its own.

use chrono::{DateTime, Utc};
use pillarbox::database::{Database, cluster_identity, time};
use pillarbox::log::Snapshot;
use pillarbox::operations::cursors::{self, DeleteResult, MoveResult};
use pillarbox::operations::dead_letters::{self, Bulk, DeadLetter, Selection};
use pillarbox::operations::parked::{self, RetryResult};
use pillarbox::operations::recovery::{self, Recovery};
use pillarbox::operations::replays::{self, CancelResult, Replay, Request};
use pillarbox::operations::{browse, status};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use super::{CannotContinue, Error, MessageView, MessageWithOutcomes};

/// The message with its status for each consumer. Fails if the log does not have it.
pub async fn message(db: &Database, id: Uuid) -> Result<MessageWithOutcomes, Error> {
    let mut db = db.acquire().await?;
    let message = browse::find(&mut db, id).await?.ok_or(Error::NoMessage)?;
    let consumers = status::message_statuses(&mut *db, &message).await?;
    Ok(MessageWithOutcomes { message: MessageView::full(message), consumers })
}

/// How an operator resets a consumer.
#[derive(Debug, Clone, Copy)]
pub struct Reset {
    /// The consumer reads again what was posted since. None: it continues with messages that are posted from now on.
    pub from: Option<DateTime<Utc>>,
    /// Whether unread messages may be skipped.
    pub skip_unread: bool,
}

/// Moves a consumer to the end of the log; it reads again what was posted since `from`. Returns how many messages it has not read.
/// Fails if it does not exist, or if it would skip unread messages and must not.
///
/// The caller takes the snapshot before the transaction, because none can be taken inside one.
pub async fn reset(
    tx: &mut PgConnection,
    consumer: &str,
    Reset { from, skip_unread }: Reset,
    snapshot: &Snapshot,
) -> Result<i64, Error> {
    if let Some(from) = from
        && from >= time::now(tx).await?
    {
        return Err(Error::FromInTheFuture);
    }
    let statuses = super::consumers(&mut *tx).await?;
    let status = statuses.into_iter().find(|status| status.consumer == consumer).ok_or(Error::NoConsumer)?;
    let mut unread = status.lag_messages;
    if consumer == hub::FAN_OUT {
        unread += hub::count_deferred(tx).await?;
    }
    if unread > 0 && from.is_none() && !skip_unread {
        return Err(Error::WouldSkip { consumer: consumer.to_owned(), unread });
    }
    if !cursors::reset_in(tx, consumer, from, snapshot).await? {
        return Err(Error::NoConsumer);
    }
    // Fan-out has read these events, but they are as unprocessed as those that it has not read.
    let deferred = if consumer == hub::FAN_OUT { hub::skip_deferred(tx, from).await? } else { 0 };
    tracing::info!(consumer, ?from, deferred, "an operator reset a consumer");
    Ok(unread)
}

/// Makes a consumer continue exactly where `other` has stopped. Fails if one of them does not exist or is in use, or if messages
/// would be lost or processed twice.
pub async fn continue_like(tx: &mut PgConnection, consumer: &str, other: &str) -> Result<(), Error> {
    let result = cursors::continue_like_in(tx, consumer, other).await?;
    let (consumer, other) = (consumer.to_owned(), other.to_owned());
    Err(match result {
        MoveResult::Moved => {
            tracing::info!(consumer, other, "an operator made a consumer continue where another one has stopped");
            return Ok(());
        }
        MoveResult::NotFound(name) => Error::NoSuchConsumer(name),
        MoveResult::InUse(name) => Error::PositionInUse(name),
        MoveResult::OtherHasParked(count) => CannotContinue::OtherHasParked { other, count }.into(),
        MoveResult::OtherIsIncomplete => CannotContinue::OtherIsIncomplete { other }.into(),
        MoveResult::WouldSkip(count) => CannotContinue::WouldSkip { consumer, other, count }.into(),
        MoveResult::IsAhead(count) => CannotContinue::IsAhead { consumer, other, count }.into(),
    })
}

/// Resumes the consumers of a restored database. Returns the number of pending hub messages that became dead letters, or
/// `None` if the database was not restored. Fails if the database cannot be reached.
pub async fn recover(db: &PgPool, recovery: Recovery) -> Result<Option<u64>, Error> {
    cluster_identity::check(db).await?;
    let mut tx = db.begin().await?;
    if !recovery::recover_in(&mut tx, recovery).await? {
        return Ok(None);
    }
    // What they have read is meaningless in this database.
    hub::fail_replays(&mut tx).await?;
    let skipped = match recovery {
        Recovery::From(_) => 0,
        Recovery::Skip => {
            let now = time::now(&mut tx).await?;
            hub::dead_letter_backlog(&mut tx, now).await?
        }
    };
    tx.commit().await?;
    tracing::info!(?recovery, skipped, "an operator recovered the log");
    Ok(Some(skipped))
}

/// Drops a consumer; its parked messages become dead letters. Returns how many there were. Fails if it does not exist or is in use.
pub async fn drop_consumer(tx: &mut PgConnection, consumer: &str) -> Result<u64, Error> {
    match cursors::delete_in(tx, consumer).await? {
        DeleteResult::Deleted { dead_letters } => {
            tracing::info!(consumer, dead_letters, "an operator dropped a consumer");
            Ok(dead_letters)
        }
        DeleteResult::NotFound => Err(Error::NoConsumer),
        DeleteResult::InUse => Err(Error::ConsumerInUse(consumer.to_owned())),
    }
}

/// Makes a parked message due now. Fails if it is not parked any more, or waits behind an earlier message of its key.
pub async fn retry_parked(tx: &mut PgConnection, place: i64) -> Result<(), Error> {
    match parked::retry(tx, place).await? {
        RetryResult::Scheduled => Ok(()),
        RetryResult::NotFound => Err(Error::NotParked),
        RetryResult::Behind(earlier) => Err(Error::ParkedBehind(earlier)),
    }
}

/// Marks a parked message as discarded; the shard worker removes it when its turn comes. Fails if it is not parked any more.
pub async fn discard_parked(tx: &mut PgConnection, place: i64) -> Result<(), Error> {
    if !parked::discard(tx, place).await? {
        return Err(Error::NotParked);
    }
    tracing::info!(place, "an operator discarded a parked message");
    Ok(())
}

/// The dead letter with this id. Fails if there is none.
pub async fn dead_letter(db: &mut PgConnection, id: i64) -> Result<DeadLetter, Error> {
    let selection = Selection { id: Some(id), ..Selection::default() };
    dead_letters::list(db, &selection, None, 1).await?.pop().ok_or(Error::NoDeadLetter)
}

/// Parks a dead letter again, due now, with all of its retries. Fails if there is none with this id, its consumer no longer
/// exists, or another message with the same event id is parked.
pub async fn retry_dead_letter(tx: &mut PgConnection, id: i64) -> Result<(), Error> {
    let selection = Selection { id: Some(id), ..Selection::default() };
    if dead_letters::retry(&mut *tx, &selection, 1).await? == 0 {
        let dead = dead_letter(&mut *tx, id).await?;
        let has_consumer = dead_letters::without_consumer(tx, &selection).await?.is_empty();
        return Err(if has_consumer { Error::SameIdParked } else { Error::ConsumerDropped(dead.consumer) });
    }
    Ok(())
}

/// Discards a dead letter. Fails if there is none with this id.
pub async fn discard_dead_letter(tx: &mut PgConnection, id: i64) -> Result<(), Error> {
    let selection = Selection { id: Some(id), ..Selection::default() };
    if dead_letters::discard(tx, &selection, 1).await? == 0 {
        return Err(Error::NoDeadLetter);
    }
    tracing::info!(id, "an operator discarded a dead letter");
    Ok(())
}

/// Parks the selected dead letters again, due now, in several transactions. Fails if the database fails; what is committed by
/// then stays.
pub async fn retry_dead_letters(db: &Database, selection: &Selection) -> Result<Bulk, Error> {
    Ok(dead_letters::retry_many(db, selection).await?)
}

/// Discards the selected dead letters in several transactions. Fails if the database fails; what is committed by then stays.
pub async fn discard_dead_letters(db: &Database, selection: &Selection) -> Result<Bulk, Error> {
    let done = dead_letters::discard_many(db, selection).await?;
    tracing::info!(count = done.count, "an operator discarded dead letters");
    Ok(done)
}

/// Requests a replay and returns its id. Fails if the range is empty or there is no such consumer.
pub async fn request_replay(tx: &mut PgConnection, request: &Request) -> Result<i64, Error> {
    if request.from >= request.to {
        return Err(Error::ToNotAfterFrom);
    }
    let id = replays::request_in(tx, request).await?.ok_or(Error::NoConsumer)?;
    tracing::info!(consumer = request.consumer, replay = id, again = request.again, "an operator requested a replay");
    Ok(id)
}

/// The replay with this id. Fails if there is none.
pub async fn replay(db: &mut PgConnection, id: i64) -> Result<Replay, Error> {
    replays::find(db, id).await?.ok_or(Error::NoReplay)
}

/// Cancels a replay. One that has ended does not change. Fails if it does not exist.
pub async fn cancel_replay(tx: &mut PgConnection, id: i64) -> Result<(), Error> {
    match replays::cancel(tx, id).await? {
        CancelResult::Canceled => {
            tracing::info!(replay = id, "an operator canceled a replay");
            Ok(())
        }
        CancelResult::AlreadyEnded => Ok(()),
        CancelResult::NotFound => Err(Error::NoReplay),
    }
}

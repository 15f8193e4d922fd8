//! The operator's actions, shared by the HTTP API and the command line. An action that takes a connection runs in the caller's
//! transaction; one that takes a pool opens its own.

use chrono::{DateTime, Utc};
use pillarbox::database::{Database, cluster_identity, time};
use pillarbox::log::Snapshot;
use pillarbox::operations::cursors::{self, DeleteResult};
use pillarbox::operations::dead_letters::{self, Bulk, DeadLetter, Selection};
use pillarbox::operations::parked::{self, RetryResult};
use pillarbox::operations::recovery::{self, Recovery};
use pillarbox::operations::replays::{self, CancelResult, Request};
use pillarbox::operations::{browse, status};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use super::{Error, MessageView, MessageWithOutcomes};

/// The message with its status for each consumer. Fails if the log does not have it.
pub async fn message(db: &Database, id: Uuid) -> Result<MessageWithOutcomes, Error> {
    let mut db = db.acquire().await?;
    let message = browse::find(&mut db, id).await?.ok_or(Error::NoMessage)?;
    let consumers = status::message_statuses(&mut *db, &message).await?;
    Ok(MessageWithOutcomes { message: MessageView::full(message), consumers })
}

/// Moves a consumer to the end of the log; it reads again what was posted since `from`. Fails if there is no such consumer.
///
/// The caller takes the snapshot before the transaction, because none can be taken inside one.
pub async fn reset(
    tx: &mut PgConnection,
    consumer: &str,
    from: Option<DateTime<Utc>>,
    (snapshot, now): (&Snapshot, DateTime<Utc>),
) -> Result<(), Error> {
    if from.is_some_and(|from| from >= now) {
        return Err(Error::FromInTheFuture);
    }
    if !cursors::reset_in(tx, consumer, from, snapshot).await? {
        return Err(Error::NoConsumer);
    }
    // Fan-out has read these events, but they are as unprocessed as those that it has not read.
    let deferred = match consumer == hub::FAN_OUT {
        true => hub::skip_deferred(tx, from).await?,
        false => 0,
    };
    tracing::info!(consumer, ?from, deferred, "an operator reset a consumer");
    Ok(())
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
        return Err(match dead_letters::without_consumer(tx, &selection).await?.is_empty() {
            true => Error::SameIdParked,
            false => Error::ConsumerDropped(dead.consumer),
        });
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
    check_range(request)?;
    let id = replays::request_in(tx, request).await?.ok_or(Error::NoConsumer)?;
    tracing::info!(consumer = request.consumer, replay = id, again = request.again, "an operator requested a replay");
    Ok(id)
}

/// Fails if the time range of the replay is empty.
pub fn check_range(request: &Request) -> Result<(), Error> {
    match request.from < request.to {
        true => Ok(()),
        false => Err(Error::ToNotAfterFrom),
    }
}

/// Cancels a replay. Returns false if it had already ended. Fails if it does not exist.
pub async fn cancel_replay(tx: &mut PgConnection, id: i64) -> Result<bool, Error> {
    match replays::cancel(tx, id).await? {
        CancelResult::Canceled => {
            tracing::info!(replay = id, "an operator canceled a replay");
            Ok(true)
        }
        CancelResult::AlreadyEnded => Ok(false),
        CancelResult::NotFound => Err(Error::NoReplay),
    }
}

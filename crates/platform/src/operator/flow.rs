use chrono::{DateTime, Utc};
use mailbox::cursor::{self, Dropped};
use mailbox::dead_letter::{self, DeadLetter, Which};
use mailbox::home::{self, Recover};
use mailbox::moment::Moment;
use mailbox::parked::{self, Retried};
use mailbox::replay::{self, Canceled, Request};
use mailbox::{browse, status};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use super::{Error, MessageView, MessageWithOutcomes};

pub(crate) async fn message(db: &PgPool, id: Uuid) -> Result<MessageWithOutcomes, Error> {
    let mut db = db.acquire().await?;
    let message = browse::find(&mut db, id).await?.ok_or(Error::NoMessage)?;
    let consumers = status::of_message(&mut *db, &message).await?;
    Ok(MessageWithOutcomes { message: MessageView::whole(message), consumers })
}

/// `now` is a moment from before the transaction: there is none inside one.
pub(crate) async fn reset(
    tx: &mut PgConnection,
    consumer: &str,
    from: Option<DateTime<Utc>>,
    (moment, now): (&Moment, DateTime<Utc>),
) -> Result<(), Error> {
    if from.is_some_and(|from| from >= now) {
        return Err(Error::FromInTheFuture);
    }
    if !cursor::reset_in(tx, consumer, from, moment).await? {
        return Err(Error::NoConsumer);
    }
    tracing::info!(consumer, ?from, "an operator has reset a consumer");
    Ok(())
}

/// Lets a restored log go on; returns how many webhooks that waited are dead letters now, or None if it was not restored.
pub(crate) async fn recover(db: &PgPool, way: Recover, now: DateTime<Utc>) -> Result<Option<u64>, Error> {
    home::settle(db).await?;
    let mut tx = db.begin().await?;
    if !home::recover_in(&mut tx, way).await? {
        return Ok(None);
    }
    let set_aside = match way {
        Recover::From(_) => 0,
        Recover::Skip => hub::set_aside(&mut tx, now).await?,
    };
    tx.commit().await?;
    tracing::info!(?way, set_aside, "an operator has recovered the log");
    Ok(Some(set_aside))
}

pub(crate) async fn forget(tx: &mut PgConnection, consumer: &str) -> Result<(), Error> {
    match cursor::forget_in(tx, consumer).await? {
        Dropped::Yes => {
            tracing::info!(consumer, "an operator has dropped a consumer");
            Ok(())
        }
        Dropped::Unknown => Err(Error::NoConsumer),
        Dropped::InUse => Err(Error::ConsumerInUse(consumer.to_owned())),
    }
}

pub(crate) async fn retry_parked(tx: &mut PgConnection, place: i64) -> Result<(), Error> {
    match parked::retry(tx, place).await? {
        Retried::Yes => Ok(()),
        Retried::Unknown => Err(Error::NotParked),
        Retried::Behind(earlier) => Err(Error::ParkedBehind(earlier)),
    }
}

pub(crate) async fn discard_parked(tx: &mut PgConnection, place: i64) -> Result<(), Error> {
    if !parked::discard(tx, place).await? {
        return Err(Error::NotParked);
    }
    tracing::info!(place, "an operator has discarded a parked message");
    Ok(())
}

pub(crate) async fn dead_letter(db: &mut PgConnection, id: i64) -> Result<DeadLetter, Error> {
    let which = Which { id: Some(id), ..Which::default() };
    dead_letter::list(db, &which, None, 1).await?.pop().ok_or(Error::NoDeadLetter)
}

pub(crate) async fn retry_dead_letter(tx: &mut PgConnection, id: i64) -> Result<(), Error> {
    let which = Which { id: Some(id), ..Which::default() };
    if dead_letter::retry(&mut *tx, &which, 1).await? == 0 {
        // It is not there, or nobody is there to take it.
        return Err(Error::ConsumerGone(dead_letter(tx, id).await?.consumer));
    }
    Ok(())
}

pub(crate) async fn discard_dead_letter(tx: &mut PgConnection, id: i64) -> Result<(), Error> {
    let which = Which { id: Some(id), ..Which::default() };
    if dead_letter::discard(tx, &which, 1).await? == 0 {
        return Err(Error::NoDeadLetter);
    }
    tracing::info!(id, "an operator has discarded a dead letter");
    Ok(())
}

pub(crate) async fn replay(tx: &mut PgConnection, request: &Request) -> Result<i64, Error> {
    if request.to <= request.from {
        return Err(Error::ToNotAfterFrom);
    }
    let id = replay::request_in(tx, request).await?.ok_or(Error::NoConsumer)?;
    tracing::info!(
        consumer = request.consumer,
        replay = id,
        again = request.again,
        "an operator has asked for a replay"
    );
    Ok(id)
}

/// False if it had ended before.
pub(crate) async fn cancel_replay(tx: &mut PgConnection, id: i64) -> Result<bool, Error> {
    match replay::cancel(tx, id).await? {
        Canceled::Yes => {
            tracing::info!(replay = id, "an operator has canceled a replay");
            Ok(true)
        }
        Canceled::HadEnded => Ok(false),
        Canceled::Unknown => Err(Error::NoReplay),
    }
}

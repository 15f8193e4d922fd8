//! What a consumer does with messages, and how what came of it is kept.

use std::collections::BTreeMap;
use std::future::Future;

use sqlx::{PgPool, Postgres, Transaction};
use uuid::Uuid;

use crate::log::{Message, Place};
use crate::parked::Key;
use crate::replay::{self, Replaying};
use crate::settle::Settlement;
use crate::{cursor, lease};

/// A message at work.
pub struct Item {
    pub message: Message,
    /// 0 is live; a replay that repeats has a run of its own.
    pub run: i32,
    /// It is read again, and may have taken effect before.
    pub is_replayed: bool,
    pub(crate) origin: Origin,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Origin {
    Log,
    Parked { place: i64, attempts: i32, discarded: bool },
}

/// What came of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// It was taken, and nobody there wanted it.
    Unrouted,
    Failed(String),
    /// It was not tried: an earlier one of its key failed.
    Behind,
}

/// What came of a batch.
pub struct Worked {
    /// One for each item, in order.
    pub outcomes: Vec<Outcome>,
    /// Holds the effects, if they are in this database: the outcomes commit with them.
    pub tx: Option<Transaction<'static, Postgres>>,
}

/// What a consumer does with messages.
pub trait Work: Send {
    /// Does these in order. An error means that nothing is known of the batch: it is done again.
    fn run(&mut self, lane: &LaneId, items: &[&Item]) -> impl Future<Output = Result<Worked, LaneError>> + Send;

    /// What the last run did is committed.
    fn kept(&mut self) {}

    /// How many it takes at most, the next time. From many shards it is given one of each all the same.
    fn most(&self) -> u32 {
        u32::MAX
    }
}

/// Who works, and where.
#[derive(Clone)]
pub struct LaneId {
    pub db: PgPool,
    pub consumer: String,
    /// The last batch could not be kept: whatever is wrong, it must be found one by one.
    pub careful: bool,
    pub(crate) owner: Uuid,
}

#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
    #[error("others have taken over")]
    TakenOver,
    #[error(
        "database-restored: this database was restored or copied; say how to go on with `pillarbox recover --from TIME` or `--skip`"
    )]
    Restored,
    #[error(
        "{0} is lapsed: it was behind for too long, and the log has gone on; say where it goes on with `pillarbox cursors reset {0}`"
    )]
    Lapsed(String),
    #[error("the database was away: what was read before that is read again")]
    Doubtful,
    /// Nothing was done: it is given fewer, by what [`Work::most`] says now.
    #[error("too much at a time")]
    TooMuch,
    #[error("{0}")]
    Work(String),
}

impl LaneId {
    /// Keeps others from taking over until the transaction ends.
    pub(crate) async fn hold(&self, tx: &mut Transaction<'_, Postgres>, durably: bool) -> Result<(), LaneError> {
        match lease::hold(tx, &self.consumer, self.owner, durably).await? {
            true => Ok(()),
            false => Err(LaneError::TakenOver),
        }
    }

    /// Keeps the new places, with the effects if there are any: true if one statement did.
    pub(crate) async fn advanced(
        &self,
        tx: Option<&mut Transaction<'static, Postgres>>,
        moved: &BTreeMap<i16, Place>,
    ) -> Result<bool, LaneError> {
        let (consumer, owner) = (&self.consumer, self.owner);
        let advanced = match tx {
            Some(tx) => cursor::advance(&mut **tx, consumer, owner, moved, true).await?,
            None => cursor::advance(&self.db, consumer, owner, moved, false).await?,
        };
        match advanced {
            Some(true) => Ok(true),
            Some(false) => Err(LaneError::TakenOver),
            None => Ok(false),
        }
    }

    /// Keeps everything in one transaction; returns which keys wait for something, and which no longer do.
    pub(crate) async fn keep(
        &self,
        tx: Option<Transaction<'static, Postgres>>,
        settlement: &Settlement<'_>,
        replayed: &[Replaying],
        moved: &BTreeMap<i16, Place>,
    ) -> Result<Vec<(i16, Key, bool)>, LaneError> {
        let has_effects = tx.is_some();
        let mut tx = match tx {
            Some(tx) => tx,
            None => self.db.begin().await?,
        };
        self.hold(&mut tx, has_effects).await?;
        let still_blocked = settlement.keep(&mut tx).await?;
        for replaying in replayed {
            replay::advance(&mut tx, replaying).await?;
        }
        cursor::append(&mut tx, &self.consumer, moved).await?;
        tx.commit().await?;
        Ok(still_blocked)
    }
}

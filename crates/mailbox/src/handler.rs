//! Consumers that act in this database: inbox, effect, posts and place commit together.

use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::FutureExt;
use kit::trace::TraceContext;
use kit::worker::panic_text;
use serde::Deserialize;
use sqlx::{Postgres, Transaction};

use crate::inbox;
use crate::log::Message;
use crate::parked::{Key, key_of};
use crate::told::told;
use crate::work::{Item, LaneError, LaneId, Origin, Outcome, Work, Worked};

/// When so many keys of a batch fail, and they are most of it, it is not the messages that are bad: the consumer stalls
/// instead of parking everything.
const STALL_KEYS: usize = 10;

/// Why a message could not be handled. Any error will do: it is kept, logged, and shown to an operator, as [`told`] tells it.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;
pub type Handling<'t> = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send + 't>>;

/// What a consumer does with one message. All that it does in the transaction happens once; it does nothing else, since
/// what is outside may happen again.
pub trait Handler: Send + Sync + 'static {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> Handling<'t>;

    /// What it does with many at once, where that costs less than one after the other; it is the same, in the same order. If it
    /// fails they are handled one by one. None: there is no such way.
    fn handle_all<'t>(
        &'t self,
        _tx: &'t mut Transaction<'static, Postgres>,
        _messages: &'t [&'t Message],
    ) -> Option<Handling<'t>> {
        None
    }

    /// Whether each message needs a transaction of its own: for a handler that takes locks which others take in another
    /// order than that of the log.
    fn works_alone(&self) -> bool {
        false
    }
}

impl<F> Handler for F
where
    F: for<'t> Fn(&'t mut Transaction<'static, Postgres>, &'t Message) -> Handling<'t> + Send + Sync + 'static,
{
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> Handling<'t> {
        self(tx, message)
    }
}

/// So often it stalls; then the messages are bad after all, and are parked.
const STALLS_MAX: u32 = 20;

/// The work of a consumer with a handler.
pub struct Handle {
    handler: Arc<dyn Handler>,
    /// How often in a row it has stalled.
    stalls: u32,
}

impl Work for Handle {
    /// All in one transaction; if one fails, one by one.
    async fn run(&mut self, lane: &LaneId, items: &[&Item]) -> Result<Worked, LaneError> {
        if lane.careful || self.handler.works_alone() {
            return self.one_by_one(lane, items).await;
        }
        let mut tx = lane.db.begin().await?;
        let mut fresh = self.enter(&mut tx, lane, items).await?;
        // Taken out: the second of two in one batch is a repeat.
        let new = items.iter().filter(|item| fresh.remove(&(item.message.message_id, item.run)));
        let messages: Vec<&Message> = new.map(|item| &item.message).collect();
        if let Err(error) = self.handle_all(&mut tx, &messages).await {
            tx.rollback().await?;
            return match items {
                [_] => Ok(Worked { outcomes: vec![Outcome::Failed(error)], tx: None }),
                items => self.one_by_one(lane, items).await,
            };
        }
        Ok(Worked { outcomes: vec![Outcome::Done; items.len()], tx: Some(tx) })
    }
}

impl Handle {
    pub fn new(handler: Arc<dyn Handler>) -> Handle {
        Handle { handler, stalls: 0 }
    }

    async fn one_by_one(&mut self, lane: &LaneId, items: &[&Item]) -> Result<Worked, LaneError> {
        let mut failed: HashSet<Key> = HashSet::new();
        let mut outcomes = Vec::with_capacity(items.len());
        // Of what is live: what is parked has failed before, and says nothing new.
        let (mut tried, mut failures, mut last_error) = (0, 0, String::new());
        for item in items {
            let key = key_of(&item.message);
            let outcome = match &key {
                Some(key) if failed.contains(key) => Outcome::Behind,
                _ => self.one(lane, item).await?,
            };
            let is_live = usize::from(matches!(item.origin, Origin::Log));
            if outcome != Outcome::Behind {
                tried += is_live;
            }
            if let Outcome::Failed(error) = &outcome {
                failures += is_live;
                last_error.clone_from(error);
                failed.extend(key);
            }
            outcomes.push(outcome);
        }
        if failures >= STALL_KEYS && failures * 2 > tried && self.stalls < STALLS_MAX {
            self.stalls += 1;
            let error = format!("{failures} of {tried} messages failed, so none is parked; the last: {last_error}");
            return Err(LaneError::Work(error));
        }
        self.stalls = 0;
        Ok(Worked { outcomes, tx: None })
    }

    /// In a transaction of its own. If the process ends before the place is kept, the inbox knows that it is done.
    async fn one(&self, lane: &LaneId, item: &Item) -> Result<Outcome, LaneError> {
        let mut tx = lane.db.begin().await?;
        if !self.enter(&mut tx, lane, &[item]).await?.is_empty()
            && let Err(error) = self.handle(&mut tx, &item.message).await
        {
            tx.rollback().await?;
            return Ok(Outcome::Failed(error));
        }
        // A handler may have broken the transaction and not said so, or left a constraint to be checked at the commit.
        let kept = match lane.hold(&mut tx, true).await {
            Ok(()) => tx.commit().await.map_err(LaneError::Database),
            Err(error) => Err(error),
        };
        match kept {
            Ok(()) => Ok(Outcome::Done),
            Err(LaneError::Database(error @ sqlx::Error::Database(_))) => Ok(Outcome::Failed(told(&error))),
            Err(error) => Err(error),
        }
    }

    async fn enter(
        &self,
        tx: &mut Transaction<'static, Postgres>,
        lane: &LaneId,
        items: &[&Item],
    ) -> Result<HashSet<(uuid::Uuid, i32)>, LaneError> {
        let ids: Vec<_> = items.iter().map(|item| (item.message.message_id, item.run)).collect();
        Ok(inbox::enter(tx, &lane.consumer, &ids).await?)
    }

    async fn handle_all(&self, tx: &mut Transaction<'static, Postgres>, messages: &[&Message]) -> Result<(), String> {
        if messages.len() > 1
            && let Some(handling) = self.handler.handle_all(tx, messages)
        {
            return outcome_of(handling).await;
        }
        for message in messages {
            self.handle(tx, message).await?;
        }
        Ok(())
    }

    async fn handle(&self, tx: &mut Transaction<'static, Postgres>, message: &Message) -> Result<(), String> {
        let handling = outcome_of(async { self.handler.handle(tx, message).await });
        match trace_of(message) {
            Some(trace) => trace.scope(handling).await,
            None => handling.await,
        }
    }
}

async fn outcome_of(handling: impl Future<Output = Result<(), Failure>>) -> Result<(), String> {
    match AssertUnwindSafe(handling).catch_unwind().await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(told(&*error)),
        Err(panic) => Err(format!("panic: {}", panic_text(&*panic))),
    }
}

/// The trace that the message was posted in.
pub fn trace_of(message: &Message) -> Option<TraceContext> {
    #[derive(Deserialize)]
    struct Headers {
        traceparent: Option<String>,
    }
    let headers: Headers = serde_json::from_str(message.headers.get()).ok()?;
    headers.traceparent?.parse().ok()
}

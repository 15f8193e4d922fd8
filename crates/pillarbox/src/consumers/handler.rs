//! Handlers: consumers that act in this database.
//!
//! Inbox rows, effects, new posts and positions are committed together. Messages that are processed one by one, each in a
//! separate transaction, are the exception: the positions are committed after them, and if the process ends in between,
//! the inbox prevents a second effect.

use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::FutureExt;
use runtime::worker::{Wake, panic_text};
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use super::inbox;
use super::parked_messages::Key;
use super::processor::{BatchResult, ConsumerError, Delivery, Origin, Outcome, Processor, WorkerContext};
use crate::database::{is_no_response, redacted_error};
use crate::log::Message;

/// If at least this many messages of a batch fail, and more than half of those that were tried, the cause is probably not
/// the messages but something that all of them need. The consumer then stalls instead of parking everything: it processes
/// the batch again later. Messages that were parked before do not count. Only consumers with a handler stall.
const STALL_FAILURES_MIN: usize = 10;

/// After this many stalls in a row, the messages are considered bad after all, and those that fail are parked.
const STALLS_MAX: u32 = 20;

/// Why a message could not be processed. Any error type will do. Its text is stored, logged and shown to operators as
/// [`redacted_error`] returns it.
pub type HandlerError = Box<dyn std::error::Error + Send + Sync>;
/// The work of a handler on one message, or on several.
pub type HandlerFuture<'t> = Pin<Box<dyn Future<Output = Result<(), HandlerError>> + Send + 't>>;

/// Processes the messages of a consumer. Its effects must all be in the transaction: these happen once, while effects
/// outside of it can happen again.
pub trait Handler: Send + Sync + 'static {
    /// Processes one message.
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t>;

    /// Processes many messages at once, if that is cheaper than one by one. The result must be the same, in the same
    /// order. If it fails, the messages are processed one by one. None: not supported.
    fn handle_all<'t>(
        &'t self,
        _tx: &'t mut Transaction<'static, Postgres>,
        _messages: &'t [&'t Message],
    ) -> Option<HandlerFuture<'t>> {
        None
    }

    /// Whether each message needs a separate transaction. Necessary for a handler that acquires locks in another
    /// order than other transactions do, when it processes several messages in the order of the log.
    fn needs_separate_transaction(&self) -> bool {
        false
    }

    /// The workers of this process that wait for what the handler commits. Each commit wakes them.
    fn wakes_after_commit(&self) -> &[Wake] {
        &[]
    }
}

impl<F> Handler for F
where
    F: for<'t> Fn(&'t mut Transaction<'static, Postgres>, &'t Message) -> HandlerFuture<'t> + Send + Sync + 'static,
{
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        self(tx, message)
    }
}

/// The processor of a consumer with a handler.
pub struct HandlerProcessor {
    handler: Arc<dyn Handler>,
    /// The number of stalls in a row.
    stalls: u32,
    /// The message whose processing was the last to exceed the time limit.
    expired: Option<Uuid>,
    /// Messages were processed since the last commit.
    has_effects: bool,
}

impl Processor for HandlerProcessor {
    /// Processes all messages in one transaction; if one fails, one by one.
    async fn process(
        &mut self,
        context: &WorkerContext,
        deliveries: &[&Delivery],
    ) -> Result<BatchResult, ConsumerError> {
        self.has_effects = true;
        if context.isolate_failures || self.handler.needs_separate_transaction() {
            return self.process_one_by_one(context, deliveries).await;
        }
        match context.step("handle a batch", self.process_together(context, deliveries)).await? {
            Ok(tx) => Ok(BatchResult { outcomes: vec![Outcome::Done; deliveries.len()], tx: Some(tx) }),
            Err(error) => match deliveries {
                [_] => Ok(BatchResult { outcomes: vec![Outcome::Failed(error.to_string())], tx: None }),
                deliveries => self.process_one_by_one(context, deliveries).await,
            },
        }
    }

    fn committed(&mut self) {
        if std::mem::take(&mut self.has_effects) {
            self.handler.wakes_after_commit().iter().for_each(Wake::wake);
        }
    }
}

impl HandlerProcessor {
    /// Returns the processor of one shard worker.
    pub fn new(handler: Arc<dyn Handler>) -> HandlerProcessor {
        HandlerProcessor { handler, stalls: 0, expired: None, has_effects: false }
    }

    /// Processes all messages in one transaction, and returns it, or the error of the message that failed.
    async fn process_together(
        &self,
        context: &WorkerContext,
        deliveries: &[&Delivery],
    ) -> Result<Result<Transaction<'static, Postgres>, HandlerFailure>, ConsumerError> {
        let mut tx = context.db.begin().await?;
        let mut new = inbox::insert(&mut tx, &context.consumer, deliveries).await?;
        // `remove`, and not `contains`: the second delivery of a message in one batch is a redelivery.
        let is_new = |delivery: &&&Delivery| new.remove(&(delivery.message.message_id, delivery.run));
        let messages: Vec<&Message> = deliveries.iter().filter(is_new).map(|delivery| &delivery.message).collect();
        if let Err(error) = self.handle_messages(&mut tx, &messages).await {
            tx.rollback().await?;
            return Ok(Err(error));
        }
        Ok(Ok(tx))
    }

    async fn process_one_by_one(
        &mut self,
        context: &WorkerContext,
        deliveries: &[&Delivery],
    ) -> Result<BatchResult, ConsumerError> {
        let mut failed_keys: HashSet<Key> = HashSet::new();
        let mut outcomes = Vec::with_capacity(deliveries.len());
        // Only messages from the log count, live or replayed: a parked message has failed before, so another failure does
        // not indicate a general cause.
        let (mut tried, mut failures, mut last_error) = (0, 0, String::new());
        for delivery in deliveries {
            let key = delivery.message.ordering_key();
            let outcome = match &key {
                Some(key) if failed_keys.contains(key) => Outcome::Blocked,
                _ => self.process_in_time(context, delivery).await?,
            };
            let is_from_log = matches!(delivery.origin, Origin::Log);
            if is_from_log && outcome != Outcome::Blocked {
                tried += 1;
            }
            if let Outcome::Failed(error) = &outcome {
                failures += usize::from(is_from_log);
                last_error = delivery.message.hide_payload_in(error.clone());
                failed_keys.extend(key);
            }
            outcomes.push(outcome);
        }
        if failures >= STALL_FAILURES_MIN && failures * 2 > tried && self.stalls < STALLS_MAX {
            self.stalls += 1;
            let error =
                format!("{failures} of {tried} messages failed, so the consumer stalls; the last error: {last_error}");
            return Err(ConsumerError::Processing(error));
        }
        self.stalls = 0;
        Ok(BatchResult { outcomes, tx: None })
    }

    /// Processes one message alone, within the time limit of a step. The first time that it takes longer, the connection may be
    /// dead, and the round fails. The second time the message is the cause, and it fails like any other: otherwise it would
    /// stop its consumer for ever.
    async fn process_in_time(
        &mut self,
        context: &WorkerContext,
        delivery: &Delivery,
    ) -> Result<Outcome, ConsumerError> {
        let id = delivery.message.message_id;
        match context.step("handle a message", self.process_alone(context, delivery)).await {
            Err(ConsumerError::Database(error)) if is_no_response(&error) => {
                let has_expired_before = self.expired.replace(id) == Some(id);
                if !has_expired_before {
                    return Err(error.into());
                }
                Ok(Outcome::Failed(format!("its processing takes too long: {error}")))
            }
            processed => processed,
        }
    }

    /// Processes one message in a separate transaction. If the process ends before the position is saved, the inbox
    /// prevents a second effect.
    async fn process_alone(&self, context: &WorkerContext, delivery: &Delivery) -> Result<Outcome, ConsumerError> {
        let mut tx = context.db.begin().await?;
        if !inbox::insert(&mut tx, &context.consumer, &[delivery]).await?.is_empty()
            && let Err(error) = self.handle_message(&mut tx, &delivery.message).await
        {
            tx.rollback().await?;
            return Ok(Outcome::Failed(error.to_string()));
        }
        // These can fail because of the message: the handler may have ignored an error that aborted the transaction, or
        // a deferred constraint is checked at the commit.
        let committed = match context.lock(&mut tx, true).await {
            Ok(()) => tx.commit().await.map_err(ConsumerError::Database),
            Err(error) => Err(error),
        };
        match committed {
            Ok(()) => Ok(Outcome::Done),
            Err(ConsumerError::Database(error @ sqlx::Error::Database(_))) => {
                Ok(Outcome::Failed(redacted_error(&error)))
            }
            Err(error) => Err(error),
        }
    }

    async fn handle_messages(
        &self,
        tx: &mut Transaction<'static, Postgres>,
        messages: &[&Message],
    ) -> Result<(), HandlerFailure> {
        if messages.len() > 1
            && let Some(handling) = self.handler.handle_all(tx, messages)
        {
            return catch_errors(handling).await;
        }
        for message in messages {
            self.handle_message(tx, message).await?;
        }
        Ok(())
    }

    async fn handle_message(
        &self,
        tx: &mut Transaction<'static, Postgres>,
        message: &Message,
    ) -> Result<(), HandlerFailure> {
        let handling = catch_errors(async { self.handler.handle(tx, message).await });
        match message.trace() {
            Some(trace) => trace.scope(handling).await,
            None => handling.await,
        }
    }
}

/// Why a handler failed, as it is stored: one line, without the row values that PostgreSQL quotes.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct HandlerFailure(String);

/// Turns errors and panics into failures.
async fn catch_errors(handling: impl Future<Output = Result<(), HandlerError>>) -> Result<(), HandlerFailure> {
    match AssertUnwindSafe(handling).catch_unwind().await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(HandlerFailure(redacted_error(&*error))),
        Err(panic) => Err(HandlerFailure(format!("panic: {}", panic_text(&*panic)))),
    }
}

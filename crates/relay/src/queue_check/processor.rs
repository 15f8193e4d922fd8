//! The processor of one queue's check.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use contracts::EventId;
use pillarbox::consumers::{BatchResult, ConsumerError, Delivery, Outcome, Processor, WorkerContext, have_passed};
use pillarbox::log::{LogRef, Message};
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

use super::replies::Replies;
use crate::broker::{Broker, BrokerError};
use crate::control::{self, Check};
use crate::publish::{Outgoing, PublishOutcome, Publisher};
use crate::route::Route;
use crate::route_processor::outgoing;
use crate::signature::MessageSigner;
use crate::topology::consumers_of;

/// How long a check waits for the routes, and for the reply. A queue with a backlog replies late: the check is then repeated.
const WAIT_MAX: Duration = Duration::from_secs(10);
const WAIT_PAUSE: Duration = Duration::from_millis(200);
/// How often the messages of a batch are published again in one go before they fail one by one.
const REPEATS_MAX: u32 = 5;

pub(super) struct QueueCheck {
    queue: String,
    routes: Vec<String>,
    broker: Arc<Broker>,
    /// To the default exchange: directly to the queue, which needs no binding.
    publisher: Publisher,
    signer: MessageSigner,
    replies: Arc<Replies>,
    /// How often each missing message of the current batch was published again.
    repeats: HashMap<Uuid, u32>,
}

fn lost_counter(queue: &str) -> metrics::Counter {
    metrics::counter!("pillarbox_service_queue_lost_messages_total", "queue" => queue.to_owned())
}

impl QueueCheck {
    pub(super) fn new(
        queue: String,
        routes: Vec<String>,
        broker: &Arc<Broker>,
        signer: &MessageSigner,
        replies: &Arc<Replies>,
    ) -> QueueCheck {
        lost_counter(&queue).increment(0);
        // Strict: no message follows one of its key that was not confirmed.
        let publisher = Publisher::new(broker.clone(), String::new(), true);
        QueueCheck {
            queue,
            routes,
            broker: broker.clone(),
            publisher,
            signer: signer.clone(),
            replies: replies.clone(),
            repeats: HashMap::new(),
        }
    }

    /// Waits until the routes have published the messages. Without it, a check would take messages for lost that are still on
    /// their way.
    async fn wait_for_routes(&self, context: &WorkerContext, items: &[&Delivery]) -> Result<(), ConsumerError> {
        let messages: Vec<LogRef> = items.iter().map(|item| item.message.log_ref()).collect();
        let deadline = Instant::now() + WAIT_MAX;
        loop {
            let reading = async { Ok(have_passed(&mut *context.db.acquire().await?, &self.routes, &messages).await?) };
            if context.step("read the positions of the routes", reading).await? {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(failure("waits for the routes, which have not published its messages yet".to_owned()));
            }
            sleep(WAIT_PAUSE).await;
        }
    }

    /// Fails if no process reads the queue: checks would pile up in it.
    async fn require_reader(&self) -> Result<(), ConsumerError> {
        let queue = &self.queue;
        match consumers_of(&self.broker, queue).await.map_err(|error| failure(error.to_string()))? {
            Some(1..) => Ok(()),
            Some(0) => Err(failure(format!("no process reads the queue `{queue}`: start its service"))),
            None => Err(failure(no_queue(queue))),
        }
    }

    /// Returns which of the messages the reader of the queue has not recorded.
    async fn missing<'a>(&mut self, messages: &[&'a Message]) -> Result<Vec<&'a Message>, ConsumerError> {
        let check = Check {
            id: Uuid::now_v7(),
            reply_to: self.replies.queue.clone(),
            messages: messages.iter().map(|one| (one.source.clone(), EventId(one.message_id))).collect(),
        };
        self.require_reader().await?;
        let reply = self.replies.expect(check.id);
        let sealed = control::seal(&self.signer, &self.queue, &check).map_err(|error| failure(error.to_string()))?;
        self.publish(&[sealed], || true).await?;
        match timeout(WAIT_MAX, reply).await {
            Ok(Ok(missing)) => Ok(missing.into_iter().filter_map(|at| messages.get(at).copied()).collect()),
            Ok(Err(_)) | Err(_) => Err(failure(format!(
                "the reader of the queue `{}` has not replied for {} s: it is behind, or its service does not run",
                self.queue,
                WAIT_MAX.as_secs()
            ))),
        }
    }

    async fn publish(&mut self, batch: &[Outgoing], may_publish: impl Fn() -> bool) -> Result<(), ConsumerError> {
        let outcomes = match self.publisher.publish_while(batch, may_publish).await {
            Err(BrokerError::Stopped) => return Err(ConsumerError::LeaseLost),
            published => published.map_err(|error| failure(error.to_string()))?,
        };
        let refused = outcomes.into_iter().find_map(|outcome| match outcome {
            PublishOutcome::Confirmed => None,
            PublishOutcome::Unroutable => Some(no_queue(&self.queue)),
            PublishOutcome::Rejected(reason) => Some(reason),
            PublishOutcome::Blocked => Some("an earlier message was not confirmed".to_owned()),
        });
        refused.map_or(Ok(()), |reason| Err(failure(reason)))
    }

    /// Publishes lost messages to the queue again, in the order of the log.
    async fn repeat(&mut self, context: &WorkerContext, lost: &[&Message]) -> Result<(), ConsumerError> {
        // The queue is read by a service of ours, which understands the envelope, whatever the format of the route was.
        let route = Route { routing_key: self.queue.clone(), ..Route::new("", "") };
        let batch: Result<Vec<Outgoing>, _> = lost.iter().map(|one| outgoing(&route, &self.signer, one)).collect();
        let batch = batch.map_err(|error| failure(error.to_string()))?;
        self.publish(&batch, || context.has_valid_lease()).await?;
        lost_counter(&self.queue).increment(lost.len() as u64);
        tracing::warn!(
            queue = self.queue,
            count = lost.len(),
            from = %lost[0].at,
            "the queue has lost messages, or was not bound for them; they were published to it again"
        );
        lost.iter().for_each(|one| *self.repeats.entry(one.message_id).or_default() += 1);
        Ok(())
    }
}

impl Processor for QueueCheck {
    async fn process(&mut self, context: &WorkerContext, items: &[&Delivery]) -> Result<BatchResult, ConsumerError> {
        self.wait_for_routes(context, items).await?;
        // A blanked payload cannot be published again. It is blanked when its consumers have processed it, this one included,
        // or when it is of no use any more.
        let messages: Vec<&Message> =
            items.iter().map(|item| &item.message).filter(|message| !message.is_blanked()).collect();
        let missing = if messages.is_empty() { Vec::new() } else { self.missing(&messages).await? };
        let is_repeated = |one: &&Message| self.repeats.get(&one.message_id).is_some_and(|count| *count >= REPEATS_MAX);
        let (unkept, lost): (Vec<&Message>, Vec<&Message>) = missing.into_iter().partition(is_repeated);
        if !lost.is_empty() {
            self.repeat(context, &lost).await?;
            // The batch is checked again.
            return Err(failure(format!(
                "the queue `{}` has lost {} messages, which were published to it again",
                self.queue,
                lost.len()
            )));
        }
        self.repeats.clear();
        let unkept: Vec<Uuid> = unkept.into_iter().map(|one| one.message_id).collect();
        let outcome = |item: &&Delivery| {
            if !unkept.contains(&item.message.message_id) {
                return Outcome::Done;
            }
            Outcome::Failed(format!(
                "the reader of the queue `{}` has not recorded the message, although it was published {REPEATS_MAX} times",
                self.queue
            ))
        };
        Ok(BatchResult { outcomes: items.iter().map(outcome).collect(), tx: None })
    }
}

fn no_queue(queue: &str) -> String {
    format!("RabbitMQ has no queue `{queue}`: its service declares it again, and what it has lost is published again")
}

fn failure(reason: String) -> ConsumerError {
    ConsumerError::Processing(reason)
}

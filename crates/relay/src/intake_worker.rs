//! The intake worker: reads a queue into the log.
//!
//! Each message is posted with the source `amqp:<queue>`, once per message id and per event id, and acknowledged when
//! the post is committed. From then on it is a message like any other. A message that cannot be posted becomes a dead
//! letter and is acknowledged as well, because RabbitMQ would deliver it again for ever.
//!
//! In the queue of a subscription, a signed message is a service's: its source and tenant are believed and it keeps its
//! event id. Every other message is a stranger's, whatever its headers say. A stranger chooses its ids freely, so they
//! are valid only within the queue: they are recorded apart from those of services, and the id in the log is derived
//! from the queue and the stranger's id. If the time in an id is too far from now, the log assigns a new id.

mod parser;
mod trust;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::consumers::{Runtime, inbox};
use pillarbox::database::{Database, is_data_error, redacted_error, step};
use pillarbox::log::{PostError, Source, post_all, unknown_tenant_text, unknown_tenants};
use pillarbox::operations::dead_letters::{self, UnusableMessage};
use runtime::worker::Round;
use serde_json::value::to_raw_value;

use self::parser::{MessageParser, Parsed, service_id};
pub(crate) use self::trust::Trust;
use crate::broker::{Broker, BrokerError};
use crate::control::{self, Check, CheckReply};
use crate::headers;
use crate::intake::{Incoming, Intake};
use crate::intake_queue::IntakeQueue;
use crate::publish::Publisher;
use crate::stored_body::{describe_body, store_body, without_nul};

/// How long a round waits for a delivery. The worker can be stopped only between rounds.
const DELIVERY_WAIT: Duration = Duration::from_millis(500);

#[derive(Debug, thiserror::Error)]
pub(crate) enum IntakeError {
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The message cannot be posted.
    #[error("{0}")]
    Invalid(String),
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

impl IntakeError {
    /// Returns the reason if the message itself is the cause of the error.
    fn invalid_message(&self) -> Option<String> {
        match self {
            IntakeError::Invalid(reason) => Some(reason.clone()),
            IntakeError::Database(error) => is_data_error(error).then(|| redacted_error(error)),
            IntakeError::Broker(_) => None,
        }
    }
}

impl From<PostError> for IntakeError {
    fn from(error: PostError) -> IntakeError {
        match error {
            PostError::Database(error) => IntakeError::Database(error),
            invalid => IntakeError::Invalid(invalid.to_string()),
        }
    }
}

/// Reads one queue into the log.
pub(crate) struct IntakeWorker {
    parser: MessageParser,
    intake: Intake,
    /// For replies to checks.
    publisher: Publisher,
    db: Database,
    /// Still set at the start of a round if the last round was dropped before it ended.
    is_processing: bool,
}

impl IntakeWorker {
    pub(crate) fn new(
        settings: IntakeQueue,
        trust: Option<Trust>,
        broker: Arc<Broker>,
        runtime: &Runtime,
    ) -> IntakeWorker {
        // RabbitMQ stops reading from a connection that publishes when it has no memory or disk left.
        let publisher = Publisher::new(Arc::new(broker.separate_connection()), String::new(), false);
        let intake = Intake::new(broker, settings.queue.clone(), settings.prefetch);
        let source = source_of(&settings.queue);
        messages_counter(&settings.queue).increment(0);
        let parser = MessageParser { settings, trust, source, clock: runtime.clock().clone() };
        IntakeWorker { parser, intake, publisher, db: runtime.db().clone(), is_processing: false }
    }

    /// Waits for a batch and posts it. Fails if the broker or the database is unavailable.
    pub(crate) async fn round(&mut self) -> Result<Round, IntakeError> {
        // As below: the messages of the last round are not acknowledged.
        if std::mem::replace(&mut self.is_processing, false) {
            self.intake.reset();
        }
        let batch_max = usize::from(self.parser.settings.prefetch);
        let Ok(batch) = tokio::time::timeout(DELIVERY_WAIT, self.intake.next_batch(batch_max)).await else {
            return Ok(Round::Busy);
        };
        let batch = batch?;
        self.is_processing = true;
        let processed = self.process(&batch).await;
        self.is_processing = false;
        if let Err(error) = processed {
            // RabbitMQ delivers unacknowledged messages again only on a new channel. On the open channel, the next
            // acknowledgement would include them.
            self.intake.reset();
            return Err(error);
        }
        messages_counter(&self.parser.settings.queue).increment(batch.len() as u64);
        Ok(Round::Busy)
    }

    /// Posts and acknowledges a batch. A check among the messages is answered when the messages before it are committed.
    async fn process(&mut self, batch: &[Incoming]) -> Result<(), IntakeError> {
        let mut rest = batch;
        while !rest.is_empty() {
            let found = rest.iter().enumerate().find_map(|(at, one)| Some((at, self.check_in(one)?)));
            let end = found.as_ref().map_or(rest.len(), |(at, _)| *at);
            self.post_each(&rest[..end]).await?;
            if let Some((_, check)) = &found {
                self.answer(check).await?;
            }
            rest = rest.get(end + 1..).unwrap_or_default();
        }
        Ok(self.intake.ack(batch).await?)
    }

    /// Posts the messages. Those that cannot be posted become dead letters.
    async fn post_each(&mut self, messages: &[Incoming]) -> Result<(), IntakeError> {
        match self.post(messages).await {
            // Post the messages one by one to find those that cannot be posted.
            Err(error) if error.invalid_message().is_some() => {
                for (at, one) in messages.iter().enumerate() {
                    if let Err(error) = self.post_one(one).await {
                        // Acknowledge the completed messages: a redelivered one could become a second dead letter.
                        self.intake.ack(&messages[..at]).await?;
                        return Err(error);
                    }
                }
                Ok(())
            }
            posted => posted,
        }
    }

    /// Returns the check of a relay, if the message is one.
    fn check_in(&self, one: &Incoming) -> Option<Check> {
        control::open(&self.parser.trust.as_ref()?.signer, one)
    }

    /// Replies which messages of the check have not arrived. If the relay has ended, its successor checks them again.
    async fn answer(&mut self, check: &Check) -> Result<(), IntakeError> {
        let Some(trust) = &self.parser.trust else { return Ok(()) };
        let ids: Vec<String> = check.messages.iter().map(|(source, id)| service_id(source, &id.to_string())).collect();
        let source = self.parser.source.as_str();
        let reading = async { inbox::unknown_foreign(&mut *self.db.acquire().await?, source, &ids).await };
        let unknown = step(self.db.pool(), source, self.db.step_time_max(), reading).await?;
        let missing = (0..ids.len()).filter(|at| unknown.contains(&ids[*at])).collect();
        let reply = CheckReply { id: check.id, missing };
        let reply = control::seal(&trust.signer, &check.reply_to, &reply).map_err(encode_error)?;
        // Without a reply the relay checks them again. The messages of the queue do not wait for that.
        if let Err(error) = self.publisher.publish(&[reply]).await {
            tracing::warn!(source, %error, "cannot answer the check of a queue");
        }
        Ok(())
    }

    /// Returns the unacknowledged messages to the queue.
    pub(crate) async fn close(self) {
        self.intake.close().await;
    }

    /// Posts all new messages in one transaction. Fails if one of them cannot be posted.
    async fn post(&self, batch: &[Incoming]) -> Result<(), IntakeError> {
        step(self.db.pool(), &self.parser.source, self.db.step_time_max(), self.try_post(batch)).await
    }

    async fn try_post(&self, batch: &[Incoming]) -> Result<(), IntakeError> {
        let parsed: Vec<Parsed> = batch.iter().map(|one| self.parser.parse(one)).collect();
        let mut tx = self.db.begin().await?;
        let ids: Vec<String> = parsed.iter().flat_map(|one| one.ids.iter().cloned()).collect();
        let mut new_ids = inbox::insert_foreign(&mut tx, &self.parser.source, &ids).await?;
        let mut posts = Vec::with_capacity(batch.len());
        for Parsed { ids, post } in parsed {
            let is_repeat = ids.iter().any(|id| !new_ids.contains(id));
            // Remove the ids, so that a second message with the same id in this batch is a repeat.
            new_ids.retain(|id| !ids.contains(id));
            if let (Some(post), false) = (post, is_repeat) {
                posts.push(post.map_err(|error| IntakeError::Invalid(error.to_string()))?);
            }
        }
        // Such a message would reach no subscriber, and a misspelled name must not become a tenant. The message becomes a dead letter.
        let tenants: Vec<&str> = posts.iter().map(|post| post.tenant.as_str()).collect();
        if let Some(unknown) = unknown_tenants(&mut tx, &tenants).await?.first() {
            return Err(IntakeError::Invalid(unknown_tenant_text(unknown)));
        }
        post_all(&mut tx, &Source::from_queue(&self.parser.settings.queue), &posts).await?;
        Ok(tx.commit().await?)
    }

    /// Posts one message, or stores it as a dead letter if it cannot be posted.
    async fn post_one(&self, one: &Incoming) -> Result<(), IntakeError> {
        let Err(failure) = self.post(std::slice::from_ref(one)).await else { return Ok(()) };
        let Some(error) = failure.invalid_message() else { return Err(failure) };
        tracing::warn!(
            queue = self.parser.settings.queue,
            error,
            "a message cannot be posted and becomes a dead letter"
        );
        let mut headers: BTreeMap<String, String> =
            one.headers.iter().map(|(name, value)| (without_nul(name), without_nul(value))).collect();
        let body = if self.parser.is_confidential(one) {
            describe_body(one, &mut headers)
        } else {
            store_body(one, &mut headers)
        };
        let body = body.map_err(encode_error)?;
        let unusable = UnusableMessage {
            consumer: &self.parser.source,
            source: &self.parser.source,
            tenant: &self.parser.tenant_of(one, &self.parser.sender_of(one)),
            topic: &without_nul(&one.routing_key),
            key: headers.get(headers::KEY).map(String::as_str),
            headers: &to_raw_value(&headers).map_err(encode_error)?,
            payload: &body,
            error: &error,
        };
        let arrived = self.parser.ids_of_service(one);
        let storing = async {
            let mut tx = self.db.begin().await?;
            dead_letters::store_unusable(&mut tx, &unusable).await?;
            // A check of the queue must not take it for lost.
            inbox::insert_foreign(&mut tx, &self.parser.source, &arrived).await?;
            Ok(tx.commit().await?)
        };
        step(self.db.pool(), &self.parser.source, self.db.step_time_max(), storing).await
    }
}

fn encode_error(error: serde_json::Error) -> sqlx::Error {
    sqlx::Error::Encode(Box::new(error))
}

/// Returns the source of the messages of a queue.
pub fn source_of(queue: &str) -> String {
    Source::from_queue(queue).as_str().to_owned()
}

fn messages_counter(queue: &str) -> metrics::Counter {
    metrics::counter!("pillarbox_intake_messages_total", "queue" => queue.to_owned())
}

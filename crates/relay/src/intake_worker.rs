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

use kit::worker::Round;
use mailbox::consumers::{Runtime, inbox};
use mailbox::database::{Database, is_data_error, redacted_error, step};
use mailbox::log::{PostError, Source, post_all, unknown_tenant_text, unknown_tenants};
use mailbox::operations::dead_letters::{self, UnusableMessage};
use serde_json::value::to_raw_value;

use self::parser::{MessageParser, Parsed};
pub(crate) use self::trust::Trust;
use crate::broker::{Broker, BrokerError};
use crate::headers;
use crate::intake::{Incoming, Intake};
use crate::intake_queue::IntakeQueue;
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
        let intake = Intake::new(broker, settings.queue.clone(), settings.prefetch);
        let source = source_of(&settings.queue);
        let parser = MessageParser { settings, trust, source, clock: runtime.clock().clone() };
        IntakeWorker { parser, intake, db: runtime.db().clone(), is_processing: false }
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
        metrics::counter!("pillarbox_intake_messages_total", "queue" => self.parser.settings.queue.clone())
            .increment(batch.len() as u64);
        Ok(Round::Busy)
    }

    /// Posts and acknowledges a batch.
    async fn process(&mut self, batch: &[Incoming]) -> Result<(), IntakeError> {
        match self.post(batch).await {
            Ok(()) => {}
            // Post the messages one by one to find those that cannot be posted.
            Err(error) if error.invalid_message().is_some() => {
                for (at, one) in batch.iter().enumerate() {
                    if let Err(error) = self.post_one(one).await {
                        // Acknowledge the completed messages: a redelivered one could become a second dead letter.
                        self.intake.ack(&batch[..at]).await?;
                        return Err(error);
                    }
                }
            }
            Err(error) => return Err(error),
        }
        Ok(self.intake.ack(batch).await?)
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
        let parsed: Vec<Parsed> = batch.iter().filter_map(|one| self.parser.parse(one)).collect();
        let mut tx = self.db.begin().await?;
        let ids: Vec<String> = parsed.iter().flat_map(|one| one.ids.iter().cloned()).collect();
        let mut new_ids = inbox::insert_foreign(&mut tx, &self.parser.source, &ids).await?;
        let mut posts = Vec::with_capacity(batch.len());
        for Parsed { ids, post } in parsed {
            let is_repeat = ids.iter().any(|id| !new_ids.contains(id));
            // Remove the ids, so that a second message with the same id in this batch is a repeat.
            new_ids.retain(|id| !ids.contains(id));
            if !is_repeat {
                posts.push(post.map_err(IntakeError::Invalid)?);
            }
        }
        // Such a message would reach nobody, and a misspelled name must not become a tenant. The message becomes a dead letter.
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
        let body = match self.parser.is_confidential(one) {
            true => describe_body(one, &mut headers),
            false => store_body(one, &mut headers),
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
        let storing = async {
            let mut tx = self.db.begin().await?;
            dead_letters::store_unusable(&mut tx, &unusable).await?;
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

//! The intake worker: reads a queue into the log.
//!
//! Each message is posted with the source `amqp:<queue>`, once per message id and per event id, and acknowledged when
//! the post is committed. An event keeps its id unless the time in the id is too far from now; then the log assigns a
//! new id. From then on it is a message like any other. A message that cannot be posted becomes a dead letter and is
//! acknowledged as well, because RabbitMQ would deliver it again for ever.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use contracts::{Envelope, EventId};
use kit::auth::Tenant;
use kit::clock::Clock;
use kit::worker::Round;
use mailbox::consumers::{Runtime, inbox};
use mailbox::database::{Database, is_data_error, redacted_error, step};
use mailbox::log::{AggregateId, Post, PostError, Source, created_at, post_all};
use mailbox::operations::dead_letters::{self, UnusableMessage};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use crate::broker::{Broker, BrokerError};
use crate::headers;
use crate::intake::{Incoming, Intake};

/// How long a round waits for a delivery. The worker can be stopped only between rounds.
const DELIVERY_WAIT: Duration = Duration::from_millis(500);

/// The default of [`IntakeQueue::prefetch`].
const PREFETCH: u16 = 10;

/// How far the time in an event's id may be from now. The inbox removes ids by this time: an id outside of these
/// limits would be removed too early or never.
const AHEAD_MAX: TimeDelta = TimeDelta::days(1);
const BEHIND_MAX: TimeDelta = TimeDelta::days(7);

/// Settings of a queue that is read into the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntakeQueue {
    pub queue: String,
    /// The largest number of messages that are delivered and not yet acknowledged.
    #[serde(default = "default_prefetch")]
    pub prefetch: u16,
    /// The tenant of the messages.
    #[serde(default = "Tenant::main")]
    pub tenant: Tenant,
    /// Set for the queue of a subscription: its messages carry their tenant, and only messages from these sources are
    /// accepted. Empty: from all sources.
    #[serde(skip)]
    pub(crate) trusted_sources: Option<Vec<String>>,
}

fn default_prefetch() -> u16 {
    PREFETCH
}

impl IntakeQueue {
    /// Returns the settings of a queue with the defaults of all other fields.
    pub fn new(queue: &str) -> IntakeQueue {
        IntakeQueue { queue: queue.to_owned(), prefetch: PREFETCH, tenant: Tenant::main(), trusted_sources: None }
    }

    /// Checks the values. Fails with the invalid one and the accepted values.
    pub fn check(&self) -> Result<(), String> {
        if self.queue.is_empty() || self.queue.len() > 200 || self.queue.contains(|c: char| c.is_whitespace()) {
            return Err(format!("queue `{}` must have 1 to 200 characters without whitespace", self.queue));
        }
        match self.prefetch {
            0 => Err(format!("queue `{}`: prefetch must be a number from 1", self.queue)),
            _ => Ok(()),
        }
    }
}

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
    settings: IntakeQueue,
    source: String,
    intake: Intake,
    db: Database,
    clock: Clock,
    /// Still set at the start of a round if the last round was dropped before it ended.
    is_processing: bool,
}

impl IntakeWorker {
    pub(crate) fn new(settings: IntakeQueue, broker: Arc<Broker>, runtime: &Runtime) -> IntakeWorker {
        let intake = Intake::new(broker, settings.queue.clone(), settings.prefetch);
        IntakeWorker {
            source: source_of(&settings.queue),
            settings,
            intake,
            db: runtime.db().clone(),
            clock: runtime.clock().clone(),
            is_processing: false,
        }
    }

    /// Waits for a batch and posts it. Fails if the broker or the database is unavailable.
    pub(crate) async fn round(&mut self) -> Result<Round, IntakeError> {
        // As below: the messages of the last round are not acknowledged.
        if std::mem::replace(&mut self.is_processing, false) {
            self.intake.reset();
        }
        let batch_max = usize::from(self.settings.prefetch);
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
        metrics::counter!("pillarbox_intake_messages_total", "queue" => self.settings.queue.clone())
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
        step(self.db.pool(), &self.source, self.db.step_time_max(), self.try_post(batch)).await
    }

    async fn try_post(&self, batch: &[Incoming]) -> Result<(), IntakeError> {
        let mut tx = self.db.begin().await?;
        let parsed: Vec<Parsed> = batch.iter().filter(|one| self.is_accepted(one)).map(|one| self.parse(one)).collect();
        let ids: Vec<String> = parsed.iter().flat_map(|one| one.ids.iter().cloned()).collect();
        let mut new_ids = inbox::insert_foreign(&mut tx, &self.source, &ids).await?;
        let mut posts = Vec::with_capacity(batch.len());
        for Parsed { ids, post } in parsed {
            let is_repeat = ids.iter().any(|id| !new_ids.contains(id));
            // Remove the ids, so that a second message with the same id in this batch is a repeat.
            new_ids.retain(|id| !ids.contains(id));
            if !is_repeat {
                posts.push(post.map_err(IntakeError::Invalid)?);
            }
        }
        post_all(&mut tx, &Source::from_queue(&self.settings.queue), &posts).await?;
        Ok(tx.commit().await?)
    }

    /// Posts one message, or stores it as a dead letter if it cannot be posted.
    async fn post_one(&self, one: &Incoming) -> Result<(), IntakeError> {
        let Err(failure) = self.post(std::slice::from_ref(one)).await else { return Ok(()) };
        let Some(error) = failure.invalid_message() else { return Err(failure) };
        tracing::warn!(queue = self.settings.queue, error, "a message cannot be posted and becomes a dead letter");
        // Invalid UTF-8 is replaced, so that the dead letter shows the rest of the text.
        let body = json(&without_nul(&String::from_utf8_lossy(&one.body)))?;
        let headers: BTreeMap<String, String> =
            one.headers.iter().map(|(name, value)| (without_nul(name), without_nul(value))).collect();
        let unusable = UnusableMessage {
            consumer: &self.source,
            source: &self.source,
            tenant: &self.tenant_of(one),
            topic: &without_nul(&one.routing_key),
            key: headers.get(headers::KEY).map(String::as_str),
            headers: &json(&headers)?,
            payload: &body,
            error: &error,
        };
        let storing = async {
            let mut tx = self.db.begin().await?;
            dead_letters::store_unusable(&mut tx, &unusable).await?;
            Ok(tx.commit().await?)
        };
        step(self.db.pool(), &self.source, self.db.step_time_max(), storing).await
    }

    /// Returns true if the source of the message is trusted. A producer that posts by SQL can have any topic
    /// published, but not in the name of another source. A message without a source is from a relay of an earlier
    /// version.
    fn is_accepted(&self, one: &Incoming) -> bool {
        match (&self.settings.trusted_sources, one.headers.get(headers::SOURCE)) {
            (Some(trusted), Some(source)) => trusted.is_empty() || trusted.contains(source),
            (None, _) | (_, None) => true,
        }
    }

    fn tenant_of(&self, one: &Incoming) -> Tenant {
        let tenant = one.headers.get(headers::TENANT).filter(|_| self.settings.trusted_sources.is_some());
        tenant.and_then(|name| name.parse().ok()).unwrap_or_else(|| self.settings.tenant.clone())
    }

    fn parse(&self, one: &Incoming) -> Parsed {
        let envelope = serde_json::from_slice::<Envelope>(&one.body).ok();
        let mut ids: Vec<String> = one.message_id.iter().cloned().collect();
        // The event id is usually equal to the message id.
        let event_id = envelope.as_ref().map(|envelope| envelope.event_id.to_string());
        ids.extend(event_id.filter(|event_id| one.message_id.as_ref() != Some(event_id)));
        Parsed { ids, post: self.post_of(one, envelope) }
    }

    /// Returns the post of a message. The payload of an envelope is posted; the body of another program's message is
    /// the payload itself, and its type or routing key is the topic.
    fn post_of(&self, one: &Incoming, envelope: Option<Envelope>) -> Result<Post, String> {
        let mut post = match envelope {
            Some(envelope) => {
                let mut post = Post::new(envelope.event_type, envelope.payload);
                let EventId(id) = envelope.event_id;
                // A UUID of another version contains no time.
                let is_near = created_at(id).is_some_and(|at| is_near(at, self.clock.now()));
                post.id = is_near.then_some(id);
                post.aggregate_type = envelope.aggregate_type;
                let aggregate_id = envelope.aggregate_id.map(|id| serde_json::from_str::<AggregateId>(id.get()));
                post.aggregate_id = aggregate_id.transpose().map_err(|error| format!("aggregate_id: {error}"))?;
                post
            }
            None => {
                let payload: Box<RawValue> =
                    serde_json::from_slice(&one.body).map_err(|error| format!("the body is not JSON: {error}"))?;
                Post::new(one.kind.as_deref().unwrap_or(&one.routing_key), payload)
            }
        };
        post.key = one.headers.get(headers::KEY).cloned();
        post.trace = one.headers.get(headers::TRACE).and_then(|trace| trace.parse().ok());
        post.tenant = self.tenant_of(one);
        Ok(post)
    }
}

/// Replaces NUL, which PostgreSQL's `text` does not support.
fn without_nul(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

fn json(value: &impl Serialize) -> sqlx::Result<Box<RawValue>> {
    to_raw_value(value).map_err(|error| sqlx::Error::Encode(Box::new(error)))
}

/// A parsed message.
struct Parsed {
    /// The ids by which a repeat is recognised: the id of the AMQP message and that of the event in it, which may
    /// arrive under several message ids.
    ids: Vec<String>,
    post: Result<Post, String>,
}

fn is_near(at: DateTime<Utc>, now: DateTime<Utc>) -> bool {
    (now - BEHIND_MAX..=now + AHEAD_MAX).contains(&at)
}

/// Returns the source of the messages of a queue.
pub fn source_of(queue: &str) -> String {
    Source::from_queue(queue).as_str().to_owned()
}

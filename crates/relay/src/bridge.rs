//! From a queue into the log.
//!
//! What a queue delivers is posted with source `amqp:<queue>`, once for each message id and each event id, and acknowledged
//! when that is committed. An event keeps its id, unless the time in it is far from now: then it gets one of ours. From there on it is a message like any other: it is parked, dies and is replayed like one. What
//! cannot be posted becomes a dead letter, and is acknowledged as well: it would come again for ever.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use contracts::{Envelope, EventId};
use kit::auth::Tenant;
use kit::clock::Clock;
use kit::worker::Round;
use mailbox::database::lies_in_the_values;
use mailbox::dead_letter::{self, Unusable};
use mailbox::post::{AggregateId, Post, PostError, Source, post_all};
use mailbox::runtime::Runtime;
use mailbox::told::told;
use mailbox::watch::Watcher;
use mailbox::{browse, inbox};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use sqlx::PgPool;

use crate::broker::{Broker, BrokerError};
use crate::intake::{Incoming, Intake};
use crate::route::{KEY_HEADER, SOURCE_HEADER, TENANT_HEADER, TRACE_HEADER};

/// How long a round waits for a delivery; between rounds it can be stopped.
const WAIT: Duration = Duration::from_millis(500);

const PREFETCH: u16 = 10;

/// An inbox keeps an id by the time in it. One that is further from now is not fit for that: it would be forgotten at
/// once, or never.
const AHEAD_MAX: TimeDelta = TimeDelta::days(1);
const BEHIND_MAX: TimeDelta = TimeDelta::days(7);

/// A queue of the user's that is read into the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntakeQueue {
    pub queue: String,
    /// How many are in hand at a time.
    #[serde(default = "prefetch")]
    pub prefetch: u16,
    /// Whose messages they are.
    #[serde(default = "Tenant::main")]
    pub tenant: Tenant,
    /// It is a queue of our own bus: the messages say whose they are, and from these sources they are taken.
    #[serde(skip)]
    pub(crate) trusted_sources: Option<Vec<String>>,
}

fn prefetch() -> u16 {
    PREFETCH
}

impl IntakeQueue {
    pub fn new(queue: &str) -> IntakeQueue {
        IntakeQueue { queue: queue.to_owned(), prefetch: PREFETCH, tenant: Tenant::main(), trusted_sources: None }
    }

    pub fn check(&self) -> Result<(), String> {
        if self.queue.is_empty() || self.queue.len() > 200 || self.queue.contains(|c: char| c.is_whitespace()) {
            return Err(format!("queue `{}` takes 1 to 200 characters without blanks", self.queue));
        }
        match self.prefetch {
            0 => Err(format!("queue `{}`: prefetch takes a number from 1", self.queue)),
            _ => Ok(()),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum BridgeError {
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// It is not fit to be posted.
    #[error("{0}")]
    Unfit(String),
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

impl BridgeError {
    /// What is wrong with the message itself, if it is the message.
    fn unfit(&self) -> Option<String> {
        match self {
            BridgeError::Unfit(reason) => Some(reason.clone()),
            BridgeError::Database(error) => lies_in_the_values(error).then(|| told(error)),
            BridgeError::Broker(_) => None,
        }
    }
}

impl From<PostError> for BridgeError {
    fn from(error: PostError) -> BridgeError {
        match error {
            PostError::Database(error) => BridgeError::Database(error),
            unfit => BridgeError::Unfit(unfit.to_string()),
        }
    }
}

pub(crate) struct Bridge {
    settings: IntakeQueue,
    source: String,
    intake: Intake,
    db: PgPool,
    watcher: Watcher,
    clock: Clock,
}

impl Bridge {
    pub(crate) fn new(settings: IntakeQueue, broker: Arc<Broker>, runtime: &Runtime) -> Bridge {
        let intake = Intake::new(broker, settings.queue.clone(), settings.prefetch);
        Bridge {
            source: source_of(&settings.queue),
            settings,
            intake,
            db: runtime.db().clone(),
            watcher: runtime.watcher().clone(),
            clock: runtime.clock().clone(),
        }
    }

    pub(crate) async fn round(&mut self) -> Result<Round, BridgeError> {
        let most = usize::from(self.settings.prefetch);
        let Ok(batch) = tokio::time::timeout(WAIT, self.intake.next(most)).await else { return Ok(Round::Busy) };
        let batch = batch?;
        if let Err(error) = self.take_in(&batch).await {
            // All that is not acknowledged comes again. Left open, the channel would not bring it again, and the next
            // acknowledgement would count for it.
            self.intake.start_over();
            return Err(error);
        }
        self.watcher.nudge();
        metrics::counter!("pillarbox_intake_messages_total", "queue" => self.settings.queue.clone())
            .increment(batch.len() as u64);
        Ok(Round::Busy)
    }

    async fn take_in(&mut self, batch: &[Incoming]) -> Result<(), BridgeError> {
        match self.keep(batch).await {
            Ok(()) => {}
            // Which of them cannot be posted is found out one by one.
            Err(error) if error.unfit().is_some() => {
                for (at, one) in batch.iter().enumerate() {
                    if let Err(error) = self.keep_one(one).await {
                        // What is settled must not come again with it: a dead letter would become two.
                        self.intake.ack(&batch[..at]).await?;
                        return Err(error);
                    }
                }
            }
            Err(error) => return Err(error),
        }
        Ok(self.intake.ack(batch).await?)
    }

    /// Gives back what is not yet acknowledged.
    pub(crate) async fn close(self) {
        self.intake.close().await;
    }

    /// Posts all that is new and can be posted, in one transaction.
    async fn keep(&self, batch: &[Incoming]) -> Result<(), BridgeError> {
        let mut tx = self.db.begin().await?;
        let opened: Vec<Opened> = batch.iter().filter(|one| self.trusts(one)).map(|one| self.open(one)).collect();
        let ids: Vec<String> = opened.iter().flat_map(|one| one.ids.iter().cloned()).collect();
        let mut fresh = inbox::enter_foreign(&mut tx, &self.source, &ids).await?;
        let mut posts = Vec::with_capacity(batch.len());
        for Opened { ids, post } in opened {
            let is_repeat = ids.iter().any(|id| !fresh.contains(id));
            // Taken out: the second of two in one batch is a repeat.
            fresh.retain(|id| !ids.contains(id));
            if !is_repeat {
                posts.push(post.map_err(BridgeError::Unfit)?);
            }
        }
        post_all(&mut tx, &Source::from_queue(&self.settings.queue), &posts).await?;
        Ok(tx.commit().await?)
    }

    /// Posts it, or makes a dead letter of it if it is not fit.
    async fn keep_one(&self, one: &Incoming) -> Result<(), BridgeError> {
        let Err(failed) = self.keep(std::slice::from_ref(one)).await else { return Ok(()) };
        let Some(error) = failed.unfit() else { return Err(failed) };
        tracing::warn!(queue = self.settings.queue, error, "a message cannot be posted, and is a dead letter");
        // A broken text is shown as well as it can be.
        let body = json(&plain(&String::from_utf8_lossy(&one.body)))?;
        let headers: BTreeMap<String, String> =
            one.headers.iter().map(|(name, value)| (plain(name), plain(value))).collect();
        let unusable = Unusable {
            consumer: &self.source,
            source: &self.source,
            tenant: &self.tenant_of(one),
            topic: &plain(&one.routing_key),
            key: headers.get(KEY_HEADER).map(String::as_str),
            headers: &json(&headers)?,
            payload: &body,
            error: &error,
        };
        let mut tx = self.db.begin().await?;
        dead_letter::keep_unusable(&mut tx, &unusable).await?;
        Ok(tx.commit().await?)
    }

    /// Whoever posts by SQL can have any topic published, but not as another's. One that does not say its source is from a
    /// relay that did not, yet.
    fn trusts(&self, one: &Incoming) -> bool {
        match (&self.settings.trusted_sources, one.headers.get(SOURCE_HEADER)) {
            (Some(trusted), Some(source)) => trusted.is_empty() || trusted.contains(source),
            (None, _) | (_, None) => true,
        }
    }

    fn tenant_of(&self, one: &Incoming) -> Tenant {
        let carried = one.headers.get(TENANT_HEADER).filter(|_| self.settings.trusted_sources.is_some());
        carried.and_then(|name| name.parse().ok()).unwrap_or_else(|| self.settings.tenant.clone())
    }

    fn open(&self, one: &Incoming) -> Opened {
        let envelope = serde_json::from_slice::<Envelope>(&one.body).ok();
        let mut ids: Vec<String> = one.message_id.iter().cloned().collect();
        // Most often the same.
        let event_id = envelope.as_ref().map(|envelope| envelope.event_id.to_string());
        ids.extend(event_id.filter(|event_id| one.message_id.as_ref() != Some(event_id)));
        Opened { ids, post: self.post_of(one, envelope) }
    }

    /// Our envelope is opened; what another program sent is the payload itself, its type or routing key the topic.
    fn post_of(&self, one: &Incoming, envelope: Option<Envelope>) -> Result<Post, String> {
        let mut post = match envelope {
            Some(envelope) => {
                let mut post = Post::new(envelope.event_type, envelope.payload);
                let EventId(id) = envelope.event_id;
                // Another version has no time in it.
                let is_near = browse::made_at(id).is_some_and(|at| is_near(at, self.clock.now()));
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
        post.key = one.headers.get(KEY_HEADER).cloned();
        post.trace = one.headers.get(TRACE_HEADER).and_then(|trace| trace.parse().ok());
        post.tenant = self.tenant_of(one);
        Ok(post)
    }
}

/// Text in PostgreSQL takes no NUL.
fn plain(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

fn json(value: &impl Serialize) -> sqlx::Result<Box<RawValue>> {
    to_raw_value(value).map_err(|error| sqlx::Error::Encode(Box::new(error)))
}

/// A message, opened.
struct Opened {
    /// It is known by any of them: its own as the queue has it, and that of the event in it, which may come under another.
    ids: Vec<String>,
    post: Result<Post, String>,
}

fn is_near(at: DateTime<Utc>, now: DateTime<Utc>) -> bool {
    (now - BEHIND_MAX..=now + AHEAD_MAX).contains(&at)
}

/// The source of what a queue brings.
pub fn source_of(queue: &str) -> String {
    Source::from_queue(queue).as_str().to_owned()
}

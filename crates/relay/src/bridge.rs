//! From a queue into the log.
//!
//! What a queue delivers is posted with source `amqp:<queue>`, once for each of its message ids, and acknowledged when
//! that is committed. From there on it is a message like any other: it is parked, dies and is replayed like one. What
//! cannot be posted becomes a dead letter, and is acknowledged as well: it would come again for ever.

use std::sync::Arc;
use std::time::Duration;

use contracts::{Envelope, EventId};
use kit::auth::Tenant;
use kit::worker::Round;
use mailbox::dead_letter::{self, Unusable};
use mailbox::inbox;
use mailbox::post::{AggregateId, Post, PostError, Source, post_all};
use mailbox::watch::Watcher;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use sqlx::PgPool;

use crate::broker::{Broker, BrokerError};
use crate::intake::{Incoming, Intake};
use crate::route::{KEY_HEADER, TENANT_HEADER, TRACE_HEADER};

/// How long a round waits for a delivery; between rounds it can be stopped.
const WAIT: Duration = Duration::from_millis(500);

const PREFETCH: u16 = 10;

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
    /// It is a queue of our own bus: the messages say whose they are.
    #[serde(skip)]
    pub(crate) carries_tenant: bool,
}

fn prefetch() -> u16 {
    PREFETCH
}

impl IntakeQueue {
    pub fn new(queue: &str) -> IntakeQueue {
        IntakeQueue { queue: queue.to_owned(), prefetch: PREFETCH, tenant: Tenant::main(), carries_tenant: false }
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

/// PostgreSQL's classes of errors that lie in the values: bad data, a broken constraint, a limit of the program (JSON that
/// is nested too deeply). Any other may be over the next time.
const LIES_IN_THE_VALUES: [&str; 3] = ["22", "23", "54"];

impl BridgeError {
    /// What is wrong with the message itself, if it is the message.
    fn unfit(&self) -> Option<String> {
        match self {
            BridgeError::Unfit(reason) => Some(reason.clone()),
            BridgeError::Database(sqlx::Error::Database(error)) => {
                let code = error.code().unwrap_or_default().into_owned();
                LIES_IN_THE_VALUES.iter().any(|class| code.starts_with(class)).then(|| error.to_string())
            }
            BridgeError::Database(_) | BridgeError::Broker(_) => None,
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
}

impl Bridge {
    pub(crate) fn new(settings: IntakeQueue, broker: Arc<Broker>, db: PgPool, watcher: Watcher) -> Bridge {
        let intake = Intake::new(broker, settings.queue.clone(), settings.prefetch);
        Bridge { source: source_of(&settings.queue), settings, intake, db, watcher }
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
        let ids: Vec<String> = batch.iter().filter_map(|one| one.message_id.clone()).collect();
        let mut fresh = inbox::enter_foreign(&mut tx, &self.source, &ids).await?;
        let mut posts = Vec::with_capacity(batch.len());
        for one in batch {
            // Taken out: the second of two in one batch is a repeat.
            if one.message_id.as_ref().is_some_and(|id| !fresh.remove(id)) {
                continue;
            }
            posts.push(self.post_of(one).map_err(BridgeError::Unfit)?);
        }
        post_all(&mut tx, &Source::from_queue(&self.settings.queue), &posts).await?;
        Ok(tx.commit().await?)
    }

    /// Posts it, or makes a dead letter of it if it is not fit.
    async fn keep_one(&self, one: &Incoming) -> Result<(), BridgeError> {
        let Err(failed) = self.keep(std::slice::from_ref(one)).await else { return Ok(()) };
        let Some(error) = failed.unfit() else { return Err(failed) };
        tracing::warn!(queue = self.settings.queue, error, "a message cannot be posted, and is a dead letter");
        // Text in PostgreSQL takes no NUL, and a broken text is shown as well as it can be.
        let shown = String::from_utf8_lossy(&one.body).replace('\0', "\u{fffd}");
        let body = to_raw_value(&shown).map_err(|error| sqlx::Error::Encode(Box::new(error)))?;
        let topic = one.routing_key.replace('\0', "");
        let unusable =
            Unusable { consumer: &self.source, source: &self.source, topic: &topic, payload: &body, error: &error };
        Ok(dead_letter::keep_unusable(&mut *self.db.acquire().await?, &unusable).await?)
    }

    fn tenant_of(&self, one: &Incoming) -> Tenant {
        let carried = one.headers.get(TENANT_HEADER).filter(|_| self.settings.carries_tenant);
        carried.and_then(|name| name.parse().ok()).unwrap_or_else(|| self.settings.tenant.clone())
    }

    /// Our envelope is opened; what another program sent is the payload itself, its type or routing key the topic.
    fn post_of(&self, one: &Incoming) -> Result<Post, String> {
        let mut post = match serde_json::from_slice::<Envelope>(&one.body) {
            Ok(envelope) => {
                let mut post = Post::new(envelope.event_type, envelope.payload);
                // Another version has no time in it, and is not fit for an inbox by days.
                let EventId(id) = envelope.event_id;
                post.id = (id.get_version_num() == 7).then_some(id);
                post.aggregate_type = envelope.aggregate_type;
                let aggregate_id = envelope.aggregate_id.map(|id| serde_json::from_str::<AggregateId>(id.get()));
                post.aggregate_id = aggregate_id.transpose().map_err(|error| format!("aggregate_id: {error}"))?;
                post
            }
            Err(_) => {
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

/// The source of what a queue brings.
pub fn source_of(queue: &str) -> String {
    Source::from_queue(queue).as_str().to_owned()
}

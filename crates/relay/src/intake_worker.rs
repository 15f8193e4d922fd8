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
use mailbox::log::{AggregateId, Post, PostError, Source, created_at, is_confidential_topic, post_all};
use mailbox::operations::dead_letters::{self, UnusableMessage};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::body_limit::BODY_BYTES_MAX;
use crate::broker::{Broker, BrokerError};
use crate::headers;
use crate::intake::{Incoming, Intake};
use crate::intake_queue::{IntakeFormat, IntakeQueue};
use crate::signature::{MessageSigner, SignedFields};
use crate::stored_body::{describe_body, store_body, without_nul};

/// How long a round waits for a delivery. The worker can be stopped only between rounds.
const DELIVERY_WAIT: Duration = Duration::from_millis(500);

/// How far the time in an event's id may be from now. The inbox removes ids by this time: an id outside of these
/// limits would be removed too early or never.
const AHEAD_MAX: TimeDelta = TimeDelta::days(1);
const BEHIND_MAX: TimeDelta = TimeDelta::days(7);

/// How long the payload of an e-mail is of use if its publisher sets no expiry.
const CONFIDENTIAL_TIME: TimeDelta = TimeDelta::days(7);
/// The topic of an e-mail from the old exchange whose publisher sets none: a fanout exchange needs no routing key.
const EMAIL_TOPIC: &str = "email.requested";

/// Which messages of the queue of a subscription are believed to be those of services.
pub(crate) struct Trust {
    /// Only messages from these sources are accepted. Empty: from all sources, and from strangers.
    pub(crate) sources: Vec<String>,
    pub(crate) signer: MessageSigner,
    /// See [`RelaySettings::accept_unsigned_until`](crate::RelaySettings).
    pub(crate) accept_unsigned_until: Option<DateTime<Utc>>,
}

/// Who has published a message.
enum Sender<'a> {
    /// A relay of this installation has published it for this source.
    Service(&'a str),
    /// Anybody else. Its ids, its source and its tenant may be invented.
    Stranger,
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
    /// None for a queue of other programs: all of its messages are strangers'.
    trust: Option<Trust>,
    source: String,
    intake: Intake,
    db: Database,
    clock: Clock,
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
        IntakeWorker {
            source: source_of(&settings.queue),
            settings,
            trust,
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
        let parsed: Vec<Parsed> = batch.iter().filter_map(|one| self.parse(one)).collect();
        let mut tx = self.db.begin().await?;
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
        let mut headers: BTreeMap<String, String> =
            one.headers.iter().map(|(name, value)| (without_nul(name), without_nul(value))).collect();
        let body = match self.is_confidential(one) {
            true => describe_body(one, &mut headers),
            false => store_body(one, &mut headers),
        };
        let body = body.map_err(encode_error)?;
        let unusable = UnusableMessage {
            consumer: &self.source,
            source: &self.source,
            tenant: &self.tenant_of(one, &self.sender_of(one)),
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
        step(self.db.pool(), &self.source, self.db.step_time_max(), storing).await
    }

    fn sender_of<'a>(&'a self, one: &'a Incoming) -> Sender<'a> {
        match &self.trust {
            Some(trust) => trust.sender_of(one, self.clock.now()),
            None => Sender::Stranger,
        }
    }

    /// The tenant of a service's message is in its headers. The settings decide about the tenant of a stranger's.
    fn tenant_of(&self, one: &Incoming, sender: &Sender<'_>) -> Tenant {
        let tenant = match sender {
            Sender::Service(_) => one.headers.get(headers::TENANT).and_then(|name| name.parse().ok()),
            Sender::Stranger => None,
        };
        tenant.unwrap_or_else(|| self.settings.tenant.clone())
    }

    /// Returns None if the message is not for this subscription. A producer that posts by SQL can have any topic
    /// published, but not in the name of another source.
    fn parse(&self, one: &Incoming) -> Option<Parsed> {
        if one.oversized.is_some() {
            return Some(Parsed { ids: Vec::new(), post: Err(oversized_error(one)) });
        }
        let sender = self.sender_of(one);
        match (&sender, self.trust.as_ref().map(|trust| trust.sources.as_slice())) {
            (_, None | Some([])) => {}
            (Sender::Service(source), Some(sources)) if sources.iter().any(|trusted| trusted == source) => {}
            (Sender::Service(_), Some(_)) => return None,
            (Sender::Stranger, Some(_)) => {
                return Some(Parsed { ids: Vec::new(), post: Err(UNSIGNED.to_owned()) });
            }
        }
        let envelope = match self.settings.format {
            IntakeFormat::Json => serde_json::from_slice::<Envelope>(&one.body).ok(),
            IntakeFormat::Email => None,
        };
        let mut ids: Vec<String> = one.message_id.iter().cloned().collect();
        // The event id is usually equal to the message id.
        let event_id = envelope.as_ref().map(|envelope| envelope.event_id.to_string());
        ids.extend(event_id.filter(|event_id| one.message_id.as_ref() != Some(event_id)));
        for id in &mut ids {
            self.qualify(id, &sender);
        }
        let post = match self.settings.format {
            IntakeFormat::Json => self.post_of(one, envelope, &sender),
            IntakeFormat::Email => self.post_of_email(one, &sender),
        };
        Some(Parsed { ids, post })
    }

    /// Makes the ids of services and of strangers in one queue different, and those of different services.
    fn qualify(&self, id: &mut String, sender: &Sender<'_>) {
        match (&self.trust, sender) {
            (None, _) => {}
            (Some(_), Sender::Service(source)) => *id = format!("signed {source} {id}"),
            (Some(_), Sender::Stranger) => *id = format!("unsigned {id}"),
        }
    }

    /// Returns the id of an event in the log. None if the log assigns one: a UUID of another version contains no time,
    /// and an inbox would forget an id with another time too early or never.
    fn log_id(&self, EventId(id): EventId, sender: &Sender<'_>) -> Option<Uuid> {
        let created_at = created_at(id).filter(|at| is_near(*at, self.clock.now()))?;
        match sender {
            Sender::Service(_) => Some(id),
            Sender::Stranger => derived_id(&self.source, id, created_at),
        }
    }

    /// Returns the post of a message. The payload of an envelope is posted; the body of another program's message is
    /// the payload itself, and its type or routing key is the topic.
    fn post_of(&self, one: &Incoming, envelope: Option<Envelope>, sender: &Sender<'_>) -> Result<Post, String> {
        let mut post = match envelope {
            Some(envelope) => {
                let mut post = Post::new(envelope.event_type, envelope.payload);
                post.id = self.log_id(envelope.event_id, sender);
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
        post.tenant = self.tenant_of(one, sender);
        post.confidential_until = self.confidential_until(one, &post.topic);
        Ok(post)
    }

    /// Returns the post of an e-mail from the old exchange: the same request that identity has posted, as far as the body and
    /// the properties tell, and with the same id if our relay has published it.
    fn post_of_email(&self, one: &Incoming, sender: &Sender<'_>) -> Result<Post, String> {
        let data: Box<RawValue> =
            serde_json::from_slice(&one.body).map_err(|error| format!("the body is not JSON: {error}"))?;
        let (key, topic) =
            (one.headers.get(headers::KEY), one.kind.as_deref().filter(|kind| is_confidential_topic(kind)));
        let topic = topic.unwrap_or(EMAIL_TOPIC);
        let user_id = match sender {
            Sender::Service(_) => key.and_then(|key| key.parse().ok()),
            Sender::Stranger => None,
        };
        let expires_at = expiry_of(one);
        let idempotency_key = one.message_id.clone().unwrap_or_else(|| Uuid::now_v7().to_string());
        let request = EmailRequest { idempotency_key, user_id, expires_at, data };
        let event_id = one.message_id.as_deref().and_then(|id| id.parse().ok());
        Ok(Post {
            id: event_id.and_then(|event_id| self.log_id(event_id, sender)),
            key: key.cloned(),
            trace: one.headers.get(headers::TRACE).and_then(|trace| trace.parse().ok()),
            tenant: self.tenant_of(one, sender),
            confidential_until: self.confidential_until(one, topic),
            ..Post::new(topic, to_raw_value(&request).map_err(|error| error.to_string())?)
        })
    }

    /// Returns when the payload expires, if it is confidential. Relays of earlier versions and other programs send no expiry.
    fn confidential_until(&self, one: &Incoming, topic: &str) -> Option<DateTime<Utc>> {
        expiry_of(one).or_else(|| is_confidential_topic(topic).then(|| self.clock.now() + CONFIDENTIAL_TIME))
    }

    /// Whether the body may be confidential, although the message cannot be posted.
    fn is_confidential(&self, one: &Incoming) -> bool {
        self.settings.format == IntakeFormat::Email
            || is_confidential_topic(&one.routing_key)
            || one.kind.as_deref().is_some_and(is_confidential_topic)
            || one.headers.contains_key(headers::CONFIDENTIAL_UNTIL)
    }
}

/// The JSON of [`contracts::email::EmailRequested`], with the e-mail as it arrived.
#[derive(Serialize)]
struct EmailRequest {
    idempotency_key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    user_id: Option<Uuid>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<DateTime<Utc>>,
    data: Box<RawValue>,
}

impl Trust {
    fn sender_of<'a>(&'a self, one: &'a Incoming, now: DateTime<Utc>) -> Sender<'a> {
        let header = |name| one.headers.get(name).map(String::as_str);
        let source = header(headers::SOURCE);
        let Some(signature) = header(headers::SIGNATURE) else {
            let is_accepted = self.accept_unsigned_until.is_some_and(|end| now < end);
            // The relay of an earlier version set the source, or, if it is older still, published only its own messages.
            let assumed = source.or(self.sources.first().map(String::as_str));
            return if is_accepted { Sender::Service(assumed.unwrap_or_default()) } else { Sender::Stranger };
        };
        let (Some(message_id), Some(source), Some(tenant), Some(kind)) =
            (one.message_id.as_deref(), source, header(headers::TENANT), one.kind.as_deref())
        else {
            return Sender::Stranger;
        };
        let fields = SignedFields { message_id, source, tenant, kind, key: header(headers::KEY), body: &one.body };
        if self.signer.verify(&fields, signature) { Sender::Service(source) } else { Sender::Stranger }
    }
}

/// The error of a stranger's message in the queue of a subscription.
const UNSIGNED: &str = "the message has no valid signature of this installation: only its relays may publish to this \
                        queue. If one did, all databases need the same secret_key; then replay its route";

/// Returns the expiry of a confidential message, if the sender has set one.
fn expiry_of(one: &Incoming) -> Option<DateTime<Utc>> {
    one.headers.get(headers::CONFIDENTIAL_UNTIL).and_then(|until| until.parse().ok())
}

fn oversized_error(one: &Incoming) -> String {
    let bytes = one.oversized.map_or(0, |body| body.bytes);
    format!(
        "the body has {bytes} bytes; at most {BODY_BYTES_MAX} are accepted: store larger content elsewhere and post a \
         reference to it"
    )
}

/// Returns an id with the time of a stranger's id. It depends on the queue, so that no stranger can choose the id of a
/// message from elsewhere: its effect would be skipped as a repeat.
fn derived_id(source: &str, id: Uuid, created_at: DateTime<Utc>) -> Option<Uuid> {
    let digest = Sha256::new().chain_update(source).chain_update([0]).chain_update(id).finalize();
    let milliseconds = u64::try_from(created_at.timestamp_millis()).ok()?;
    Some(uuid::Builder::from_unix_timestamp_millis(milliseconds, digest.first_chunk()?).into_uuid())
}

fn encode_error(error: serde_json::Error) -> sqlx::Error {
    sqlx::Error::Encode(Box::new(error))
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

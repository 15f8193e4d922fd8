//! Turns the messages of a queue into posts.

use chrono::{DateTime, TimeDelta, Utc};
use contracts::{Envelope, EventId};
use pillarbox::log::Tenant;
use pillarbox::log::{AggregateId, Post, created_at, is_confidential_topic};
use runtime::clock::Clock;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::trust::{Sender, Trust};
use crate::body_limit::BODY_BYTES_MAX;
use crate::headers;
use crate::intake::Incoming;
use crate::intake_queue::{IntakeFormat, IntakeQueue};

/// How far the time in an event's id may be from now. The inbox removes ids by this time: an id outside of these
/// limits would be removed too early or never.
const AHEAD_MAX: TimeDelta = TimeDelta::days(1);
const BEHIND_MAX: TimeDelta = TimeDelta::days(7);

/// How long the payload of an e-mail is of use if its publisher sets no expiry.
const CONFIDENTIAL_TIME: TimeDelta = TimeDelta::days(7);
/// The topic of an e-mail from the old exchange whose publisher sets none: a fanout exchange needs no routing key.
const EMAIL_TOPIC: &str = "email.requested";

/// Parses the messages of one queue.
pub(super) struct MessageParser {
    pub(super) settings: IntakeQueue,
    /// None for a queue of other programs: all of its messages are strangers'.
    pub(super) trust: Option<Trust>,
    pub(super) source: String,
    pub(super) clock: Clock,
}

/// A parsed message.
pub(super) struct Parsed {
    /// The ids by which a repeat is recognised: the id of the AMQP message and that of the event in it, which may
    /// arrive under several message ids.
    pub(super) ids: Vec<String>,
    /// None if the message is not for this subscription. Its ids are recorded, because a check of the queue would take it for lost.
    pub(super) post: Option<Result<Post, Unusable>>,
}

impl MessageParser {
    pub(super) fn sender_of<'a>(&'a self, one: &'a Incoming) -> Sender<'a> {
        match &self.trust {
            Some(trust) => trust.sender_of(one),
            None => Sender::Stranger,
        }
    }

    /// The tenant of a service's message is in its headers. The settings decide about the tenant of a stranger's.
    pub(super) fn tenant_of(&self, one: &Incoming, sender: &Sender<'_>) -> Tenant {
        let tenant = match sender {
            Sender::Service(_) => one.headers.get(headers::TENANT).and_then(|name| name.parse().ok()),
            Sender::Stranger => None,
        };
        tenant.unwrap_or_else(|| self.settings.tenant.clone())
    }

    /// A producer that posts by SQL can have any topic published, but not in the name of another source.
    pub(super) fn parse(&self, one: &Incoming) -> Parsed {
        let unusable = |error: Unusable| Parsed { ids: Vec::new(), post: Some(Err(error)) };
        if one.oversized.is_some() {
            return unusable(Unusable::TooLarge(one.oversized.map_or(0, |body| body.bytes)));
        }
        if let Some(reason) = &one.invalid {
            return unusable(Unusable::Invalid(reason.clone()));
        }
        let sender = self.sender_of(one);
        match (&sender, self.trust.as_ref().map(|trust| trust.sources.as_slice())) {
            (_, None | Some([])) => {}
            (Sender::Service(source), Some(sources)) if sources.iter().any(|trusted| trusted == source) => {}
            (Sender::Service(source), Some(_)) => return self.refused(one, &format!("from the source {source}")),
            (Sender::Stranger, Some(_)) => return unusable(Unusable::Unsigned),
        }
        let envelope = match self.settings.format {
            IntakeFormat::Json => serde_json::from_slice::<Envelope>(&one.body).ok(),
            IntakeFormat::Email => None,
        };
        if let (Some(trust), Some(envelope)) = (&self.trust, &envelope)
            && !trust.aggregate_types.is_empty()
            && !envelope.aggregate_type.as_ref().is_some_and(|own| trust.aggregate_types.contains(own))
        {
            let aggregate_type = envelope.aggregate_type.as_deref().unwrap_or("none");
            return self.refused(one, &format!("with the aggregate type {aggregate_type}"));
        }
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
        Parsed { ids, post: Some(post) }
    }

    /// What becomes of a service's message that is not for this subscription: a dead letter in a queue that others use as well,
    /// nothing in one that receives every message of its exchange.
    fn refused(&self, one: &Incoming, what: &str) -> Parsed {
        let is_shared = self.trust.as_ref().is_some_and(|trust| trust.is_shared);
        Parsed { ids: self.ids_of_service(one), post: is_shared.then(|| Err(Unusable::Unwanted(what.to_owned()))) }
    }

    /// Makes the ids of services and of strangers in one queue different, and those of different services.
    fn qualify(&self, id: &mut String, sender: &Sender<'_>) {
        match (&self.trust, sender) {
            (None, _) => {}
            (Some(_), Sender::Service(source)) => *id = service_id(source, id),
            (Some(_), Sender::Stranger) => *id = format!("unsigned {id}"),
        }
    }

    /// Returns the ids by which a service's message is known when it has arrived, even as a dead letter. A stranger may send its
    /// message again after it has corrected it, with the same id.
    pub(super) fn ids_of_service(&self, one: &Incoming) -> Vec<String> {
        match (&self.trust, self.sender_of(one)) {
            (Some(_), Sender::Service(source)) => one.message_id.iter().map(|id| service_id(source, id)).collect(),
            (Some(_) | None, Sender::Service(_) | Sender::Stranger) => Vec::new(),
        }
    }

    /// Returns the id of an event in the log. None if the log assigns one: a UUID of another version contains no time,
    /// and an inbox would forget an id with another time too early or never. `posted_at`: when a service has posted it.
    fn log_id(&self, EventId(id): EventId, posted_at: Option<DateTime<Utc>>, sender: &Sender<'_>) -> Option<Uuid> {
        let is_near = |at: &DateTime<Utc>| is_near(*at, self.clock.now());
        match (sender, created_at(id)) {
            (Sender::Service(_), Some(created_at)) => Some(id).filter(|_| is_near(&created_at)),
            // The producer has chosen the id. A repeat has the same time, so it has the same derived id.
            (Sender::Service(_), None) => derived_id(&self.source, id, posted_at.filter(is_near)?),
            (Sender::Stranger, created_at) => derived_id(&self.source, id, created_at.filter(is_near)?),
        }
    }

    /// Returns the post of a message. The payload of an envelope is posted; the body of another program's message is
    /// the payload itself, and its type or routing key is the topic.
    fn post_of(&self, one: &Incoming, envelope: Option<Envelope>, sender: &Sender<'_>) -> Result<Post, Unusable> {
        let mut post = match envelope {
            Some(envelope) => {
                let mut post = Post::new(envelope.event_type, envelope.payload);
                post.id = self.log_id(envelope.event_id, Some(envelope.timestamp), sender);
                let EventId(original_id) = envelope.event_id;
                post.original_id = match sender {
                    Sender::Service(_) => Some(original_id).filter(|id| post.id != Some(*id)),
                    Sender::Stranger => None,
                };
                post.aggregate_type = envelope.aggregate_type;
                let aggregate_id = envelope.aggregate_id.map(|id| serde_json::from_str::<AggregateId>(id.get()));
                post.aggregate_id = aggregate_id.transpose().map_err(Unusable::AggregateId)?;
                post
            }
            None => {
                let payload: Box<RawValue> = serde_json::from_slice(&one.body).map_err(Unusable::NotJson)?;
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
    fn post_of_email(&self, one: &Incoming, sender: &Sender<'_>) -> Result<Post, Unusable> {
        let data: Box<RawValue> = serde_json::from_slice(&one.body).map_err(Unusable::NotJson)?;
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
            id: event_id.and_then(|event_id| self.log_id(event_id, None, sender)),
            key: key.cloned(),
            trace: one.headers.get(headers::TRACE).and_then(|trace| trace.parse().ok()),
            tenant: self.tenant_of(one, sender),
            confidential_until: self.confidential_until(one, topic),
            ..Post::new(topic, to_raw_value(&request).map_err(Unusable::NotJson)?)
        })
    }

    /// Returns when the payload expires, if it is confidential. Other programs send no expiry.
    fn confidential_until(&self, one: &Incoming, topic: &str) -> Option<DateTime<Utc>> {
        expiry_of(one).or_else(|| is_confidential_topic(topic).then(|| self.clock.now() + CONFIDENTIAL_TIME))
    }

    /// Whether the body may be confidential, although the message cannot be posted.
    pub(super) fn is_confidential(&self, one: &Incoming) -> bool {
        self.settings.format == IntakeFormat::Email
            || is_confidential_topic(&one.routing_key)
            || one.kind.as_deref().is_some_and(is_confidential_topic)
            || one.headers.contains_key(headers::CONFIDENTIAL_UNTIL)
    }
}

/// The id by which the reader of a queue recognises a service's message.
pub(super) fn service_id(source: &str, id: &str) -> String {
    format!("signed {source} {id}")
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

/// Why a message becomes a dead letter instead of a post.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unusable {
    #[error(
        "the body has {0} bytes; at most {BODY_BYTES_MAX} are accepted: store larger content elsewhere and post a reference to it"
    )]
    TooLarge(u64),
    /// Lapin could not read its properties.
    #[error("{0}")]
    Invalid(String),
    /// A stranger's message in the queue of a subscription.
    #[error(
        "the message has no valid signature of this installation: only its relays may publish to this queue. If one did, all \
         databases need the same secret_key; then replay its route"
    )]
    Unsigned,
    #[error(
        "the message is {0}, which the consumer of this queue does not process: publish such messages to another queue"
    )]
    Unwanted(String),
    #[error("aggregate_id: {0}")]
    AggregateId(serde_json::Error),
    #[error("the body is not JSON: {0}")]
    NotJson(serde_json::Error),
}

/// Returns the expiry of a confidential message, if the sender has set one.
fn expiry_of(one: &Incoming) -> Option<DateTime<Utc>> {
    one.headers.get(headers::CONFIDENTIAL_UNTIL).and_then(|until| until.parse().ok())
}

/// Returns an id with the time of a stranger's id. It depends on the queue, so that no stranger can choose the id of a
/// message from elsewhere: its effect would be skipped as a repeat.
fn derived_id(source: &str, id: Uuid, created_at: DateTime<Utc>) -> Option<Uuid> {
    let digest = Sha256::new().chain_update(source).chain_update([0]).chain_update(id).finalize();
    let milliseconds = u64::try_from(created_at.timestamp_millis()).ok()?;
    Some(uuid::Builder::from_unix_timestamp_millis(milliseconds, digest.first_chunk()?).into_uuid())
}

fn is_near(at: DateTime<Utc>, now: DateTime<Utc>) -> bool {
    (now - BEHIND_MAX..=now + AHEAD_MAX).contains(&at)
}

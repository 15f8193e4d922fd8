//! Publishes messages to an exchange and waits for their confirms.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures_util::future::{MaybeDone, maybe_done};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString, ShortStringError};
use lapin::{BasicProperties, Channel, Confirmation, ExchangeKind, PublisherConfirm};
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::broker::{Broker, BrokerError, NOT_FOUND, amqp_code, response_of, short_name};

/// The default time limit for the confirms of one wave.
const CONFIRM_TIME_MAX: Duration = Duration::from_secs(10);
/// The largest total size of a message's headers, in bytes. AMQP sends them in one frame, and a frame larger than
/// negotiated (128 KiB) ends the connection.
const HEADER_BYTES_MAX: usize = 64 * 1024;
/// AMQP's delivery mode for messages that are stored on disk.
const PERSISTENT: u8 = 2;

/// A message to publish.
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// Unique in its batch. Messages with the same id all get the worst outcome among them.
    pub message_id: String,
    pub routing_key: String,
    /// Messages with the same key are published in order.
    pub key: Option<String>,
    pub body: Bytes,
    pub headers: Vec<(Cow<'static, str>, String)>,
    pub timestamp: DateTime<Utc>,
    /// AMQP's property `type`: the type of the event.
    pub kind: String,
}

/// The outcome of publishing one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishOutcome {
    /// RabbitMQ has stored it in every queue that it is routed to.
    Confirmed,
    /// No queue is bound for its routing key.
    Unroutable,
    /// RabbitMQ rejected it, or it exceeds a limit of AMQP; with the reason.
    Rejected(String),
    /// Not sent, because an earlier message of its key was not confirmed.
    Blocked,
}

/// Publishes to one exchange over its own channel.
pub struct Publisher {
    broker: Arc<Broker>,
    exchange: String,
    strict: bool,
    confirm_time_max: Duration,
    channel: Option<Arc<Channel>>,
}

impl Publisher {
    /// If `strict`, at most one message of a key is unconfirmed at a time, so that no message follows one of its key
    /// that was not confirmed. This costs a round trip for each message of the most frequent key in the batch.
    pub fn new(broker: Arc<Broker>, exchange: String, strict: bool) -> Publisher {
        Publisher { broker, exchange, strict, confirm_time_max: CONFIRM_TIME_MAX, channel: None }
    }

    /// Sets the time limit for the confirms of one wave.
    pub fn with_confirm_timeout(self, confirm_time_max: Duration) -> Publisher {
        Publisher { confirm_time_max, ..self }
    }

    /// Returns one outcome per message, in order.
    ///
    /// # Errors
    /// The connection or the channel failed, or a confirm did not arrive in time. The outcome of the whole batch is
    /// unknown: publish all of it again, in the same order. Some messages may arrive twice, but the first copies
    /// arrive in order.
    pub async fn publish(&mut self, batch: &[Outgoing]) -> Result<Vec<PublishOutcome>, BrokerError> {
        self.publish_while(batch, || true).await
    }

    /// Like [`Publisher::publish`], and also fails, with [`BrokerError::Stopped`], if `may_publish` is false at the moment
    /// before a wave is sent.
    pub async fn publish_while(
        &mut self,
        batch: &[Outgoing],
        may_publish: impl Fn() -> bool,
    ) -> Result<Vec<PublishOutcome>, BrokerError> {
        // The channel is stored again only after success. After a failure, or if the caller stops waiting, it has
        // pending confirms and returned messages, which would be attributed to the next batch.
        let channel = match self.channel.take() {
            Some(channel) if channel.status().connected() => channel,
            _ => Arc::new(self.open().await?),
        };
        let mut outcomes = vec![PublishOutcome::Blocked; batch.len()];
        let mut blocked_keys: HashSet<&str> = HashSet::new();
        for mut wave in self.waves(batch) {
            wave.retain(|&at| batch[at].key.as_deref().is_none_or(|key| !blocked_keys.contains(key)));
            if !may_publish() {
                // All earlier waves are confirmed, so nothing is pending on the channel.
                self.channel = Some(channel);
                return Err(BrokerError::Stopped);
            }
            self.send(&channel, batch, &wave, &mut outcomes).await.map_err(|error| self.explain(error))?;
            if self.strict {
                let unconfirmed = wave.iter().filter(|&&at| outcomes[at] != PublishOutcome::Confirmed);
                blocked_keys.extend(unconfirmed.filter_map(|&at| batch[at].key.as_deref()));
            }
        }
        self.channel = Some(channel);
        Ok(outcomes)
    }

    /// Opens a channel in confirm mode. Checks the exchange now, while no message is in flight: publishing to a
    /// missing exchange closes the channel and, if more messages are queued behind, the connection.
    async fn open(&self) -> Result<Channel, BrokerError> {
        let exchange = short_name(&self.exchange)?;
        let channel = self.broker.channel().await?;
        // The default exchange always exists, and RabbitMQ rejects a check of it.
        if !self.exchange.is_empty() {
            let passive = ExchangeDeclareOptions { passive: true, ..Default::default() };
            response_of(channel.exchange_declare(exchange, ExchangeKind::default(), passive, FieldTable::default()))
                .await
                .map_err(|error| self.explain(error))?;
        }
        response_of(channel.confirm_select(ConfirmSelectOptions::default())).await?;
        Ok(channel)
    }

    /// Groups the indexes of the batch into waves; the messages of one wave may be in flight together. Without
    /// `strict` there is one wave; otherwise the first message of each key, then the second of each, and so on.
    fn waves(&self, batch: &[Outgoing]) -> Vec<Vec<usize>> {
        if !self.strict {
            return vec![(0..batch.len()).collect()];
        }
        let mut waves: Vec<Vec<usize>> = vec![Vec::new()];
        let mut seen: HashMap<&str, usize> = HashMap::new();
        for (at, message) in batch.iter().enumerate() {
            let turn = message.key.as_deref().map_or(0, |key| {
                let count = seen.entry(key).or_default();
                *count += 1;
                *count - 1
            });
            if turn == waves.len() {
                waves.push(Vec::new());
            }
            waves[turn].push(at);
        }
        waves
    }

    /// Publishes one wave, waits for its confirms and sets the outcomes.
    async fn send(
        &self,
        channel: &Arc<Channel>,
        batch: &[Outgoing],
        wave: &[usize],
        outcomes: &mut [PublishOutcome],
    ) -> Result<(), BrokerError> {
        let exchange = short_name(&self.exchange)?;
        let mut sent = Vec::with_capacity(wave.len());
        let mut sending = Sending { channel: Arc::clone(channel), writes: Vec::with_capacity(wave.len()) };
        for &at in wave {
            match AmqpMessage::new(&batch[at]) {
                Ok(amqp_message) => {
                    sending.push(exchange.clone(), amqp_message);
                    sent.push(at);
                }
                Err(limit) => outcomes[at] = PublishOutcome::Rejected(limit.to_string()),
            }
        }
        let confirmations = timeout(self.confirm_time_max, sending.confirmed())
            .await
            .map_err(|_| BrokerError::Unconfirmed(self.confirm_time_max))??;

        // lapin attaches a returned message to the next confirm, which may belong to another message. RabbitMQ
        // returns a message before it confirms it, so after the confirms of the whole wave all returned messages are
        // among them; they are matched by message id.
        let mut returned: HashSet<String> = HashSet::new();
        for (at, confirmation) in sent.iter().zip(confirmations) {
            outcomes[*at] = match confirmation {
                Confirmation::Ack(_) => PublishOutcome::Confirmed,
                Confirmation::Nack(_) => PublishOutcome::Rejected("RabbitMQ could not store the message".to_owned()),
                // Only happens on a channel that is not in confirm mode.
                Confirmation::NotRequested => return Err(BrokerError::Unconfirmed(Duration::ZERO)),
            };
            if let Some(message) = confirmation.take_message() {
                returned.extend(message.delivery.properties.message_id().as_ref().map(ToString::to_string));
            }
        }
        if !returned.is_empty() {
            for at in sent.into_iter().filter(|&at| returned.contains(&batch[at].message_id)) {
                outcomes[at] = PublishOutcome::Unroutable;
            }
        }
        Ok(())
    }

    /// Replaces AMQP's error for a missing exchange.
    fn explain(&self, error: BrokerError) -> BrokerError {
        match amqp_code(&error) {
            Some(NOT_FOUND) => BrokerError::NoExchange(self.exchange.clone()),
            _ => error,
        }
    }
}

/// A message in the types of AMQP.
struct AmqpMessage {
    routing_key: ShortString,
    properties: BasicProperties,
    body: Bytes,
}

/// A message exceeds a limit of AMQP. Publishing it would end the connection.
#[derive(Debug, thiserror::Error)]
enum AmqpLimit {
    #[error("the headers must have at most {HEADER_BYTES_MAX} bytes; they have {0}")]
    Headers(usize),
    #[error("{part}: {error}")]
    Text { part: &'static str, error: ShortStringError },
}

impl AmqpMessage {
    fn new(message: &Outgoing) -> Result<AmqpMessage, AmqpLimit> {
        let short = |part: &'static str, text: &str| {
            ShortString::try_new(text).map_err(|error| AmqpLimit::Text { part, error })
        };
        let header_bytes: usize = message.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        if header_bytes > HEADER_BYTES_MAX {
            return Err(AmqpLimit::Headers(header_bytes));
        }
        let mut headers = FieldTable::default();
        for (name, value) in &message.headers {
            headers.insert(short("header", name)?, AMQPValue::LongString(value.as_str().into()));
        }
        let properties = BasicProperties::default()
            .with_content_type("application/json".into())
            .with_delivery_mode(PERSISTENT)
            .with_message_id(short("message id", &message.message_id)?)
            .with_timestamp(message.timestamp.timestamp().try_into().unwrap_or(0))
            .with_type(short("type", &message.kind)?)
            .with_headers(headers);
        Ok(AmqpMessage {
            routing_key: short("routing key", &message.routing_key)?,
            properties,
            body: message.body.clone(),
        })
    }
}

/// A future that resolves when the message is written to the socket.
type Write = Pin<Box<dyn Future<Output = lapin::Result<PublisherConfirm>> + Send>>;

/// Messages that were passed to lapin and may not be written yet.
struct Sending {
    channel: Arc<Channel>,
    writes: Vec<MaybeDone<Write>>,
}

impl Sending {
    /// Passes a message to lapin without waiting until it is written, so that lapin writes many at once.
    fn push(&mut self, exchange: ShortString, message: AmqpMessage) {
        let channel = Arc::clone(&self.channel);
        let mut write = maybe_done(Box::pin(async move {
            let AmqpMessage { routing_key, properties, body } = message;
            let mandatory = BasicPublishOptions { mandatory: true, ..Default::default() };
            channel.basic_publish(exchange, routing_key, mandatory, &body, properties).await
        }) as Write);
        // The first poll passes the message to lapin. No task needs a wake-up per message, because `confirmed` polls
        // again.
        let _ = Pin::new(&mut write).poll(&mut Context::from_waker(Waker::noop()));
        self.writes.push(write);
    }

    /// Waits until all messages are written and confirmed. Both loops start with the last message, which resolves
    /// last: the others then resolve without waiting.
    async fn confirmed(mut self) -> lapin::Result<Vec<Confirmation>> {
        for write in self.writes.iter_mut().rev() {
            write.await;
        }
        let written = mem::take(&mut self.writes);
        let mut confirmations = Vec::with_capacity(written.len());
        for mut write in written.into_iter().rev() {
            if let Some(confirm) = Pin::new(&mut write).take_output() {
                confirmations.push(confirm?.await?);
            }
        }
        confirmations.reverse();
        Ok(confirmations)
    }
}

impl Drop for Sending {
    /// lapin may close a channel before it has written the channel's queued messages. RabbitMQ would then receive
    /// messages on a closed channel and end the connection, which all publishers share. So the channel stays open
    /// until the messages are written or the connection is lost.
    fn drop(&mut self) {
        let mut writes = mem::take(&mut self.writes);
        let is_pending = writes.iter().any(|write| matches!(write, MaybeDone::Future(_)));
        if let (true, Ok(runtime)) = (is_pending, Handle::try_current()) {
            let channel = Arc::clone(&self.channel);
            runtime.spawn(async move {
                for write in writes.iter_mut().rev() {
                    write.await;
                }
                drop(channel);
            });
        }
    }
}

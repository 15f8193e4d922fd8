//! Publishing with confirms.

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

use crate::broker::{Broker, BrokerError, answer, code, name};

/// How long RabbitMQ may take to confirm all of a wave.
const CONFIRM_TIME_MAX: Duration = Duration::from_secs(10);
/// AMQP puts a message's headers into one frame, and a frame that is larger than agreed (128 KiB) ends the connection.
const HEADER_BYTES_MAX: usize = 64 * 1024;
const PERSISTENT: u8 = 2;

/// A message on its way to an exchange.
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// Unique in its batch, or else all that share an id share the fate of the unluckiest.
    pub message_id: String,
    pub routing_key: String,
    /// Messages of one key keep their order.
    pub key: Option<String>,
    pub body: Bytes,
    pub headers: Vec<(&'static str, String)>,
    pub timestamp: DateTime<Utc>,
    /// AMQP's `type`: the type of the event.
    pub kind: String,
}

/// What became of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sent {
    /// In every queue that it is routed to, for good.
    Confirmed,
    /// In no queue: none is bound for its routing key.
    Unroutable,
    /// RabbitMQ, or AMQP itself, does not take it.
    Refused(String),
    /// Not sent, because an earlier one of its key was not taken.
    Behind,
}

/// Publishes to one exchange, through a channel of its own.
pub struct Publisher {
    broker: Arc<Broker>,
    exchange: String,
    strict: bool,
    confirm_time_max: Duration,
    channel: Option<Arc<Channel>>,
}

impl Publisher {
    /// If `strict`, at most one message of a key is unconfirmed at a time, so that what follows a message that was not
    /// taken is not sent. It costs a round trip for each message of the batch's most frequent key.
    pub fn new(broker: Arc<Broker>, exchange: String, strict: bool) -> Publisher {
        Publisher { broker, exchange, strict, confirm_time_max: CONFIRM_TIME_MAX, channel: None }
    }

    /// Sets how long to wait for the confirms of a wave.
    pub fn confirm_within(self, confirm_time_max: Duration) -> Publisher {
        Publisher { confirm_time_max, ..self }
    }

    /// One outcome per message, in order.
    ///
    /// # Errors
    /// The connection or the channel failed, or a confirm did not come in time. Nothing is known of the batch then:
    /// publish all of it again, in the same order. Some messages may arrive twice, but the first copies arrive in order.
    pub async fn publish(&mut self, batch: &[Outgoing]) -> Result<Vec<Sent>, BrokerError> {
        // Put back only at the end: after a failure, or if the caller stops waiting, there are confirms on it that
        // nobody awaits, and returned messages that would be taken for those of the next batch.
        let channel = match self.channel.take() {
            Some(channel) if channel.status().connected() => channel,
            _ => Arc::new(self.open().await?),
        };
        let mut outcomes = vec![Sent::Behind; batch.len()];
        let mut stuck: HashSet<&str> = HashSet::new();
        for mut wave in self.waves(batch) {
            wave.retain(|&at| batch[at].key.as_deref().is_none_or(|key| !stuck.contains(key)));
            self.send(&channel, batch, &wave, &mut outcomes).await.map_err(|error| self.explain(error))?;
            if self.strict {
                let not_taken = wave.iter().filter(|&&at| outcomes[at] != Sent::Confirmed);
                stuck.extend(not_taken.filter_map(|&at| batch[at].key.as_deref()));
            }
        }
        self.channel = Some(channel);
        Ok(outcomes)
    }

    /// The exchange is looked up here, when nothing is under way: found missing by a publish, it costs the channel, and
    /// if messages wait to be written behind that one, the connection.
    async fn open(&self) -> Result<Channel, BrokerError> {
        let exchange = name(&self.exchange)?;
        let channel = self.broker.channel().await?;
        // The default exchange always exists, and RabbitMQ refuses to look it up.
        if !self.exchange.is_empty() {
            let look_up = ExchangeDeclareOptions { passive: true, ..Default::default() };
            answer(channel.exchange_declare(exchange, ExchangeKind::default(), look_up, FieldTable::default()))
                .await
                .map_err(|error| self.explain(error))?;
        }
        answer(channel.confirm_select(ConfirmSelectOptions::default())).await?;
        Ok(channel)
    }

    /// The batch's indexes, grouped by what may be under way at the same time: everything, or if strict, the first of
    /// each key, then the second of each, and so on.
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

    async fn send(
        &self,
        channel: &Arc<Channel>,
        batch: &[Outgoing],
        wave: &[usize],
        outcomes: &mut [Sent],
    ) -> Result<(), BrokerError> {
        let exchange = name(&self.exchange)?;
        let mut sent = Vec::with_capacity(wave.len());
        let mut sending = Sending { channel: Arc::clone(channel), sends: Vec::with_capacity(wave.len()) };
        for &at in wave {
            match Envelope::of(&batch[at]) {
                Ok(envelope) => {
                    sending.push(exchange.clone(), envelope);
                    sent.push(at);
                }
                Err(reason) => outcomes[at] = Sent::Refused(reason),
            }
        }
        let confirmations = timeout(self.confirm_time_max, sending.confirmed())
            .await
            .map_err(|_| BrokerError::Unconfirmed(self.confirm_time_max))??;

        // lapin gives a returned message to whichever confirm comes next, which need not be its own. The whole wave is
        // confirmed by now, and a message is returned before it is confirmed, so all returns are among these.
        let mut returned: HashSet<String> = HashSet::new();
        for (at, confirmation) in sent.iter().zip(confirmations) {
            outcomes[*at] = match confirmation {
                Confirmation::Ack(_) => Sent::Confirmed,
                Confirmation::Nack(_) => Sent::Refused("RabbitMQ could not store it".to_owned()),
                // Only a channel without confirms says so.
                Confirmation::NotRequested => return Err(BrokerError::Unconfirmed(Duration::ZERO)),
            };
            if let Some(message) = confirmation.take_message() {
                returned.extend(message.delivery.properties.message_id().as_ref().map(ToString::to_string));
            }
        }
        if !returned.is_empty() {
            for at in sent.into_iter().filter(|&at| returned.contains(&batch[at].message_id)) {
                outcomes[at] = Sent::Unroutable;
            }
        }
        Ok(())
    }

    fn explain(&self, error: BrokerError) -> BrokerError {
        match code(&error) {
            Some(404) => BrokerError::NoExchange(self.exchange.clone()),
            _ => error,
        }
    }
}

/// A message in AMQP's terms.
struct Envelope {
    routing_key: ShortString,
    properties: BasicProperties,
    body: Bytes,
}

impl Envelope {
    /// Fails, with the reason, for what cannot be said in AMQP. Sent all the same, it would end the connection.
    fn of(message: &Outgoing) -> Result<Envelope, String> {
        let short = |what: &str, text: &str| {
            ShortString::try_new(text).map_err(|error: ShortStringError| format!("its {what}: {error}"))
        };
        let header_bytes: usize = message.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        if header_bytes > HEADER_BYTES_MAX {
            return Err(format!("its headers are {header_bytes} bytes, and at most {HEADER_BYTES_MAX} can be sent"));
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
        Ok(Envelope {
            routing_key: short("routing key", &message.routing_key)?,
            properties,
            body: message.body.clone(),
        })
    }
}

/// Resolves when the message is written to the socket.
type Send = Pin<Box<dyn Future<Output = lapin::Result<PublisherConfirm>> + std::marker::Send>>;

/// Messages that are handed to lapin, but perhaps not yet written.
struct Sending {
    channel: Arc<Channel>,
    sends: Vec<MaybeDone<Send>>,
}

impl Sending {
    /// Hands a message over without waiting until it is written, so that lapin writes many at once.
    fn push(&mut self, exchange: ShortString, message: Envelope) {
        let channel = Arc::clone(&self.channel);
        let mut send = maybe_done(Box::pin(async move {
            let Envelope { routing_key, properties, body } = message;
            let mandatory = BasicPublishOptions { mandatory: true, ..Default::default() };
            channel.basic_publish(exchange, routing_key, mandatory, &body, properties).await
        }) as Send);
        // The first poll hands it over. Nobody is to be woken per message: `confirmed` asks again.
        let _ = Pin::new(&mut send).poll(&mut Context::from_waker(Waker::noop()));
        self.sends.push(send);
    }

    /// The last comes first in both loops, because it is resolved last: after it, the others need no waiting.
    async fn confirmed(mut self) -> lapin::Result<Vec<Confirmation>> {
        for send in self.sends.iter_mut().rev() {
            send.await;
        }
        let written = mem::take(&mut self.sends);
        let mut confirmations = Vec::with_capacity(written.len());
        for mut send in written.into_iter().rev() {
            if let Some(confirm) = Pin::new(&mut send).take_output() {
                confirmations.push(confirm?.await?);
            }
        }
        confirmations.reverse();
        Ok(confirmations)
    }
}

impl Drop for Sending {
    /// lapin lets the end of a channel overtake messages of that channel which wait to be written. RabbitMQ would then
    /// be sent messages through a channel that it no longer knows, and would end the connection, everyone's. So the
    /// channel is kept until they are written, or the connection is lost.
    fn drop(&mut self) {
        let mut sends = mem::take(&mut self.sends);
        let waiting = sends.iter().any(|send| matches!(send, MaybeDone::Future(_)));
        if let (true, Ok(runtime)) = (waiting, Handle::try_current()) {
            let channel = Arc::clone(&self.channel);
            runtime.spawn(async move {
                for send in sends.iter_mut().rev() {
                    send.await;
                }
                drop(channel);
            });
        }
    }
}

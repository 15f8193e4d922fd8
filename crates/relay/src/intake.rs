//! Consumes a queue in batches, with explicit acknowledgement.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::{FutureExt, StreamExt};
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Consumer};
use tokio::task::JoinHandle;

use crate::body_limit::OversizedBody;
use crate::broker::{Broker, BrokerError, NOT_FOUND, amqp_code, response_of, short_name};
use crate::headers;

/// A delivered message. It stays in the queue until it is acknowledged.
#[derive(Debug, Clone)]
pub struct Incoming {
    pub message_id: Option<String>,
    pub routing_key: String,
    /// AMQP's property `type`.
    pub kind: Option<String>,
    /// The headers with a text value.
    pub headers: BTreeMap<String, String>,
    /// At most [`BODY_BYTES_MAX`](crate::BODY_BYTES_MAX) bytes.
    pub body: Vec<u8>,
    /// Set if a field that the intake reads is not text: the reason, with the name of the field.
    pub invalid: Option<String>,
    /// Set if the body of the message is larger; then only its beginning is in `body`.
    pub oversized: Option<OversizedBody>,
    /// Whether the message was delivered before, to this or another consumer.
    pub redelivered: bool,
    tag: Tag,
}

/// RabbitMQ numbers the deliveries of each channel from 1. Without the number of the channel, a late acknowledgement
/// would acknowledge another message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tag {
    channel: u64,
    delivery: u64,
}

/// The consumer of one queue.
pub struct Intake {
    broker: Arc<Broker>,
    queue: String,
    prefetch: u16,
    channels: u64,
    /// Starting to consume runs in its own task: if its caller stopped waiting, lapin would drop the consumer while
    /// RabbitMQ continues to deliver to it, and those messages would be stuck.
    starting: Option<JoinHandle<Result<OpenChannel, BrokerError>>>,
    open: Option<OpenChannel>,
}

struct OpenChannel {
    consumer: Consumer,
    channel: Channel,
    number: u64,
    /// The last acknowledged delivery. RabbitMQ closes the channel if a delivery is acknowledged twice.
    acknowledged: u64,
}

impl Intake {
    /// Does not connect yet. At most `prefetch` messages are delivered and not yet acknowledged.
    pub fn new(broker: Arc<Broker>, queue: String, prefetch: u16) -> Intake {
        Intake { broker, queue, prefetch, channels: 0, starting: None, open: None }
    }

    /// Waits for a message, then returns it with the others that are already delivered, at most `max` in all. No
    /// message is lost if the caller stops waiting.
    ///
    /// # Errors
    /// The connection, the channel or the consumer has ended. The next call opens a new channel, and RabbitMQ delivers
    /// the unacknowledged messages again.
    pub async fn next_batch(&mut self, max: usize) -> Result<Vec<Incoming>, BrokerError> {
        let open = match &mut self.open {
            Some(open) => open,
            None => {
                let starting = self.starting.get_or_insert_with(|| {
                    self.channels += 1;
                    let (broker, queue) = (Arc::clone(&self.broker), self.queue.clone());
                    tokio::spawn(OpenChannel::start(broker, queue, self.prefetch, self.channels))
                });
                let started = starting.await;
                self.starting = None;
                // The task panicked, or the runtime is shutting down.
                self.open.insert(started.map_err(|_| BrokerError::ConnectionLost)??)
            }
        };
        let number = open.number;
        let mut batch = Vec::new();
        // Nothing is awaited below while the batch contains a message; otherwise a cancelled call would lose it.
        let mut delivered = open.consumer.next().await;
        loop {
            match delivered {
                Some(Ok(delivery)) => batch.push(Incoming::from(delivery, number)),
                Some(Err(error)) => {
                    self.open = None;
                    return Err(error.into());
                }
                None => {
                    self.open = None;
                    return Err(BrokerError::Cancelled(self.queue.clone()));
                }
            }
            if batch.len() >= max {
                return Ok(batch);
            }
            delivered = match open.consumer.next().now_or_never() {
                Some(delivered) => delivered,
                None => return Ok(batch),
            };
        }
    }

    /// Acknowledges all messages up to and including the last of the batch. A repeated call has no effect. Fails with
    /// [`BrokerError::StaleDelivery`] if the channel of the batch is closed.
    pub async fn ack(&mut self, batch: &[Incoming]) -> Result<(), BrokerError> {
        let Some(last) = batch.last() else { return Ok(()) };
        let open = self.channel_of(last)?;
        let tag = last.tag.delivery;
        if tag <= open.acknowledged {
            return Ok(());
        }
        open.acknowledged = tag;
        let acknowledged = response_of(open.channel.basic_ack(tag, BasicAckOptions { multiple: true })).await;
        if acknowledged.is_err() {
            self.open = None;
        }
        acknowledged
    }

    /// Drops the channel. RabbitMQ delivers the unacknowledged messages again, to the next call or to another
    /// consumer.
    pub fn reset(&mut self) {
        self.open = None;
    }

    /// Stops consuming. The unacknowledged messages return to the queue; dropping the intake has the same effect, a
    /// little later.
    pub async fn close(self) {
        let Some(OpenChannel { channel, .. }) = self.open else { return };
        if let Err(error) = response_of(channel.close(200, "bye".into())).await {
            // The end of the channel has already returned the messages to the queue.
            tracing::debug!(%error, queue = self.queue, "the channel was already closed");
        }
    }

    /// Returns the channel that delivered the message. Fails if it is closed.
    fn channel_of(&mut self, one: &Incoming) -> Result<&mut OpenChannel, BrokerError> {
        self.open.as_mut().filter(|open| open.number == one.tag.channel).ok_or(BrokerError::StaleDelivery)
    }
}

impl OpenChannel {
    async fn start(broker: Arc<Broker>, queue: String, prefetch: u16, number: u64) -> Result<OpenChannel, BrokerError> {
        let queue_name = short_name(&queue)?;
        let channel = broker.channel().await?;
        response_of(channel.basic_qos(prefetch, BasicQosOptions::default())).await?;
        let options = BasicConsumeOptions::default();
        match response_of(channel.basic_consume(queue_name, "".into(), options, FieldTable::default())).await {
            Ok(consumer) => Ok(OpenChannel { consumer, channel, number, acknowledged: 0 }),
            Err(error) if amqp_code(&error) == Some(NOT_FOUND) => Err(BrokerError::NoQueue(queue)),
            Err(error) => {
                // If only the response was late, there is a consumer, and lapin does not close the channel on drop.
                let _ = response_of(channel.close(200, "bye".into())).await;
                Err(error)
            }
        }
    }
}

impl Incoming {
    fn from(mut delivery: Delivery, channel: u64) -> Incoming {
        let oversized = OversizedBody::split_from(&mut delivery.data);
        let properties = &delivery.properties;
        let mut headers = BTreeMap::new();
        let mut invalid = Vec::new();
        for (name, value) in properties.headers().iter().flat_map(FieldTable::inner) {
            let text = match value {
                AMQPValue::LongString(text) => std::str::from_utf8(text.as_bytes()),
                AMQPValue::ShortString(text) => Ok(text.as_str()),
                _ => continue,
            };
            match text {
                Ok(text) if !text.contains('\0') || !is_pillarbox_header(name.as_str()) => {
                    headers.insert(name.to_string(), text.to_owned());
                }
                Ok(_) | Err(_) if is_pillarbox_header(name.as_str()) => invalid.push(format!("the header `{name}`")),
                Ok(_) | Err(_) => {}
            }
        }
        let texts = [
            ("message_id", properties.message_id().as_ref().map(ShortString::as_str)),
            ("type", properties.kind().as_ref().map(ShortString::as_str)),
            ("routing key", Some(delivery.routing_key.as_str())),
        ];
        // See `frame_text`: what is not UTF-8 contains NUL here.
        let without_text = texts.iter().filter(|(_, text)| text.is_some_and(|text| text.contains('\0')));
        invalid.extend(without_text.map(|(field, _)| format!("`{field}`")));
        Incoming {
            message_id: properties.message_id().as_ref().map(ToString::to_string),
            routing_key: delivery.routing_key.to_string(),
            kind: properties.kind().as_ref().map(ToString::to_string),
            headers,
            invalid: (!invalid.is_empty())
                .then(|| format!("{} must be UTF-8 without NUL: correct the publisher", invalid.join(" and "))),
            redelivered: delivery.redelivered,
            tag: Tag { channel, delivery: delivery.delivery_tag },
            body: delivery.data,
            oversized,
        }
    }
}

/// Whether the intake reads the header. Those of other programs may have any value.
fn is_pillarbox_header(name: &str) -> bool {
    name.starts_with(headers::PREFIX)
}

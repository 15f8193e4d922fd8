//! Consuming a queue in batches.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use futures_util::{FutureExt, StreamExt};
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, BasicRejectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Consumer};
use tokio::task::JoinHandle;

use crate::broker::{Broker, BrokerError, answer, code, name};

const NOT_FOUND: u16 = 404;

/// A message that a queue has delivered. It is the queue's until it is acknowledged or rejected.
#[derive(Debug, Clone)]
pub struct Incoming {
    pub message_id: Option<String>,
    pub routing_key: String,
    /// AMQP's `type`.
    pub kind: Option<String>,
    /// Those whose value is text.
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
    /// It was delivered before, to us or to another.
    pub redelivered: bool,
    tag: Tag,
}

/// RabbitMQ counts deliveries anew on each channel: without the channel's own number, an acknowledgement that comes late
/// would hit another message.
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
    /// In a task of its own, because lapin forgets a consumer whose caller stops waiting for it, and RabbitMQ goes on
    /// delivering to it: those messages would be stuck.
    starting: Option<JoinHandle<Result<Open, BrokerError>>>,
    open: Option<Open>,
}

struct Open {
    consumer: Consumer,
    channel: Channel,
    number: u64,
    /// Rejected, and not yet passed by an acknowledgement. RabbitMQ closes the channel if one is settled twice.
    rejected: HashSet<u64>,
    acknowledged: u64,
}

impl Intake {
    /// At most `prefetch` messages are delivered and not yet acknowledged.
    pub fn new(broker: Arc<Broker>, queue: String, prefetch: u16) -> Intake {
        Intake { broker, queue, prefetch, channels: 0, starting: None, open: None }
    }

    /// Waits for a message, then takes what else is there, at most `max` in all. Nothing is lost if the caller stops
    /// waiting.
    ///
    /// # Errors
    /// The connection, the channel or the consumer has ended. The next call starts anew, and what was not acknowledged
    /// comes again.
    pub async fn next(&mut self, max: usize) -> Result<Vec<Incoming>, BrokerError> {
        let open = match &mut self.open {
            Some(open) => open,
            None => {
                let starting = self.starting.get_or_insert_with(|| {
                    self.channels += 1;
                    let (broker, queue) = (Arc::clone(&self.broker), self.queue.clone());
                    tokio::spawn(Open::start(broker, queue, self.prefetch, self.channels))
                });
                let started = starting.await;
                self.starting = None;
                // It panicked, or the runtime is ending.
                self.open.insert(started.map_err(|_| BrokerError::Lost)??)
            }
        };
        let number = open.number;
        let mut batch = Vec::new();
        // From here to the return nothing is awaited while there is something in the batch.
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

    /// Acknowledges everything up to and including the last of the batch, except what was rejected.
    pub async fn ack(&mut self, batch: &[Incoming]) -> Result<(), BrokerError> {
        let Some(last) = batch.last() else { return Ok(()) };
        let open = self.delivering(last)?;
        let unsettled = batch.iter().rev().map(|one| one.tag.delivery).find(|tag| !open.rejected.contains(tag));
        let Some(tag) = unsettled.filter(|&tag| tag > open.acknowledged) else { return Ok(()) };
        open.acknowledged = tag;
        open.rejected.retain(|&rejected| rejected > tag);
        let acked = answer(open.channel.basic_ack(tag, BasicAckOptions { multiple: true })).await;
        self.settled(acked)
    }

    /// Refuses it: it goes to the queue's dead-letter exchange, if there is one, or else it is gone.
    pub async fn reject(&mut self, one: &Incoming) -> Result<(), BrokerError> {
        let open = self.delivering(one)?;
        let tag = one.tag.delivery;
        if tag <= open.acknowledged || !open.rejected.insert(tag) {
            return Ok(());
        }
        let rejected = answer(open.channel.basic_reject(tag, BasicRejectOptions { requeue: false })).await;
        self.settled(rejected)
    }

    /// Lets go of the channel: what is not acknowledged comes again, to the next call or to another consumer.
    pub fn start_over(&mut self) {
        self.open = None;
    }

    /// Stops consuming. What is not acknowledged goes back to the queue, as it also does, a little later, on a drop.
    pub async fn close(self) {
        let Some(Open { channel, .. }) = self.open else { return };
        if let Err(error) = answer(channel.close(200, "bye".into())).await {
            // What ended the channel has also put the messages back.
            tracing::debug!(%error, queue = self.queue, "the channel was already gone");
        }
    }

    fn delivering(&mut self, one: &Incoming) -> Result<&mut Open, BrokerError> {
        self.open.as_mut().filter(|open| open.number == one.tag.channel).ok_or(BrokerError::Stale)
    }

    fn settled(&mut self, answered: Result<(), BrokerError>) -> Result<(), BrokerError> {
        if answered.is_err() {
            self.open = None;
        }
        answered
    }
}

impl Open {
    async fn start(broker: Arc<Broker>, queue: String, prefetch: u16, number: u64) -> Result<Open, BrokerError> {
        let queue_name = name(&queue)?;
        let channel = broker.channel().await?;
        answer(channel.basic_qos(prefetch, BasicQosOptions::default())).await?;
        let options = BasicConsumeOptions::default();
        match answer(channel.basic_consume(queue_name, "".into(), options, FieldTable::default())).await {
            Ok(consumer) => Ok(Open { consumer, channel, number, rejected: HashSet::new(), acknowledged: 0 }),
            Err(error) if code(&error) == Some(NOT_FOUND) => Err(BrokerError::NoQueue(queue)),
            Err(error) => {
                // There may be a consumer all the same, if only the answer was late; and then lapin keeps the channel.
                let _ = answer(channel.close(200, "bye".into())).await;
                Err(error)
            }
        }
    }
}

impl Incoming {
    fn from(delivery: Delivery, channel: u64) -> Incoming {
        let properties = &delivery.properties;
        let mut headers = BTreeMap::new();
        for (name, value) in properties.headers().iter().flat_map(FieldTable::inner) {
            let text = match value {
                AMQPValue::LongString(text) => std::str::from_utf8(text.as_bytes()).ok(),
                AMQPValue::ShortString(text) => Some(text.as_str()),
                _ => None,
            };
            headers.extend(text.map(|text| (name.to_string(), text.to_owned())));
        }
        Incoming {
            message_id: properties.message_id().as_ref().map(ToString::to_string),
            routing_key: delivery.routing_key.to_string(),
            kind: properties.kind().as_ref().map(ToString::to_string),
            headers,
            redelivered: delivery.redelivered,
            tag: Tag { channel, delivery: delivery.delivery_tag },
            body: delivery.data,
        }
    }
}

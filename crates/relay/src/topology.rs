//! The exchanges and queues that are to exist.

use lapin::Channel;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use serde::{Deserialize, Serialize};

use crate::broker::{Broker, BrokerError, answer, code, name};

/// AMQP's code for "it exists, but not like that".
const PRECONDITION_FAILED: u16 = 406;
const NOT_FOUND: u16 = 404;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    #[serde(default)]
    pub exchanges: Vec<Exchange>,
    #[serde(default)]
    pub queues: Vec<Queue>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exchange {
    pub name: String,
    #[serde(default)]
    pub kind: ExchangeKind,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExchangeKind {
    #[default]
    Topic,
    Fanout,
    Direct,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Queue {
    pub name: String,
    #[serde(default)]
    pub bindings: Vec<Binding>,
    /// Of several consumers one gets everything, in order, and another takes over when it is gone.
    #[serde(default)]
    pub single_active_consumer: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Binding {
    pub exchange: String,
    /// A fanout exchange needs none.
    #[serde(default)]
    pub routing_key: String,
}

impl Topology {
    /// Makes what does not exist yet. What exists stays as it is, also where it differs from what is asked for: it is
    /// someone's, with messages in it.
    pub async fn declare(&self, broker: &Broker) -> Result<(), BrokerError> {
        let mut channel = broker.channel().await?;
        for exchange in &self.exchanges {
            if differs(exchange.declare(&channel).await, "exchange", &exchange.name)? {
                channel = broker.channel().await?;
            }
        }
        for queue in &self.queues {
            if differs(queue.declare(&channel).await, "queue", &queue.name)? {
                channel = broker.channel().await?;
            }
            for binding in &queue.bindings {
                binding.declare(&queue.name, &channel).await?;
            }
        }
        Ok(())
    }
}

impl Exchange {
    async fn declare(&self, channel: &Channel) -> Result<(), BrokerError> {
        let kind = match self.kind {
            ExchangeKind::Topic => lapin::ExchangeKind::Topic,
            ExchangeKind::Fanout => lapin::ExchangeKind::Fanout,
            ExchangeKind::Direct => lapin::ExchangeKind::Direct,
        };
        let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
        answer(channel.exchange_declare(name(&self.name)?, kind, options, FieldTable::default())).await
    }
}

impl Queue {
    /// A quorum queue: it survives the loss of a node, and confirms a message only when that is so.
    async fn declare(&self, channel: &Channel) -> Result<(), BrokerError> {
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        if self.single_active_consumer {
            arguments.insert("x-single-active-consumer".into(), true.into());
        }
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        answer(channel.queue_declare(name(&self.name)?, options, arguments)).await.map(drop)
    }
}

impl Binding {
    async fn declare(&self, queue: &str, channel: &Channel) -> Result<(), BrokerError> {
        let (queue, exchange, routing_key) = (name(queue)?, name(&self.exchange)?, name(&self.routing_key)?);
        let options = QueueBindOptions::default();
        let bound = answer(channel.queue_bind(queue, exchange, routing_key, options, FieldTable::default())).await;
        bound.map_err(|error| match code(&error) {
            // The queue was there a moment ago.
            Some(NOT_FOUND) => BrokerError::NoExchange(self.exchange.clone()),
            _ => error,
        })
    }
}

/// Whether it exists with other properties. RabbitMQ has closed the channel then.
fn differs(declared: Result<(), BrokerError>, what: &str, name: &str) -> Result<bool, BrokerError> {
    match declared {
        Ok(()) => Ok(false),
        Err(error) if code(&error) == Some(PRECONDITION_FAILED) => {
            tracing::warn!(name, %error, "the {what} exists with other properties: using it as it is");
            Ok(true)
        }
        Err(error) => Err(error),
    }
}

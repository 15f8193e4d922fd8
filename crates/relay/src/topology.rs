//! The topology: declares exchanges, queues and bindings.

use lapin::Channel;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use serde::{Deserialize, Serialize};

use crate::broker::{Broker, BrokerError, NOT_FOUND, amqp_code, response_of, short_name};

/// AMQP's code for a declaration that differs from the existing object.
const PRECONDITION_FAILED: u16 = 406;

/// Settings: the exchanges and queues that must exist.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    #[serde(default, deserialize_with = "kit::config::list")]
    pub exchanges: Vec<Exchange>,
    #[serde(default, deserialize_with = "kit::config::list")]
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
    #[serde(default, deserialize_with = "kit::config::list")]
    pub bindings: Vec<Binding>,
    /// Whether RabbitMQ delivers to only one of several consumers, in order. Another takes over when it disconnects.
    #[serde(default)]
    pub single_active_consumer: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Binding {
    pub exchange: String,
    /// Empty for a fanout exchange.
    #[serde(default)]
    pub routing_key: String,
}

impl Topology {
    /// Adds an exchange unless it is listed already. Ignores the default exchange, which has no name: it always exists,
    /// and RabbitMQ allows no bindings to it.
    pub(crate) fn add_exchange(&mut self, exchange: Exchange) {
        if !exchange.name.is_empty() && !self.exchanges.contains(&exchange) {
            self.exchanges.push(exchange);
        }
    }

    /// Declares the objects that do not exist yet. An existing object stays as it is, even if it differs from the
    /// settings: it belongs to another application and may contain messages.
    pub async fn declare(&self, broker: &Broker) -> Result<(), BrokerError> {
        let mut channel = broker.channel().await?;
        for exchange in &self.exchanges {
            if exists_differently(exchange.declare(&channel).await, "exchange", &exchange.name)? {
                channel = broker.channel().await?;
            }
        }
        for queue in &self.queues {
            if exists_differently(queue.declare(&channel).await, "queue", &queue.name)? {
                if queue.single_active_consumer {
                    tracing::warn!(
                        queue = queue.name,
                        "the queue may have no single active consumer: several processes can process messages of one key out \
                         of order. Stop the relay, wait until the queue is empty, delete it, and start the relay again"
                    );
                }
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
        response_of(channel.exchange_declare(short_name(&self.name)?, kind, options, FieldTable::default())).await
    }
}

impl Queue {
    /// Declares a quorum queue: it survives the loss of a node, and confirms a message only when a majority has
    /// stored it.
    async fn declare(&self, channel: &Channel) -> Result<(), BrokerError> {
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        if self.single_active_consumer {
            arguments.insert("x-single-active-consumer".into(), true.into());
        }
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        response_of(channel.queue_declare(short_name(&self.name)?, options, arguments)).await.map(drop)
    }
}

impl Binding {
    async fn declare(&self, queue: &str, channel: &Channel) -> Result<(), BrokerError> {
        let (queue, exchange, routing_key) =
            (short_name(queue)?, short_name(&self.exchange)?, short_name(&self.routing_key)?);
        let options = QueueBindOptions::default();
        let bound = response_of(channel.queue_bind(queue, exchange, routing_key, options, FieldTable::default())).await;
        bound.map_err(|error| match amqp_code(&error) {
            // The queue exists, it was declared before.
            Some(NOT_FOUND) => BrokerError::NoExchange(self.exchange.clone()),
            _ => error,
        })
    }
}

/// Returns true if the object exists with other properties. RabbitMQ has closed the channel in this case.
fn exists_differently(declared: Result<(), BrokerError>, what: &str, name: &str) -> Result<bool, BrokerError> {
    match declared {
        Ok(()) => Ok(false),
        Err(error) if amqp_code(&error) == Some(PRECONDITION_FAILED) => {
            tracing::warn!(name, %error, "the {what} exists with other properties and is used as it is");
            Ok(true)
        }
        Err(error) => Err(error),
    }
}

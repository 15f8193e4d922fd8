//! The topology: declares exchanges, queues and bindings.

use std::time::Duration;

use lapin::Channel;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use runtime::worker::Round;
use serde::{Deserialize, Serialize};

use crate::broker::{Broker, BrokerError, NOT_FOUND, amqp_code, response_of, short_name};

/// The pause between two declarations of the topology: a broker may lose its objects in a restart, and anybody can delete
/// them.
pub(crate) const TOPOLOGY_PAUSE: Duration = Duration::from_secs(10);
/// AMQP's code for a declaration that differs from the existing object.
const PRECONDITION_FAILED: u16 = 406;

/// Settings: the exchanges and queues that must exist.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    #[serde(default, deserialize_with = "runtime::config::list")]
    pub exchanges: Vec<Exchange>,
    #[serde(default, deserialize_with = "runtime::config::list")]
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
    #[serde(default, deserialize_with = "runtime::config::list")]
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

    /// Declares the objects that do not exist yet. Returns those that exist with other properties. They stay as they are:
    /// they may belong to another application and contain messages.
    pub async fn declare(&self, broker: &Broker) -> Result<Vec<Difference>, BrokerError> {
        let mut differences = Vec::new();
        let mut channel = broker.channel().await?;
        for exchange in &self.exchanges {
            if let Some(difference) = difference(exchange.declare(&channel).await, "exchange", &exchange.name)? {
                differences.push(difference);
                channel = broker.channel().await?;
            }
        }
        for queue in &self.queues {
            if let Some(difference) = difference(queue.declare(&channel).await, "queue", &queue.name)? {
                differences.push(difference);
                channel = broker.channel().await?;
            }
            for binding in &queue.bindings {
                binding.declare(&queue.name, &channel).await?;
            }
        }
        Ok(differences)
    }
}

/// Returns the number of a queue's consumers. None if there is no such queue.
pub(crate) async fn consumers_of(broker: &Broker, queue: &str) -> Result<Option<u32>, BrokerError> {
    let channel = broker.channel().await?;
    let passive = QueueDeclareOptions { passive: true, ..Default::default() };
    match response_of(channel.queue_declare(short_name(queue)?, passive, FieldTable::default())).await {
        Ok(found) => Ok(Some(found.consumer_count())),
        Err(error) if amqp_code(&error) == Some(NOT_FOUND) => Ok(None),
        Err(error) => Err(error),
    }
}

/// An object that exists with other properties than the declared ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// `exchange` or `queue`.
    pub kind: &'static str,
    pub name: String,
    /// RabbitMQ's answer: the property, the declared value and the current one.
    pub answer: String,
}

impl Difference {
    pub(crate) fn warn(&self) {
        let Difference { kind, name, answer } = self;
        tracing::warn!(
            name,
            answer,
            "the {kind} exists with other properties and is used as it is; messages in such a queue can be lost, or processed \
             out of order: to have it declared again, wait until it is empty, and delete it"
        );
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

/// Returns how the object differs, if it exists with other properties. RabbitMQ has closed the channel in this case.
fn difference(
    declared: Result<(), BrokerError>,
    kind: &'static str,
    name: &str,
) -> Result<Option<Difference>, BrokerError> {
    match declared {
        Ok(()) => Ok(None),
        Err(error) if amqp_code(&error) == Some(PRECONDITION_FAILED) => {
            Ok(Some(Difference { kind, name: name.to_owned(), answer: error.to_string() }))
        }
        Err(error) => Err(error),
    }
}

/// Declares the topology. Logs the differences that are not `known`.
pub(crate) async fn declare(
    topology: &Topology,
    broker: &Broker,
    known: &mut Vec<Difference>,
) -> Result<Round, BrokerError> {
    let differences = topology.declare(broker).await?;
    differences.iter().filter(|difference| !known.contains(difference)).for_each(Difference::warn);
    *known = differences;
    Ok(Round::Idle)
}

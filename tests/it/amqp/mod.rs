//! Tests of the AMQP layer with a real RabbitMQ and a network with injected faults.

mod intake;
mod publish;
mod topology;

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use lapin::message::Delivery;
use lapin::options::{BasicGetOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties};
use relay::{Binding, Broker, Exchange, ExchangeKind, Outgoing, Queue, Topology};
use runtime::secret::Secret;
use testkit::TestVhost;

const DEADLINE: Duration = Duration::from_secs(30);

fn broker(url: &str) -> Arc<Broker> {
    Arc::new(Broker::new(Secret::new(url.to_owned())).unwrap())
}

/// The topic exchange `events`, and the queue `all`, which receives messages with a routing key such as `to.x`.
fn events_to_all() -> Topology {
    Topology {
        exchanges: vec![Exchange { name: "events".into(), kind: ExchangeKind::Topic }],
        queues: vec![queue("all", "to.#")],
    }
}

fn queue(name: &str, routing_key: &str) -> Queue {
    let binding = Binding { exchange: "events".into(), routing_key: routing_key.into() };
    Queue { name: name.into(), bindings: vec![binding], single_active_consumer: false }
}

fn message(id: impl ToString, key: Option<&str>, routing_key: &str) -> Outgoing {
    Outgoing {
        message_id: id.to_string(),
        routing_key: routing_key.into(),
        key: key.map(Into::into),
        body: format!("{{\"id\":\"{}\"}}", id.to_string()).into(),
        headers: vec![("tenant".into(), "acme".into())],
        timestamp: DateTime::<Utc>::from_timestamp(1_700_000_000, 0).unwrap(),
        kind: "order.paid".into(),
    }
}

/// The test's own connection to a vhost, independent of the code under test.
struct Observer {
    _connection: Connection,
    channel: Channel,
}

impl Observer {
    async fn of(vhost: &TestVhost) -> Observer {
        let connection = Connection::connect(&vhost.amqp_url(), ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        Observer { _connection: connection, channel }
    }

    /// Returns the number of messages that are ready in a queue; delivered ones are not counted.
    async fn ready(&self, queue: &str) -> u32 {
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        self.channel.queue_declare(queue.into(), passive, FieldTable::default()).await.unwrap().message_count()
    }

    /// Removes all messages from a queue and returns them.
    async fn remove_all(&self, queue: &str) -> Vec<Delivery> {
        let mut messages = Vec::new();
        while let Some(got) = self.channel.basic_get(queue.into(), BasicGetOptions { no_ack: true }).await.unwrap() {
            messages.push(got.delivery);
        }
        messages
    }

    async fn remove_all_ids(&self, queue: &str) -> Vec<String> {
        self.remove_all(queue)
            .await
            .iter()
            .map(|message| message.properties.message_id().clone().unwrap().to_string())
            .collect()
    }
}

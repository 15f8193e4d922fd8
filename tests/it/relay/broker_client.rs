//! A RabbitMQ client that plays a program other than Pillarbox.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
    ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind};
use serde_json::Value;
use testkit::TestVhost;

const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct BrokerClient {
    connection: Connection,
    channel: Channel,
}

/// A message that was consumed from a queue.
#[derive(Debug, Clone)]
pub(crate) struct Received {
    pub(crate) message_id: String,
    pub(crate) routing_key: String,
    pub(crate) body: Value,
    pub(crate) body_bytes: Vec<u8>,
    pub(crate) kind: String,
    pub(crate) headers: HashMap<String, String>,
    pub(crate) persistent: bool,
}

impl BrokerClient {
    pub(crate) async fn connect(vhost: &TestVhost) -> BrokerClient {
        BrokerClient::connect_to(&vhost.amqp_url()).await
    }

    /// Connects to a broker, and waits if it is still starting.
    pub(crate) async fn connect_to(url: &str) -> BrokerClient {
        let connection = testkit::eventually("the broker accepts a connection", TIMEOUT, async || {
            Connection::connect(url, ConnectionProperties::default()).await
        })
        .await;
        let channel = connection.create_channel().await.unwrap();
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        BrokerClient { connection, channel }
    }

    pub(crate) async fn exchange(&self, name: &str, kind: ExchangeKind) {
        self.declare_exchange(name, kind, FieldTable::default()).await;
    }

    /// Declares an exchange that passes unroutable messages to an alternate exchange.
    pub(crate) async fn exchange_with_alternate(&self, name: &str, kind: ExchangeKind, other: &str) {
        let mut arguments = FieldTable::default();
        arguments.insert("alternate-exchange".into(), AMQPValue::LongString(other.into()));
        self.declare_exchange(name, kind, arguments).await;
    }

    async fn declare_exchange(&self, name: &str, kind: ExchangeKind, arguments: FieldTable) {
        let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
        self.channel.exchange_declare(name.into(), kind, options, arguments).await.unwrap();
    }

    /// Declares a queue that loses no confirmed message, even if the broker is killed.
    pub(crate) async fn quorum_queue(&self, name: &str, exchange: &str, routing_key: &str) {
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        self.declare(name, exchange, routing_key, arguments).await;
    }

    pub(crate) async fn queue(&self, name: &str, exchange: &str, routing_key: &str) {
        self.declare(name, exchange, routing_key, FieldTable::default()).await;
    }

    async fn declare(&self, name: &str, exchange: &str, routing_key: &str, arguments: FieldTable) {
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        self.channel.queue_declare(name.into(), options, arguments).await.unwrap();
        if !exchange.is_empty() {
            self.bind(name, exchange, routing_key).await;
        }
    }

    /// Binds a queue. It may already have the same binding.
    pub(crate) async fn bind(&self, queue: &str, exchange: &str, routing_key: &str) {
        let options = QueueBindOptions::default();
        self.channel
            .queue_bind(queue.into(), exchange.into(), routing_key.into(), options, FieldTable::default())
            .await
            .unwrap();
    }

    pub(crate) async fn delete_exchange(&self, name: &str) {
        self.channel.exchange_delete(name.into(), Default::default()).await.unwrap();
    }

    pub(crate) async fn delete_queue(&self, name: &str) {
        self.channel.queue_delete(name.into(), Default::default()).await.unwrap();
    }

    pub(crate) async fn unbind(&self, queue: &str, exchange: &str, routing_key: &str) {
        self.channel
            .queue_unbind(queue.into(), exchange.into(), routing_key.into(), FieldTable::default())
            .await
            .unwrap();
    }

    /// Declares a classic queue whose messages expire. Returns false if the queue exists with other arguments.
    pub(crate) async fn expiring_queue(&self, name: &str, ttl_ms: i32) -> bool {
        let channel = self.connection.create_channel().await.unwrap();
        let mut arguments = FieldTable::default();
        arguments.insert("x-message-ttl".into(), ttl_ms.into());
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(name.into(), options, arguments).await.is_ok()
    }

    /// Waits until the queue exists.
    pub(crate) async fn wait_for_queue(&self, queue: &str) {
        testkit::eventually(queue, TIMEOUT, async || self.has_queue(queue).await).await;
    }

    pub(crate) async fn has_queue(&self, queue: &str) -> bool {
        // A passive declare of a missing queue closes its channel, hence a new channel each time.
        let channel = self.connection.create_channel().await.unwrap();
        let options = QueueDeclareOptions { passive: true, ..Default::default() };
        channel.queue_declare(queue.into(), options, FieldTable::default()).await.is_ok()
    }

    /// Waits until the consumer's queue exists and is bound. Its dead-letter queue is declared last, so that one is awaited.
    pub(crate) async fn wait_for_consumer_queue(&self, consumer: &str) {
        self.wait_for_queue(&format!("pillarbox.{consumer}.dlq")).await;
    }

    pub(crate) async fn depth(&self, queue: &str) -> u32 {
        let options = QueueDeclareOptions { passive: true, ..Default::default() };
        self.channel.queue_declare(queue.into(), options, FieldTable::default()).await.unwrap().message_count()
    }

    /// The number of consumers of the queue.
    pub(crate) async fn consumers(&self, queue: &str) -> u32 {
        let options = QueueDeclareOptions { passive: true, ..Default::default() };
        self.channel.queue_declare(queue.into(), options, FieldTable::default()).await.unwrap().consumer_count()
    }

    pub(crate) async fn publish(
        &self,
        queue: &str,
        message_id: Option<&str>,
        kind: Option<&str>,
        key: Option<&str>,
        body: &[u8],
    ) {
        let headers: Vec<_> = key.map(|key| ("pillarbox-key", key)).into_iter().collect();
        self.publish_with_headers(queue, message_id, kind, &headers, body).await;
    }

    pub(crate) async fn publish_with_headers(
        &self,
        queue: &str,
        message_id: Option<&str>,
        kind: Option<&str>,
        headers: &[(&str, &str)],
        body: &[u8],
    ) {
        let mut properties = BasicProperties::default().with_delivery_mode(2);
        if let Some(id) = message_id {
            properties = properties.with_message_id(id.into());
        }
        if let Some(kind) = kind {
            properties = properties.with_type(kind.into());
        }
        let mut table = FieldTable::default();
        for (name, value) in headers {
            table.insert((*name).into(), AMQPValue::LongString((*value).into()));
        }
        properties = properties.with_headers(table);
        let confirm =
            self.channel.basic_publish("".into(), queue.into(), BasicPublishOptions::default(), body, properties).await;
        confirm.unwrap().await.unwrap();
    }

    /// Publishes a copy of a message directly to a queue.
    pub(crate) async fn publish_copy(&self, queue: &str, message: &Received) {
        let headers: Vec<(&str, &str)> =
            message.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let Received { message_id, kind, body_bytes, .. } = message;
        self.publish_with_headers(queue, Some(message_id), Some(kind), &headers, body_bytes).await;
    }

    /// Consumes `count` messages from the queue. Panics if fewer arrive in time.
    pub(crate) async fn consume(&self, queue: &str, count: usize) -> Vec<Received> {
        let mut received = Vec::new();
        self.consume_until(queue, &mut received, |received| received.len() >= count).await;
        received
    }

    /// Consumes messages from the queue until `is_enough` is true. Panics if that takes too long.
    pub(crate) async fn consume_until(
        &self,
        queue: &str,
        received: &mut Vec<Received>,
        enough: impl Fn(&[Received]) -> bool,
    ) {
        self.channel.basic_qos(500, BasicQosOptions::default()).await.unwrap();
        let tag = format!("tag-{}", uuid::Uuid::new_v4());
        let options = BasicConsumeOptions::default();
        let mut consumer = self
            .channel
            .basic_consume(queue.into(), tag.as_str().into(), options, FieldTable::default())
            .await
            .unwrap();
        let deadline = tokio::time::Instant::now() + TIMEOUT;
        while !enough(received) {
            let delivery = tokio::time::timeout_at(deadline, consumer.next()).await;
            let Ok(Some(delivery)) = delivery else { panic!("{queue} contained only {} messages", received.len()) };
            let delivery = delivery.unwrap();
            delivery.ack(BasicAckOptions::default()).await.unwrap();
            let headers = delivery.properties.headers().iter().flat_map(FieldTable::inner).filter_map(
                |(name, value)| match value {
                    AMQPValue::LongString(text) => Some((name.to_string(), text.to_string())),
                    _ => None,
                },
            );
            received.push(Received {
                message_id: delivery.properties.message_id().as_ref().map(ToString::to_string).unwrap_or_default(),
                routing_key: delivery.routing_key.to_string(),
                body: serde_json::from_slice(&delivery.data).unwrap(),
                kind: delivery.properties.kind().as_ref().map(ToString::to_string).unwrap_or_default(),
                body_bytes: delivery.data,
                headers: headers.collect(),
                persistent: *delivery.properties.delivery_mode() == Some(2),
            });
        }
        self.channel.basic_cancel(tag.as_str().into(), Default::default()).await.unwrap();
    }
}

//! Declaring exchanges, queues and bindings.

use lapin::ExchangeKind::Direct;
use lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use relay::{Binding, BrokerError, Exchange, ExchangeKind, PublishOutcome, Publisher, Queue, Topology};
use serde_json::json;
use testkit::TestVhost;

use crate::amqp::{Observer, broker, events_to_all, message, queue};

#[tokio::test]
async fn a_topology_can_be_declared_twice_and_uses_quorum_queues() {
    let vhost = TestVhost::new().await;
    let broker = broker(&vhost.amqp_url());
    let mut topology = events_to_all();
    topology.exchanges.push(Exchange { name: "wide".into(), kind: ExchangeKind::Fanout });
    topology.queues.push(Queue { single_active_consumer: true, ..queue("one", "one") });
    topology.declare(&broker).await.unwrap();
    topology.declare(&broker).await.unwrap();

    // RabbitMQ accepts a second declaration only if it equals the first.
    let observer = Observer::of(&vhost).await;
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    observer.channel.queue_declare("all".into(), durable, arguments.clone()).await.unwrap();
    arguments.insert("x-single-active-consumer".into(), true.into());
    observer.channel.queue_declare("one".into(), durable, arguments).await.unwrap();
}

#[tokio::test]
async fn objects_with_other_properties_are_used_as_they_are() {
    let vhost = TestVhost::new().await;
    let broker = broker(&vhost.amqp_url());
    let observer = Observer::of(&vhost).await;
    // A direct exchange instead of a topic exchange, and a classic queue instead of a quorum queue.
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    observer.channel.exchange_declare("events".into(), Direct, durable, FieldTable::default()).await.unwrap();
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    observer.channel.queue_declare("old".into(), durable, FieldTable::default()).await.unwrap();

    let topology = Topology { queues: vec![queue("old", "to.a"), queue("new", "to.a")], ..events_to_all() };
    topology.declare(&broker).await.unwrap();
    let mut publisher = Publisher::new(broker, "events".into(), false);
    assert_eq!(publisher.publish(&[message(1, None, "to.a")]).await.unwrap(), [PublishOutcome::Confirmed]);
    assert_eq!(observer.remove_all_ids("old").await, ["1"]);
    assert_eq!(observer.remove_all_ids("new").await, ["1"]);
}

#[tokio::test]
async fn a_binding_to_a_missing_exchange_names_the_exchange() {
    let vhost = TestVhost::new().await;
    let broker = broker(&vhost.amqp_url());
    let binding = Binding { exchange: "elsewhere".into(), routing_key: String::new() };
    let queue = Queue { name: "q".into(), bindings: vec![binding], single_active_consumer: false };
    let error = Topology { queues: vec![queue], ..Default::default() }.declare(&broker).await.unwrap_err();
    assert!(matches!(&error, BrokerError::NoExchange(name) if name == "elsewhere"), "{error}");
    let long = Exchange { name: "x".repeat(256), kind: ExchangeKind::Topic };
    let error = Topology { exchanges: vec![long], ..Default::default() }.declare(&broker).await.unwrap_err();
    assert!(matches!(error, BrokerError::NameTooLong(_)), "{error}");
}

#[test]
fn defaults_may_be_omitted_and_misspelled_fields_are_rejected() {
    let written = json!({
        "exchanges": [{ "name": "events" }, { "name": "wide", "kind": "fanout" }],
        "queues": [{ "name": "all", "bindings": [{ "exchange": "events", "routing_key": "to.#" }] }],
    });
    let mut expected = events_to_all();
    expected.exchanges.push(Exchange { name: "wide".into(), kind: ExchangeKind::Fanout });
    assert_eq!(serde_json::from_value::<Topology>(written).unwrap(), expected);

    for misspelled in [
        json!({ "exchange": [] }),
        json!({ "exchanges": [{ "name": "events", "kind": "Topic" }] }),
        json!({ "queues": [{ "name": "all", "singleactiveconsumer": true }] }),
        json!({ "queues": [{ "name": "all", "bindings": [{ "exchange": "events", "key": "a" }] }] }),
    ] {
        serde_json::from_value::<Topology>(misspelled.clone()).expect_err(&misspelled.to_string());
    }
}

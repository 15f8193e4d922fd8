//! Intake of messages with foreign ids, and of messages that cannot be posted.

use std::sync::Arc;

use chrono::{DateTime, Duration, Utc};
use lapin::options::BasicPublishOptions;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use pillarbox::consumers::{StartAt, Subscription};
use pillarbox::log::MessagePattern;
use pillarbox::operations::maintenance::{self, Retention};
use relay::{Broker, IntakeQueue};
use runtime::secret::Secret;
use serde_json::json;
use sqlx::PgPool;
use testkit::TestVhost;
use uuid::Uuid;

use crate::consumers::support::{
    Process, count, database, fast_options, numbers, recorder, wait_for_count, wait_for_effects,
};
use crate::relay::broker_client::BrokerClient;

/// Starts the intake of a queue and a consumer that records the numbers of its messages.
fn start_intake_and_consumer(db: &PgPool, vhost: &TestVhost, queue: &IntakeQueue) -> Process {
    let process = Process::idle(db);
    let broker = Arc::new(Broker::new(Secret::new(vhost.amqp_url())).unwrap());
    relay::start_intake(&process.runtime, queue, &broker);
    let matching = MessagePattern { sources: vec![relay::source_of(&queue.queue)], ..MessagePattern::default() };
    let subscription = Subscription {
        consumer: "effects".into(),
        matching,
        start: StartAt::Beginning,
        handler: recorder(),
        options: fast_options(),
    };
    process.runtime.subscribe(&subscription);
    process
}

fn id_at(time: DateTime<Utc>) -> Uuid {
    let milliseconds = u64::try_from(time.timestamp_millis()).unwrap();
    let random = Uuid::new_v4().into_bytes();
    uuid::Builder::from_unix_timestamp_millis(milliseconds, random.first_chunk().unwrap()).into_uuid()
}

#[tokio::test]
async fn an_id_with_any_timestamp_has_one_effect_and_expires() {
    let (database, vhost) = (database().await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    amqp.queue("orders", "", "").await;
    let process = start_intake_and_consumer(db, &vhost, &IntakeQueue::new("orders"));
    let now = Utc::now();
    let ids = [
        id_at(now),
        id_at(now - Duration::hours(12)),
        id_at(now + Duration::hours(12)),
        id_at(now + Duration::days(2)),
        id_at(now + Duration::days(4_000)),
        id_at(now - Duration::days(8)),
        id_at(DateTime::UNIX_EPOCH + Duration::days(1)),
        Uuid::new_v4(),
    ];
    for round in 0..3 {
        for (number, id) in ids.iter().enumerate() {
            let body = json!({"event_id": format!("evt_{id}"), "event_type": "order.placed", "schema_version": 1,
                "timestamp": "2026-01-01T00:00:00Z", "payload": number});
            // With another AMQP message id each time, or without one.
            let message_id = format!("{round} {number}");
            let message_id = (round < 2).then_some(message_id.as_str());
            amqp.publish("orders", message_id, None, Some("k"), body.to_string().as_bytes()).await;
        }
    }
    amqp.publish("orders", Some("last"), Some("order.placed"), Some("k"), b"8").await;
    wait_for_effects(db, 9).await;
    process.stop().await;
    assert_eq!(numbers(db).await, (0..9).collect::<Vec<_>>(), "each id has one effect");

    let in_log: Vec<Uuid> =
        sqlx::query_scalar("select message_id from pillarbox.log where source = 'amqp:orders' order by id")
            .fetch_all(db)
            .await
            .unwrap();
    let time_of = |id: &Uuid| id.as_u128() >> 80;
    for (id, logged) in ids.iter().zip(&in_log) {
        assert_ne!(id, logged, "no producer chooses an id of the log");
        let is_recent = ids[..3].contains(id);
        assert_eq!(time_of(id) == time_of(logged), is_recent, "the time of {id} is kept if it is recent");
    }
    // An inbox that was created today has no partition for yesterday; those ids are stored with the foreign ones.
    let far: i64 = sqlx::query_scalar(
        "select count(*) from pillarbox.inbox_overflow
         where message_id not between pillarbox.uuid_at(now() - interval '7 days') and pillarbox.uuid_at(now() + interval '1 day')",
    )
    .fetch_one(db)
    .await
    .unwrap();
    assert_eq!(far, 0);
    let older = "update pillarbox.inbox_foreign set at = at - interval '30 days'";
    sqlx::query(older).execute(db).await.unwrap();
    maintenance::run_once(db, Retention::default(), maintenance::CATCH_UP_TIME).await.unwrap();
    assert_eq!(count(db, "inbox_foreign").await, 0, "it is emptied by retention");
}

#[tokio::test]
async fn a_dead_letter_of_a_queue_has_its_key_headers_and_tenant() {
    let (database, vhost) = (database().await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    amqp.queue("orders", "", "").await;
    let mut queue = IntakeQueue::new("orders");
    queue.tenant = "acme".parse().unwrap();
    let process = start_intake_and_consumer(db, &vhost, &queue);
    let mut headers = FieldTable::default();
    for (name, value) in [("pillarbox-key", "k"), ("traceparent", "any"), ("x-origin", "shop"), ("x-nul", "\0")] {
        headers.insert(name.into(), AMQPValue::LongString(value.into()));
    }
    // Only headers that are text are stored.
    headers.insert("x-number".into(), AMQPValue::LongInt(5));
    let connection = Connection::connect(&vhost.amqp_url(), ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    for properties in [BasicProperties::default().with_headers(headers), BasicProperties::default()] {
        let options = BasicPublishOptions::default();
        channel.basic_publish("".into(), "orders".into(), options, b"not json", properties).await.unwrap();
    }
    wait_for_count(db, "dead_letter", 2).await;
    process.stop().await;
    let found: Vec<(String, Option<String>, serde_json::Value)> =
        sqlx::query_as("select tenant, key, headers from pillarbox.dead_letter order by id")
            .fetch_all(db)
            .await
            .unwrap();
    let stored = json!({"pillarbox-key": "k", "traceparent": "any", "x-origin": "shop", "x-nul": "\u{fffd}"});
    assert_eq!(found[0], ("acme".to_owned(), Some("k".to_owned()), stored));
    assert_eq!(found[1], ("acme".to_owned(), None, json!({})));
}

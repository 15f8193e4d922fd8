//! The relay publishes the log to RabbitMQ.

use std::collections::HashSet;

use lapin::ExchangeKind;
use pillarbox::log::{AggregateId, Post, Source, post_all};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
use server::migrations;
use testkit::{TestApp, TestDatabase, TestVhost, eventually};

use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{
    TIMEOUT, distinct, first_copies, numbered, one_route, parked, post, post_from, relay_to, relayed,
};

#[tokio::test]
async fn ten_thousand_messages_reach_the_queue_of_their_type_once() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let app = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        // A process that stands still for longer than its lease publishes again, which is not the claim of this test.
        settings.lease_ms = 15_000;
    })
    .await;
    let types = ["RESTAURANT", "CUSTOMER", "AGENCY", "ADMIN"];
    let messages: Vec<Post> = (0..10_000)
        .map(|n| Post {
            aggregate_type: Some(types[n % 4].to_owned()),
            aggregate_id: Some(AggregateId::Number(n as i64 % 7)),
            payload: to_raw_value(&json!({ "n": n })).unwrap(),
            ..numbered("RESERVATION_REQUESTED", Some(&format!("r{}", n % 100)), n)
        })
        .collect();
    let mut tx = database.pool().begin().await.unwrap();
    post_all(&mut tx, &Source::new("notify"), &messages).await.unwrap();
    tx.commit().await.unwrap();
    let amqp = BrokerClient::connect(&vhost).await;
    eventually("all messages are published", TIMEOUT, async || relayed(database.pool(), "relay.notifications").await)
        .await;
    let mut all = HashSet::new();
    for (at, kind) in types.iter().enumerate() {
        let queue = format!("notification.{}", kind.to_lowercase());
        let received = amqp.consume(&queue, 2_500).await;
        assert_eq!(amqp.depth(&queue).await, 0, "no message is published twice");
        for message in &received {
            let number = message.body["payload"]["n"].as_u64().unwrap();
            assert_eq!(number as usize % 4, at, "the message is in the queue of its type");
            assert_eq!(message.body["aggregate_type"], *kind);
            assert_eq!(message.body["aggregate_id"], number % 7, "a numeric id stays a number");
            assert_eq!(message.body["event_type"], "RESERVATION_REQUESTED");
            assert_eq!(message.body["event_id"], message.message_id);
            assert_eq!((message.routing_key.as_str(), message.persistent), (queue.as_str(), true));
            let fields: Vec<&str> = message.body.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(
                fields,
                [
                    "event_id",
                    "event_type",
                    "timestamp",
                    "aggregate_type",
                    "aggregate_id",
                    "trace_id",
                    "schema_version",
                    "payload"
                ]
                .into_iter()
                .collect::<std::collections::BTreeSet<_>>()
                .into_iter()
                .collect::<Vec<_>>(),
                "the envelope has no other fields"
            );
            all.insert(number);
        }
    }
    assert_eq!(all.len(), 10_000);
    let pending: i64 =
        sqlx::query_scalar("select count(*) from pillarbox.outbox_status where status <> 'sent' or sent_at is null")
            .fetch_one(database.pool())
            .await
            .unwrap();
    assert_eq!(pending, 0);
    let metrics = app.anonymous().get("/metrics").await.text;
    assert!(metrics.contains("pillarbox_relay_published_total{route=\"notifications\"}"), "{metrics}");
    assert!(metrics.contains("event_publish_duration_seconds"), "{metrics}");
    app.stop().await;
}

#[tokio::test]
async fn headers_of_a_sql_post_are_headers_of_the_amqp_message() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let app = TestApp::start_with(&database, one_route(&vhost)).await;
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.exchange("test.exchange", ExchangeKind::Topic).await;
    amqp.queue("all", "test.exchange", "#").await;
    let query = "select pillarbox.post('test.a', '1', headers => $1)";
    let headers = json!({"region": "Zürich 8", "key": "k", "source_event_id": "own"});
    sqlx::query(query).bind(headers).execute(database.pool()).await.unwrap();
    let message = amqp.consume("all", 1).await.remove(0);
    let of_producer = message.headers.iter().filter(|(name, _)| name.starts_with("pillarbox-header-"));
    let mut of_producer: Vec<(&str, &str)> = of_producer.map(|(name, value)| (&**name, &**value)).collect();
    of_producer.sort_unstable();
    assert_eq!(of_producer, [("pillarbox-header-key", "k"), ("pillarbox-header-region", "Zürich 8")]);
    assert!(!message.headers.contains_key("pillarbox-key"), "a header of the producer replaces none of ours");
    app.stop().await;
}

#[tokio::test]
async fn an_unroutable_message_blocks_only_its_key() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.exchange("test.exchange", ExchangeKind::Topic).await;
    amqp.queue("good", "test.exchange", "test.good").await;
    let db = database.pool();
    let app = TestApp::start_with(&database, |settings| {
        one_route(&vhost)(settings);
        settings.relay.routes[0].required = true;
    })
    .await;
    // In one batch, for each key: a routable message, one that may be unroutable, and another routable one.
    let of_key = |number: usize| {
        let key = format!("key{number}");
        let second = if number.is_multiple_of(5) { "test.lost" } else { "test.good" };
        [(1, "test.good"), (2, second), (3, "test.good")].map(|(n, topic)| numbered(topic, Some(&key), n))
    };
    let mut tx = db.begin().await.unwrap();
    post_all(&mut tx, &Source::new("sql"), &(0..50).flat_map(of_key).collect::<Vec<Post>>()).await.unwrap();
    tx.commit().await.unwrap();
    // Some may arrive twice: a batch that could not be committed is published again.
    let mut received = Vec::new();
    amqp.consume_until("good", &mut received, |received| distinct(received) >= 130).await;
    eventually("the unroutable messages and those behind them are parked", TIMEOUT, async || {
        parked(db).await == (10, 20)
    })
    .await;
    for (key, numbers) in first_copies(&received) {
        let number: usize = key[3..].parse().unwrap();
        let expected: &[u64] = if number.is_multiple_of(5) { &[1] } else { &[1, 2, 3] };
        assert_eq!(numbers, expected, "{key}");
    }
    // Once a queue is bound for it, it is published, and the messages behind it follow.
    amqp.queue("found", "test.exchange", "test.lost").await;
    assert_eq!(amqp.consume("found", 10).await.len(), 10);
    amqp.consume_until("good", &mut received, |received| distinct(received) >= 140).await;
    eventually("nothing is parked", TIMEOUT, async || parked(db).await == (0, 0)).await;
    app.stop().await;
}

#[tokio::test]
async fn an_unroutable_message_of_an_optional_route_is_counted() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let app = TestApp::start_with(&database, one_route(&vhost)).await;
    post(database.pool(), "test.lost", None, 1).await;
    eventually("the metric counts the message", TIMEOUT, async || {
        app.anonymous()
            .get("/metrics")
            .await
            .text
            .contains("pillarbox_consumer_messages_total{consumer=\"relay.test\",outcome=\"unrouted\"}")
    })
    .await;
    assert_eq!(parked(database.pool()).await, (0, 0));
    app.stop().await;
}

#[tokio::test]
async fn a_missing_legacy_exchange_blocks_nothing_and_catches_up() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.exchange("smap.events", ExchangeKind::Topic).await;
    amqp.queue("smtp_send_email_v2", "smap.events", "email.#").await;
    let app = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        settings.relay.enable_dual_publish = true;
    })
    .await;
    let db = database.pool();
    eventually("the legacy route has read the log", TIMEOUT, async || relayed(db, "relay.legacy").await).await;
    // The data is published byte for byte, whatever the rest of the payload is.
    let mail = |number: usize| {
        let payload = format!("{{\"idempotency_key\": \"k{number}\", \"data\": {}}}", email_data(number));
        Post::new("email.verification.requested", RawValue::from_string(payload).unwrap()).with_key("u1")
    };
    post_from(db, "identity", &mail(1)).await;
    post_from(db, "identity", &numbered("subscription.created", Some("u1"), 2)).await;
    post_from(db, "identity", &mail(3)).await;
    let new = amqp.consume("smtp_send_email_v2", 2).await;
    let numbers: Vec<&Value> = new.iter().map(|message| &message.body["payload"]["data"]["n"]).collect();
    assert_eq!(numbers, [1, 3]);
    let readiness = app.anonymous().get("/readyz").await.text;
    eventually("readiness names the exchange", TIMEOUT, async || {
        app.anonymous().get("/readyz").await.text.contains("smtp_send_email_exc")
    })
    .await;
    assert!(!readiness.contains("unready"));

    // The exchange must have its queue from the start: a message to an exchange without a queue is skipped.
    amqp.exchange("nowhere_else", ExchangeKind::Fanout).await;
    amqp.queue("smtp_send_email", "nowhere_else", "").await;
    amqp.exchange_with_alternate("smtp_send_email_exc", ExchangeKind::Fanout, "nowhere_else").await;
    let old = amqp.consume("smtp_send_email", 2).await;
    let bodies: Vec<&str> = old.iter().map(|message| std::str::from_utf8(&message.body_bytes).unwrap()).collect();
    assert_eq!(bodies, [email_data(1), email_data(3)], "exactly the data of the payload");
    for (old, new) in old.iter().zip(&new) {
        assert_eq!((&old.message_id, &old.kind), (&new.message_id, &new.kind), "the ids are properties");
        assert_eq!(old.headers["pillarbox-key"], "u1");
    }

    // A payload without data is not what the old consumers know: it is parked there, and sent to the new exchange.
    post_from(db, "identity", &numbered("email.verification.requested", Some("u2"), 9)).await;
    amqp.consume("smtp_send_email_v2", 1).await;
    eventually("it is parked", TIMEOUT, async || parked(db).await == (1, 1)).await;
    let query = "select consumer || ': ' || last_error from pillarbox.parked";
    let error: String = sqlx::query_scalar(query).fetch_one(db).await.unwrap();
    assert!(error.starts_with("relay.legacy: ") && error.contains("no object `data`"), "{error}");
    app.stop().await;

    // After dual publishing was off for a while, the missed messages are published.
    let off = TestApp::start_with(&database, relay_to(&vhost)).await;
    post_from(db, "identity", &mail(4)).await;
    amqp.consume("smtp_send_email_v2", 1).await;
    off.stop().await;
    assert_eq!(amqp.depth("smtp_send_email").await, 0);
    let on = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        settings.relay.enable_dual_publish = true;
    })
    .await;
    assert_eq!(amqp.consume("smtp_send_email", 1).await[0].body["n"], 4);
    on.stop().await;
}

/// An e-mail with unusual spaces and a number that a parser would change.
fn email_data(number: usize) -> String {
    format!("{{ \"to\":\"a@b.example\",  \"n\": {number}, \"price\": 1.50 }}")
}

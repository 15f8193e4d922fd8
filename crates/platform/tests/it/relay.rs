//! The log to RabbitMQ.

use std::collections::HashSet;

use lapin::ExchangeKind;
use mailbox::database::migrations;
use serde_json::json;
use testkit::{TestApp, TestDatabase, TestVhost, drain};

use crate::broker::Outside;
use crate::relaying::{PATIENCE, distinct, firsts, one_route, parked, post, relayed, relaying};

#[tokio::test]
async fn ten_thousand_events_reach_the_queue_of_their_aggregate_type_once() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let app = TestApp::start_with(&database, relaying(&vhost)).await;
    sqlx::query(
        "select pillarbox.post('RESERVATION_REQUESTED', json_build_object('n', n), key => 'r' || n % 100,
             aggregate_type => (array['RESTAURANT', 'CUSTOMER', 'AGENCY', 'ADMIN'])[n % 4 + 1], aggregate_id => (n % 7)::text)
         from generate_series(0, 9999) as n",
    )
    .execute(database.pool())
    .await
    .unwrap();
    let outside = Outside::of(&vhost).await;
    drain("the queues are there", PATIENCE, async || relayed(database.pool(), "relay.notifications").await).await;
    let mut all = HashSet::new();
    for (at, kind) in ["RESTAURANT", "CUSTOMER", "AGENCY", "ADMIN"].iter().enumerate() {
        let queue = format!("notification.{}", kind.to_lowercase());
        let received = outside.take(&queue, 2_500).await;
        assert_eq!(outside.depth(&queue).await, 0, "nothing twice");
        for message in &received {
            let number = message.body["payload"]["n"].as_u64().unwrap();
            assert_eq!(number as usize % 4, at, "the right queue");
            assert_eq!(message.body["aggregate_type"], *kind);
            assert_eq!(message.body["aggregate_id"], number % 7, "a number stays a number");
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
                "no recipients, preferences or channels"
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
    let metrics = app.anyone().get("/metrics").await.text;
    assert!(metrics.contains("pillarbox_relay_published_total{route=\"notifications\"}"), "{metrics}");
    assert!(metrics.contains("event_publish_duration_seconds"), "{metrics}");
    app.stop().await;
}

#[tokio::test]
async fn unroutable_among_routable_waits_with_its_key_and_the_others_go() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let outside = Outside::of(&vhost).await;
    outside.exchange("test.exchange", ExchangeKind::Topic).await;
    outside.queue("good", "test.exchange", "test.good").await;
    let db = database.pool();
    // In one pipeline: of each key, a routable one, one that nobody wants, and another routable one.
    for number in 0..50 {
        let key = format!("key{number}");
        post(db, "test.good", Some(&key), 1).await;
        post(db, if number % 5 == 0 { "test.lost" } else { "test.good" }, Some(&key), 2).await;
        post(db, "test.good", Some(&key), 3).await;
    }
    let app = TestApp::start_with(&database, |settings| {
        one_route(&vhost)(settings);
        settings.relay.routes[0].required = true;
    })
    .await;
    // Some may come twice: a batch that could not be kept is sent again.
    let mut received = Vec::new();
    outside.take_until("good", &mut received, |received| distinct(received) >= 130).await;
    drain("the others are parked", PATIENCE, async || parked(db).await == (10, 20)).await;
    for (key, numbers) in firsts(&received) {
        let number: usize = key[3..].parse().unwrap();
        let expected: &[u64] = if number.is_multiple_of(5) { &[1] } else { &[1, 2, 3] };
        assert_eq!(numbers, expected, "{key}");
    }
    // Once there is a queue for it, it goes, and what waited behind it follows.
    outside.queue("found", "test.exchange", "test.lost").await;
    assert_eq!(outside.take("found", 10).await.len(), 10);
    outside.take_until("good", &mut received, |received| distinct(received) >= 140).await;
    drain("nothing is parked", PATIENCE, async || parked(db).await == (0, 0)).await;
    app.stop().await;
}

#[tokio::test]
async fn what_nobody_wants_on_a_route_that_is_not_required_is_counted_and_passed() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let app = TestApp::start_with(&database, one_route(&vhost)).await;
    post(database.pool(), "test.lost", None, 1).await;
    drain("it is counted", PATIENCE, async || {
        app.anyone()
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
async fn dual_publish_with_its_exchange_missing_holds_up_nobody_and_catches_up() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let outside = Outside::of(&vhost).await;
    outside.exchange("smap.events", ExchangeKind::Topic).await;
    outside.queue("smtp_send_email_v2", "smap.events", "email.#").await;
    let app = TestApp::start_with(&database, |settings| {
        relaying(&vhost)(settings);
        settings.relay.enable_dual_publish = true;
    })
    .await;
    let db = database.pool();
    drain("the legacy route is known", PATIENCE, async || relayed(db, "relay.legacy").await).await;
    post(db, "email.verification.requested", Some("u1"), 1).await;
    post(db, "subscription.created", Some("u1"), 2).await;
    post(db, "email.verification.requested", Some("u1"), 3).await;
    let new = outside.take("smtp_send_email_v2", 2).await;
    assert_eq!(firsts(&new)["u1"], [1, 3]);
    let readiness = app.anyone().get("/readyz").await.text;
    drain("readiness names the exchange", PATIENCE, async || {
        app.anyone().get("/readyz").await.text.contains("smtp_send_email_exc")
    })
    .await;
    assert!(!readiness.contains("unready"));

    // With its queue from the first moment on: what comes to an exchange without one is passed.
    outside.exchange("nowhere_else", ExchangeKind::Fanout).await;
    outside.queue("smtp_send_email", "nowhere_else", "").await;
    outside.exchange_or_else("smtp_send_email_exc", ExchangeKind::Fanout, "nowhere_else").await;
    let old = outside.take("smtp_send_email", 2).await;
    assert_eq!(
        old.iter().map(|message| message.body.clone()).collect::<Vec<_>>(),
        [json!(1), json!(3)],
        "bare payloads"
    );
    assert_eq!(
        old.iter().map(|message| &message.message_id).collect::<Vec<_>>(),
        new.iter().map(|message| &message.message_id).collect::<Vec<_>>()
    );
    app.stop().await;

    // Off for a while, and on again: what was missed comes.
    let off = TestApp::start_with(&database, relaying(&vhost)).await;
    post(db, "email.verification.requested", Some("u1"), 4).await;
    outside.take("smtp_send_email_v2", 1).await;
    off.stop().await;
    assert_eq!(outside.depth("smtp_send_email").await, 0);
    let on = TestApp::start_with(&database, |settings| {
        relaying(&vhost)(settings);
        settings.relay.enable_dual_publish = true;
    })
    .await;
    assert_eq!(outside.take("smtp_send_email", 1).await[0].body, json!(4));
    on.stop().await;
}

#[tokio::test]
async fn a_producer_and_a_consumer_in_python_need_nothing_of_ours() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let app = TestApp::start_with(&database, relaying(&vhost)).await;
    let db = database.pool();
    sqlx::raw_sql("create table reservation (id int, seats int); grant insert on reservation to pillarbox_producer")
        .execute(db)
        .await
        .unwrap();
    Outside::of(&vhost).await.until_there("notification.restaurant").await;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/python/producer_and_consumer.py");
    // The distribution's own Python: that is where its packages are.
    let output = tokio::process::Command::new("/usr/bin/python3")
        .arg(script)
        .env("POSTGRES_URL", database.url())
        .env("AMQP_URL", vhost.amqp_url())
        .env("QUEUE", "notification.restaurant")
        .output()
        .await
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let envelope: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(envelope["payload"], json!({"seats": 2}));
    assert_eq!((&envelope["event_type"], &envelope["aggregate_id"]), (&json!("RESERVATION_REQUESTED"), &json!(5)));
    app.stop().await;
}

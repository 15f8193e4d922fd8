//! The first start with RabbitMQ: which default routes are on, and with which messages they begin.

use std::sync::Arc;

use lapin::ExchangeKind;
use serde_json::{Value, json};
use server::migrations;
use server::settings::Settings;
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase, TestVhost, eventually};
use tokio::sync::Barrier;

use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{TIMEOUT, numbered, parked, post, post_from, relay_to, statuses};
use crate::server::process::run;

/// The relay with the routes that are on without a setting.
fn shipped(vhost: &TestVhost) -> impl Fn(&mut Settings) {
    let relay_to = relay_to(vhost);
    move |settings| {
        relay_to(settings);
        settings.relay.enable_routes = Settings::default().relay.enable_routes;
    }
}

async fn cursors(db: &PgPool) -> Vec<String> {
    let query = "select consumer from pillarbox.cursor where kind = 'relay' and consumer like 'relay.%' order by 1";
    sqlx::query_scalar(query).fetch_all(db).await.unwrap()
}

/// Binds a queue with all messages to an exchange.
async fn queue_of(amqp: &BrokerClient, exchange: &str) -> String {
    let queue = format!("all of {exchange}");
    amqp.exchange(exchange, ExchangeKind::Topic).await;
    amqp.queue(&queue, exchange, "#").await;
    queue
}

fn payloads(received: &[crate::relay::broker_client::Received]) -> Vec<&Value> {
    received.iter().map(|one| &one.body["payload"]).collect()
}

#[tokio::test]
async fn without_a_setting_nothing_is_published_that_has_no_reader() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    let (events, mails) = (queue_of(&amqp, "pillarbox.events").await, queue_of(&amqp, "smap.events").await);
    let business_events = queue_of(&amqp, "notifications.exchange").await;
    let app = TestApp::start_with(&database, shipped(&vhost)).await;
    post_from(db, "notify", &numbered("order.late", Some("k"), 1)).await;
    post_from(db, "identity", &numbered("email.welcome", Some("k"), 2)).await;
    post_from(db, "identity", &numbered("subscription.created", Some("k"), 3)).await;
    post(db, "order.created", Some("k"), 4).await;
    assert_eq!(payloads(&amqp.consume(&events, 1).await), [4]);
    assert_eq!(payloads(&amqp.consume(&mails, 1).await), [3], "no other route publishes e-mails");
    assert_eq!((amqp.depth(&mails).await, amqp.depth(&business_events).await), (0, 0));
    assert_eq!(cursors(db).await, ["relay.dead-letters", "relay.default", "relay.smap"]);
    assert_eq!(parked(db).await, (0, 0));
    assert!(!amqp.has_queue("notification.customer").await, "the route is off");

    // No queue is bound to this exchange, and none has to be.
    post_from(db, "pillarbox", &numbered("dead_letter.test", None, 5)).await;
    let is_unrouted = async || statuses(db, "relay.dead-letters", "dead_letter.test").await == ["unrouted"];
    eventually("the message is unrouted", TIMEOUT, is_unrouted).await;
    let overview = app.admin().get("/admin/v1/overview").await.json();
    assert_eq!(overview["findings"], json!([]), "{overview}");
    let (_, status, error) =
        run(&["status", "--database-url", &database.url()], &[("PILLARBOX_AMQP_URL", &vhost.amqp_url())]);
    let line = |name: &str| status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
    let off = line("off ");
    assert!(off.contains("relay.notifications, relay.email") && off.contains("relay.enable_routes"), "{status}{error}");
    let unrouted = line("unrouted ");
    assert!(unrouted.contains("1 of relay.dead-letters") && unrouted.contains("none has to be"), "{status}{error}");
    app.stop().await;
}

#[tokio::test]
async fn the_first_routes_start_with_what_is_posted_after_the_start() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    let (events, mails) = (queue_of(&amqp, "pillarbox.events").await, queue_of(&amqp, "smap.events").await);
    post(db, "order.created", None, 1).await;
    let app = TestApp::start_with(&database, |settings| {
        shipped(&vhost)(settings);
        // A message that is posted before the relay begins to work is not too early.
        settings.relay.initial_delay_ms = 2_000;
    })
    .await;
    post(db, "order.created", None, 2).await;
    post_from(db, "identity", &numbered("email.welcome", None, 3)).await;
    assert_eq!(payloads(&amqp.consume(&events, 1).await), [2]);
    app.stop().await;

    // The same for a route that is turned on later. A replay publishes what was posted before.
    let app = TestApp::start_with(&database, relay_to(&vhost)).await;
    let has_route = async || cursors(db).await.contains(&"relay.email".to_owned());
    eventually("the route is on", TIMEOUT, has_route).await;
    post_from(db, "identity", &numbered("email.welcome", None, 4)).await;
    assert_eq!(payloads(&amqp.consume(&mails, 1).await), [4]);
    for (consumer, queue, expected) in [("relay.email", &mails, [3, 4]), ("relay.default", &events, [1, 2])] {
        let from = chrono::Utc::now() - chrono::TimeDelta::hours(1);
        let replay = json!({"consumer": consumer, "from": from.to_rfc3339(), "again": true});
        let requested = app.admin().post("/admin/v1/replays", replay).await;
        assert!((200..300).contains(&requested.status), "{requested:?}");
        // They have no key, so they may be in two shards.
        let mut received: Vec<u64> =
            amqp.consume(queue, 2).await.iter().filter_map(|one| one.body["payload"].as_u64()).collect();
        received.sort_unstable();
        assert_eq!(received, expected, "{consumer}");
    }
    app.stop().await;
}

/// Many processes may be started at once. None of them may find a part of the routes and start the others at the beginning.
#[tokio::test]
async fn processes_that_start_together_publish_no_earlier_message() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    let events = queue_of(&amqp, "pillarbox.events").await;
    let subscriptions = queue_of(&amqp, "smap.events").await;
    post(db, "order.created", None, 1).await;
    post_from(db, "identity", &numbered("subscription.created", None, 2)).await;
    let settings = {
        let mut settings = Settings::default();
        shipped(&vhost)(&mut settings);
        Arc::new(settings.relay)
    };
    let barrier = Arc::new(Barrier::new(20));
    let racers = (0..20).map(|_| {
        let (db, settings, barrier) = (db.clone(), settings.clone(), barrier.clone());
        tokio::spawn(async move {
            barrier.wait().await;
            relay::register_first_routes(&db, &settings, false).await
        })
    });
    for racer in racers.collect::<Vec<_>>() {
        racer.await.unwrap().unwrap();
    }
    let app = TestApp::start_with(&database, shipped(&vhost)).await;
    post(db, "order.created", None, 3).await;
    post_from(db, "identity", &numbered("subscription.created", None, 4)).await;
    assert_eq!(payloads(&amqp.consume(&events, 1).await), [3]);
    assert_eq!(payloads(&amqp.consume(&subscriptions, 1).await), [4]);
    app.stop().await;
}

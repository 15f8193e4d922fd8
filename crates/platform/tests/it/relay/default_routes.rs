//! The default routes and their retry policy, as they are shipped.

use lapin::ExchangeKind;
use mailbox::database::migrations;
use relay::Route;
use serde_json::json;
use testkit::{TestApp, TestDatabase, TestVhost, eventually};

use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{TIMEOUT, post, relay_to, relayed};

const EXCHANGES: [&str; 4] = ["pillarbox.events", "smap.events", "notifications.exchange", "pillarbox.dead_letters"];

/// A message of a required route is retried however often it has failed.
#[tokio::test]
async fn a_message_of_a_required_route_never_dies_by_count() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let db = database.pool();
    let app = TestApp::start_with(&database, relay_to(&vhost)).await;
    post(db, "email.welcome", Some("ada"), 1).await; // no queue is bound
    let attempts = async || -> Option<i32> {
        let query = "select attempts from pillarbox.parked where consumer = 'relay.email'";
        sqlx::query_scalar(query).fetch_optional(db).await.unwrap()
    };
    eventually("the message is parked", TIMEOUT, async || attempts().await.is_some()).await;
    for failed in [3, 100, 1_000_000] {
        let overdue = "update pillarbox.parked set attempts = $1, next_at = now() - interval '1 hour'";
        sqlx::query(overdue).bind(failed).execute(db).await.unwrap();
        eventually("it is tried again", TIMEOUT, async || match attempts().await {
            Some(attempts) if attempts > failed => Ok(()),
            other => Err(other),
        })
        .await;
    }
    let dead: i64 = sqlx::query_scalar("select count(*) from pillarbox.dead_letter").fetch_one(db).await.unwrap();
    assert_eq!(dead, 0);
    // It is published as soon as a queue is bound.
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.queue("mails", "smap.events", "email.#").await;
    sqlx::query("update pillarbox.parked set next_at = now()").execute(db).await.unwrap();
    assert_eq!(amqp.consume("mails", 1).await.len(), 1);
    app.stop().await;
}

#[tokio::test]
async fn hub_events_are_published_only_by_a_route_that_lists_their_source() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    amqp.queue("all", "", "").await;
    for exchange in EXCHANGES {
        amqp.exchange(exchange, ExchangeKind::Topic).await;
        amqp.bind("all", exchange, "#").await;
    }
    let app = TestApp::start_with(&database, relay_to(&vhost)).await;
    let topics = ["order.paid", "email.welcome", "notification.customer", "job.run", "dead_letter.x", "subscription.x"];
    for topic in topics {
        let posted = app.admin().post("/hub/v1/events", json!({"event_type": topic, "payload": {"n": 1}})).await;
        assert_eq!(posted.status, 202, "{posted:?}");
    }
    post(db, "order.created", None, 7).await;
    let published = amqp.consume("all", 1).await;
    assert_eq!(published[0].body["event_type"], "order.created");
    for route in Route::defaults() {
        let consumer = format!("relay.{}", route.name);
        eventually(&consumer, TIMEOUT, async || relayed(db, &consumer).await).await;
    }
    assert_eq!(amqp.depth("all").await, 0, "no hub event is published");
    app.stop().await;

    // A route that lists the source publishes them, so the queue would have received them.
    let app = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        settings.relay.routes =
            vec![Route { sources: vec!["hub".to_owned()], ..Route::new("hub", "pillarbox.events") }];
    })
    .await;
    assert_eq!(amqp.consume("all", topics.len()).await.len(), topics.len());
    app.stop().await;
}

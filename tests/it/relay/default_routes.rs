//! The default routes and their retry policy, as they are shipped, and how settings change them.

use std::path::Path;

use lapin::ExchangeKind;
use pillarbox::log::Post;
use relay::Route;
use runtime::config::Sources;
use serde_json::json;
use server::migrations;
use server::settings::Settings;
use testkit::{TestApp, TestDatabase, TestVhost, eventually};

use crate::operator::commands::Cli;
use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{TIMEOUT, numbered, post, post_from, relay_to, relayed, statuses};

const EXCHANGES: [&str; 4] = ["pillarbox.events", "smap.events", "notifications.exchange", "pillarbox.dead_letters"];

/// A message of a required route is retried however often it has failed.
#[tokio::test]
async fn a_message_of_a_required_route_never_dies_by_count() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let db = database.pool();
    let app = TestApp::start_with(&database, relay_to(&vhost)).await;
    post_from(db, "identity", &numbered("email.welcome", Some("ada"), 1)).await; // no queue is bound
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

/// Posts what its documented topics and aggregate types would send to the exchanges of other producers.
async fn post_lookalikes(db: &sqlx::PgPool) -> usize {
    let lookalikes = [
        ("customer.created", Some("CUSTOMER")),
        ("notification.customer", None),
        ("subscription.renewed", None),
        ("job.done", None),
        ("email.requested", None),
        ("dead_letter.relay_default", None),
    ];
    for (topic, aggregate_type) in lookalikes {
        sqlx::query("select pillarbox.post($1, '{}', key => 'k', aggregate_type => $2, aggregate_id => 7)")
            .bind(topic)
            .bind(aggregate_type)
            .execute(db)
            .await
            .unwrap();
    }
    lookalikes.len()
}

#[tokio::test]
async fn what_is_posted_in_sql_reaches_pillarbox_events_whatever_its_topic() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    amqp.exchange("pillarbox.events", ExchangeKind::Topic).await;
    amqp.queue("mine", "pillarbox.events", "#").await;
    let app = TestApp::start_with(&database, relay_to(&vhost)).await;
    let count = post_lookalikes(db).await;
    let received = amqp.consume("mine", count).await;
    let posted: Vec<String> =
        sqlx::query_scalar("select topic from pillarbox.log order by id").fetch_all(db).await.unwrap();
    let routing_keys: Vec<&str> = received.iter().map(|message| message.routing_key.as_str()).collect();
    assert_eq!(routing_keys, posted, "in order, with the topic as the routing key");
    eventually("all are sent", TIMEOUT, async || relayed(db, "relay.default").await).await;
    let consumers: Vec<String> = sqlx::query_scalar(
        "select distinct consumer from pillarbox.outbox_status where consumer like 'relay.%' and consumer <> 'relay.default'",
    )
    .fetch_all(db)
    .await
    .unwrap();
    assert_eq!(consumers, [""; 0], "no other route reads them");
    assert_eq!(amqp.depth("notification.customer").await, 0);
    app.stop().await;
}

#[tokio::test]
async fn messages_of_identity_and_progress_arrive_on_smap_events() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    amqp.exchange("smap.events", ExchangeKind::Topic).await;
    for (queue, topics) in [("subscriptions", "subscription.#"), ("jobs", "job.#"), ("mails", "email.#")] {
        amqp.queue(queue, "smap.events", topics).await;
    }
    let app = TestApp::start_with(&database, relay_to(&vhost)).await;
    for (number, topic) in ["subscription.created", "subscription.status_changed"].into_iter().enumerate() {
        post_from(db, "identity", &numbered(topic, Some("user"), number)).await;
    }
    post_from(db, "identity", &numbered("email.verification.requested", Some("user"), 2)).await;
    post_from(db, "progress", &numbered("job.completed", Some("project"), 3)).await;
    let received = amqp.consume("subscriptions", 2).await;
    let seen: Vec<_> = received.iter().map(|one| (one.routing_key.as_str(), &one.body["payload"])).collect();
    assert_eq!(seen, [("subscription.created", &json!(0)), ("subscription.status_changed", &json!(1))]);
    for (queue, topic, number) in [("jobs", "job.completed", 3), ("mails", "email.verification.requested", 2)] {
        let one = amqp.consume(queue, 1).await.remove(0);
        assert_eq!((one.routing_key.as_str(), &one.body["event_type"]), (topic, &json!(topic)));
        assert_eq!(one.body["payload"], number);
    }
    app.stop().await;
}

/// The example of the documentation, which routes SQL posts to the exchanges of the services.
fn documented_settings() -> Settings {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/event-routing-keys.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, section) = page.split_once("### Route SQL posts to other exchanges").unwrap();
    let section = section.split("\n#").next().unwrap();
    let example: String =
        section.lines().filter_map(|line| line.strip_prefix("    ")).flat_map(|line| [line, "\n"]).collect();
    let file = tempfile(&example);
    let sources = Sources { file: Some(file.as_ref()), given: Vec::new(), flags: json!({}) };
    let settings = sources.load().unwrap();
    std::fs::remove_file(&file).unwrap();
    settings
}

fn tempfile(content: &str) -> impl AsRef<Path> {
    let path = std::env::temp_dir().join(format!("pillarbox_{}.toml", uuid::Uuid::new_v4().simple()));
    std::fs::write(&path, content).unwrap();
    path
}

#[tokio::test]
async fn the_documented_settings_route_sql_posts_to_the_exchanges_of_the_services() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    for (queue, exchange) in [("smap", "smap.events"), ("other", "pillarbox.events")] {
        amqp.exchange(exchange, ExchangeKind::Topic).await;
        amqp.queue(queue, exchange, "#").await;
    }
    let app = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        settings.relay.routes = documented_settings().relay.routes;
    })
    .await;
    post_lookalikes(db).await;
    post(db, "order.created", Some("k"), 1).await;
    let topics = async |queue: &str, count: usize| -> Vec<String> {
        let mut topics: Vec<String> = amqp.consume(queue, count).await.into_iter().map(|one| one.kind).collect();
        topics.sort();
        topics
    };
    amqp.wait_for_queue("notification.customer").await;
    assert_eq!(topics("notification.customer", 2).await, ["customer.created", "notification.customer"]);
    assert_eq!(topics("smap", 3).await, ["email.requested", "job.done", "subscription.renewed"]);
    assert_eq!(topics("other", 2).await, ["dead_letter.relay_default", "order.created"]);
    app.stop().await;
}

#[tokio::test]
async fn a_message_that_no_queue_took_is_unrouted_and_never_sent() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    amqp.exchange("pillarbox.events", ExchangeKind::Topic).await;
    amqp.queue("mine", "pillarbox.events", "order.#").await;
    let app = TestApp::start_with(&database, relay_to(&vhost)).await;
    post(db, "order.created", None, 1).await;
    post(db, "job.done", None, 2).await;
    let is_unrouted = async |topic: &str| statuses(db, "relay.default", topic).await == ["unrouted"];
    eventually("the message is unrouted", TIMEOUT, async || is_unrouted("job.done").await).await;
    assert_eq!(amqp.consume("mine", 1).await.len(), 1);
    eventually("the other one is sent", TIMEOUT, async || {
        statuses(db, "relay.default", "order.created").await == ["sent"]
    })
    .await;

    let listed = app.admin().get("/admin/v1/log?topic=job").await.json();
    let shown = app.admin().get(&format!("/admin/v1/log/{}", listed["items"][0]["event_id"].as_str().unwrap())).await;
    let shown = shown.json();
    let of_route = |shown: &serde_json::Value| {
        shown["consumers"].as_array().unwrap().iter().find(|one| one["consumer"] == "relay.default").unwrap().clone()
    };
    let status = of_route(&shown);
    assert_eq!((&status["status"], &status["sent_at"]), (&json!("unrouted"), &json!(null)), "{shown}");
    let unrouted = async || -> i64 {
        let consumers = app.admin().get("/admin/v1/consumers").await.json();
        let consumers = consumers["items"].as_array().unwrap();
        consumers.iter().find(|one| one["consumer"] == "relay.default").unwrap()["unrouted"].as_i64().unwrap()
    };
    assert_eq!(unrouted().await, 1);
    let cursors = Cli::with_server(&database, &app).ok("cursors").await;
    let row = cursors.lines().find(|line| line.starts_with("relay.default")).unwrap();
    let column = cursors.lines().next().unwrap().split_whitespace().position(|head| head == "UNROUTED").unwrap();
    assert_eq!(row.split_whitespace().nth(column), Some("1"), "{cursors}");
    let metrics = app.anonymous().get("/metrics").await.text;
    assert!(
        metrics.contains("pillarbox_consumer_messages_total{consumer=\"relay.default\",outcome=\"unrouted\"} 1"),
        "{metrics}"
    );

    // Once a queue is bound, a replay sends it.
    amqp.bind("mine", "pillarbox.events", "job.#").await;
    let from = chrono::Utc::now() - chrono::TimeDelta::hours(1);
    let replay = json!({"consumer": "relay.default", "from": from.to_rfc3339()});
    let requested = app.admin().post("/admin/v1/replays", replay).await;
    assert!((200..300).contains(&requested.status), "{requested:?}");
    eventually("it is sent", TIMEOUT, async || statuses(db, "relay.default", "job.done").await == ["sent"]).await;
    assert_eq!(unrouted().await, 0);
    app.stop().await;
}

#[tokio::test]
async fn a_parked_message_shows_when_it_is_retried() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let db = database.pool();
    let app = TestApp::start_with(&database, relay_to(&vhost)).await;
    let first = Post { aggregate_type: Some("USER".to_owned()), ..numbered("user.left", Some("ada"), 1) };
    post_from(db, "notify", &first).await; // no queue for this aggregate type
    post_from(db, "notify", &Post { topic: "user.back".to_owned(), ..first }).await;
    let of = async |topic: &str| -> Option<(String, bool)> {
        let query = "select status, next_retry_at > created_at is true from pillarbox.outbox_status
                     where consumer = 'relay.notifications' and event_type = $1 and status = 'parked'";
        sqlx::query_as(query).bind(topic).fetch_optional(db).await.unwrap()
    };
    eventually("both are parked", TIMEOUT, async || of("user.left").await.is_some() && of("user.back").await.is_some())
        .await;
    assert_eq!(of("user.left").await.unwrap(), ("parked".to_owned(), true));
    assert_eq!(of("user.back").await.unwrap(), ("parked".to_owned(), false), "it waits for the first one");
    let listed = app.admin().get("/admin/v1/log?topic=user.left").await.json();
    let shown = app.admin().get(&format!("/admin/v1/log/{}", listed["items"][0]["event_id"].as_str().unwrap())).await;
    assert!(shown.json()["consumers"][0]["next_retry_at"].is_string(), "{shown:?}");
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

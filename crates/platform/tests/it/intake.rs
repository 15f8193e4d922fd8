//! From a queue of RabbitMQ into the log.

use std::time::Duration;

use kit::secret::Secret;
use lapin::ExchangeKind;
use mailbox::database::migrations;
use relay::IntakeQueue;
use serde_json::json;
use testkit::{FaultProxy, TestApp, TestDatabase, TestVhost, drain};

use crate::broker::Outside;
use crate::relaying::{PATIENCE, post, relaying};

#[tokio::test]
async fn a_queue_of_the_users_is_read_into_the_log_once_and_not_sent_back() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let outside = Outside::of(&vhost).await;
    outside.queue("orders", "", "").await;
    outside.exchange("pillarbox.events", ExchangeKind::Topic).await;
    outside.queue("back", "pillarbox.events", "#").await;
    let app = TestApp::start_with(&database, |settings| {
        relaying(&vhost)(settings);
        settings.relay.intake = vec![IntakeQueue::new("orders")];
    })
    .await;
    let db = database.pool();
    for number in 0..30 {
        let (id, body) = (format!("any id {number}"), number.to_string());
        outside.publish("orders", Some(&id), Some("order.placed"), Some("k"), body.as_bytes()).await;
        outside.publish("orders", Some(&id), Some("order.placed"), Some("k"), body.as_bytes()).await;
    }
    let in_log = async || -> Vec<i64> {
        sqlx::query_scalar("select payload::text::bigint from pillarbox.log where source = 'amqp:orders' order by id")
            .fetch_all(db)
            .await
            .unwrap()
    };
    drain("all are in the log", PATIENCE, async || in_log().await.len() >= 30).await;
    // A repeat after midnight: as if the first had come yesterday.
    sqlx::query("update pillarbox.inbox_foreign set at = at - interval '1 day'").execute(db).await.unwrap();
    outside.publish("orders", Some("any id 7"), Some("order.placed"), Some("k"), b"7").await;
    // What cannot be posted is kept, and holds up nothing: no JSON, no topic, NUL, and nested beyond measure.
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    outside.publish("orders", Some("bad 1"), Some("order.placed"), None, b"not json").await;
    outside.publish("orders", Some("bad 2"), Some("no topic"), None, b"1").await;
    outside.publish("orders", Some("bad 3\0"), Some("order.placed"), None, b"1").await;
    outside.publish("orders", Some("bad 4"), Some("order.placed"), None, deep.as_bytes()).await;
    outside.publish("orders", None, Some("order.placed"), Some("k"), b"30").await;
    drain("the last is in the log", PATIENCE, async || in_log().await.len() >= 31).await;
    assert_eq!(in_log().await, (0..31).collect::<Vec<_>>(), "each once, in order");
    let dead: Vec<(String, String)> = sqlx::query_as(
        "select payload::text, last_error from pillarbox.dead_letter where consumer = 'amqp:orders' order by id",
    )
    .fetch_all(db)
    .await
    .unwrap();
    assert_eq!(dead.len(), 4, "{dead:?}");
    assert_eq!(dead[0].0, "\"not json\"");
    drain("all is acknowledged", PATIENCE, async || outside.depth("orders").await == 0).await;
    post(db, "order.placed", None, 99).await;
    let back = outside.take("back", 1).await;
    assert_eq!(
        (back[0].body["payload"].clone(), outside.depth("back").await),
        (json!(99), 0),
        "only what was posted here"
    );
    app.stop().await;
}

#[tokio::test]
async fn a_database_that_goes_away_costs_a_queue_nothing() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let postgres = FaultProxy::in_front_of(&database.url()).await;
    let outside = Outside::of(&vhost).await;
    outside.queue("orders", "", "").await;
    let app = TestApp::start_with(&database, |settings| {
        relaying(&vhost)(settings);
        settings.database_url = Some(Secret::new(postgres.url(&database.url())));
        settings.relay.intake = vec![IntakeQueue::new("orders")];
    })
    .await;
    for number in 0..60 {
        match number % 20 {
            5 => postgres.refuse(),
            15 => postgres.pass(),
            _ => {}
        }
        let (id, body) = (format!("id {number}"), number.to_string());
        outside.publish("orders", Some(&id), Some("order.placed"), Some("k"), body.as_bytes()).await;
        tokio::time::sleep(Duration::from_millis(20)).await; // so that some are delivered while it is away
    }
    postgres.pass();
    let query = "select payload::text::bigint from pillarbox.log where source = 'amqp:orders' order by id";
    drain("all are in the log", PATIENCE, async || {
        let found: Vec<i64> = sqlx::query_scalar(query).fetch_all(database.pool()).await.unwrap();
        if found == (0..60).collect::<Vec<_>>() { Ok(()) } else { Err(found) }
    })
    .await;
    app.stop().await;
}

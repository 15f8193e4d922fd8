//! Messages posted in SQL as webhooks of their tenant: the setting `hub.sql_events`.

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use server::settings::Settings;
use sqlx::PgPool;
use testkit::{Client, Receiver, Reply, TestApp, TestDatabase};
use uuid::Uuid;

use crate::hub::fixture::{
    Fixture, attempts, post, received_numbers, replay_fanout, subscribe, wait_for_dead_letters, wait_for_outcome,
    wait_for_webhooks,
};
use crate::hub::stream_fixture::{create_stream, pull_count};
use crate::support::{caller, collect_pages, text};

fn with_sql_events(topics: &[&str]) -> impl FnOnce(&mut Settings) {
    let topics = json!(topics);
    move |settings| settings.hub.sql_events = serde_json::from_value(topics).unwrap()
}

/// Posts in SQL and returns the event id.
async fn post_in_sql(db: &PgPool, tenant: &str, topic: &str, n: u64, key: Option<&str>) -> String {
    let query = "select pillarbox.post($1, jsonb_build_object('n', $2::bigint), key => $3, tenant => $4)";
    let id: Uuid =
        sqlx::query_scalar(query).bind(topic).bind(n as i64).bind(key).bind(tenant).fetch_one(db).await.unwrap();
    format!("evt_{id}")
}

async fn listed(manager: &Client) -> Vec<String> {
    let id = |event: &Value| text(&event["event_id"]).to_owned();
    collect_pages(manager, "/hub/v1/events").await.iter().map(id).collect()
}

#[tokio::test]
async fn a_post_in_a_business_transaction_reaches_the_webhooks_of_its_tenant() {
    let fixture = Fixture::start().await;
    let (db, manager) = (fixture.database.pool(), &fixture.manager);
    let (receiver, others) = (Receiver::start().await, Receiver::start().await);
    let subscriber = subscribe(manager, &receiver.url(), json!({"format": "cloudevents"})).await;
    subscribe(&caller(&fixture.app, "manage", "rival").await, &others.url(), json!({})).await;
    sqlx::raw_sql("create table orders (id int)").execute(db).await.unwrap();
    let mut rolled_back = db.begin().await.unwrap();
    sqlx::query("select pillarbox.post('order.paid', '0', tenant => 'acme')").execute(&mut *rolled_back).await.unwrap();
    rolled_back.rollback().await.unwrap();
    let mut tx = db.begin().await.unwrap();
    sqlx::query("insert into orders values (1)").execute(&mut *tx).await.unwrap();
    let order = "select pillarbox.post('order.paid', '{\"total\":  9.50}'::json, key => 'order-1', tenant => 'acme')";
    let id: Uuid = sqlx::query_scalar(order).fetch_one(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    wait_for_webhooks(&receiver, 1).await;
    // What must not arrive comes before what must.
    post_in_sql(db, "acme", "email.code", 2, Some("order-1")).await;
    post_in_sql(db, "main", "order.paid", 3, Some("order-1")).await;
    let last = post_in_sql(db, "acme", "order.sent", 4, Some("order-1")).await;
    wait_for_outcome(manager, &last, &subscriber, "delivered").await;

    let received = receiver.received();
    assert_eq!(received.len(), 2, "no e-mail, no other tenant, nothing that was rolled back");
    let one = &received[0];
    let webhook = standardwebhooks::Webhook::new(text(&subscriber["secret"])).unwrap();
    webhook.verify(&one.body, &one.headers).unwrap();
    assert_eq!(one.header("webhook-id"), format!("evt_{id}"));
    assert_eq!((one.header("webhook-lane"), one.header("webhook-seq")), ("order-1", "1"));
    assert_eq!(received[1].header("webhook-seq"), "2");
    let body = one.json();
    assert_eq!((&body["type"], &body["source"]), (&json!("order.paid"), &json!("/pillarbox/sql")));
    assert!(String::from_utf8_lossy(&one.body).contains("{\"total\":  9.50}"), "byte for byte: {body}");

    let shown = manager.get(&format!("/hub/v1/events/evt_{id}")).await.json();
    assert_eq!((&shown["source"], &shown["ordering_key"]), (&json!("sql"), &json!("order-1")), "{shown}");
    assert_eq!(shown["outcomes"][0]["outcome"], "delivered");
    assert_eq!(attempts(manager, &shown["outcomes"][0]).await.len(), 1);
    assert_eq!(listed(manager).await, [last, format!("evt_{id}")]);
    assert_eq!(others.count(), 0);
    fixture.app.stop().await;
}

#[tokio::test]
async fn headers_of_a_sql_post_reach_webhooks_batches_and_streams() {
    let fixture = Fixture::start().await;
    let (db, manager) = (fixture.database.pool(), &fixture.manager);
    let (single, batches) = (Receiver::with_reply(|_| Reply::status(400)).await, Receiver::start().await);
    let subscriber = subscribe(manager, &single.url(), json!({})).await;
    subscribe(manager, &batches.url(), json!({"batch": {"max": 2}})).await;
    create_stream(manager, json!({})).await;
    let query = "select pillarbox.post('order.paid', '{\"n\": 1}', tenant => 'acme', headers => $1)";
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let headers = json!({"region": "Zürich 8", "request-id": "r1", "traceparent": trace});
    sqlx::query(query).bind(headers).execute(db).await.unwrap();
    // Also from the dead letter that stores the event.
    let dead = wait_for_dead_letters(manager, &subscriber, 1).await.remove(0);
    let retry = format!("/hub/v1/dead-letters/{}/retry", text(&dead["id"]));
    assert_eq!(manager.send(Method::POST, &retry, None).await.status, 202);
    wait_for_webhooks(&single, 2).await;
    for one in single.received() {
        assert_eq!(one.header("webhook-header-region"), "Z%C3%BCrich%208");
        assert_eq!((one.header("webhook-header-request-id"), one.header("traceparent")), ("r1", trace));
        assert!(!one.headers.contains_key("webhook-header-traceparent"));
    }
    let expected = json!({"region": "Zürich 8", "request-id": "r1"});
    wait_for_webhooks(&batches, 1).await;
    assert_eq!(batches.received()[0].json()[0]["headers"], expected);
    let pulled = pull_count(manager, "reader", 1).await;
    assert_eq!(pulled["items"][0]["headers"], expected, "{pulled}");
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_failed_webhook_of_a_sql_post_is_dead_lettered_and_retried_like_any_other() {
    let fixture = Fixture::start().await;
    let (db, manager) = (fixture.database.pool(), &fixture.manager);
    let receiver = Receiver::with_reply(|_| Reply::status(400)).await;
    let subscriber = subscribe(manager, &receiver.url(), json!({})).await;
    // An id that its producer has chosen contains no time.
    let id = Uuid::new_v4();
    let query = "select pillarbox.post('order.paid', '{\"n\": 1}', key => 'k', tenant => 'acme', message_id => $1)";
    sqlx::query(query).bind(id).execute(db).await.unwrap();
    let dead = wait_for_dead_letters(manager, &subscriber, 1).await.remove(0);
    assert_eq!(dead["event_type"], "order.paid");
    let event = format!("evt_{id}");
    let outcome = wait_for_outcome(manager, &event, &subscriber, "dead").await;
    let message = manager.get(&format!("/hub/v1/messages/{}", text(&outcome["message_id"]))).await;
    assert_eq!(message.json()["lane"], "k", "{message:?}");
    receiver.set_reply(|_| Reply::status(200));
    let retry = format!("/hub/v1/dead-letters/{}/retry", text(&dead["id"]));
    assert_eq!(manager.send(Method::POST, &retry, None).await.status, 202);
    wait_for_webhooks(&receiver, 2).await;
    assert!(receiver.received().iter().all(|one| one.header("webhook-id") == event));
    wait_for_outcome(manager, &event, &subscriber, "delivered").await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn the_setting_narrows_sql_events_or_switches_them_off_and_a_replay_covers_older_ones() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let app = TestApp::start_with(&database, with_sql_events(&[])).await;
    let manager = caller(&app, "manage", "acme").await;
    let receiver = Receiver::start().await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({})).await;
    let off = post_in_sql(db, "acme", "order.paid", 1, None).await;
    let behind = post(&manager, "order.paid", json!({"n": 2}), None).await;
    wait_for_outcome(&manager, &behind, &subscriber, "delivered").await;
    manager.get(&format!("/hub/v1/events/{off}")).await.assert_problem(404, "event-not-found");
    assert_eq!(listed(&manager).await, std::slice::from_ref(&behind));
    app.stop().await;

    let app = TestApp::start_with(&database, with_sql_events(&["order.*"])).await;
    let manager = caller(&app, "manage", "acme").await;
    post_in_sql(db, "acme", "user.left", 3, None).await;
    let narrowed = post_in_sql(db, "acme", "order.sent", 4, None).await;
    wait_for_outcome(&manager, &narrowed, &subscriber, "delivered").await;
    assert_eq!(received_numbers(&receiver), [2, 4]);
    // Fan-out has passed the first one without making messages of it.
    assert_eq!(listed(&manager).await, [narrowed.clone(), behind.clone()]);
    manager.get(&format!("/hub/v1/events/{off}")).await.assert_problem(404, "event-not-found");
    replay_fanout(db, false).await;
    wait_for_webhooks(&receiver, 3).await;
    assert_eq!(received_numbers(&receiver), [2, 4, 1]);
    assert_eq!(listed(&manager).await, [narrowed, behind, off.clone()]);
    assert_eq!(manager.get(&format!("/hub/v1/events/{off}")).await.status, 200);
    app.stop().await;
}

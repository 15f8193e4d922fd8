//! Notifications as webhooks: a hub event in the tenant of the recipient.

use serde_json::json;
use server::migrations;
use testkit::{Receiver, TestApp, TestDatabase, eventually};

use super::fixture::{insert_contact, insert_due, set_event_type, statuses, wait_for_state};
use crate::hub::fixture::{Fixture, subscribe, wait_for_webhooks};
use crate::support::{DEADLINE, caller};

#[tokio::test]
async fn a_webhook_arrives_at_the_subscribers_of_the_recipients_tenant() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let db = database.pool();
    let (receiver, stranger) = (Receiver::start().await, Receiver::start().await);
    subscribe(&manager, &receiver.url(), json!({"event_types": ["notification.order.*"]})).await;
    subscribe(&caller(&app, "manage", "other").await, &stranger.url(), json!({})).await;
    for event_type in ["order.paid", "invoice.paid"] {
        set_event_type(&app, event_type, json!({"channels": ["webhook"]})).await;
    }
    let user = insert_contact(db, None, Some("acme")).await;
    let without_tenant = insert_contact(db, Some("ada@example.org"), None).await;
    let skipped = insert_due(db, without_tenant, "webhook", "order.paid", 0).await;
    let filtered = insert_due(db, user, "webhook", "invoice.paid", 0).await;
    let sent = insert_due(db, user, "webhook", "order.paid", 0).await;
    wait_for_webhooks(&receiver, 1).await;
    wait_for_state(db, sent, "delivered").await;
    wait_for_state(db, filtered, "delivered").await;
    assert_eq!(wait_for_state(db, skipped, "skipped").await.as_deref(), Some("the user has no tenant"));
    let received = receiver.received();
    assert_eq!(received.len(), 1, "{received:?}");
    let event: uuid::Uuid = sqlx::query_scalar("select event_id from pillarbox_notify.notification where id = $1")
        .bind(sent)
        .fetch_one(db)
        .await
        .unwrap();
    let expected = json!({"event_id": format!("evt_{event}"), "event_type": "order.paid", "aggregate_type": "CUSTOMER",
        "aggregate_id": 7, "user_id": user, "payload": {"title": "Rust meetup", "order": 5}});
    assert_eq!(received[0].json(), expected);
    let events = manager.get("/hub/v1/events?limit=100").await.json();
    let types: Vec<_> = events["items"].as_array().unwrap().iter().map(|event| event["event_type"].clone()).collect();
    assert!(types.contains(&json!("notification.order.paid")) && types.contains(&json!("notification.invoice.paid")));
    assert_eq!(stranger.count(), 0);
    app.stop().await;
}

#[tokio::test]
async fn processes_that_deliver_at_the_same_time_post_the_webhooks_of_a_user_in_order() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let insert = "insert into pillarbox_notify.event_type (name, channels) values ('order.paid', '{webhook}')";
    sqlx::query(insert).execute(db).await.unwrap();
    let user = insert_contact(db, None, Some("acme")).await;
    let insert = "with event as (
                      insert into pillarbox_notify.business_event (id, event_type, payload, at)
                      select gen_random_uuid(), 'order.paid', to_json(number), clock_timestamp()
                      from generate_series(1, 2000) number returning id, payload
                  )
                  insert into pillarbox_notify.notification (event_id, user_id, channel, status, due_at, created_at)
                  select id, $1, 'webhook', 'waiting', clock_timestamp(), clock_timestamp()
                  from event order by payload::text::int";
    sqlx::query(insert).bind(user).execute(db).await.unwrap();
    let mut apps = Vec::new();
    for _ in 0..3 {
        apps.push(TestApp::start(&database).await);
    }
    eventually("all are delivered", DEADLINE, async || match statuses(db).await {
        found if found.get("delivered") == Some(&2_000) => Ok(()),
        other => Err(other),
    })
    .await;
    let posted = "select (payload->'payload')::text::int from pillarbox.log where topic = 'notification.order.paid'
                  order by id";
    let posted: Vec<i32> = sqlx::query_scalar(posted).fetch_all(db).await.unwrap();
    assert_eq!(posted, (1..=2_000).collect::<Vec<_>>());
    for app in apps {
        app.stop().await;
    }
}

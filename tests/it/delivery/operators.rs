//! Operators see the notifications that were given up, find those about an event, and retry them in bulk.

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use server::migrations;
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::{insert_due, insert_person, statuses, wait_for_state};
use crate::hub::process::Replica;
use crate::notifications::fixture::put_recipient;
use crate::operator::commands::Cli;
use crate::support::{DEADLINE, text};

/// A notification that was given up. Returns its id.
async fn insert_dead(db: &PgPool, user: Uuid, channel: &str, event_type: &str) -> i64 {
    let id = insert_due(db, user, channel, event_type, 3_600).await;
    let dead = "update pillarbox_notify.notification set status = 'dead', due_at = null, attempts = 5 where id = $1";
    sqlx::query(dead).bind(id).execute(db).await.unwrap();
    id
}

#[tokio::test]
async fn dead_notifications_are_shown_measured_and_retried_by_filter_or_all_of_them() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, cli) = (database.pool(), Cli::new(&database));
    let (ada, bob) = (insert_person(db, "ada@example.org").await, insert_person(db, "bob@example.org").await);
    let paid = insert_dead(db, ada, "email", "order.paid").await;
    let sent = insert_dead(db, ada, "email", "order.sent").await;
    let webhook = insert_dead(db, ada, "webhook", "order.sent").await;
    let of_bob = insert_dead(db, bob, "email", "order.late").await;
    let last = insert_dead(db, ada, "email", "order.late").await;
    let status = cli.status_without_process("").await;
    assert!(status.contains("5 notifications") && status.contains("`pillarbox notifications retry --all`"), "{status}");
    let json: Value = serde_json::from_str(&cli.status_without_process("--json").await).unwrap();
    assert_eq!((&json["dead_notifications"], &json["dead_emails"]), (&json!(5), &json!(0)));

    let app = TestApp::start(&database).await;
    let cli = Cli::with_server(&database, &app);
    let mut measuring = Replica::start_beside(&app.settings, "maintain");
    for (gauge, value) in [("dead", 5.0), ("due", 0.0), ("oldest_seconds", 0.0)] {
        let gauge = format!("pillarbox_notifications_{gauge}");
        eventually("the gauge is set", DEADLINE, async || measuring.metric(&gauge).await == Some(value)).await;
    }
    assert!(measuring.process.terminate().await.success());
    let retry = async |body| app.admin().post("/admin/v1/notifications/retry", body).await;
    for (body, field) in [(json!({}), ""), (json!({"all": true, "channel": "email"}), "/all")] {
        let refused = retry(body).await;
        refused.assert_problem(422, "validation-failed");
        assert_eq!(refused.json()["errors"][0]["pointer"], field, "{refused:?}");
    }
    assert_eq!(retry(json!({"event_type": "order"})).await.json(), json!({"count": 0, "more": false}));
    let created = "select created_at from pillarbox_notify.notification where id = $1";
    let first: DateTime<Utc> = sqlx::query_scalar(created).bind(paid).fetch_one(db).await.unwrap();
    assert_eq!(retry(json!({"to": first.to_rfc3339()})).await.json()["count"], 0, "all were created then or later");
    assert_eq!(retry(json!({"event_type": "order.paid"})).await.json(), json!({"count": 1, "more": false}));
    wait_for_state(db, paid, "delivered").await;
    assert_eq!(retry(json!({"channel": "webhook"})).await.json()["count"], 1);
    assert_eq!(
        wait_for_state(db, webhook, "skipped").await.as_deref(),
        Some("the event type no longer has this channel")
    );
    cli.refused("notifications retry").await;
    cli.refused("notifications retry --all --channel email").await;
    assert!(cli.ok("notifications retry --event-type order.sent").await.contains("1 notification is due now"));
    wait_for_state(db, sent, "delivered").await;
    assert_eq!(retry(json!({"user_id": bob})).await.json()["count"], 1);
    wait_for_state(db, of_bob, "delivered").await;
    assert!(cli.ok("notifications retry --all").await.contains("1 notification is due now"));
    wait_for_state(db, last, "delivered").await;
    assert_eq!(statuses(db).await.get("dead"), None);
    assert!(!cli.ok("status").await.contains("notifications retry"));
    let metrics = app.anonymous().get("/metrics").await.text;
    assert!(metrics.contains("\npillarbox_notifications_skipped_total{channel=\"webhook\"} "), "{metrics}");
    app.stop().await;
}

#[tokio::test]
async fn operators_find_notifications_by_the_type_and_the_id_of_their_event() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let user = insert_person(db, "ada@example.org").await;
    assert_eq!(put_recipient(&app.admin(), "CUSTOMER/7", user).await.status, 204);
    let own_uuid = Uuid::now_v7();
    let post = async |id: &str, event_type: &str| {
        let event = json!({"event_id": id, "event_type": event_type, "aggregate_type": "CUSTOMER", "aggregate_id": 7,
                           "payload": {}});
        text(&app.admin().post("/notify/v1/events", event).await.json()["event_id"]).to_owned()
    };
    let paid = post("evt-123-456", "order.paid").await;
    post(&own_uuid.to_string(), "order.sent").await;
    eventually("the user is notified", DEADLINE, async || {
        let count: i64 = statuses(db).await.values().sum();
        if count == 4 { Ok(()) } else { Err(count) }
    })
    .await;
    let found = async |query: &str| -> Vec<String> {
        let listed = app.admin().get(&format!("/admin/v1/notifications?{query}")).await.json();
        listed["items"].as_array().unwrap().iter().map(|one| text(&one["event_type"]).to_owned()).collect()
    };
    assert_eq!(found("").await.len(), 4);
    for query in ["event_type=order.paid", "event_id=evt-123-456", &format!("event_id={paid}")] {
        assert_eq!(found(query).await, ["order.paid"; 2], "{query}");
    }
    assert_eq!(found(&format!("event_id={}", paid.trim_start_matches("evt_"))).await, ["order.paid"; 2]);
    assert_eq!(found(&format!("event_id={own_uuid}")).await, ["order.sent"; 2], "the UUID of a producer");
    assert_eq!(found("event_type=order.sent&channel=in_app").await, ["order.sent"]);
    assert_eq!(found("event_id=evt-123").await, [""; 0]);
    assert_eq!(found("event_type=order").await, [""; 0]);
    app.stop().await;
}

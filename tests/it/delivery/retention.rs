//! Notifications and their events are deleted after their retention; the counts of unread ones stay exact.

use serde_json::json;
use server::migrations;
use testkit::{TestApp, TestDatabase, eventually};

use super::fixture::{insert_due, insert_in_app, insert_person};
use crate::support::DEADLINE;

#[tokio::test]
async fn old_notifications_are_deleted_and_those_that_wait_or_are_recent_are_not() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let user = insert_person(db, "ada@example.org").await;
    let mut connection = db.acquire().await.unwrap();
    for _ in 0..5 {
        insert_in_app(&mut connection, user, "order.paid", json!({})).await;
    }
    let waiting = insert_due(db, user, "email", "order.paid", 3600).await;
    for change in [
        "update pillarbox_notify.notification set read_at = clock_timestamp() where seq = 1",
        "update pillarbox_notify.inbox set unread = 4",
        "update pillarbox_notify.notification set created_at = created_at - interval '91 days'
         where seq <= 3 or seq is null",
        "update pillarbox_notify.business_event set at = at - interval '91 days'",
    ] {
        sqlx::query(change).execute(db).await.unwrap();
    }
    let app = TestApp::start(&database).await;
    eventually("the old ones are deleted", DEADLINE, async || {
        let left: Vec<Option<i64>> = sqlx::query_scalar("select seq from pillarbox_notify.notification order by seq")
            .fetch_all(db)
            .await
            .unwrap();
        if left == [Some(4), Some(5), None] { Ok(()) } else { Err(left) }
    })
    .await;
    let state = app.user(user, None).get("/notify/v1/inbox/unread-count").await.json();
    assert_eq!(state, json!({"unread_count": 2, "last_seq": 5}));
    eventually("events without notifications are deleted", DEADLINE, async || {
        let query = "select count(*) from pillarbox_notify.business_event";
        let left: i64 = sqlx::query_scalar(query).fetch_one(db).await.unwrap();
        if left == 3 { Ok(()) } else { Err(left) }
    })
    .await;
    assert_eq!(super::fixture::state_of(db, waiting).await.0, "waiting");
    app.stop().await;
}

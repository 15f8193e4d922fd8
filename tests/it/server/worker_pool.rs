//! Background work shares a pool of connections that is smaller than the number of its tasks.

use serde_json::json;
use server::migrations;
use testkit::{Receiver, TestApp, TestDatabase, eventually};

use crate::delivery::fixture::{insert_contact, statuses};
use crate::hub::fixture::subscribe;
use crate::notifications::fixture::add_recipients;
use crate::progress::fixture::{create_with, mark_numbers, wait_until_completed};
use crate::support::DEADLINE;

/// A task that held a connection while it waits for another one would wait for ever.
#[tokio::test]
async fn no_background_task_needs_two_connections_at_a_time() {
    let (database, receiver) = (TestDatabase::new(&migrations()).await, Receiver::start().await);
    let db = database.pool();
    let user = insert_contact(db, Some("ada@example.org"), Some("main")).await;
    add_recipients(db, "ADMIN", None, &[user]).await;
    let rules = "insert into pillarbox_notify.event_type (name, channels) values ('A', '{in_app,email,webhook}')";
    sqlx::query(rules).execute(db).await.unwrap();
    let app = TestApp::start_with(&database, |settings| settings.worker_pool_max = 1).await;
    subscribe(&app.admin(), &receiver.url(), json!({"event_types": ["notification.A"]})).await;
    let post = "select pillarbox.notify('A', 'ADMIN', n, '{}') from generate_series(1, 20) as n";
    sqlx::query(post).execute(db).await.unwrap();
    let client = app.user(user, None);
    let project = create_with(&client, 2).await;
    mark_numbers(&client, &project, 2).await;
    eventually("everything is delivered", DEADLINE, async || {
        let found = (statuses(db).await.get("delivered").copied(), receiver.count());
        if found == (Some(60), 20) { Ok(()) } else { Err(found) }
    })
    .await;
    wait_until_completed(db, &project).await;
    let ready = app.anonymous().get("/readyz").await;
    assert_eq!(ready.status, 200, "{ready:?}");
    app.stop().await;
}

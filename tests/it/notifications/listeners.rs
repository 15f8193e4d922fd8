//! A listener turns each event into one notification for each recipient and channel, once, whatever is repeated or killed.

use pillarbox::operations::replays::{self, Request};
use serde_json::json;
use server::migrations;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::{
    add_recipients, check_inboxes, count, in_app_count, inbox, notifications, post_event, reservation, users,
    wait_for_inbox, wait_until_processed, with,
};
use crate::server::process::{DataFolder, serve};
use crate::support::{DEADLINE, caller};

#[tokio::test]
async fn everyone_behind_the_aggregate_hears_of_an_event_over_the_channels_of_its_type() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let user = users(5);
    // Two of the restaurant, of which one is also behind all restaurants; one of another one; one of a customer.
    add_recipients(db, "RESTAURANT", Some(5), &[user[0], user[1]]).await;
    add_recipients(db, "RESTAURANT", None, &[user[1], user[2]]).await;
    add_recipients(db, "RESTAURANT", Some(6), &[user[3]]).await;
    add_recipients(db, "CUSTOMER", Some(5), &[user[4]]).await;
    let types = "insert into pillarbox_notify.event_type (name, channels) values ('ORDER_CREATED', '{in_app,webhook}')";
    sqlx::query(types).execute(db).await.unwrap();
    let muted = "insert into pillarbox_notify.preference (user_id, channel, enabled) values ($1, 'email', false)";
    sqlx::query(muted).bind(user[2]).execute(db).await.unwrap();
    let app = TestApp::start(&database).await;
    let producer = caller(&app, "ingest", "main").await;
    assert_eq!(post_event(&producer, reservation(5)).await.status, 202);
    assert_eq!(post_event(&producer, with(&reservation(5), "event_type", json!("ORDER_CREATED"))).await.status, 202);
    for user in &user[..3] {
        wait_for_inbox(db, *user, &["RESERVATION_REQUESTED", "ORDER_CREATED"]).await;
    }
    let of = async |user: Uuid| -> Vec<String> {
        let found = notifications(db, user).await;
        found.into_iter().map(|(event_type, channel, seq)| format!("{event_type} {channel} {seq:?}")).collect()
    };
    let both = [
        "RESERVATION_REQUESTED email None",
        "RESERVATION_REQUESTED in_app Some(1)",
        "ORDER_CREATED in_app Some(2)",
        "ORDER_CREATED webhook None",
    ];
    assert_eq!(of(user[0]).await, both);
    assert_eq!(of(user[1]).await, both, "once, although this user is a recipient twice");
    assert_eq!(of(user[2]).await, &both[1..], "no e-mail for the user who muted them");
    assert_eq!((of(user[3]).await.len(), of(user[4]).await.len()), (0, 0));
    let stored: (serde_json::Value, i64, String) =
        sqlx::query_as("select payload, aggregate_id, aggregate_type from pillarbox_notify.business_event limit 1")
            .fetch_one(db)
            .await
            .unwrap();
    assert_eq!(stored, (json!({"guests": 4}), 5, "RESTAURANT".to_owned()));
    check_inboxes(db).await;
    app.stop().await;
}

#[tokio::test]
async fn an_event_that_is_processed_again_makes_no_second_notification_and_uses_no_number() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, user) = (database.pool(), users(3));
    add_recipients(db, "ADMIN", None, &user[..2]).await;
    for number in 0..20 {
        let query = "select pillarbox.notify('A', 'ADMIN', $1, '{}')";
        sqlx::query(query).bind(number % 3).execute(db).await.unwrap();
    }
    let app = TestApp::start(&database).await;
    eventually("all are recorded", DEADLINE, async || in_app_count(db).await == 40).await;
    // A third recipient is added, and everything is processed again.
    add_recipients(db, "ADMIN", None, &user[2..]).await;
    let (from, to) = (chrono::Utc::now() - chrono::TimeDelta::hours(1), chrono::Utc::now());
    let request = Request { consumer: "notify.admin".to_owned(), from, to, again: true };
    replays::request(db, &request).await.unwrap();
    eventually("the new recipient has all", DEADLINE, async || inbox(db, user[2]).await.len() == 20).await;
    wait_until_processed(db, "notify.admin", 40).await;
    assert_eq!(in_app_count(db).await, 60);
    check_inboxes(db).await;
    app.stop().await;
}

#[tokio::test]
async fn a_listener_that_is_killed_before_it_saves_its_position_makes_no_second_notification() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let (db, user) = (database.pool(), users(10));
    add_recipients(db, "CUSTOMER", Some(1), &user).await;
    let post = "select pillarbox.notify('A', 'CUSTOMER', 1, to_json(n)) from generate_series(1, 500) as n";
    for _ in 0..3 {
        let before = in_app_count(db).await;
        sqlx::query(post).execute(db).await.unwrap();
        let mut process = serve(&folder, &database, &[("PILLARBOX_LEASE_MS", "1000")]);
        eventually("some are recorded", DEADLINE, async || in_app_count(db).await > before).await;
        process.kill9();
    }
    let mut process = serve(&folder, &database, &[("PILLARBOX_LEASE_MS", "1000")]);
    eventually("all are recorded", DEADLINE, async || match in_app_count(db).await {
        15_000 => Ok(()),
        other => Err(other),
    })
    .await;
    wait_until_processed(db, "notify.customer", 1_500).await;
    assert_eq!(in_app_count(db).await, 15_000);
    check_inboxes(db).await;
    let out_of_order = "select count(*) from (
            select (payload::text)::int < lag((payload::text)::int) over (partition by user_id, batch order by seq) as wrong
            from (select *, (seq - 1) / 500 as batch from pillarbox_notify.notification
                  join pillarbox_notify.business_event on business_event.id = event_id where channel = 'in_app') rows
        ) neighbours where wrong";
    assert_eq!(count(db, out_of_order).await, 0, "each inbox is in the order of the posts");
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn a_deleted_user_gets_nothing_more_and_has_nothing_left() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, user) = (database.pool(), users(2));
    let app = TestApp::start(&database).await;
    add_recipients(db, "ADMIN", None, &user).await;
    for statement in [
        "insert into pillarbox_notify.contact (user_id, email) values ($1, 'a@example.org')",
        "insert into pillarbox_notify.preference (user_id, enabled) values ($1, true)",
        "insert into pillarbox_notify.quiet_hours values ($1, 'UTC', '22:00', '07:00')",
        "insert into pillarbox_notify.participant values (gen_random_uuid(), $1, 'active')",
        "insert into pillarbox_notify.preference_set values ($1, 1, now())",
        "insert into pillarbox_notify.waiting_registration (message_id, event_id, user_id, topic, payload, due_at, created_at)
         values (gen_random_uuid(), gen_random_uuid(), $1, 'join.confirmed', '{}', 'infinity', now())",
    ] {
        sqlx::query(statement).bind(user[0]).execute(db).await.unwrap();
    }
    let post = "select pillarbox.notify('A', 'ADMIN', 1, '{}')";
    sqlx::query(post).execute(db).await.unwrap();
    wait_for_inbox(db, user[0], &["A"]).await;
    let deleted = serde_json::to_string(&contracts::identity::AccountDeleted { user_id: user[0] }).unwrap();
    crate::mail::fixture::post_raw(db, contracts::identity::ACCOUNT_DELETED, &deleted).await;
    eventually("nothing is left", DEADLINE, async || {
        let tables = [
            "notification",
            "inbox",
            "recipient",
            "contact",
            "preference",
            "preference_set",
            "quiet_hours",
            "participant",
            "waiting_registration",
        ];
        let found = futures_util::future::join_all(tables.map(async |table| {
            let query = format!("select count(*) from pillarbox_notify.{table} where user_id = $1");
            sqlx::query_scalar::<_, i64>(sqlx::AssertSqlSafe(query)).bind(user[0]).fetch_one(db).await.unwrap()
        }))
        .await;
        if found.iter().all(|rows| *rows == 0) { Ok(()) } else { Err(found) }
    })
    .await;
    // Neither by a new recipient row, which a late import could add past the API, nor by an older one.
    add_recipients(db, "ADMIN", Some(1), &user[..1]).await;
    sqlx::query(post).execute(db).await.unwrap();
    wait_for_inbox(db, user[1], &["A", "A"]).await;
    assert_eq!(inbox(db, user[0]).await, [""; 0]);
    app.stop().await;
}

//! Digests: many notifications of one kind become one e-mail, also when several processes deliver.

use serde_json::json;
use server::migrations;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::{emails_of, insert_due, insert_many, insert_person, set_event_type, statuses, wait_for_state};
use crate::support::DEADLINE;

#[tokio::test]
async fn notifications_of_one_kind_become_one_email_when_the_first_is_due() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    set_event_type(&app, "join.promoted", json!({"digest_minutes": 60})).await;
    // The API refuses such rules.
    let rules =
        "insert into pillarbox_notify.event_type (name, critical, digest_minutes) values ('alarm.raised', true, 60)";
    sqlx::query(rules).execute(db).await.unwrap();
    let (user, other) = (insert_person(db, "ada@example.org").await, insert_person(db, "bob@example.org").await);
    let mut collected = Vec::new();
    for seconds in [1800, 600, 3600] {
        collected.push(insert_due(db, user, "email", "join.promoted", seconds).await);
    }
    let of_other = insert_due(db, other, "email", "join.promoted", 600).await;
    let another_kind = insert_due(db, user, "email", "order.paid", 600).await;
    collected.push(insert_due(db, user, "email", "join.promoted", 0).await);
    for id in &collected {
        wait_for_state(db, *id, "delivered").await;
    }
    let emails = emails_of(db, user).await;
    assert_eq!(emails.len(), 1, "{emails:?}");
    assert_eq!(emails[0].0, "Join promoted (4)");
    assert_eq!(emails[0].1.matches("A seat at “Rust meetup” became free").count(), 4, "{}", emails[0].1);
    for id in [of_other, another_kind] {
        assert_eq!(super::fixture::state_of(db, id).await.0, "waiting");
    }
    // The next one begins a new collection; critical ones are never collected.
    let next = insert_due(db, user, "email", "join.promoted", 0).await;
    wait_for_state(db, next, "delivered").await;
    for _ in 0..2 {
        let alarm = insert_due(db, user, "email", "alarm.raised", 0).await;
        wait_for_state(db, alarm, "delivered").await;
    }
    let subjects: Vec<String> = emails_of(db, user).await.into_iter().map(|(subject, _)| subject).collect();
    let alone = "A seat is free, and it is yours: event “Rust meetup”";
    assert_eq!(subjects, ["Join promoted (4)", alone, "Alarm raised", "Alarm raised"]);
    app.stop().await;
}

#[tokio::test]
async fn processes_that_deliver_at_the_same_time_send_one_digest_to_each_person() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let insert = "insert into pillarbox_notify.event_type (name, digest_minutes) values ('order.paid', 60)";
    sqlx::query(insert).execute(db).await.unwrap();
    let mut users = Vec::new();
    for number in 0..30 {
        users.push(insert_person(db, &format!("user{number}@example.org")).await);
    }
    // All are due at once, as at the end of quiet hours, those of a person far apart.
    let twenty: Vec<Uuid> = (0..20).flat_map(|_| users.clone()).collect();
    insert_many(db, &twenty, "order.paid").await;
    // Another process collects those of this person: it has locked the contact, and not all of the notifications yet.
    let mut collecting = db.begin().await.unwrap();
    let contact = "select from pillarbox_notify.contact where user_id = $1 for update";
    sqlx::query(contact).bind(users[0]).execute(&mut *collecting).await.unwrap();
    let mut apps = Vec::new();
    for _ in 0..3 {
        apps.push(TestApp::start(&database).await);
    }
    let delivered = async |count: i64| {
        eventually("all are delivered", DEADLINE, async || match statuses(db).await {
            found if found.get("delivered") == Some(&count) => Ok(()),
            other => Err(other),
        })
        .await;
    };
    delivered(580).await;
    assert_eq!(emails_of(db, users[0]).await, []);
    collecting.rollback().await.unwrap();
    delivered(600).await;
    for user in users {
        let subjects: Vec<String> = emails_of(db, user).await.into_iter().map(|(subject, _)| subject).collect();
        assert_eq!(subjects, ["Order paid (20)"]);
    }
    for app in apps {
        app.stop().await;
    }
}

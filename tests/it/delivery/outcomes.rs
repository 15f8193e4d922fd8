//! What becomes of a notification that is due: it is delivered, or skipped with the reason.

use hyper::Method;
use serde_json::json;
use server::migrations;
use server::settings::Role;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::{emails_of, insert_contact, insert_due, insert_person, set_event_type, state_of, wait_for_state};
use crate::support::DEADLINE;

#[tokio::test]
async fn a_muted_type_is_skipped_and_a_critical_one_is_delivered_all_the_same() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let user = insert_person(db, "ada@example.org").await;
    set_event_type(&app, "alarm.raised", json!({"critical": true})).await;
    let muted = json!({"preferences": [{"enabled": false}, {"event_type": "join.promoted", "channel": "email", "enabled": true}]});
    let saved = app.user(user, None).send(Method::PUT, "/notify/v1/preferences", Some(muted)).await;
    assert_eq!(saved.status, 200, "{saved:?}");

    // They were planned before the user changed the preferences.
    let order = insert_due(db, user, "email", "order.paid", 0).await;
    let promoted = insert_due(db, user, "email", "join.promoted", 0).await;
    let alarm = insert_due(db, user, "email", "alarm.raised", 0).await;
    assert_eq!(wait_for_state(db, order, "skipped").await.as_deref(), Some("the user has muted it"));
    wait_for_state(db, promoted, "delivered").await;
    wait_for_state(db, alarm, "delivered").await;
    let subjects: Vec<String> = emails_of(db, user).await.into_iter().map(|(subject, _)| subject).collect();
    assert_eq!(subjects, ["A seat is free, and it is yours: event “Rust meetup”", "Alarm raised"]);
    app.stop().await;
}

#[tokio::test]
async fn who_cannot_be_reached_gets_nothing_and_others_are_not_delayed() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let unknown = insert_due(db, Uuid::now_v7(), "email", "order.paid", 0).await;
    let age = "update pillarbox_notify.notification set created_at = created_at - interval '61 minutes'";
    sqlx::query(age).execute(db).await.unwrap();
    let without_address = insert_contact(db, None, None).await;
    let without_address = insert_due(db, without_address, "email", "order.paid", 0).await;
    let invalid = insert_person(db, "no address").await;
    let invalid = insert_due(db, invalid, "email", "order.paid", 0).await;
    let deleted = insert_person(db, "bob@example.org").await;
    let delete = "insert into pillarbox_notify.deleted_account (user_id, deleted_at) values ($1, clock_timestamp())";
    sqlx::query(delete).bind(deleted).execute(db).await.unwrap();
    let of_deleted = insert_due(db, deleted, "email", "order.paid", 0).await;
    let reachable = insert_person(db, "ada@example.org").await;
    let delivered = insert_due(db, reachable, "email", "order.paid", 0).await;
    let later = insert_due(db, reachable, "email", "order.paid", 3600).await;
    // Without the role that deletes what is left of the account.
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Api, Role::Dispatch]).await;
    wait_for_state(db, delivered, "delivered").await;
    for (id, reason) in [
        (unknown, "nothing is known about how to reach the user"),
        (without_address, "the user has no e-mail address"),
        (invalid, "the e-mail address is invalid"),
        (of_deleted, "the account was deleted"),
    ] {
        assert_eq!(wait_for_state(db, id, "skipped").await.as_deref(), Some(reason));
    }
    assert_eq!(state_of(db, later).await.0, "waiting");
    assert_eq!((emails_of(db, reachable).await.len(), emails_of(db, deleted).await.len()), (1, 0));

    // An operator sees why, and delivers it again when the cause is corrected.
    let skipped = app.admin().get("/admin/v1/notifications?status=skipped&limit=100").await.json();
    assert_eq!(skipped["items"].as_array().unwrap().len(), 4, "{skipped}");
    let correct = "update pillarbox_notify.contact set email = 'eve@example.org' where email is null";
    sqlx::query(correct).execute(db).await.unwrap();
    let retry = |id: i64| format!("/admin/v1/notifications/{id}/retry");
    assert_eq!(app.admin().send(Method::POST, &retry(without_address), None).await.status, 202);
    wait_for_state(db, without_address, "delivered").await;
    let again = app.admin().send(Method::POST, &retry(without_address), None).await;
    again.assert_problem(409, "notification-not-dead");
    app.admin().send(Method::POST, &retry(i64::MAX), None).await.assert_problem(404, "notification-not-found");
    app.user(reachable, None).get("/admin/v1/notifications").await.assert_problem(403, "forbidden");
    app.stop().await;
}

#[tokio::test]
async fn what_waits_for_a_contact_is_due_when_it_arrives_and_is_read_twice_until_then() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let (user, imported) = (Uuid::now_v7(), Uuid::now_v7());
    let waiting = insert_due(db, user, "email", "order.paid", 0).await;
    let also_waiting = insert_due(db, imported, "email", "order.paid", 0).await;
    let minutes = async |id: i64, minutes: std::ops::RangeInclusive<f64>| {
        let query = "select (extract(epoch from due_at - clock_timestamp()) / 60)::float8
                     from pillarbox_notify.notification where id = $1";
        eventually(&format!("it waits for {minutes:?} minutes"), DEADLINE, async || {
            let due: Option<f64> = sqlx::query_scalar(query).bind(id).fetch_one(db).await.unwrap();
            if due.is_some_and(|due| minutes.contains(&due)) { Ok(()) } else { Err(due) }
        })
        .await;
    };
    for id in [waiting, also_waiting] {
        minutes(id, 0.5..=1.0).await;
    }
    let minute = "update pillarbox_notify.notification set due_at = clock_timestamp(), created_at = created_at - interval '1 minute'";
    sqlx::query(minute).execute(db).await.unwrap();
    for id in [waiting, also_waiting] {
        minutes(id, 58.0..=59.0).await;
    }

    // The contact arrives from identity, or in an import.
    let contact = json!({"user_id": user, "version": 1, "email": "ada@example.org", "name": "Ada", "locale": "en"});
    let (source, topic) = (contracts::identity::CONTACTS_SOURCE, contracts::identity::ACCOUNT_CONTACT_CHANGED);
    crate::mail::fixture::post_raw_from(db, source, topic, &contact.to_string()).await;
    let row = json!({"aggregate_type": "CUSTOMER", "aggregate_id": 7, "user_id": imported,
        "email": "bob@example.org"});
    let made = app.admin().post("/notify/v1/recipients/import", json!({"recipients": [row]})).await;
    assert_eq!(made.status, 200, "{made:?}");
    for id in [waiting, also_waiting] {
        wait_for_state(db, id, "delivered").await;
    }
    assert_eq!((emails_of(db, user).await.len(), emails_of(db, imported).await.len()), (1, 1));

    set_event_type(&app, "order.paid", json!({"channels": ["in_app"]})).await;
    let removed = insert_due(db, user, "email", "order.paid", 0).await;
    let reason = wait_for_state(db, removed, "skipped").await;
    assert_eq!(reason.as_deref(), Some("the event type no longer has this channel"));
    app.stop().await;
}

#[tokio::test]
async fn many_that_wait_for_a_contact_delay_no_other() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let strangers: Vec<Uuid> = (0..20_000).map(|_| Uuid::now_v7()).collect();
    super::fixture::insert_many(db, &strangers, "order.paid").await;
    let user = insert_person(db, "ada@example.org").await;
    let last = insert_due(db, user, "email", "order.paid", 0).await;
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Api, Role::Dispatch]).await;
    wait_for_state(db, last, "delivered").await;
    // Each transaction that changed them has its own id: a few, and not one for each 200.
    let transactions = "select count(distinct xmin::text) from pillarbox_notify.notification where due_at > created_at";
    let transactions: i64 = sqlx::query_scalar(transactions).fetch_one(db).await.unwrap();
    assert!(transactions <= 6, "{transactions} transactions");
    app.stop().await;
}

//! People hear of their registrations and of events that they have joined, of each fact once.

use chrono::TimeDelta;
use contracts::events::{EventChanged, EventStatus};
use events::reconcile::{self, ReconcileOptions};
use pillarbox::database::Database;
use serde_json::{Value, json};
use server::migrations;
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::{check_inboxes, count, in_app_count, inbox, users, wait_for_inbox, wait_until_processed};
use crate::events::fixture::{event_id, meetup_with, new_user, patch_event, post_action, publish_event};
use crate::joins::fixture::{moderate, new_event, next_version, post_event_update, post_join_action};
use crate::mail::fixture::post_raw_from;
use crate::support::DEADLINE;

/// The payload of the last notification of a user.
async fn last_payload(db: &PgPool, user: Uuid) -> Value {
    let query = "select payload from pillarbox_notify.notification
                 join pillarbox_notify.business_event on business_event.id = event_id
                 where user_id = $1 and channel = 'in_app' order by seq desc limit 1";
    sqlx::query_scalar(query).bind(user).fetch_one(db).await.unwrap()
}

#[tokio::test]
async fn users_are_notified_once_of_seats_moderation_another_city_and_a_cancellation() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let app = TestApp::start_with(&database, |settings| settings.notify.change_delay_seconds = 0).await;
    let (owner, user) = (new_user(&app), users(5));
    let event = publish_event(&owner, meetup_with(json!({"capacity": 3}))).await;
    let id = event_id(&event);
    // On a busy machine, the publication is answered before the joins service knows it.
    let known = "select exists (select from pillarbox_joins.event_capacity where event_id = $1)";
    eventually("the event can be joined", DEADLINE, async || {
        sqlx::query_scalar::<_, bool>(known).bind(id).fetch_one(db).await.unwrap()
    })
    .await;
    for user in &user {
        assert_eq!(post_join_action(&app.user(*user, None), id, "join").await.status, 201);
    }
    assert_eq!(post_join_action(&app.user(user[0], None), id, "cancel").await.status, 200);
    let kick = json!({"user_id": user[1], "reason": "loud"});
    assert_eq!(moderate(&owner, id, "kick", kick.clone()).await.status, 200);
    wait_for_inbox(db, user[0], &["join.confirmed", "join.canceled"]).await;
    wait_for_inbox(db, user[1], &["join.confirmed", "mod.kicked"]).await;
    let payload = last_payload(db, user[1]).await;
    assert_eq!((&payload["title"], &payload["reason"]), (&json!("Rust meetup"), &json!("loud")), "{payload}");
    for user in &user[3..] {
        wait_for_inbox(db, *user, &["join.waitlisted", "join.promoted"]).await;
    }
    assert_eq!(moderate(&owner, id, "ban", kick).await.status, 200);

    // Users are not notified of another title, but of another city.
    assert_eq!(patch_event(&owner, &event, json!({"title": "Rust evening"})).await.status, 200);
    assert_eq!(patch_event(&owner, &event, json!({"city": "Bern"})).await.status, 200);
    wait_for_inbox(db, user[2], &["join.confirmed", "event.updated"]).await;
    let payload = last_payload(db, user[2]).await;
    assert_eq!((&payload["title"], &payload["city"]), (&json!("Rust evening"), &json!("Bern")), "{payload}");
    assert_eq!(payload["previous"]["city"], event["city"], "{payload}");

    assert_eq!(post_action(&owner, &event, "cancel").await.status, 200);
    let promoted = ["join.waitlisted", "join.promoted", "event.updated", "event.canceled"];
    wait_for_inbox(db, user[2], &["join.confirmed", "event.updated", "event.canceled"]).await;
    for user in &user[3..] {
        wait_for_inbox(db, *user, &promoted).await;
    }
    // Everything that was posted is processed, and led to no other notification.
    // Counts, which are posted from time to time, concern no user.
    let posted =
        "select count(*) from pillarbox.log where source = 'joins' and topic not in ('join.counted', 'join.recounted')";
    wait_until_processed(db, "notify.people", count(db, posted).await).await;
    assert_eq!(in_app_count(db).await, 2 + 2 + 3 + 2 * 4);
    let taking_part = "select count(*) from pillarbox_notify.participant where status <> 'left'";
    assert_eq!(count(db, taking_part).await, 0);
    assert_eq!(count(db, "select count(*) from pillarbox.dead_letter").await, 0);
    check_inboxes(db).await;
    app.stop().await;
}

fn registration(event: &EventChanged, user: Uuid) -> String {
    versioned(event, user, 1).to_string()
}

fn versioned(event: &EventChanged, user: Uuid, version: i64) -> Value {
    json!({"event_id": event.event_id, "user_id": user, "counts": {"active": 1, "waitlisted": 0, "version": version},
        "occurred_at": event.occurred_at, "trace_id": ""})
}

/// Posts as the joins service does, without it.
async fn post_registration(db: &PgPool, topic: &str, event: &EventChanged, user: Uuid) {
    post_payload(db, topic, event, registration(event, user)).await;
}

async fn post_payload(db: &PgPool, topic: &str, event: &EventChanged, payload: String) {
    let payload = serde_json::value::RawValue::from_string(payload).unwrap();
    let post = pillarbox::log::Post::new(topic, payload).with_key(event.event_id.to_string());
    crate::events::fixture::post_messages(db, "joins", &[post]).await;
}

#[tokio::test]
async fn a_registration_waits_for_its_event_and_an_expiry_for_its_explanation() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, user) = (database.pool(), Uuid::now_v7());
    let app = TestApp::start_with(&database, |settings| settings.services = vec!["notify".to_owned()]).await;
    let event = new_event(Uuid::now_v7(), 1);
    let is_waiting = async || count(db, "select count(*) from pillarbox_notify.waiting_registration").await;
    // Over a broker, the messages of the two services arrive in any order.
    post_registration(db, "join.confirmed", &event, user).await;
    eventually("the registration waits", DEADLINE, async || is_waiting().await == 1).await;
    post_event_update(db, &event).await;
    wait_for_inbox(db, user, &["join.confirmed"]).await;
    assert_eq!(last_payload(db, user).await["title"], "An evening");
    post_registration(db, "join.expired", &event, user).await;
    eventually("the expiry waits", DEADLINE, async || is_waiting().await == 1).await;
    let canceled = next_version(&event, |event| {
        event.status = EventStatus::Canceled;
        event.reason = Some("rain".to_owned());
    });
    post_event_update(db, &canceled).await;
    wait_for_inbox(db, user, &["join.confirmed", "event.canceled"]).await;
    assert_eq!(last_payload(db, user).await["reason"], "rain");
    assert_eq!(is_waiting().await, 0);
    app.stop().await;
}

#[tokio::test]
async fn many_participants_are_notified_in_steps_but_not_of_past_registrations() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, early) = (database.pool(), Uuid::now_v7());
    let event = new_event(Uuid::now_v7(), 0);
    post_event_update(db, &event).await;
    post_registration(db, "join.confirmed", &event, early).await;
    sqlx::query("update pillarbox_notify.facts_since set at = clock_timestamp()").execute(db).await.unwrap();
    let join =
        "insert into pillarbox_notify.participant select $1, gen_random_uuid(), 'active' from generate_series(1, 1200)";
    sqlx::query(join).bind(event.event_id).execute(db).await.unwrap();
    let at_once = |settings: &mut server::settings::Settings| settings.notify.change_delay_seconds = 0;
    let apps = [TestApp::start_with(&database, at_once).await, TestApp::start_with(&database, at_once).await];
    wait_until_processed(db, "notify.people", 1).await;
    assert_eq!(inbox(db, early).await, [""; 0], "the registration is older than notifications");
    let moved = next_version(&event, |event| {
        event.start_time += TimeDelta::minutes(30);
        event.occurred_at = chrono::Utc::now();
    });
    post_event_update(db, &moved).await;
    eventually("everyone is notified", DEADLINE, async || match in_app_count(db).await {
        1_201 => Ok(()),
        other => Err(other),
    })
    .await;
    eventually("the announcement is done", DEADLINE, async || {
        count(db, "select count(*) from pillarbox_notify.announcement").await == 0
    })
    .await;
    assert_eq!(in_app_count(db).await, 1_201, "each once");
    assert_eq!(inbox(db, early).await, ["event.updated"]);
    check_inboxes(db).await;
    for app in apps {
        app.stop().await;
    }
}

#[tokio::test]
async fn a_message_that_is_not_a_registration_is_a_dead_letter_without_its_content() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let app = TestApp::start(&database).await;
    let contact = r#"{"email": "hunter2@example.org"}"#;
    post_raw_from(db, contracts::identity::CONTACTS_SOURCE, "account.contact_changed", contact).await;
    eventually("it failed", DEADLINE, async || {
        count(db, "select count(*) from pillarbox.parked where consumer = 'notify.contacts'").await == 1
    })
    .await;
    let error: String = sqlx::query_scalar("select last_error from pillarbox.parked").fetch_one(db).await.unwrap();
    assert!(error.contains("not a contact of an account") && !error.contains("hunter2"), "{error}");
    app.stop().await;
}

#[tokio::test]
async fn a_text_that_waits_in_vain_names_no_event_and_its_user_is_a_participant() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, user) = (database.pool(), users(2));
    let app = TestApp::start_with(&database, |settings| {
        settings.services = vec!["notify".to_owned()];
        settings.notify.change_delay_seconds = 0;
    })
    .await;
    let event = new_event(Uuid::now_v7(), 1);
    for (topic, version) in [("join.waitlisted", 1), ("join.promoted", 2)] {
        post_payload(db, topic, &event, versioned(&event, user[0], version).to_string()).await;
    }
    wait_until_processed(db, "notify.people", 2).await;
    let taking_part = "select count(*) from pillarbox_notify.participant where status = 'active'";
    assert_eq!((count(db, taking_part).await, in_app_count(db).await), (1, 0));
    let later = "update pillarbox_notify.waiting_registration
                 set created_at = created_at - interval '61 minutes', due_at = statement_timestamp()";
    sqlx::query(later).execute(db).await.unwrap();
    wait_for_inbox(db, user[0], &["join.waitlisted", "join.promoted"]).await;
    assert_eq!(last_payload(db, user[0]).await, json!({"event_id": event.event_id}));
    // The next message about the event ends the wait of others, and earlier participants are notified of changes.
    post_registration(db, "join.confirmed", &event, user[1]).await;
    wait_until_processed(db, "notify.people", 3).await;
    post_event_update(db, &event).await;
    wait_for_inbox(db, user[1], &["join.confirmed"]).await;
    post_event_update(db, &next_version(&event, |event| event.city = "Bergen".to_owned())).await;
    wait_for_inbox(db, user[0], &["join.waitlisted", "join.promoted", "event.updated"]).await;
    assert_eq!(count(db, "select count(*) from pillarbox.dead_letter").await, 0);
    assert_eq!(count(db, "select count(*) from pillarbox.parked").await, 0);
    app.stop().await;
}

#[tokio::test]
async fn late_messages_deleted_users_and_the_past_make_no_notified_participant() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, user) = (database.pool(), users(4));
    let app = TestApp::start_with(&database, |settings| settings.services = vec!["notify".to_owned()]).await;
    let event = new_event(Uuid::now_v7(), 9);
    post_event_update(db, &event).await;
    let deleted = "insert into pillarbox_notify.deleted_account (user_id, deleted_at) values ($1, now())";
    sqlx::query(deleted).bind(user[1]).execute(db).await.unwrap();
    for (topic, user, version) in [
        ("join.confirmed", user[0], 1),
        ("join.canceled", user[0], 5),
        // Replayed, or parked for some time.
        ("join.promoted", user[0], 4),
        ("join.confirmed", user[1], 6),
        ("join.confirmed", user[2], 7),
    ] {
        post_payload(db, topic, &event, versioned(&event, user, version).to_string()).await;
    }
    // It happened long before it arrived, over a queue that no process has read.
    let mut past = versioned(&event, user[3], 8);
    past["occurred_at"] = json!(event.occurred_at - TimeDelta::days(30));
    post_payload(db, "join.confirmed", &event, past.to_string()).await;
    wait_until_processed(db, "notify.people", 6).await;
    let statuses: Vec<(Uuid, String)> =
        sqlx::query_as("select user_id, status from pillarbox_notify.participant order by version")
            .fetch_all(db)
            .await
            .unwrap();
    let expected = [(user[0], "left"), (user[2], "active"), (user[3], "active")];
    assert_eq!(statuses, expected.map(|(user, status)| (user, status.to_owned())));
    // The text waits until the event is known, which is the work of another consumer.
    eventually("a text is written", DEADLINE, async || !inbox(db, user[2]).await.is_empty()).await;
    assert_eq!(inbox(db, user[3]).await, [""; 0], "past registrations are not announced");
    let at = "select bool_and(at = $1) from pillarbox_notify.business_event";
    assert!(sqlx::query_scalar::<_, bool>(at).bind(event.occurred_at).fetch_one(db).await.unwrap(), "when it happened");
    app.stop().await;
}

#[tokio::test]
async fn a_forced_reconciliation_restates_events_that_notify_does_not_know() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let owner = new_user(&app);
    let id = event_id(&publish_event(&owner, meetup_with(json!({"capacity": 3}))).await);
    let is_known = async || {
        let query = "select exists (select from pillarbox_notify.joinable_event where event_id = $1)";
        sqlx::query_scalar::<_, bool>(query).bind(id).fetch_one(db).await.unwrap()
    };
    eventually("the event is known", DEADLINE, is_known).await;
    // As in a new database of the service, when the log does not retain the message of the publication any more.
    sqlx::query("delete from pillarbox_notify.joinable_event").execute(db).await.unwrap();
    let options = ReconcileOptions { force: true, ..ReconcileOptions::default() };
    reconcile::begin(&Database::new(db.clone()), options).await.unwrap();
    eventually("the event is known again", DEADLINE, is_known).await;
    app.stop().await;
}

//! Notifications that an organizer can cause: none for strangers, one for several changes, and limited e-mails.

use chrono::TimeDelta;
use contracts::events::EventStatus;
use serde_json::{Value, json};
use server::migrations;
use server::settings::Settings;
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::{count, inbox, users, wait_for_inbox, wait_until_processed};
use crate::delivery::fixture::insert_person;
use crate::events::fixture::{event_id, meetup_with, new_user, publish_event};
use crate::joins::fixture::{moderate, new_event, next_version, post_event_update, post_join_action};
use crate::support::{DEADLINE, text};

const FROM_JOINS: &str =
    "select count(*) from pillarbox.log where source = 'joins' and topic not in ('join.counted', 'join.recounted')";

#[tokio::test]
async fn a_ban_reaches_only_users_whose_registration_it_ends() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let (owner, user) = (new_user(&app), users(2));
    let stranger = insert_person(db, "eve@example.org").await;
    let event = event_id(&publish_event(&owner, meetup_with(json!({"title": "Your account was locked"}))).await);
    eventually("the event can be joined", DEADLINE, async || {
        post_join_action(&app.user(user[0], None), event, "join").await.status == 201
    })
    .await;
    assert_eq!(post_join_action(&app.user(user[1], None), event, "join").await.status, 201);
    let kick = json!({"user_id": user[1], "reason": "loud"});
    assert_eq!(moderate(&owner, event, "kick", kick).await.status, 200);
    for number in 0..5 {
        for user in [stranger, user[0], user[1]] {
            let ban = json!({"user_id": user, "reason": format!("See https://evil.example/{number}")});
            assert_eq!(moderate(&owner, event, "ban", ban).await.status, 200);
        }
        assert_eq!(moderate(&owner, event, "unban", json!({"user_id": stranger})).await.status, 204);
    }
    let lifted = "select count(*) from pillarbox.log where topic = 'mod.unbanned'";
    let heard = count(db, FROM_JOINS).await - count(db, lifted).await;
    wait_until_processed(db, "notify.people", heard).await;
    wait_for_inbox(db, user[0], &["join.confirmed", "mod.banned"]).await;
    wait_for_inbox(db, user[1], &["join.confirmed", "mod.kicked"]).await;
    assert_eq!(inbox(db, stranger).await, [""; 0]);
    let to_stranger = "select count(*) from pillarbox_notify.notification where user_id = $1";
    assert_eq!(sqlx::query_scalar::<_, i64>(to_stranger).bind(stranger).fetch_one(db).await.unwrap(), 0);
    let known = "select count(*) from pillarbox_notify.participant";
    assert_eq!(count(db, known).await, 2, "a stranger is not a participant");
    app.stop().await;
}

/// A server with the service alone: the test posts the messages of events.
async fn start_alone(database: &TestDatabase, change: impl FnOnce(&mut Settings)) -> TestApp {
    TestApp::start_with(database, |settings| {
        settings.services = vec!["notify".to_owned()];
        change(settings);
    })
    .await
}

async fn add_participants(db: &PgPool, event: Uuid, users: &[Uuid]) {
    let join =
        "insert into pillarbox_notify.participant select $1, one, 'active' from unnest($2::uuid[]) as users (one)";
    sqlx::query(join).bind(event).bind(users).execute(db).await.unwrap();
}

async fn updates(db: &PgPool) -> Vec<Value> {
    let query = "select payload from pillarbox_notify.business_event where event_type = 'event.updated' order by at";
    sqlx::query_scalar(query).fetch_all(db).await.unwrap()
}

/// Makes the announcement due that waits for its pause.
async fn end_pause(db: &PgPool) {
    let waiting = "select count(*) from pillarbox_notify.announcement
                   where previous is not null and due_at > statement_timestamp() + interval '8 minutes'";
    eventually("an announcement waits for its pause", DEADLINE, async || count(db, waiting).await == 1).await;
    let due = "update pillarbox_notify.announcement set due_at = statement_timestamp()";
    sqlx::query(due).execute(db).await.unwrap();
}

async fn wait_until_announced(db: &PgPool) {
    let pending = "select count(*) from pillarbox_notify.announcement";
    eventually("nothing is left to announce", DEADLINE, async || count(db, pending).await == 0).await;
}

#[tokio::test]
async fn changes_of_an_event_are_announced_together_with_the_latest_state_and_a_pause_between() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, user) = (database.pool(), users(3));
    let app = start_alone(&database, |settings| settings.notify.change_delay_seconds = 3).await;
    let mut event = new_event(Uuid::now_v7(), 0);
    post_event_update(db, &event).await;
    wait_until_processed(db, "notify.events", 1).await;
    add_participants(db, event.event_id, &user).await;
    let (first_city, first_start) = (event.city.clone(), event.start_time);
    for number in 0..100 {
        event = next_version(&event, |event| {
            event.start_time = first_start + TimeDelta::minutes(number % 2);
            event.city = format!("City {number}");
        });
        post_event_update(db, &event).await;
    }
    wait_until_processed(db, "notify.events", 101).await;
    for user in &user {
        wait_for_inbox(db, *user, &["event.updated"]).await;
    }
    wait_until_announced(db).await;
    let announced = updates(db).await;
    assert_eq!(announced.len(), 1, "{announced:?}");
    assert_eq!((&announced[0]["city"], &announced[0]["previous"]["city"]), (&json!("City 99"), &json!(first_city)));

    // The next one waits, and is complete as well.
    for city in ["Bern", "Chur"] {
        event = next_version(&event, |event| event.city = city.to_owned());
        post_event_update(db, &event).await;
    }
    wait_until_processed(db, "notify.events", 103).await;
    end_pause(db).await;
    wait_for_inbox(db, user[0], &["event.updated", "event.updated"]).await;
    wait_until_announced(db).await;
    let last = updates(db).await.pop().unwrap();
    assert_eq!((&last["city"], &last["previous"]["city"]), (&json!("Chur"), &json!("City 99")), "{last}");

    // A change that is undone and a change of an event that is canceled are not announced.
    for city in ["Bern", "Chur"] {
        event = next_version(&event, |event| event.city = city.to_owned());
        post_event_update(db, &event).await;
    }
    wait_until_processed(db, "notify.events", 105).await;
    end_pause(db).await;
    wait_until_announced(db).await;
    event = next_version(&event, |event| event.city = "Genf".to_owned());
    post_event_update(db, &event).await;
    post_event_update(db, &next_version(&event, |event| event.status = EventStatus::Canceled)).await;
    wait_until_processed(db, "notify.events", 107).await;
    wait_until_announced(db).await;
    assert_eq!(updates(db).await.len(), 2);
    app.stop().await;
}

#[tokio::test]
async fn an_undone_change_is_announced_if_a_user_joined_before_it_was_undone() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, user) = (database.pool(), users(2));
    let app = TestApp::start_with(&database, |settings| {
        settings.services = ["notify", "joins"].map(str::to_owned).to_vec();
        settings.notify.change_delay_seconds = 3_600;
    })
    .await;
    let event = new_event(Uuid::now_v7(), 0);
    post_event_update(db, &event).await;
    wait_until_processed(db, "notify.events", 1).await;
    add_participants(db, event.event_id, &user[..1]).await;
    let moved = next_version(&event, |event| event.city = "Bern".to_owned());
    post_event_update(db, &moved).await;
    wait_until_processed(db, "notify.events", 2).await;
    eventually("the event can be joined", DEADLINE, async || {
        post_join_action(&app.user(user[1], None), event.event_id, "join").await.status == 201
    })
    .await;
    wait_for_inbox(db, user[1], &["join.confirmed"]).await;
    post_event_update(db, &next_version(&moved, |moved| moved.city = event.city.clone())).await;
    wait_until_processed(db, "notify.events", 3).await;
    end_pause(db).await;
    wait_until_announced(db).await;
    assert_eq!(updates(db).await.len(), 1, "the confirmation named another city");
    app.stop().await;
}

#[tokio::test]
async fn emails_of_an_organizer_beyond_the_limits_are_recorded_as_skipped() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let app = TestApp::start_with(&database, |settings| settings.notify.emails_per_recipient_max = 2).await;
    let (owner, user) = (new_user(&app), insert_person(db, "ada@example.org").await);
    for number in 0..3 {
        let event = event_id(&publish_event(&owner, meetup_with(json!({"title": format!("Chess {number}")}))).await);
        let known = "select exists (select from pillarbox_notify.joinable_event where event_id = $1)";
        eventually("the event is known", DEADLINE, async || {
            sqlx::query_scalar::<_, bool>(known).bind(event).fetch_one(db).await.unwrap()
        })
        .await;
        eventually("the event can be joined", DEADLINE, async || {
            post_join_action(&app.user(user, None), event, "join").await.status == 201
        })
        .await;
        assert_eq!(moderate(&owner, event, "kick", json!({"user_id": user})).await.status, 200);
    }
    wait_for_inbox(db, user, &["join.confirmed", "mod.kicked"].repeat(3)).await;
    eventually("the other e-mails are written", DEADLINE, async || {
        let written = "select count(*) from pillarbox_notify.mail where template like 'notification.%'";
        match count(db, written).await {
            5 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    let skipped = app.admin().get("/admin/v1/notifications?status=skipped").await.json();
    let items = skipped["items"].as_array().unwrap();
    assert_eq!(items.len(), 1, "{skipped}");
    assert_eq!((text(&items[0]["event_type"]), text(&items[0]["channel"])), ("mod.kicked", "email"));
    assert!(text(&items[0]["last_error"]).contains("notify.emails_per_recipient_max"), "{skipped}");
    app.stop().await;
}

#[tokio::test]
async fn a_title_in_a_subject_has_no_link_and_nothing_invisible() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, user) = (database.pool(), insert_person(database.pool(), "ada@example.org").await);
    let app = start_alone(&database, |_| {}).await;
    let mut event = new_event(Uuid::now_v7(), 0);
    event.title = "Chess” now\u{202e} at https://evil\u{200b}.example/x".to_owned();
    post_event_update(db, &event).await;
    wait_until_processed(db, "notify.events", 1).await;
    let confirmed = json!({"event_id": event.event_id, "user_id": user, "counts": {"active": 1, "waitlisted": 0,
        "version": 1}, "occurred_at": event.occurred_at, "trace_id": ""});
    crate::mail::fixture::post_raw_from(db, "joins", "join.confirmed", &confirmed.to_string()).await;
    let subject = "select subject from pillarbox_notify.mail";
    let subject = eventually("the e-mail is written", DEADLINE, async || {
        sqlx::query_scalar::<_, String>(subject).fetch_optional(db).await.unwrap()
    })
    .await;
    assert_eq!(subject, "You have a seat: event “Chess' now at https: //evil. example/x”");
    app.stop().await;
}

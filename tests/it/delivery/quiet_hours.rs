//! Quiet hours end to end, over the night in which clocks are set forward, on a database whose time the test moves.

use std::time::Duration;

use chrono::{DateTime, DurationRound, TimeDelta, Utc};
use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use sqlx::PgPool;
use testkit::{MovableTime, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::{emails_of, insert_due, insert_person, set_event_type, state_of, wait_for_state};
use crate::server::process::{DataFolder, serve};
use crate::support::DEADLINE;

async fn set_quiet_hours(db: &PgPool, user: Uuid, zone: &str) {
    let insert = "insert into pillarbox_notify.quiet_hours (user_id, time_zone, quiet_from, quiet_until)
                  values ($1, $2, '22:00', '07:00')";
    sqlx::query(insert).bind(user).bind(zone).execute(db).await.unwrap();
}

async fn due_at(db: &PgPool, id: i64) -> Option<DateTime<Utc>> {
    let query = "select due_at from pillarbox_notify.notification where id = $1";
    sqlx::query_scalar(query).bind(id).fetch_one(db).await.unwrap()
}

#[tokio::test]
async fn an_email_of_the_night_waits_until_seven_local_time_although_clocks_change() {
    let time = MovableTime::start(&migrations()).await;
    let db = time.database().pool();
    // 23:30 in Berlin, in the night in which clocks are set forward at 02:00.
    let night: DateTime<Utc> = "2027-03-27T22:30:00Z".parse().unwrap();
    let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()").fetch_one(db).await.unwrap();
    time.advance((night - now).to_std().unwrap());
    let (sleeper, awake) = (insert_person(db, "ada@example.org").await, insert_person(db, "bob@example.org").await);
    set_quiet_hours(db, sleeper, "Europe/Berlin").await;
    set_quiet_hours(db, awake, "America/New_York").await;
    let insert = "insert into pillarbox_notify.event_type (name, critical) values ('alarm.raised', true)";
    sqlx::query(insert).execute(db).await.unwrap();
    let folder = DataFolder::new();
    let environment = time.environment();
    let environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (&**name, &**value)).collect();
    let mut process = serve(&folder, time.database(), &environment);

    let waiting = insert_due(db, sleeper, "email", "order.paid", 0).await;
    let at_once = insert_due(db, awake, "email", "order.paid", 0).await;
    let alarm = insert_due(db, sleeper, "email", "alarm.raised", 0).await;
    wait_for_state(db, at_once, "delivered").await;
    wait_for_state(db, alarm, "delivered").await;
    let end: DateTime<Utc> = "2027-03-28T05:00:00Z".parse().unwrap();
    eventually("the e-mail is postponed", DEADLINE, async || due_at(db, waiting).await == Some(end)).await;
    assert_eq!(emails_of(db, sleeper).await.len(), 1, "only the critical one");

    // 06:59 in Berlin: the night had an hour less.
    time.advance(Duration::from_secs((6 * 60 + 29) * 60));
    let marker = insert_due(db, awake, "email", "order.paid", 0).await;
    // In New York it is late in the evening by now.
    let postponed: DateTime<Utc> = "2027-03-28T11:00:00Z".parse().unwrap();
    eventually("a round has run", DEADLINE, async || due_at(db, marker).await == Some(postponed)).await;
    assert_eq!(emails_of(db, sleeper).await.len(), 1, "it is not seven o'clock yet");
    time.advance(Duration::from_secs(61));
    wait_for_state(db, waiting, "delivered").await;
    assert_eq!(emails_of(db, sleeper).await.len(), 2);
    process.kill9();
}

#[tokio::test]
async fn removed_or_changed_quiet_hours_release_the_emails_that_wait_for_their_end() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    set_event_type(&app, "order.sent", json!({"digest_minutes": 60})).await;
    let user = insert_person(db, "ada@example.org").await;
    let now = Utc::now().duration_trunc(TimeDelta::minutes(1)).unwrap();
    let patch = async |quiet_hours: Value| {
        let body = Some(json!({"quiet_hours": quiet_hours}));
        let changed = app.user(user, None).send(Method::PATCH, "/notify/v1/preferences", body).await;
        assert_eq!(changed.status, 200, "{changed:?}");
    };
    let until = |end: DateTime<Utc>| {
        let text = |time: DateTime<Utc>| time.format("%H:%M").to_string();
        json!({"time_zone": "UTC", "from": text(now - TimeDelta::hours(1)), "until": text(end)})
    };
    let wait_for_due = async |id: i64, time: DateTime<Utc>| {
        eventually("the e-mail waits for the end", DEADLINE, async || match due_at(db, id).await {
            found if found == Some(time) => Ok(()),
            other => Err(other),
        })
        .await;
    };
    let end = now + TimeDelta::hours(6);
    patch(until(end)).await;
    let alone = insert_due(db, user, "email", "order.paid", 0).await;
    let collected = insert_due(db, user, "email", "order.sent", 0).await;
    let failed = insert_due(db, user, "email", "order.late", 3 * 3_600).await;
    let fail = "update pillarbox_notify.notification set attempts = 1, last_error = 'x' where id = $1";
    sqlx::query(fail).bind(failed).execute(db).await.unwrap();
    let retry_at = due_at(db, failed).await;
    wait_for_due(alone, end).await;
    wait_for_due(collected, end).await;

    let sooner = now + TimeDelta::hours(4);
    patch(until(sooner)).await;
    wait_for_due(alone, sooner).await;
    patch(json!(null)).await;
    wait_for_state(db, alone, "delivered").await;
    let created = "select created_at from pillarbox_notify.notification where id = $1";
    let created: DateTime<Utc> = sqlx::query_scalar(created).bind(collected).fetch_one(db).await.unwrap();
    assert_eq!(due_at(db, collected).await, Some(created + TimeDelta::hours(1)), "it is collected for an hour");
    assert_eq!((due_at(db, failed).await, state_of(db, failed).await.2), (retry_at, 1), "it waits for its retry");
    app.stop().await;
}

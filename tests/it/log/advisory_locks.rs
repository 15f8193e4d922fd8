//! A producer that may post in SQL holds the advisory lock of every name that Pillarbox locks, and the work goes on.

use runtime::secret::digest;
use serde_json::json;
use server::migrations;
use sqlx::{Connection, PgConnection};
use testkit::{Receiver, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::events::fixture::meetup;
use crate::hub::fixture::{post, subscribe, wait_for_webhooks};
use crate::hub::replays::{hour_ago, is_delivered, wait_for_replay};
use crate::joins::fixture::{new_event, post_event_update};
use crate::mail::fixture::post_raw_from;
use crate::notifications::fixture::wait_for_inbox;
use crate::support::{DEADLINE, caller};

/// The names of all work that one transaction at a time may do.
fn names() -> Vec<String> {
    let replays = (0..64).map(|slot| format!("hub.replays {slot}"));
    let others = ["events.trending", "events.reconciliation", "notify.waiting_registrations"].map(str::to_owned);
    replays.chain(others).collect()
}

async fn count(db: &TestDatabase, query: &'static str) -> i64 {
    sqlx::query_scalar(query).fetch_one(db.pool()).await.unwrap()
}

#[tokio::test]
async fn a_producer_with_every_advisory_lock_stops_no_work() {
    let database = TestDatabase::new(&migrations()).await;
    let mut producer = PgConnection::connect(&database.url()).await.unwrap();
    sqlx::query("set session authorization pillarbox_producer").execute(&mut producer).await.unwrap();
    let lock = "select pg_advisory_lock(hashtextextended(name, 0)) from unnest($1::text[]) as names (name)";
    sqlx::query(lock).bind(names()).execute(&mut producer).await.unwrap();
    let held: i64 =
        sqlx::query_scalar("select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()")
            .fetch_one(&mut producer)
            .await
            .unwrap();
    assert_eq!(held, names().len() as i64);
    let refused = sqlx::query("select from pillarbox.work_lock for update").execute(&mut producer).await.unwrap_err();
    assert!(refused.to_string().contains("permission denied"), "{refused}");

    let app = TestApp::start_with(&database, |settings| {
        settings.events.trending_seconds = 1;
        settings.events.reconcile_minutes = 1;
    })
    .await;
    let manager = caller(&app, "manage", "main").await;
    let receiver = Receiver::start().await;
    subscribe(&manager, &receiver.url(), json!({})).await;
    post(&manager, "order.paid", json!({"n": 1}), None).await;
    wait_for_webhooks(&receiver, 1).await;
    let everything = json!({"mode": "resend", "from": hour_ago()});
    let created = manager.post("/hub/v1/replays", everything).await;
    assert_eq!(created.status, 202, "{created:?}");
    wait_for_replay(&manager, &created.json(), "the replay has finished", is_delivered).await;
    wait_for_webhooks(&receiver, 2).await;
    eventually("trending is computed", DEADLINE, async || {
        count(&database, "select count(*) from pillarbox_events.trending_epoch").await > 0
    })
    .await;
    eventually("the reconciliation runs", DEADLINE, async || {
        count(&database, "select count(*) from pillarbox_events.reconciliation").await > 0
    })
    .await;
    let (event, user) = (new_event(Uuid::now_v7(), 1), Uuid::now_v7());
    let registration = json!({"event_id": event.event_id, "user_id": user, "occurred_at": event.occurred_at, "trace_id": "",
        "counts": {"active": 1, "waitlisted": 0, "version": 1}});
    post_raw_from(database.pool(), "joins", "join.confirmed", &registration.to_string()).await;
    let waiting = "select count(*) from pillarbox_notify.waiting_registration";
    eventually("the registration waits for its event", DEADLINE, async || count(&database, waiting).await == 1).await;
    post_event_update(database.pool(), &event).await;
    wait_for_inbox(database.pool(), user, &["join.confirmed"]).await;
    drop(producer);
    app.stop().await;
}

/// The lock of the requests of a user with this Idempotency-Key.
fn lock_of(user: Uuid, key: &str) -> i64 {
    let sized = |part: &str| format!("\0\0\0\0\0\0\0{}{part}", char::from(u8::try_from(part.len()).unwrap()));
    let id = digest(&[sized(&format!("main user:{user}")), sized(key)].concat());
    i64::from_be_bytes(id[..8].try_into().unwrap())
}

#[tokio::test]
async fn a_producer_with_the_lock_of_an_idempotency_key_stops_the_requests_with_that_key_only() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let user = Uuid::now_v7();
    let mut producer = PgConnection::connect(&database.url()).await.unwrap();
    sqlx::query("set session authorization pillarbox_producer").execute(&mut producer).await.unwrap();
    let lock = "select pg_advisory_lock($1)";
    sqlx::query(lock).bind(lock_of(user, "first")).execute(&mut producer).await.unwrap();
    let create = async |key: &str| {
        app.user(user, None).with_header("idempotency-key", key).post("/event/v1/events", meetup()).await
    };
    create("first").await.assert_problem(409, "still-running");
    let created = create("second").await;
    assert_eq!(created.status, 201, "{created:?}");
    drop(producer);
    let created = eventually("the lock is released", DEADLINE, async || match create("first").await {
        created if created.status == 409 => Err(created),
        created => Ok(created),
    })
    .await;
    assert_eq!(created.status, 201, "{created:?}");
    app.stop().await;
}

//! Retention of the notify service: what must be erased is erased, whatever else fails.

use server::migrations;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::count;
use crate::support::DEADLINE;

#[tokio::test]
async fn a_step_that_fails_prevents_no_other_and_participants_of_ended_events_are_deleted() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, event) = (database.pool(), Uuid::now_v7());
    let mail = "insert into pillarbox_notify.mail (message_id, source, idempotency_key, recipient, template, locale, subject, text,
                    html, status, next_attempt_at, give_up_at, expires_at, created_at)
                values (gen_random_uuid(), 'identity', 'k', 'a@example.org', 't', 'en', 's', 'secret', 'secret', 'dead', now(),
                    now(), now() - interval '1 hour', now())";
    sqlx::query(mail).execute(db).await.unwrap();
    let ended = "insert into pillarbox_notify.joinable_event
                 values ($1, 1, 'published', 't', 'c', now() - interval '92 days', now() - interval '91 days', 'UTC',
                     gen_random_uuid())";
    sqlx::query(ended).bind(event).execute(db).await.unwrap();
    let participants = "insert into pillarbox_notify.participant
                        select $1, gen_random_uuid(), 'left' from generate_series(1, 2500)";
    sqlx::query(participants).bind(event).execute(db).await.unwrap();
    // The step of the deleted accounts fails.
    let broken = "alter table pillarbox_notify.deleted_account rename to deleted_account_elsewhere";
    sqlx::query(broken).execute(db).await.unwrap();
    let app = TestApp::start(&database).await;
    eventually("the secret is erased", DEADLINE, async || {
        count(db, "select count(*) from pillarbox_notify.mail where text is not null").await == 0
    })
    .await;
    let first = async || count(db, "select count(*) from pillarbox_notify.participant").await;
    eventually("participants are deleted", DEADLINE, async || first().await < 2_500).await;
    assert_eq!(first().await % 1_000, 500, "in steps of 1,000");
    let mended = "alter table pillarbox_notify.deleted_account_elsewhere rename to deleted_account";
    sqlx::query(mended).execute(db).await.unwrap();
    eventually("the event is deleted with its participants", DEADLINE, async || {
        let left = "select (select count(*) from pillarbox_notify.participant) + count(*) from pillarbox_notify.joinable_event";
        match count(db, left).await {
            0 => Ok(()),
            left => Err(left),
        }
    })
    .await;
    app.stop().await;
}

/// An id of an event that was created this many days ago.
fn event_of_days_ago(days: u64) -> Uuid {
    let now = chrono::Utc::now().timestamp() as u64;
    Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, now - days * 86_400, 0))
}

#[tokio::test]
async fn participants_of_an_event_that_never_becomes_known_are_deleted() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let (unknown, young, known, awaited) =
        (event_of_days_ago(100), event_of_days_ago(10), event_of_days_ago(100), event_of_days_ago(101));
    let event = "insert into pillarbox_notify.joinable_event
                 values ($1, 1, 'published', 't', 'c', now() + interval '1 day', now() + interval '2 days', 'UTC',
                     gen_random_uuid())";
    sqlx::query(event).bind(known).execute(db).await.unwrap();
    // More than one round deletes.
    let participants = "insert into pillarbox_notify.participant
                        select $1, gen_random_uuid(), 'active' from generate_series(1, $2)";
    for (event, count) in [(unknown, 1_500), (young, 2), (known, 2), (awaited, 2)] {
        sqlx::query(participants).bind(event).bind(count).execute(db).await.unwrap();
    }
    let waits = "insert into pillarbox_notify.waiting_registration
                     (message_id, event_id, user_id, topic, payload, due_at, created_at)
                 values (gen_random_uuid(), $1, gen_random_uuid(), 'join.confirmed', '{}', 'infinity', now())";
    sqlx::query(waits).bind(awaited).execute(db).await.unwrap();
    // Notifications exist for long enough: the messages about the event would have arrived.
    let since = "update pillarbox_notify.facts_since set at = now() - interval '91 days'";
    sqlx::query(since).execute(db).await.unwrap();
    let app = TestApp::start(&database).await;
    eventually("those of the unknown event are deleted", DEADLINE, async || {
        let left = "select event_id, count(*) from pillarbox_notify.participant group by event_id order by event_id";
        let left: Vec<(Uuid, i64)> = sqlx::query_as(left).fetch_all(db).await.unwrap();
        if left == [(awaited, 2), (known, 2), (young, 2)] { Ok(()) } else { Err(left) }
    })
    .await;
    app.stop().await;
}

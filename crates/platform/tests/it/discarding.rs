//! What is thrown away is shown as such, for as long as the log may have it.

use std::sync::Arc;

use chrono::Utc;
use mailbox::cursor::Start;
use mailbox::handler::{Handler, Handling};
use mailbox::log::Message;
use mailbox::maintain::{self, Keep};
use mailbox::parked;
use mailbox::replay::{self, Request};
use sqlx::{PgPool, Postgres, Transaction};
use testkit::drain;
use tokio::sync::Semaphore;

use crate::consuming::{
    PATIENCE, Patient, Process, count, database, numbers, post_numbers, quick, until_count, until_effects,
    until_replays_are_done,
};
use crate::operator_commands::Desk;

/// Of the message with this number, for the one consumer: its status, whether it was sent, its attempts and its last error.
async fn status(db: &PgPool, number: i64) -> (String, bool, i32, Option<String>) {
    sqlx::query_as(
        "select status, sent_at is not null, attempts, last_error
         from pillarbox.outbox_status join pillarbox.log using (message_id) where payload::text = $1",
    )
    .bind(number.to_string())
    .fetch_one(db)
    .await
    .unwrap()
}

fn discarded() -> (String, bool, i32, Option<String>) {
    ("discarded".to_owned(), false, 1, Some("negative".to_owned()))
}

fn sent() -> (String, bool, i32, Option<String>) {
    ("sent".to_owned(), true, 1, None)
}

async fn replay_the_last_hour(db: &PgPool, again: bool) {
    let (from, to) = (Utc::now() - chrono::Duration::hours(1), Utc::now());
    let request = Request { consumer: "effects".to_owned(), from, to, again };
    replay::request(db, &request).await.unwrap().unwrap();
    until_replays_are_done(db).await;
}

#[tokio::test]
async fn a_parked_message_that_is_thrown_away_shows_as_discarded_until_a_replay_sends_it() {
    let database = database().await;
    let (db, desk) = (database.pool(), Desk::at(&database));
    let patient = Patient::slow(db);
    post_numbers(db, Some("k"), [-1, 2]).await;
    until_count(db, "parked", 2).await;
    assert_eq!(status(db, -1).await.0, "parked");
    let place: i64 = sqlx::query_scalar("select min(place) from pillarbox.parked").fetch_one(db).await.unwrap();
    desk.ok(&format!("parked discard {place}")).await;
    until_count(db, "parked", 0).await;
    assert_eq!(status(db, -1).await, discarded());
    assert_eq!(status(db, 2).await, sent());
    assert_eq!(numbers(db).await, [2]);

    patient.cure();
    replay_the_last_hour(db, false).await;
    assert_eq!(status(db, -1).await, sent());
    patient.process.stop().await;
    assert_eq!(numbers(db).await, [2, -1]);
    maintain::round(db, Keep::default(), Utc::now(), maintain::PATIENCE).await.unwrap();
    assert_eq!(count(db, "discarded").await, 1);
    maintain::round(db, Keep::default(), Utc::now() + chrono::Duration::days(20), maintain::PATIENCE).await.unwrap();
    assert_eq!(count(db, "discarded").await, 0, "it goes when the log has gone");
}

#[tokio::test]
async fn a_dead_letter_that_is_thrown_away_shows_as_discarded_unless_it_was_a_repeat() {
    let database = database().await;
    let (db, desk) = (database.pool(), Desk::at(&database));
    let patient = Patient::hasty(db);
    post_numbers(db, None, [1, -1, 2]).await;
    until_count(db, "dead_letter", 1).await;
    desk.ok("dead-letters discard --consumer effects").await;
    let (status_now, is_sent, ..) = status(db, -1).await;
    assert_eq!((status_now.as_str(), is_sent), ("discarded", false));
    patient.process.stop().await;
    assert_eq!(count(db, "discarded").await, 1);

    // What was sent before, and fails only when it is repeated, was sent.
    sqlx::query(
        "insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, log_id, message_id, source, tenant,
             topic, headers, payload, at)
         select 'effects', shard, 1, 1, 'x', id, message_id, source, tenant, topic, headers, payload, at
         from pillarbox.log where payload::text = '1'",
    )
    .execute(db)
    .await
    .unwrap();
    assert_eq!(status(db, 1).await.0, "dead");
    desk.ok("dead-letters discard --consumer effects").await;
    assert_eq!(status(db, 1).await, sent());
}

/// Fails at first; the second time it says that it is at work, and waits for leave.
struct Slow {
    at_work: Arc<Semaphore>,
    leave: Arc<Semaphore>,
    calls: Arc<std::sync::atomic::AtomicU32>,
}

impl Handler for Slow {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, _: &'t Message) -> Handling<'t> {
        Box::pin(async move {
            if self.calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 0 {
                return Err("negative".into());
            }
            self.at_work.add_permits(1);
            self.leave.acquire().await?.forget();
            sqlx::query("insert into effect (number) values (1)").execute(&mut **tx).await?;
            Ok(())
        })
    }
}

#[tokio::test]
async fn what_is_thrown_away_while_it_is_being_done_is_done() {
    let database = database().await;
    let db = database.pool();
    let (at_work, leave) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let handler = Slow { at_work: at_work.clone(), leave: leave.clone(), calls: Arc::default() };
    let process = Process::start_with(db, Arc::new(handler), Start::Beginning, quick());
    post_numbers(db, Some("k"), [1]).await;
    tokio::time::timeout(PATIENCE, at_work.acquire()).await.unwrap().unwrap().forget();
    let place: i64 = sqlx::query_scalar("select place from pillarbox.parked").fetch_one(db).await.unwrap();
    assert!(parked::discard(db, place).await.unwrap());
    assert_eq!(status(db, 1).await.0, "discarded");
    leave.add_permits(1);
    until_effects(db, 1).await;
    drain("it is kept", PATIENCE, async || count(db, "parked").await == 0).await;
    process.stop().await;
    assert_eq!(status(db, 1).await, sent());
}

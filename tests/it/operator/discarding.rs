//! Discarded messages: their status is `discarded` for as long as the log may contain them.

use std::sync::Arc;

use chrono::Utc;
use pillarbox::consumers::{Handler, HandlerFuture, StartAt};
use pillarbox::log::Message;
use pillarbox::operations::maintenance::{self, Retention};
use pillarbox::operations::parked;
use pillarbox::operations::replays::{self, Request};
use sqlx::{PgPool, Postgres, Transaction};
use testkit::eventually;
use tokio::sync::Semaphore;

use crate::consumers::support::{
    FailingConsumer, Process, TIMEOUT, count, database, fast_options, numbers, post_numbers, wait_for_count,
    wait_for_effects, wait_for_replays,
};
use crate::operator::commands::Cli;

/// Status, whether it was sent, attempts and last error of the message with this number, for the only consumer.
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
    replays::request(db, &request).await.unwrap().unwrap();
    wait_for_replays(db).await;
}

#[tokio::test]
async fn a_discarded_parked_message_is_shown_until_a_replay_sends_it() {
    let database = database().await;
    let (db, (cli, app)) = (database.pool(), Cli::with_api(&database).await);
    let consumer = FailingConsumer::with_slow_retries(db);
    post_numbers(db, Some("k"), [-1, 2]).await;
    wait_for_count(db, "parked", 2).await;
    assert_eq!(status(db, -1).await.0, "parked");
    let place: i64 = sqlx::query_scalar("select min(id) from pillarbox.parked").fetch_one(db).await.unwrap();
    cli.ok(&format!("parked discard {place}")).await;
    wait_for_count(db, "parked", 0).await;
    assert_eq!(status(db, -1).await, discarded());
    assert_eq!(status(db, 2).await, sent());
    assert_eq!(numbers(db).await, [2]);

    consumer.stop_failing();
    replay_the_last_hour(db, false).await;
    assert_eq!(status(db, -1).await, sent());
    consumer.process.stop().await;
    assert_eq!(numbers(db).await, [2, -1]);
    maintenance::run_once(db, Retention::default(), maintenance::CATCH_UP_TIME).await.unwrap();
    assert_eq!(count(db, "discarded").await, 1);
    let older = "update pillarbox.discarded set discarded_at = discarded_at - interval '20 days'";
    sqlx::query(older).execute(db).await.unwrap();
    maintenance::run_once(db, Retention::default(), maintenance::CATCH_UP_TIME).await.unwrap();
    assert_eq!(count(db, "discarded").await, 0, "the row is deleted after the retention of the log");
    app.stop().await;
}

#[tokio::test]
async fn a_discarded_dead_letter_is_shown_unless_it_was_sent_before() {
    let database = database().await;
    let (db, (cli, app)) = (database.pool(), Cli::with_api(&database).await);
    let consumer = FailingConsumer::without_retries(db);
    post_numbers(db, None, [1, -1, 2]).await;
    wait_for_count(db, "dead_letter", 1).await;
    cli.ok("dead-letters discard --consumer effects").await;
    let (status_now, is_sent, ..) = status(db, -1).await;
    assert_eq!((status_now.as_str(), is_sent), ("discarded", false));
    consumer.process.stop().await;
    assert_eq!(count(db, "discarded").await, 1);

    // A message that was processed before, and fails only in a replays, counts as sent.
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
    cli.ok("dead-letters discard --consumer effects").await;
    assert_eq!(status(db, 1).await, sent());
    app.stop().await;
}

/// Fails at the first attempt. At the second one it announces itself and waits for a permit.
struct Slow {
    at_work: Arc<Semaphore>,
    leave: Arc<Semaphore>,
    calls: Arc<std::sync::atomic::AtomicU32>,
}

impl Handler for Slow {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, _: &'t Message) -> HandlerFuture<'t> {
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
async fn a_message_discarded_during_its_processing_is_processed() {
    let database = database().await;
    let db = database.pool();
    let (at_work, leave) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let handler = Slow { at_work: at_work.clone(), leave: leave.clone(), calls: Arc::default() };
    let process = Process::start_with(db, Arc::new(handler), StartAt::Beginning, fast_options());
    post_numbers(db, Some("k"), [1]).await;
    tokio::time::timeout(TIMEOUT, at_work.acquire()).await.unwrap().unwrap().forget();
    let place: i64 = sqlx::query_scalar("select id from pillarbox.parked").fetch_one(db).await.unwrap();
    assert!(parked::discard(db, place).await.unwrap());
    assert_eq!(status(db, 1).await.0, "discarded");
    leave.add_permits(1);
    wait_for_effects(db, 1).await;
    eventually("the message is no longer parked", TIMEOUT, async || count(db, "parked").await == 0).await;
    process.stop().await;
    assert_eq!(status(db, 1).await, sent());
}

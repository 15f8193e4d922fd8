//! Replays of a range: their cost, their cancellation, and their commands.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use pillarbox::consumers::{Handler, HandlerFuture, StartAt};
use pillarbox::log::Message;
use pillarbox::operations::replays::{self, Request};
use serde_json::json;
use sqlx::postgres::PgConnectOptions;
use sqlx::{PgPool, Postgres, Transaction};
use testkit::{TestApp, eventually};
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::consumers::support::{
    Process, TIMEOUT, count, database, fast_options, numbers, post_numbers, recorder, wait_for_effects,
    wait_for_replays,
};
use crate::operator::commands::Cli;

/// Inserts a past day with one message per second, whose number is the second. The ids have gaps, as rollbacks cause
/// them. Returns the midnight at which the day starts.
async fn insert_a_day(db: &PgPool) -> DateTime<Utc> {
    sqlx::raw_sql(
        "set timezone = 'UTC';
         do $$ begin execute format('create table pillarbox.log_old partition of pillarbox.log for values from (%L) to (%L)',
             current_date - 2, current_date - 1); end $$;
         insert into pillarbox.log (id, shard, message_id, source, tenant, topic, payload, at)
         select nextval('pillarbox.log_id') * 3, n % 16,
             overlay(pillarbox.uuid_at(at)::text placing '7' from 15 for 1)::uuid, 'test', 'main', 'test.old', to_json(n), at
         from generate_series(0, 86399) as n
         cross join lateral (select current_date - 2 + n * interval '1 second' as at) as time;
         select setval('pillarbox.log_id', 3 * 86400);
         analyze pillarbox.log",
    )
    .execute(db)
    .await
    .unwrap();
    Utc::now().date_naive().and_hms_opt(0, 0, 0).unwrap().and_utc() - chrono::Duration::days(2)
}

/// The number of rows of that day that were read so far. PostgreSQL counts those of a session when the session ends.
async fn rows_read(db: &PgPool) -> i64 {
    let query = "select seq_tup_read + idx_tup_fetch from pg_stat_user_tables where relname = 'log_old'";
    sqlx::query_scalar(query).fetch_one(db).await.unwrap()
}

#[tokio::test]
async fn a_replay_reads_only_the_rows_of_its_range() {
    let database = database().await;
    let db = database.pool();
    let midnight = insert_a_day(db).await;
    // Separate sessions: their rows are counted when they end.
    let options: PgConnectOptions = database.url().parse().unwrap();
    let counted = PgPool::connect_lazy_with(options.application_name("counted"));
    let process = Process::start_with(&counted, recorder(), StartAt::Now, fast_options());
    eventually("the consumer is registered", TIMEOUT, async || count(db, "cursor").await == 1).await;
    let before = rows_read(db).await;

    let second = |number: i64| midnight + chrono::Duration::seconds(number);
    let request = Request { consumer: "effects".to_owned(), from: second(40_000), to: second(40_600), again: false };
    replays::request(db, &request).await.unwrap().unwrap();
    wait_for_replays(db).await;
    process.stop().await;
    counted.close().await;
    eventually("the counted sessions have ended", TIMEOUT, async || {
        let query =
            "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
                         and application_name = 'counted'";
        sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap() == 0
    })
    .await;

    let mut found = numbers(db).await;
    found.sort_unstable();
    assert_eq!(found, (40_000..40_600).collect::<Vec<_>>(), "the start is included and the end is not");
    let rows = rows_read(db).await - before;
    assert!((600..4_000).contains(&rows), "{rows} of 86,400 rows for 600");
}

/// Waits for a permit before each message.
struct Gated(Arc<Semaphore>);

impl Handler for Gated {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move {
            self.0.acquire().await?.forget();
            let insert = "insert into effect (number) values ($1)";
            sqlx::query(insert).bind(message.payload.get().parse::<i64>()?).execute(&mut **tx).await?;
            Ok(())
        })
    }
}

#[tokio::test]
async fn a_canceled_replay_stops_and_its_effects_stay() {
    let database = database().await;
    let db = database.pool();
    let app = TestApp::start(&database).await;
    let (admin, permits) = (app.admin(), Arc::new(Semaphore::new(100)));
    let mut worker_options = fast_options();
    worker_options.worker.batch = 1;
    let process = Process::start_with(db, Arc::new(Gated(permits.clone())), StartAt::Beginning, worker_options);
    post_numbers(db, Some("k"), 1..=100).await;
    wait_for_effects(db, 100).await;

    let request = json!({"consumer": "effects", "from": Utc::now() - chrono::Duration::hours(1), "again": true});
    let made = admin.post("/admin/v1/replays", request.clone()).await;
    let replay = format!("/admin/v1/replays/{}", made.json()["id"]);
    permits.add_permits(10);
    wait_for_effects(db, 110).await;
    for _ in 0..2 {
        assert_eq!(admin.delete(&replay).await.status, 204, "a repeated cancellation succeeds");
    }
    // One message is being processed and may finish.
    permits.add_permits(1_000);
    // A second replay runs after the first: when it is done, the first one has stopped.
    let second = admin.post("/admin/v1/replays", request).await.json()["id"].clone();
    wait_for_replays(db).await;
    process.stop().await;
    let found = numbers(db).await.len();
    assert!((210..=211).contains(&found), "{found}: 100 live, 10 or 11 of the first replay, 100 of the second");

    let listed = admin.get("/admin/v1/replays").await.json()["items"].clone();
    assert_eq!(listed[0]["id"], second);
    assert!(listed[0]["canceled_at"].is_null() && listed[1]["canceled_at"].is_string(), "{listed}");
    assert!(listed[1]["shards_done"].as_i64().unwrap() < 16);
    let consumers = admin.get("/admin/v1/consumers").await.json();
    assert_eq!(consumers["items"][0]["replays"], 0, "no replay is active");

    // Canceling a completed replay changes nothing.
    assert_eq!(admin.delete(&format!("/admin/v1/replays/{second}")).await.status, 204);
    assert!(admin.get("/admin/v1/replays").await.json()["items"][0]["canceled_at"].is_null());
    admin.delete("/admin/v1/replays/1000000").await.assert_problem(404, "replay-not-found");
    admin.delete("/admin/v1/replays/first").await.assert_problem(400, "malformed-path");
    app.anonymous().delete(&replay).await.assert_problem(401, "unauthorized");
    app.user(Uuid::now_v7(), None).delete(&replay).await.assert_problem(403, "forbidden");
    app.stop().await;
}

#[tokio::test]
async fn replays_are_listed_and_canceled_by_command() {
    let database = database().await;
    let (db, (cli, app)) = (database.pool(), Cli::with_api(&database).await);
    let process = Process::start(db, recorder());
    post_numbers(db, None, [1]).await;
    wait_for_effects(db, 1).await;
    process.stop().await;
    assert!(cli.ok("replay --consumer effects --from 1h").await.contains("Replay 1"));
    assert!(cli.ok("replay list").await.contains("0 of 16 shards done"));
    assert!(cli.ok("replay cancel 1").await.contains("is canceled"));
    assert!(cli.ok("replay cancel 1").await.contains("had ended"));
    assert!(cli.ok("replay list --consumer effects").await.contains("canceled, 0 of 16"));
    assert!(cli.ok("replay list --json").await.contains("canceled_at"));
    assert_eq!(cli.ok("replay list --consumer missing").await.lines().count(), 1);
    assert!(cli.refused("replay cancel 2").await.contains("no such replay"));
    for wrong in ["replay", "replay --from 1h", "replay cancel", "replay --consumer effects --from 1h cancel 1"] {
        cli.refused(wrong).await;
    }
    app.stop().await;
}

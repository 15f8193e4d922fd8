//! Reading again: what of the log it costs, and calling it off.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use mailbox::cursor::Start;
use mailbox::handler::{Handler, Handling};
use mailbox::log::Message;
use mailbox::replay::{self, Request};
use serde_json::json;
use sqlx::postgres::PgConnectOptions;
use sqlx::{PgPool, Postgres, Transaction};
use testkit::{TestApp, drain};
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::consuming::{
    PATIENCE, Process, count, database, numbers, post_numbers, quick, recorder, until_effects, until_replays_are_done,
};
use crate::operator_commands::Desk;

/// A day that is past, with one message a second: its number is its second. Gaps in the ids, as rollbacks leave them.
async fn post_a_day(db: &PgPool) -> DateTime<Utc> {
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

/// How many rows of that day were looked at so far. A session's counts are there when it has ended.
async fn rows_looked_at(db: &PgPool) -> i64 {
    let query = "select seq_tup_read + idx_tup_fetch from pg_stat_user_tables where relname = 'log_old'";
    sqlx::query_scalar(query).fetch_one(db).await.unwrap()
}

#[tokio::test]
async fn ten_minutes_of_a_day_cost_ten_minutes_of_the_log() {
    let database = database().await;
    let db = database.pool();
    let midnight = post_a_day(db).await;
    // Sessions of its own: their counts are there when they have ended.
    let options: PgConnectOptions = database.url().parse().unwrap();
    let own = PgPool::connect_lazy_with(options.application_name("counted"));
    let process = Process::start_with(&own, recorder(), Start::Now, quick());
    drain("it reads from now on", PATIENCE, async || count(db, "cursor").await == 1).await;
    let before = rows_looked_at(db).await;

    let second = |number: i64| midnight + chrono::Duration::seconds(number);
    let request = Request { consumer: "effects".to_owned(), from: second(40_000), to: second(40_600), again: false };
    replay::request(db, &request).await.unwrap().unwrap();
    until_replays_are_done(db).await;
    process.stop().await;
    own.close().await;
    drain("its sessions have ended", PATIENCE, async || {
        let query =
            "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
                         and application_name = 'counted'";
        sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap() == 0
    })
    .await;

    let mut found = numbers(db).await;
    found.sort_unstable();
    assert_eq!(found, (40_000..40_600).collect::<Vec<_>>(), "from the first to before the last");
    let looked_at = rows_looked_at(db).await - before;
    assert!((600..4_000).contains(&looked_at), "{looked_at} of 86,400 rows for 600");
}

/// Does one message at a time, and waits for leave before each.
struct Gated(Arc<Semaphore>);

impl Handler for Gated {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> Handling<'t> {
        Box::pin(async move {
            self.0.acquire().await?.forget();
            let insert = "insert into effect (number) values ($1)";
            sqlx::query(insert).bind(message.payload.get().parse::<i64>()?).execute(&mut **tx).await?;
            Ok(())
        })
    }
}

#[tokio::test]
async fn a_replay_that_is_called_off_stops_and_what_it_repeated_stays() {
    let database = database().await;
    let db = database.pool();
    let app = TestApp::start(&database).await;
    let (admin, leave) = (app.admin(), Arc::new(Semaphore::new(100)));
    let mut rhythm = quick();
    rhythm.lane.batch = 1;
    let process = Process::start_with(db, Arc::new(Gated(leave.clone())), Start::Beginning, rhythm);
    post_numbers(db, Some("k"), 1..=100).await;
    until_effects(db, 100).await;

    let asked = json!({"consumer": "effects", "from": Utc::now() - chrono::Duration::hours(1), "again": true});
    let made = admin.post("/admin/v1/replays", asked.clone()).await;
    let replay = format!("/admin/v1/replays/{}", made.json()["id"]);
    leave.add_permits(10);
    until_effects(db, 110).await;
    for _ in 0..2 {
        assert_eq!(admin.delete(&replay).await.status, 204, "as often as one likes");
    }
    // One was at work, and may end.
    leave.add_permits(1_000);
    // A second replay is read behind the first: when it is done, the first has stopped.
    let second = admin.post("/admin/v1/replays", asked).await.json()["id"].clone();
    until_replays_are_done(db).await;
    process.stop().await;
    let found = numbers(db).await.len();
    assert!((210..=211).contains(&found), "{found}: 100 live, 10 or 11 of the first replay, 100 of the second");

    let listed = admin.get("/admin/v1/replays").await.json()["items"].clone();
    assert_eq!(listed[0]["id"], second);
    assert!(listed[0]["canceled_at"].is_null() && listed[1]["canceled_at"].is_string(), "{listed}");
    assert!(listed[1]["shards_done"].as_i64().unwrap() < 16);
    let consumers = admin.get("/admin/v1/consumers").await.json();
    assert_eq!(consumers["items"][0]["replays"], 0, "nothing is left to do");

    // One that is done stays done.
    assert_eq!(admin.delete(&format!("/admin/v1/replays/{second}")).await.status, 204);
    assert!(admin.get("/admin/v1/replays").await.json()["items"][0]["canceled_at"].is_null());
    admin.delete("/admin/v1/replays/1000000").await.assert_problem(404, "replay-not-found");
    admin.delete("/admin/v1/replays/first").await.assert_problem(400, "malformed-path");
    app.anyone().delete(&replay).await.assert_problem(401, "unauthorized");
    app.user(Uuid::now_v7(), None).delete(&replay).await.assert_problem(403, "forbidden");
    app.stop().await;
}

#[tokio::test]
async fn replays_are_listed_and_canceled_by_command() {
    let database = database().await;
    let (db, desk) = (database.pool(), Desk::at(&database));
    let process = Process::start(db, recorder());
    post_numbers(db, None, [1]).await;
    until_effects(db, 1).await;
    process.stop().await;
    assert!(desk.ok("replay --consumer effects --from 1h").await.contains("Replay 1"));
    assert!(desk.ok("replay list").await.contains("0 of 16 shards done"));
    assert!(desk.ok("replay cancel 1").await.contains("is canceled"));
    assert!(desk.ok("replay cancel 1").await.contains("had ended"));
    assert!(desk.ok("replay list --consumer effects").await.contains("canceled, 0 of 16"));
    assert!(desk.ok("replay list --json").await.contains("canceled_at"));
    assert_eq!(desk.ok("replay list --consumer nobody").await.lines().count(), 1);
    assert!(desk.refused("replay cancel 2").await.contains("no such replay"));
    for wrong in ["replay", "replay --from 1h", "replay cancel", "replay --consumer effects --from 1h cancel 1"] {
        desk.refused(wrong).await;
    }
}

//! Reading again: what of the log it costs, and calling it off.

use chrono::{DateTime, Utc};
use mailbox::cursor::Start;
use mailbox::replay::{self, Request};
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;
use testkit::drain;

use crate::consuming::{PATIENCE, Process, count, database, numbers, quick, recorder, until_replays_are_done};

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

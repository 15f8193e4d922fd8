//! How long the log is kept, and what becomes of a consumer that was away for longer, or of a copy.

use std::collections::HashSet;
use std::time::Duration;

use chrono::Utc;
use mailbox::cursor::{self, Cursor, Dropped, Kind, Start};
use mailbox::filter::Filter;
use mailbox::home::{self, Recover};
use mailbox::maintain::{self, Keep};
use mailbox::replay;
use sqlx::PgPool;
use testkit::{TestDatabase, drain};

use crate::consuming::{
    PATIENCE, Process, copy_database, database, dump_database, effects, numbers, post_numbers, recorder,
    restore_database, until_effects,
};

#[tokio::test]
async fn a_restored_database_stays_silent_until_it_is_told_how_to_go_on() {
    for (way, expected) in
        [(Recover::Skip, vec![4]), (Recover::From(Utc::now() - chrono::Duration::hours(1)), vec![3, 4])]
    {
        let original = database().await;
        home::settle(original.pool()).await.unwrap();
        post_numbers(original.pool(), Some("k"), 1..=2).await;
        let process = Process::start(original.pool(), recorder());
        until_effects(original.pool(), 2).await;
        process.stop().await;
        post_numbers(original.pool(), Some("k"), [3]).await;

        let copy = TestDatabase::empty().await;
        copy_database(&original, &copy);
        let db = copy.pool();
        sqlx::query("truncate effect").execute(db).await.unwrap();
        home::settle(db).await.unwrap();
        let process = Process::start(db, recorder());
        post_numbers(db, Some("k"), [4]).await;
        drain("readiness says so", PATIENCE, async || {
            let down = |state: &kit::health::State| {
                state.required && state.error.as_ref().is_some_and(|error| error.contains("database-restored"))
            };
            process.health.report().iter().any(down)
        })
        .await;
        assert!(effects(db).await.is_empty());
        assert!(home::recover(db, way).await.unwrap());
        drain("it goes on", PATIENCE, async || match numbers(db).await {
            found if found.iter().copied().collect::<HashSet<_>>() == expected.iter().copied().collect() => Ok(()),
            other => Err(other),
        })
        .await;
        process.stop().await;
        assert_eq!(effects(db).await.len(), expected.len(), "each once: {way:?}");
        assert!(!home::recover(db, way).await.unwrap(), "told once");
    }
}

/// A day of the log that is long over.
async fn make_old_day(db: &PgPool, days_ago: i32, number: i64) -> String {
    let name: String = sqlx::query_scalar("select 'log_' || to_char(current_date - $1, 'YYYYMMDD')")
        .bind(days_ago)
        .fetch_one(db)
        .await
        .unwrap();
    let statements = format!(
        "create table pillarbox.{name} partition of pillarbox.log
             for values from (current_date - {days_ago}) to (current_date - {days_ago} + 1);
         insert into pillarbox.log (shard, message_id, source, tenant, topic, key, payload, at)
         values (3, pillarbox.uuid_v7(), 'test', 'main', 'test.posted', 'old', '{number}', current_date - {days_ago} + interval '1 hour')"
    );
    let statements = format!("set timezone = 'UTC'; {statements}; reset timezone");
    sqlx::raw_sql(sqlx::AssertSqlSafe(statements)).execute(db).await.unwrap();
    name
}

async fn exists(db: &PgPool, table: &str) -> bool {
    sqlx::query_scalar("select to_regclass('pillarbox.' || $1) is not null").bind(table).fetch_one(db).await.unwrap()
}

#[tokio::test]
async fn an_old_day_goes_when_every_consumer_has_passed_it_and_no_post_waits_for_that() {
    let database = database().await;
    let db = database.pool();
    let (old, recent) = (make_old_day(db, 10, 1).await, make_old_day(db, 3, 2).await);
    let process = Process::start(db, recorder());
    let behind = Cursor {
        consumer: "behind".to_owned(),
        kind: Kind::Handler,
        filter: Filter::everything(),
        start: Start::Beginning,
    };
    behind.register(db).await.unwrap();
    until_effects(db, 2).await;
    // Who has read something later has passed them; stopped before that, it may still hold their day.
    post_numbers(db, None, [3]).await;
    until_effects(db, 3).await;
    process.stop().await;
    maintain::round(db, Keep::default(), Utc::now(), maintain::PATIENCE).await.unwrap();
    assert!(exists(db, &old).await, "one consumer has not read it");
    sqlx::query("delete from pillarbox.cursor where consumer = 'behind'").execute(db).await.unwrap();

    // The hour's margin, and a reader of another kind that keeps the table open.
    sqlx::query("update pillarbox.position set old_at = old_at + interval '2 hours'").execute(db).await.unwrap();
    let mut reader = db.begin().await.unwrap();
    sqlx::query("select count(*) from pillarbox.log").execute(&mut *reader).await.unwrap();
    let posting = async {
        let mut slowest = Duration::ZERO;
        for number in 0..100 {
            let began = std::time::Instant::now();
            post_numbers(db, None, [number]).await;
            slowest = slowest.max(began.elapsed());
        }
        slowest
    };
    let maintaining = async {
        for _ in 0..3 {
            maintain::round(db, Keep::default(), Utc::now(), maintain::PATIENCE).await.unwrap();
        }
    };
    let (slowest, ()) = tokio::join!(posting, maintaining);
    assert!(slowest < Duration::from_secs(1), "a post took {slowest:?}");
    assert!(exists(db, &old).await, "a long reader has it");
    reader.rollback().await.unwrap();
    // Whoever else has it for a moment, such as autovacuum, is not waited for: it goes another time.
    drain("it goes", PATIENCE, async || {
        maintain::round(db, Keep::default(), Utc::now(), maintain::PATIENCE).await.unwrap();
        !exists(db, &old).await
    })
    .await;
    assert!(exists(db, &recent).await, "it is not old enough");
}

#[tokio::test]
async fn an_old_day_stays_while_a_replay_needs_it_or_nobody_has_said_how_a_restored_log_goes_on() {
    let database = database().await;
    let db = database.pool();
    home::settle(db).await.unwrap();
    let old = make_old_day(db, 10, 1).await;
    let keep = Keep::default();
    let mark = "update pillarbox.home set restored_at = ";
    sqlx::query(sqlx::AssertSqlSafe(format!("{mark} now()"))).execute(db).await.unwrap();
    maintain::round(db, keep, Utc::now(), maintain::PATIENCE).await.unwrap();
    assert!(exists(db, &old).await, "its operator may still want it");
    sqlx::query(sqlx::AssertSqlSafe(format!("{mark} null"))).execute(db).await.unwrap();

    let idle =
        Cursor { consumer: "idle".to_owned(), kind: Kind::Handler, filter: Filter::everything(), start: Start::Now };
    idle.register(db).await.unwrap();
    sqlx::query("update pillarbox.position set old_at = old_at + interval '2 hours'").execute(db).await.unwrap();
    let from = Utc::now() - chrono::Duration::days(11);
    let request = replay::Request { consumer: "idle".to_owned(), from, to: Utc::now(), again: false };
    replay::request(db, &request).await.unwrap();
    maintain::round(db, keep, Utc::now(), maintain::PATIENCE).await.unwrap();
    assert!(exists(db, &old).await, "a replay is to read it");
    sqlx::query("update pillarbox.replay_shard set done = true").execute(db).await.unwrap();
    maintain::round(db, keep, Utc::now(), maintain::PATIENCE).await.unwrap();
    assert!(!exists(db, &old).await);
}

#[tokio::test]
async fn who_was_switched_off_for_long_and_has_nothing_to_read_does_not_lapse() {
    let database = database().await;
    let db = database.pool();
    let process = Process::start(db, recorder());
    post_numbers(db, None, [1]).await;
    until_effects(db, 1).await;
    process.stop().await;
    sqlx::raw_sql(
        "update pillarbox.cursor set since = since - interval '15 days';
         update pillarbox.position set old_at = old_at - interval '15 days'",
    )
    .execute(db)
    .await
    .unwrap();
    maintain::round(db, Keep::default(), Utc::now(), maintain::PATIENCE).await.unwrap();
    let process = Process::start(db, recorder());
    post_numbers(db, None, [2]).await;
    until_effects(db, 2).await;
    process.stop().await;
}

#[tokio::test]
async fn a_consumer_that_is_behind_for_too_long_lapses_and_is_reset_by_an_operator() {
    let database = database().await;
    let db = database.pool();
    let process = Process::start(db, recorder());
    post_numbers(db, None, [1]).await;
    until_effects(db, 1).await;
    process.stop().await;
    post_numbers(db, None, [2]).await;
    // As if the last it did was long ago.
    sqlx::raw_sql(
        "update pillarbox.cursor set since = since - interval '15 days';
         update pillarbox.position set old_at = old_at - interval '15 days'",
    )
    .execute(db)
    .await
    .unwrap();
    let lapsed = async || {
        let query = "select count(*) from pillarbox.cursor where lapsed_at is not null";
        sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap()
    };
    maintain::round(db, Keep::default(), Utc::now(), std::time::Duration::ZERO).await.unwrap();
    assert_eq!(lapsed().await, 0, "it may be back as soon as who maintains");
    maintain::round(db, Keep::default(), Utc::now(), maintain::PATIENCE).await.unwrap();
    assert_eq!(lapsed().await, 1);
    let process = Process::start(db, recorder());
    drain("it says so", PATIENCE, async || {
        process
            .health
            .report()
            .iter()
            .any(|state| state.error.as_ref().is_some_and(|error| error.contains("cursors reset effects")))
    })
    .await;
    assert_eq!(numbers(db).await, [1]);
    assert!(cursor::reset(db, "effects", Some(Utc::now() - chrono::Duration::hours(1))).await.unwrap());
    post_numbers(db, None, [3]).await;
    until_effects(db, 3).await;
    assert_eq!(cursor::forget(db, "effects").await.unwrap(), Dropped::InUse);
    process.stop().await;
    let mut all = numbers(db).await;
    all.sort_unstable();
    assert_eq!(all, [1, 2, 3], "what it had missed, and nothing twice");
    assert_eq!(cursor::forget(db, "effects").await.unwrap(), Dropped::Yes);
    assert_eq!(cursor::forget(db, "effects").await.unwrap(), Dropped::Unknown);
    assert!(!cursor::reset(db, "effects", None).await.unwrap());
}

#[tokio::test]
async fn a_log_that_was_restored_where_it_was_is_noticed() {
    let database = testkit::TestDatabase::new(&mailbox::database::migrations()).await;
    let db = database.pool();
    home::settle(db).await.unwrap();
    let is_restored = async || home::is_restored(&mut db.acquire().await.unwrap()).await.unwrap();
    assert!(!is_restored().await);
    let dump = dump_database(&database);
    sqlx::raw_sql(
        "do $$ declare name text; begin
             for name in select nspname from pg_namespace where nspname like 'pillarbox%' loop
                 execute format('drop schema %I cascade', name);
             end loop;
         end $$",
    )
    .execute(db)
    .await
    .unwrap();
    restore_database(&database, &dump);
    assert!(is_restored().await, "its tables are others");
    home::settle(db).await.unwrap();
    assert!(is_restored().await, "until an operator has said how to go on");
    assert!(home::recover(db, Recover::Skip).await.unwrap());
    assert!(!is_restored().await);
}

//! Retention of the log, lapsed consumers, and restored databases.

use std::collections::HashSet;
use std::time::Duration;

use chrono::Utc;
use pillarbox::consumers::{Consumer, ConsumerKind, StartAt};
use pillarbox::database::cluster_identity;
use pillarbox::log::Filter;
use pillarbox::operations::cursors::{self, DeleteResult};
use pillarbox::operations::maintenance::{self, Retention};
use pillarbox::operations::recovery::{self, Recovery};
use pillarbox::operations::{replays, retention_hold};
use sqlx::PgPool;
use testkit::{TestDatabase, eventually};

use crate::consumers::support::{
    Process, TIMEOUT, copy_database, database, dump_database, effects, numbers, post_numbers, recorder,
    restore_database, wait_for_effects,
};
use crate::support::lock_waits;

#[tokio::test]
async fn a_restored_database_processes_nothing_until_recover() {
    for (way, expected) in
        [(Recovery::Skip, vec![4]), (Recovery::From(Utc::now() - chrono::Duration::hours(1)), vec![3, 4])]
    {
        let original = database().await;
        cluster_identity::check(original.pool()).await.unwrap();
        post_numbers(original.pool(), Some("k"), 1..=2).await;
        let process = Process::start(original.pool(), recorder());
        wait_for_effects(original.pool(), 2).await;
        process.stop().await;
        post_numbers(original.pool(), Some("k"), [3]).await;

        let copy = TestDatabase::empty().await;
        copy_database(&original, &copy);
        let db = copy.pool();
        sqlx::query("truncate effect").execute(db).await.unwrap();
        cluster_identity::check(db).await.unwrap();
        let process = Process::start(db, recorder());
        post_numbers(db, Some("k"), [4]).await;
        eventually("readiness reports the restored database", TIMEOUT, async || {
            let down = |state: &runtime::health::State| {
                state.required && state.error.as_ref().is_some_and(|error| error.contains("database-restored"))
            };
            process.health.report().iter().any(down)
        })
        .await;
        assert!(effects(db).await.is_empty());
        assert!(recovery::recover(db, way).await.unwrap());
        eventually("the consumer continues", TIMEOUT, async || match numbers(db).await {
            found if found.iter().copied().collect::<HashSet<_>>() == expected.iter().copied().collect() => Ok(()),
            other => Err(other),
        })
        .await;
        process.stop().await;
        assert_eq!(effects(db).await.len(), expected.len(), "each message once: {way:?}");
        assert!(!recovery::recover(db, way).await.unwrap(), "a second recover changes nothing");
    }
}

/// Creates the partition of a past day with one message. Returns its name.
async fn create_old_day(db: &PgPool, days_ago: i32, number: i64) -> String {
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
async fn an_old_day_is_dropped_after_all_consumers_without_delaying_posts() {
    let database = database().await;
    let db = database.pool();
    let (old, recent) = (create_old_day(db, 10, 1).await, create_old_day(db, 3, 2).await);
    let process = Process::start(db, recorder());
    let behind = Consumer {
        name: "behind".to_owned(),
        kind: ConsumerKind::Handler,
        filter: Filter::everything(),
        start: StartAt::Beginning,
    };
    behind.register(db).await.unwrap();
    wait_for_effects(db, 2).await;
    // Only a later message moves the position beyond the old days.
    post_numbers(db, None, [3]).await;
    wait_for_effects(db, 3).await;
    process.stop().await;
    maintenance::run_once(db, Retention::default(), maintenance::CATCH_UP_TIME).await.unwrap();
    assert!(exists(db, &old).await, "one consumer has not read it");
    sqlx::query("delete from pillarbox.cursor where consumer = 'behind'").execute(db).await.unwrap();

    // The margin of an hour, and another transaction that has locked the table by reading it.
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
            maintenance::run_once(db, Retention::default(), maintenance::CATCH_UP_TIME).await.unwrap();
        }
    };
    let (slowest, ()) = tokio::join!(posting, maintaining);
    assert!(slowest < Duration::from_secs(1), "a post took {slowest:?}");
    assert!(exists(db, &old).await, "a long transaction reads it");
    reader.rollback().await.unwrap();
    // Maintenance does not wait for other locks, such as those of autovacuum: a later run drops the day.
    eventually("the day is dropped", TIMEOUT, async || {
        maintenance::run_once(db, Retention::default(), maintenance::CATCH_UP_TIME).await.unwrap();
        !exists(db, &old).await
    })
    .await;
    assert!(exists(db, &recent).await, "the day is too recent");
}

#[tokio::test]
async fn an_old_day_stays_for_a_replay_and_until_recover() {
    let database = database().await;
    let db = database.pool();
    cluster_identity::check(db).await.unwrap();
    let old = create_old_day(db, 10, 1).await;
    let keep = Retention::default();
    let set_restored_at = "update pillarbox.cluster_identity set restored_at = ";
    sqlx::query(sqlx::AssertSqlSafe(format!("{set_restored_at} now()"))).execute(db).await.unwrap();
    maintenance::run_once(db, keep, maintenance::CATCH_UP_TIME).await.unwrap();
    assert!(exists(db, &old).await, "the operator may still recover from it");
    sqlx::query(sqlx::AssertSqlSafe(format!("{set_restored_at} null"))).execute(db).await.unwrap();

    let idle = Consumer {
        name: "idle".to_owned(),
        kind: ConsumerKind::Handler,
        filter: Filter::everything(),
        start: StartAt::Now,
    };
    idle.register(db).await.unwrap();
    sqlx::query("update pillarbox.position set old_at = old_at + interval '2 hours'").execute(db).await.unwrap();
    let from = Utc::now() - chrono::Duration::days(11);
    let request = replays::Request { consumer: "idle".to_owned(), from, to: Utc::now(), again: false };
    replays::request(db, &request).await.unwrap();
    maintenance::run_once(db, keep, maintenance::CATCH_UP_TIME).await.unwrap();
    assert!(exists(db, &old).await, "a replay needs it");
    sqlx::query("update pillarbox.replay_shard set done = true").execute(db).await.unwrap();
    maintenance::run_once(db, keep, maintenance::CATCH_UP_TIME).await.unwrap();
    assert!(!exists(db, &old).await);
}

#[tokio::test]
async fn a_consumer_that_was_off_without_a_backlog_does_not_lapse() {
    let database = database().await;
    let db = database.pool();
    let process = Process::start(db, recorder());
    post_numbers(db, None, [1]).await;
    wait_for_effects(db, 1).await;
    process.stop().await;
    sqlx::raw_sql(
        "update pillarbox.cursor set since = since - interval '15 days';
         update pillarbox.position set old_at = old_at - interval '15 days'",
    )
    .execute(db)
    .await
    .unwrap();
    maintenance::run_once(db, Retention::default(), maintenance::CATCH_UP_TIME).await.unwrap();
    let process = Process::start(db, recorder());
    post_numbers(db, None, [2]).await;
    wait_for_effects(db, 2).await;
    process.stop().await;
}

#[tokio::test]
async fn a_consumer_too_far_behind_lapses_until_its_reset() {
    let database = database().await;
    let db = database.pool();
    let process = Process::start(db, recorder());
    post_numbers(db, None, [1]).await;
    wait_for_effects(db, 1).await;
    process.stop().await;
    post_numbers(db, None, [2]).await;
    // Move its last activity into the past.
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
    maintenance::run_once(db, Retention::default(), std::time::Duration::ZERO).await.unwrap();
    assert_eq!(lapsed().await, 0, "the consumer may start at the same time as maintenance");
    maintenance::run_once(db, Retention::default(), maintenance::CATCH_UP_TIME).await.unwrap();
    assert_eq!(lapsed().await, 1);
    let process = Process::start(db, recorder());
    eventually("the health report names the reset command", TIMEOUT, async || {
        process
            .health
            .report()
            .iter()
            .any(|state| state.error.as_ref().is_some_and(|error| error.contains("cursors reset effects")))
    })
    .await;
    assert_eq!(numbers(db).await, [1]);
    assert!(cursors::reset(db, "effects", Some(Utc::now() - chrono::Duration::hours(1))).await.unwrap());
    post_numbers(db, None, [3]).await;
    wait_for_effects(db, 3).await;
    assert_eq!(cursors::delete(db, "effects").await.unwrap(), DeleteResult::InUse);
    process.stop().await;
    let mut all = numbers(db).await;
    all.sort_unstable();
    assert_eq!(all, [1, 2, 3], "the missed message, and no message twice");
    assert_eq!(cursors::delete(db, "effects").await.unwrap(), DeleteResult::Deleted { dead_letters: 0 });
    assert_eq!(cursors::delete(db, "effects").await.unwrap(), DeleteResult::NotFound);
    assert!(!cursors::reset(db, "effects", None).await.unwrap());
}

#[tokio::test]
async fn a_log_restored_in_the_same_database_is_detected() {
    let database = testkit::TestDatabase::new(&server::migrations()).await;
    let db = database.pool();
    cluster_identity::check(db).await.unwrap();
    let is_restored = async || cluster_identity::is_restored(&mut db.acquire().await.unwrap()).await.unwrap();
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
    assert!(is_restored().await, "the restored tables have other ids");
    cluster_identity::check(db).await.unwrap();
    assert!(is_restored().await, "it counts as restored until recover");
    assert!(recovery::recover(db, Recovery::Skip).await.unwrap());
    assert!(!is_restored().await);
}

#[tokio::test]
async fn old_rows_of_unrouted_messages_are_dropped_and_days_have_partitions() {
    let database = database().await;
    let db = database.pool();
    sqlx::raw_sql(
        "create table pillarbox.unrouted_20200101 partition of pillarbox.unrouted
             for values from ('2020-01-01 00:00+0') to ('2020-01-02 00:00+0');
         insert into pillarbox.unrouted (consumer, log_id, at)
         values ('relay.a', 1, '2020-01-01 12:00+0'), ('relay.a', 2, '2020-01-05 12:00+0'), ('relay.a', 3, now())",
    )
    .execute(db)
    .await
    .unwrap();
    maintenance::run_once(db, Retention::default(), Duration::ZERO).await.unwrap();
    let left: Vec<(i64, bool)> =
        sqlx::query_as("select log_id, tableoid = 'pillarbox.unrouted_overflow'::regclass from pillarbox.unrouted")
            .fetch_all(db)
            .await
            .unwrap();
    assert_eq!(left, [(3, false)]);
    let dropped: bool =
        sqlx::query_scalar("select to_regclass('pillarbox.unrouted_20200101') is null").fetch_one(db).await.unwrap();
    assert!(dropped);
}

#[tokio::test]
async fn a_retention_hold_that_is_being_extended_is_not_removed() {
    let database = database().await;
    let db = database.pool();
    let from = async || {
        let query = "select from_at from pillarbox.retention_hold where holder = 'test'";
        sqlx::query_scalar::<_, chrono::DateTime<Utc>>(query).fetch_optional(db).await.unwrap()
    };
    let (young, old) = (Utc::now() - chrono::Duration::days(1), Utc::now() - chrono::Duration::days(3));
    let mut remover = db.acquire().await.unwrap();
    assert_eq!(retention_hold::version(&mut remover, "test").await.unwrap(), None);
    retention_hold::extend(&mut db.acquire().await.unwrap(), "test", old).await.unwrap();
    let version = retention_hold::version(&mut remover, "test").await.unwrap().unwrap();
    let mut tx = db.begin().await.unwrap();
    retention_hold::extend(&mut tx, "test", young).await.unwrap();
    let removing = tokio::spawn(async move {
        retention_hold::remove_version(&mut remover, "test", &version).await.unwrap();
        remover
    });
    eventually("the removal waits", TIMEOUT, async || lock_waits(db).await == 1).await;
    tx.commit().await.unwrap();
    let mut remover = removing.await.unwrap();
    assert_eq!(from().await.map(|from| from.timestamp()), Some(old.timestamp()), "the oldest reference counts");
    let version = retention_hold::version(&mut remover, "test").await.unwrap().unwrap();
    retention_hold::remove_version(&mut remover, "test", &version).await.unwrap();
    assert_eq!(from().await, None);
}

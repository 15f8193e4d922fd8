//! The lock of migrations, which any login of the database can hold.

use std::time::Duration;

use futures_util::future::join_all;
use pillarbox::database::{LockWait, MIGRATION_LOCK, MigrationError, MigrationId, migrate_all, migrate_reporting};
use server::migrations;
use sqlx::{Connection, PgConnection};
use testkit::{Pillarbox, TestDatabase, eventually, program};

/// Holds the lock in a separate session. Returns the session with its process id.
async fn lock_migrations(database: &TestDatabase) -> (PgConnection, i32) {
    let options = database.connect_options().application_name("bob's report");
    let mut session = PgConnection::connect_with(&options).await.unwrap();
    sqlx::query("select pg_advisory_lock($1)").bind(MIGRATION_LOCK).execute(&mut session).await.unwrap();
    let pid = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut session).await.unwrap();
    (session, pid)
}

#[tokio::test]
async fn a_migration_names_the_session_that_has_the_lock_and_continues_when_it_ends() {
    let database = TestDatabase::empty().await;
    let (session, pid) = lock_migrations(&database).await;
    let mut process = Pillarbox::start(program(), &["migrate"], &[("PILLARBOX_DATABASE_URL", &database.url())]);
    let waiting = |line: &str| line.contains("waiting for the lock of migrations");
    let line = process.wait_for_line(waiting, Duration::from_secs(20)).await;
    let names = [&format!("pid {pid}"), "bob's report", "role", "client", "connected since 20"];
    assert!(names.iter().all(|name| line.contains(*name)), "{line}");
    session.close().await.unwrap();
    assert!(process.wait_for_exit().await.success(), "{}", process.logs());
    assert!(process.logs().contains("up to date"), "{}", process.logs());
}

#[tokio::test]
async fn a_migration_that_cannot_get_the_lock_fails_and_says_what_to_do() {
    let database = TestDatabase::empty().await;
    let (mut session, pid) = lock_migrations(&database).await;
    let wait = LockWait { report_after: Duration::from_millis(100), reports_max: 2 };
    let reports = std::sync::atomic::AtomicU32::new(0);
    let report = |holder: &pillarbox::database::LockHolder| {
        assert_eq!(holder.pid, pid);
        reports.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    };
    let error = migrate_reporting(&database.connect_options(), &migrations(), wait, report).await.unwrap_err();
    assert!(matches!(error, MigrationError::Locked { .. }), "{error}");
    let error = error.to_string();
    assert!(error.contains("bob's report") && error.contains(&format!("pg_terminate_backend({pid})")), "{error}");
    assert_eq!(reports.into_inner(), 2);
    // Following the advice helps.
    sqlx::query("select pg_terminate_backend($1)").bind(pid).execute(database.pool()).await.unwrap();
    eventually("the session has ended", Duration::from_secs(10), async || session.ping().await.is_err()).await;
    assert!(!migrate_all(&database.connect_options(), &migrations()).await.unwrap().is_empty());
}

#[tokio::test]
async fn processes_that_migrate_at_once_wait_for_each_other() {
    let database = TestDatabase::empty().await;
    let options = database.connect_options();
    let migrations = migrations();
    let starts = (0..8).map(|_| migrate_all(&options, &migrations));
    let mut applied: Vec<Vec<MigrationId>> = join_all(starts).await.into_iter().map(Result::unwrap).collect();
    applied.retain(|applied| !applied.is_empty());
    assert_eq!(applied.len(), 1, "one process has migrated, the others found nothing to do");
}

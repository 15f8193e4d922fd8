//! Proves that an upgrade needs no downtime: a binary runs on the schema of the next version, and a database of the first
//! version is migrated with its content.

use std::borrow::Cow;

use mailbox::database::{migrate, migrations};
use serde_json::json;
use sqlx::migrate::Migrator;
use testkit::{Receiver, TestApp, TestDatabase, eventually};

use crate::events_and_joins::scenario::EventScenario;
use crate::hub::fixture::{post, subscribe, wait_for_webhooks};
use crate::server::process::run;
use crate::support::{DEADLINE, caller, lock_waits};

/// The last migration of the first version.
const FIRST_VERSION: i64 = 5;

/// Does to every table what a migration of the next version may do: it only adds. New columns are first in no index and
/// have a default; the new check accepts what this version writes.
const EXPANSION: &str = "
    do $$
    declare
        name text;
    begin
        for name in
            select format('%I.%I', nspname, relname)
            from pg_class join pg_namespace on pg_namespace.oid = relnamespace
            where nspname like 'pillarbox%' and relkind in ('r', 'p') and not relispartition and relname <> 'migration'
        loop
            execute format(
                'alter table %s add column next_version_text text not null default ''new'',
                                add column next_version_number bigint check (next_version_number > 0)', name);
        end loop;
    end
    $$;
    create table pillarbox.next_version (id bigint primary key);
    insert into pillarbox.migration select 999999, 'later', now(), true, '', 0";

/// A database with the migrations up to this one.
async fn database_of(version: i64) -> TestDatabase {
    let first = migrations().iter().filter(|migration| migration.version <= version).cloned().collect();
    TestDatabase::new(&Migrator { migrations: Cow::Owned(first), ..migrations() }).await
}

#[tokio::test]
async fn all_services_work_on_the_schema_of_the_next_version() {
    let database = TestDatabase::new(&migrations()).await;
    sqlx::raw_sql(EXPANSION).execute(database.pool()).await.unwrap();
    let (code, _, error) = run(&["migrate", "--database-url", &database.url()], &[]);
    assert_eq!(code, Some(0), "{error}");
    let app = TestApp::start(&database).await;
    assert_eq!(app.anonymous().get("/readyz").await.status, 200);
    let (manager, receiver) = (caller(&app, "manage", "acme").await, Receiver::start().await);
    subscribe(&manager, &receiver.url(), json!({})).await;
    post(&manager, "test.posted", json!({"n": 1}), Some("lane")).await;
    wait_for_webhooks(&receiver, 1).await;
    EventScenario::in_one_process(&app, &database).run().await;
    app.stop().await;
}

#[tokio::test]
async fn a_database_of_the_first_version_is_migrated_with_its_content() {
    let database = database_of(FIRST_VERSION).await;
    sqlx::query("select pillarbox.post('order.paid', '{}'::json, key => 'k') from generate_series(1, 10)")
        .execute(database.pool())
        .await
        .unwrap();
    let missing = migrate(&database.connect_options()).await.unwrap();
    let later: Vec<i64> =
        migrations().iter().map(|migration| migration.version).filter(|version| *version > FIRST_VERSION).collect();
    assert_eq!(missing, later);
    let app = TestApp::start(&database).await;
    let log = app.admin().get("/admin/v1/log").await.json();
    assert_eq!(log["items"].as_array().unwrap().len(), 10, "{log}");
    EventScenario::in_one_process(&app, &database).run().await;
    app.stop().await;
}

/// The tables of which later migrations build indexes, and the last migration before them.
const INDEXED: &str = "pillarbox_joins.history, pillarbox_joins.event_bans, pillarbox_events.event";
const BEFORE_INDEXES: i64 = 13;

#[tokio::test]
async fn tables_can_be_written_while_a_migration_builds_their_indexes() {
    let database = database_of(BEFORE_INDEXES).await;
    let db = database.pool();
    // As a transaction that writes.
    let write = |how: &str| sqlx::AssertSqlSafe(format!("lock table {INDEXED} in row exclusive mode {how}"));
    let mut open = db.begin().await.unwrap();
    sqlx::raw_sql(write("")).execute(&mut *open).await.unwrap();
    let migration = tokio::spawn({
        let options = database.connect_options();
        async move { migrate(&options).await }
    });
    eventually("the migration waits for the transaction", DEADLINE, async || lock_waits(db).await == 1).await;
    let mut other = db.begin().await.unwrap();
    sqlx::raw_sql(write("nowait")).execute(&mut *other).await.expect("writes do not wait for the migration");
    other.rollback().await.unwrap();
    open.commit().await.unwrap();
    migration.await.unwrap().unwrap();
    assert_eq!(invalid_indexes(db).await, [""; 0]);
}

async fn invalid_indexes(db: &sqlx::PgPool) -> Vec<String> {
    let query = "select indexrelid::regclass::text from pg_index where not indisvalid";
    sqlx::query_scalar(query).fetch_all(db).await.unwrap()
}

#[tokio::test]
async fn an_index_whose_build_was_interrupted_is_built_again() {
    let database = database_of(BEFORE_INDEXES).await;
    let db = database.pool();
    let mut open = db.begin().await.unwrap();
    let write = sqlx::AssertSqlSafe(format!("lock table {INDEXED} in row exclusive mode"));
    sqlx::raw_sql(write).execute(&mut *open).await.unwrap();
    let options = database.connect_options();
    let interrupted = tokio::spawn({
        let options = options.clone();
        async move { migrate(&options).await }
    });
    eventually("the migration waits for the transaction", DEADLINE, async || lock_waits(db).await == 1).await;
    let end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'pillarbox migrate'
               and datname = current_database()";
    sqlx::query(end).execute(db).await.unwrap();
    interrupted.await.unwrap().unwrap_err();
    open.commit().await.unwrap();
    assert_eq!(invalid_indexes(db).await.len(), 1);
    let missing = migrate(&options).await.unwrap();
    assert!(!missing.is_empty());
    assert_eq!(invalid_indexes(db).await, [""; 0]);
    let built = "select count(*) from pg_indexes where indexname in ('event_bans_newest', 'history_moderated_user',
                 'history_moderated_at', 'history_moderated_by', 'status_change_at', 'status_change_by', 'event_title_words')";
    assert_eq!(sqlx::query_scalar::<_, i64>(built).fetch_one(db).await.unwrap(), 7);
    assert_eq!(migrate(&options).await.unwrap(), [0; 0], "nothing is done again");
}

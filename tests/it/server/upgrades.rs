//! Migrations: the program runs on the schema of its next version, and tables can be written while a migration builds indexes.

use pillarbox::database::{MigrationError, Migrations, SchemaMigrations, migrate_all, missing_migrations};
use serde_json::json;
use server::migrations;
use testkit::{Receiver, TestApp, TestDatabase, eventually};

use crate::events_and_joins::scenario::EventScenario;
use crate::hub::fixture::{post, subscribe, wait_for_webhooks};
use crate::server::process::run;
use crate::support::{DEADLINE, caller, lock_waits};

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
    insert into pillarbox.migration (schema, version, checksum) values ('pillarbox', 2, ''), ('pillarbox_later', 1, '')";

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
async fn the_library_migrates_its_schema_alone_and_the_program_the_others() {
    let database = TestDatabase::empty().await;
    let options = database.connect_options();
    let names =
        |applied: Vec<pillarbox::database::MigrationId>| applied.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(names(migrate_all(&options, &Migrations::default()).await.unwrap()), ["pillarbox 1"]);
    let missing = names(missing_migrations(database.pool(), &migrations()).await.unwrap());
    assert!(
        !missing.contains(&"pillarbox 1".to_owned()) && missing.contains(&"pillarbox_hub 1".to_owned()),
        "{missing:?}"
    );
    assert_eq!(names(migrate_all(&options, &migrations()).await.unwrap()), missing);
    assert_eq!(migrate_all(&options, &migrations()).await.unwrap(), [], "nothing is done again");
}

const TABLE: &str = "create schema pillarbox_greetings; create table pillarbox_greetings.greeting (at int)";
const INDEX: &str = "-- no-transaction
    drop index concurrently if exists pillarbox_greetings.greeting_at;
    create index concurrently greeting_at on pillarbox_greetings.greeting (at)";

/// The migrations of the library, and of a service with these texts.
fn with_service(texts: &'static [&'static str]) -> Migrations {
    Migrations::default().with([SchemaMigrations { schema: "pillarbox_greetings", texts }])
}

#[tokio::test]
async fn a_migration_that_was_changed_after_it_was_applied_is_refused() {
    let database = TestDatabase::new(&with_service(&[TABLE])).await;
    let error = migrate_all(&database.connect_options(), &with_service(&["select 1", INDEX])).await.unwrap_err();
    assert!(matches!(error, MigrationError::Changed(migration) if migration.version == 1), "{error}");
    assert!(error.to_string().contains("pillarbox_greetings 1"), "{error}");
}

#[tokio::test]
async fn a_failed_migration_changes_nothing_and_is_named() {
    let database = TestDatabase::new(&with_service(&[TABLE])).await;
    let failing = with_service(&[TABLE, "create table pillarbox_greetings.other (at int); select 1 / 0"]);
    let error = migrate_all(&database.connect_options(), &failing).await.unwrap_err();
    assert!(error.to_string().contains("pillarbox_greetings 2 failed"), "{error}");
    let query = "select to_regclass('pillarbox_greetings.other') is null";
    assert!(sqlx::query_scalar::<_, bool>(query).fetch_one(database.pool()).await.unwrap());
    assert_eq!(missing_migrations(database.pool(), &failing).await.unwrap().len(), 1);
}

#[tokio::test]
async fn tables_can_be_written_while_a_migration_builds_their_indexes() {
    let database = TestDatabase::new(&with_service(&[TABLE])).await;
    let db = database.pool();
    // As a transaction that writes.
    let write =
        |how: &str| sqlx::AssertSqlSafe(format!("lock table pillarbox_greetings.greeting in row exclusive mode {how}"));
    let mut open = db.begin().await.unwrap();
    sqlx::raw_sql(write("")).execute(&mut *open).await.unwrap();
    let migration = tokio::spawn({
        let options = database.connect_options();
        async move { migrate_all(&options, &with_service(&[TABLE, INDEX])).await }
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
    let database = TestDatabase::new(&with_service(&[TABLE])).await;
    let db = database.pool();
    let mut open = db.begin().await.unwrap();
    let write = "lock table pillarbox_greetings.greeting in row exclusive mode";
    sqlx::raw_sql(write).execute(&mut *open).await.unwrap();
    let (options, service) = (database.connect_options(), with_service(&[TABLE, INDEX]));
    let interrupted = tokio::spawn({
        let (options, service) = (options.clone(), service.clone());
        async move { migrate_all(&options, &service).await }
    });
    eventually("the migration waits for the transaction", DEADLINE, async || lock_waits(db).await == 1).await;
    let end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'pillarbox migrate'
               and datname = current_database()";
    sqlx::query(end).execute(db).await.unwrap();
    interrupted.await.unwrap().unwrap_err();
    open.commit().await.unwrap();
    assert_eq!(invalid_indexes(db).await, ["pillarbox_greetings.greeting_at"]);
    assert_eq!(migrate_all(&options, &service).await.unwrap().len(), 1);
    assert_eq!(invalid_indexes(db).await, [""; 0]);
    assert_eq!(migrate_all(&options, &service).await.unwrap(), [], "nothing is done again");
}

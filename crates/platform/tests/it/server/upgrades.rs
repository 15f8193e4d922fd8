//! Proves that an upgrade needs no downtime: a binary runs on the schema of the next version, and a database of the first
//! version is migrated with its content.

use std::borrow::Cow;

use mailbox::database::{migrate, migrations};
use serde_json::json;
use sqlx::migrate::Migrator;
use testkit::{Receiver, TestApp, TestDatabase};

use crate::events_and_joins::scenario::EventScenario;
use crate::hub::fixture::{post, subscribe, wait_for_webhooks};
use crate::server::process::run;
use crate::support::caller;

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
    let first = migrations().iter().filter(|migration| migration.version <= FIRST_VERSION).cloned().collect();
    let first = Migrator { migrations: Cow::Owned(first), ..migrations() };
    let database = TestDatabase::new(&first).await;
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

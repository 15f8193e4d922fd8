//! Requests through PgBouncer in transaction mode, where each transaction may run in another session.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use runtime::secret::Secret;
use serde_json::json;
use server::migrations;
use server::settings::Settings;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use testkit::{Pillarbox, TestApp, TestDatabase, TestPooler, eventually, program};
use tokio::sync::Barrier;

use crate::events_and_joins::scenario::EventScenario;
use crate::hub::fixture::{numbered_events, post_batch, subscribe};
use crate::hub::recorder::RequestRecorder;
use crate::joins::invariants::check_invariants;
use crate::server::process::DataFolder;
use crate::support::{DEADLINE, caller};

const PGBOUNCER: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/pgbouncer");
/// PgBouncer's default.
const STATEMENTS: u32 = 200;

/// Runs a command that must fail. Returns its output.
async fn refused(command: &str, urls: &[&str]) -> String {
    let folder = DataFolder::new();
    let args = [&[command, "--listen", "127.0.0.1:0", "--data-dir", folder.text()], urls].concat();
    let mut process = Pillarbox::start(program(), &args, &[]);
    assert_eq!(process.wait_for_exit().await.code(), Some(1), "{}", process.logs());
    process.logs()
}

async fn refused_behind(pooler: &TestPooler, database: &TestDatabase) -> String {
    let (url, direct) = (pooler.url(&database.url()), database.url());
    refused("serve", &["--database-url", &url, "--database-direct-url", &direct]).await
}

/// Applies the settings for the role that the error message contains, as an operator does.
async fn configure_role(database: &TestDatabase) {
    let output = refused_behind(&TestPooler::start(PGBOUNCER, STATEMENTS).await, database).await;
    assert!(output.contains("search_path is \"$user\", public instead of pg_catalog, pg_temp"), "{output}");
    let statements: String = output.lines().filter(|line| line.starts_with("alter role ")).collect();
    assert!(statements.contains("statement_timeout = 10000;"), "{output}");
    sqlx::raw_sql(AssertSqlSafe(statements)).execute(database.pool()).await.unwrap();
}

fn behind(pooler: &TestPooler, database: &TestDatabase) -> impl Fn(&mut Settings) + use<> {
    let (url, direct) = (pooler.url(&database.url()), database.url());
    move |settings| {
        settings.database_url = Some(Secret::new(url.clone()));
        settings.database_direct_url = Some(Secret::new(direct.clone()));
        settings.pool_max = 20;
    }
}

#[tokio::test]
async fn an_unsuitable_pooler_is_refused_with_instructions() {
    let database = TestDatabase::new(&migrations()).await;
    configure_role(&database).await;
    let without_statements = TestPooler::start(PGBOUNCER, 0).await;
    let output = refused_behind(&without_statements, &database).await;
    assert!(output.contains("max_prepared_statements"), "{output}");

    let pooler = TestPooler::start(PGBOUNCER, STATEMENTS).await;
    let (url, other) = (pooler.url(&database.url()), TestDatabase::new(&migrations()).await);
    let output = refused("serve", &["--database-url", &url, "--database-direct-url", &other.url()]).await;
    assert!(output.contains("different databases"), "{output}");
    for (command, setting, urls) in [
        ("serve", "database_url", &["--database-url", &*url][..]),
        ("migrate", "database_url", &["--database-url", &url]),
        ("serve", "database_direct_url", &["--database-url", &url, "--database-direct-url", &url]),
        ("serve", "replica_url", &["--database-url", &database.url(), "--replica-url", &url]),
    ] {
        let output = refused(command, urls).await;
        assert!(output.contains(&format!("{setting} is the address of a pooler")), "{command} {urls:?}: {output}");
    }
}

#[tokio::test]
async fn migrations_ignore_the_statement_timeout_of_the_role() {
    let database = TestDatabase::empty().await;
    let limit = "do $$ begin execute format('alter role %I in database %I set statement_timeout = 1', session_user, current_database()); end $$";
    sqlx::raw_sql(limit).execute(database.pool()).await.unwrap();
    pillarbox::database::migrate_all(&database.connect_options(), &server::migrations()).await.unwrap();
}

#[tokio::test]
async fn all_services_work_behind_a_pooler_without_changing_sessions() {
    let database = TestDatabase::new(&migrations()).await;
    configure_role(&database).await;
    let pooler = TestPooler::start(PGBOUNCER, STATEMENTS).await;
    let app = TestApp::start_with(&database, behind(&pooler, &database)).await;
    let replica = TestApp::start_with(&database, behind(&pooler, &database)).await;

    let [manager, producer] = [caller(&app, "manage", "acme").await, caller(&replica, "ingest", "acme").await];
    let recorder = RequestRecorder::start(|_, _, _, _| (200, std::time::Duration::ZERO)).await;
    subscribe(&manager, &recorder.url("all"), json!({})).await;
    let posting = async {
        for n in 1..=20 {
            let posts = numbered_events(10, [n]).into_iter().map(|event| post_batch(&producer, vec![event]));
            join_all(posts).await;
        }
    };
    let scenario = EventScenario::in_one_process(&app, &database);
    tokio::join!(posting, scenario.run());
    recorder.wait_until_accepted(200, DEADLINE).await;
    recorder.check_lane_order();
    check_invariants(database.pool(), &[]).await;

    // All clients at the same time, so that each has a different session. The settings come from the role, not from a client.
    let (requests, together) = (app.settings.pooler().unwrap().unwrap(), Barrier::new(TestPooler::SESSIONS));
    let sessions = join_all((0..TestPooler::SESSIONS).map(async |_| {
        let mut client = PgConnection::connect_with(&requests).await.unwrap();
        let mut tx = client.begin().await.unwrap();
        let query = "select pg_backend_pid(), array(
                       select name || ' of ' || source from pg_settings
                       where name in ('search_path', 'statement_timeout', 'plan_cache_mode', 'enable_seqscan') order by name)";
        let (session, sources): (i32, Vec<String>) = sqlx::query_as(query).fetch_one(&mut *tx).await.unwrap();
        together.wait().await;
        tx.rollback().await.unwrap();
        let (role, default) = ("database user", "default");
        let wanted = [("enable_seqscan", default), ("plan_cache_mode", default), ("search_path", role), ("statement_timeout", role)];
        assert_eq!(sources, wanted.map(|(name, source)| format!("{name} of {source}")));
        session
    }));
    let sessions: BTreeSet<i32> = sessions.await.into_iter().collect();
    assert_eq!(sessions.len(), TestPooler::SESSIONS);

    // Readiness fails when a new session starts without the settings of the role.
    let (db, reset_role) = (
        database.pool(),
        "do $$ begin
        execute format('alter role %I in database %I reset all', session_user, current_database()); end $$",
    );
    sqlx::raw_sql(reset_role).execute(db).await.unwrap();
    let ended: Vec<i32> = sessions.into_iter().collect();
    sqlx::query("select pg_terminate_backend(pid) from unnest($1) as pid").bind(ended).execute(db).await.unwrap();
    eventually("readiness names the setting", DEADLINE, async || {
        let ready = app.anonymous().get("/readyz").await;
        if ready.status == 503 && ready.text.contains("search_path") { Ok(()) } else { Err(ready.text) }
    })
    .await;

    drop(pooler);
    manager.get("/hub/v1/subscribers").await.assert_problem(503, "unavailable");
    eventually("the server is unready", DEADLINE, async || app.anonymous().get("/readyz").await.status == 503).await;
    replica.stop().await;
    app.stop().await;
}

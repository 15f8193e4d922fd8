//! Requests through PgBouncer, which hands out another session of PostgreSQL for each transaction.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use kit::secret::Secret;
use mailbox::database::migrations;
use pillarbox::settings::Settings;
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use testkit::{Pillarbox, TestApp, TestDatabase, TestPooler, drain};
use tokio::sync::Barrier;

use crate::community::Community;
use crate::hub_delivery::{PATIENCE, caller, subscribe};
use crate::hub_world::{Notebook, numbered, post_batch};
use crate::instance::{BINARY, DataFolder};
use crate::joins_world;

const PGBOUNCER: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/pgbouncer");
/// As PgBouncer has it when nothing is said.
const STATEMENTS: u32 = 200;

/// What a command says that fails.
async fn refused(command: &str, urls: &[&str]) -> String {
    let folder = DataFolder::new();
    let args = [&[command, "--listen", "127.0.0.1:0", "--data-dir", folder.text()], urls].concat();
    let mut process = Pillarbox::start(BINARY, &args, &[]);
    assert_eq!(process.ended().await.code(), Some(1), "{}", process.logs());
    process.logs()
}

async fn refused_behind(pooler: &TestPooler, database: &TestDatabase) -> String {
    let (url, direct) = (pooler.url(&database.url()), database.url());
    refused("serve", &["--database-url", &url, "--database-direct-url", &direct]).await
}

/// Gives the role what the refusal says, as an operator does who copies it.
async fn cure(database: &TestDatabase) {
    let said = refused_behind(&TestPooler::start(PGBOUNCER, STATEMENTS).await, database).await;
    assert!(said.contains("search_path is \"$user\", public instead of pg_catalog, pg_temp"), "{said}");
    let cure: String = said.lines().filter(|line| line.starts_with("alter role ")).collect();
    assert!(cure.contains("statement_timeout = 10000;"), "{said}");
    sqlx::raw_sql(AssertSqlSafe(cure)).execute(database.pool()).await.unwrap();
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
async fn a_pooler_that_does_not_do_is_refused_with_what_to_do() {
    let database = TestDatabase::new(&migrations()).await;
    cure(&database).await;
    let forgetful = TestPooler::start(PGBOUNCER, 0).await;
    let said = refused_behind(&forgetful, &database).await;
    assert!(said.contains("max_prepared_statements"), "{said}");

    let pooler = TestPooler::start(PGBOUNCER, STATEMENTS).await;
    let (url, other) = (pooler.url(&database.url()), TestDatabase::new(&migrations()).await);
    let said = refused("serve", &["--database-url", &url, "--database-direct-url", &other.url()]).await;
    assert!(said.contains("different databases"), "{said}");
    for (command, setting, urls) in [
        ("serve", "database_url", &["--database-url", &*url][..]),
        ("migrate", "database_url", &["--database-url", &url]),
        ("serve", "database_direct_url", &["--database-url", &url, "--database-direct-url", &url]),
        ("serve", "replica_url", &["--database-url", &database.url(), "--replica-url", &url]),
    ] {
        let said = refused(command, urls).await;
        assert!(said.contains(&format!("{setting} leads to a pooler")), "{command} {urls:?}: {said}");
    }
}

#[tokio::test]
async fn a_roles_limits_do_not_hold_for_migrations() {
    let database = TestDatabase::empty().await;
    let limit = "do $$ begin execute format('alter role %I in database %I set statement_timeout = 1', session_user, current_database()); end $$";
    sqlx::raw_sql(limit).execute(database.pool()).await.unwrap();
    mailbox::database::migrate(&database.connect_options()).await.unwrap();
}

#[tokio::test]
async fn behind_a_pooler_everything_works_and_no_session_is_changed_for_others() {
    let database = TestDatabase::new(&migrations()).await;
    cure(&database).await;
    let pooler = TestPooler::start(PGBOUNCER, STATEMENTS).await;
    let app = TestApp::start_with(&database, behind(&pooler, &database)).await;
    let replica = TestApp::start_with(&database, behind(&pooler, &database)).await;

    let [manager, producer] = [caller(&app, "manage", "acme").await, caller(&replica, "ingest", "acme").await];
    let notebook = Notebook::start(|_, _, _, _| (200, std::time::Duration::ZERO)).await;
    subscribe(&manager, &notebook.url("all"), json!({})).await;
    let posting = async {
        for n in 1..=20 {
            let posts = numbered(10, [n]).into_iter().map(|event| post_batch(&producer, vec![event]));
            join_all(posts).await;
        }
    };
    let community = Community::of(&app, &database);
    tokio::join!(posting, community.live());
    notebook.until_taken(200, PATIENCE).await;
    notebook.check_order();
    joins_world::check(database.pool(), &[]).await;

    // All at once, so that each is given a session of its own. What the role has is not what a client has set.
    let (requests, together) = (app.settings.pooler().unwrap().unwrap(), Barrier::new(TestPooler::SESSIONS));
    let sessions = join_all((0..TestPooler::SESSIONS).map(async |_| {
        let mut client = PgConnection::connect_with(&requests).await.unwrap();
        let mut tx = client.begin().await.unwrap();
        let ask = "select pg_backend_pid(), array(
                       select name || ' of ' || source from pg_settings
                       where name in ('search_path', 'statement_timeout', 'plan_cache_mode', 'enable_seqscan') order by name)";
        let (session, sources): (i32, Vec<String>) = sqlx::query_as(ask).fetch_one(&mut *tx).await.unwrap();
        together.wait().await;
        tx.rollback().await.unwrap();
        let (role, nobody) = ("database user", "default");
        let wanted = [("enable_seqscan", nobody), ("plan_cache_mode", nobody), ("search_path", role), ("statement_timeout", role)];
        assert_eq!(sources, wanted.map(|(name, source)| format!("{name} of {source}")));
        session
    }));
    let sessions: BTreeSet<i32> = sessions.await.into_iter().collect();
    assert_eq!(sessions.len(), TestPooler::SESSIONS);

    // A role that has lost its settings is noticed with the next session that begins.
    let (db, forget) = (
        database.pool(),
        "do $$ begin
        execute format('alter role %I in database %I reset all', session_user, current_database()); end $$",
    );
    sqlx::raw_sql(forget).execute(db).await.unwrap();
    let ended: Vec<i32> = sessions.into_iter().collect();
    sqlx::query("select pg_terminate_backend(pid) from unnest($1) as pid").bind(ended).execute(db).await.unwrap();
    drain("readiness tells it", PATIENCE, async || {
        let ready = app.anyone().get("/readyz").await;
        if ready.status == 503 && ready.text.contains("search_path") { Ok(()) } else { Err(ready.text) }
    })
    .await;

    drop(pooler);
    manager.get("/hub/v1/subscribers").await.assert_problem(503, "unavailable");
    drain("it is not ready", PATIENCE, async || app.anyone().get("/readyz").await.status == 503).await;
    replica.stop().await;
    app.stop().await;
}

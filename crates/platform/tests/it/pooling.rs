//! Requests through PgBouncer, which hands out another session of PostgreSQL for each transaction.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use kit::secret::Secret;
use mailbox::database::migrations;
use pillarbox::settings::Settings;
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use testkit::{TestApp, TestDatabase, TestPooler, drain};

use crate::community::Community;
use crate::hub_delivery::{PATIENCE, caller, subscribe};
use crate::hub_world::{Notebook, numbered, post_batch};
use crate::instance::{DataFolder, run};
use crate::joins_world;

const PGBOUNCER: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/pgbouncer");
/// As PgBouncer has it when nothing is said.
const STATEMENTS: u32 = 200;

/// What `serve` says when it does not start.
async fn refused(database: &TestDatabase, pooler: &TestPooler) -> String {
    let folder = DataFolder::new();
    let (url, direct) = (pooler.url(&database.url()), database.url());
    tokio::task::spawn_blocking(move || {
        let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text()];
        let urls = ["--database-url", &url, "--database-direct-url", &direct];
        let (code, _, said) = run(&[&args[..], &urls[..]].concat(), &[]);
        assert_eq!(code, Some(1), "{said}");
        said
    })
    .await
    .unwrap()
}

/// Gives the role what the refusal says, as an operator does who copies it.
async fn cure(database: &TestDatabase) {
    let said = refused(database, &TestPooler::start(PGBOUNCER, STATEMENTS).await).await;
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
    let said = refused(&database, &forgetful).await;
    assert!(said.contains("max_prepared_statements"), "{said}");
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

    // All at once, so that each is given a session of its own.
    let requests = app.settings.pooler().unwrap().unwrap();
    let sessions = join_all((0..4).map(async |_| {
        let mut client = PgConnection::connect_with(&requests).await.unwrap();
        let mut tx = client.begin().await.unwrap();
        let shown =
            "select pg_backend_pid(), array[current_setting('search_path'), current_setting('statement_timeout'),
                            current_setting('plan_cache_mode'), current_setting('enable_seqscan')], pg_sleep(1)::text";
        let (session, settings, _): (i32, Vec<String>, String) =
            sqlx::query_as(shown).fetch_one(&mut *tx).await.unwrap();
        tx.rollback().await.unwrap();
        assert_eq!(settings, ["pg_catalog, pg_temp", "10s", "auto", "on"]);
        session
    }));
    assert_eq!(sessions.await.into_iter().collect::<BTreeSet<i32>>().len(), 4);
    drop(pooler);
    drain("requests have no other way", PATIENCE, async || app.anyone().get("/readyz").await.status == 503).await;
    replica.stop().await;
    app.stop().await;
}

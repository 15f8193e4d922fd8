//! Feeds and searches of one caller leave connections to others, and a search has a limit of its own.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use server::migrations;
use server::settings::{Role, Settings};
use testkit::{Client, Response, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::support::{DEADLINE, lock_waits};

const REQUESTS: usize = 40;

/// Without workers, which would wait for the locks of the tests as well.
fn api_only(settings: &mut Settings) {
    settings.roles = vec![Role::Api];
    settings.pool_max = 20;
}

/// Sends requests without a caller, each with another query.
fn requests(reader: Client, query: &'static str) -> tokio::task::JoinHandle<Vec<Response>> {
    let paths = (0..REQUESTS).map(move |n| format!("/event/v1/{}", query.replace('#', &n.to_string())));
    tokio::spawn(async move { join_all(paths.map(async |path| reader.get(&path).await)).await })
}

#[tokio::test]
async fn the_feed_pages_of_strangers_do_not_use_all_connections() {
    for query in ["events?city=c#", "meta/cities?q=c#"] {
        let database = TestDatabase::new(&migrations()).await;
        let (db, app) = (database.pool(), TestApp::start_with(&database, api_only).await);
        let mut blocking = db.begin().await.unwrap();
        let lock = "lock table pillarbox_events.event, pillarbox_events.city in access exclusive mode";
        sqlx::query(lock).execute(&mut *blocking).await.unwrap();
        let pages = requests(app.anonymous(), query);
        eventually("half of the 20 connections wait", DEADLINE, async || match lock_waits(db).await {
            10 => Ok(()),
            other => Err(other),
        })
        .await;
        let other = app.user(Uuid::now_v7(), None);
        let started = Instant::now();
        for _ in 0..10 {
            assert_eq!(other.get("/progress/v1/projects").await.status, 200);
        }
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
        assert_eq!(lock_waits(db).await, 10, "the others wait without a connection");
        blocking.rollback().await.unwrap();
        for answer in pages.await.unwrap() {
            assert!(answer.status == 200 || answer.status == 503, "{answer:?}");
        }
        app.stop().await;
    }
}

#[tokio::test]
async fn a_caller_has_few_searches_at_a_time_and_a_slow_search_is_refused() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start_with(&database, api_only).await);
    let mut blocking = db.begin().await.unwrap();
    sqlx::query("lock table pillarbox_events.event in access exclusive mode").execute(&mut *blocking).await.unwrap();
    let searches = requests(app.anonymous(), "events?q=%22some%20phrase%20#%22&sort=latest");
    eventually("two searches of the network run", DEADLINE, async || match lock_waits(db).await {
        2 => Ok(()),
        other => Err(other),
    })
    .await;
    let answers = searches.await.unwrap();
    let refused = answers.iter().filter(|answer| answer.status == 422).count();
    assert!((2..REQUESTS / 2).contains(&refused), "{refused} searches ran, each for a second, two at a time");
    for answer in answers {
        match answer.status {
            422 => answer.assert_problem(422, "search-too-broad"),
            _ => {
                answer.assert_problem(503, "overloaded");
                assert_eq!(answer.header("retry-after"), "1");
            }
        }
    }
    blocking.rollback().await.unwrap();
    assert_eq!(app.anonymous().get("/event/v1/events?q=phrase").await.status, 200);
    app.stop().await;
}

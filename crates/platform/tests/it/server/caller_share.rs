//! One caller with many slow requests does not use all connections of the process.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use hyper::Method;
use mailbox::database::migrations;
use serde_json::json;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::support::{DEADLINE, lock_waits};

#[tokio::test]
async fn the_slow_requests_of_one_caller_do_not_delay_those_of_others() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start_with(&database, |settings| settings.pool_max = 20).await);
    let (slow, other) = (app.user(Uuid::now_v7(), None), app.user(Uuid::now_v7(), None));
    // Every change of preferences waits for this transaction.
    let mut blocking = db.begin().await.unwrap();
    sqlx::query("lock table pillarbox_notify.preference_set in exclusive mode").execute(&mut *blocking).await.unwrap();
    let change = json!({"preferences": [{"enabled": false}]});
    let changes = tokio::spawn(async move {
        join_all((0..40).map(|_| slow.send(Method::PUT, "/notify/v1/preferences", Some(change.clone())))).await
    });
    eventually("half of the 20 connections wait", DEADLINE, async || match lock_waits(db).await {
        10 => Ok(()),
        other => Err(other),
    })
    .await;
    let started = Instant::now();
    for _ in 0..10 {
        let answer = other.get("/progress/v1/projects").await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert_eq!(lock_waits(db).await, 10, "the others wait without a connection");
    blocking.rollback().await.unwrap();
    for answer in changes.await.unwrap() {
        match answer.status {
            200 => {}
            _ => {
                answer.assert_problem(503, "overloaded");
                assert_eq!(answer.header("retry-after"), "1");
            }
        }
    }
    app.stop().await;
}

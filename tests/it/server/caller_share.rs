//! One caller with many slow requests does not use all connections of the process.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http_kit::admission::caller_id::CallerId;
use http_kit::admission::caller_share::{assert_admitted, scope};
use hyper::Method;
use pillarbox::database::PoolLimits;
use pillarbox::log::Tenant;
use serde_json::json;
use server::migrations;
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

/// In a debug build, code of a request that uses a bare pool is found as soon as the pool has an idle connection.
#[cfg(debug_assertions)]
#[tokio::test]
#[should_panic(expected = "a request acquires a connection without a share of its caller")]
async fn a_request_that_acquires_an_idle_connection_without_a_share_panics() {
    let database = TestDatabase::new(&migrations()).await;
    let limits = PoolLimits { connections_min: 0, before_acquire: assert_admitted, ..PoolLimits::default() };
    let pool = pillarbox::database::pool(database.url().parse().unwrap(), limits);
    drop(pool.acquire().await.unwrap());
    eventually("the connection is idle", DEADLINE, async || pool.num_idle() == 1).await;
    scope(CallerId::of_tenant(&Tenant::main()), async { drop(pool.acquire().await.unwrap()) }).await;
}

//! Many workers race over the finish line of a project, on several server processes: one `job.completed` for each project.

use std::collections::BTreeMap;

use futures_util::stream::{self, StreamExt};
use serde_json::Value;
use server::migrations;
use testkit::{Client, TestDatabase, TestRedis};

use crate::hub::fixture::test_size;
use crate::hub::process::Replica;
use crate::progress::fixture::{Backend, completed, counts, create_with, mark, show};

const WORKERS: usize = 100;
/// Of so many rounds, one has all workers in `make test`. The others have a fifth of them: what races is the last few.
const CROWDED: usize = 10;
/// Rounds that run at the same time.
const ROUNDS_AT_ONCE: usize = 4;

/// One process of two, with its counts there.
fn start(database: &TestDatabase, backend: Backend, redis: &TestRedis) -> Replica {
    let url = redis.url();
    let mut settings = vec![("PILLARBOX_REDIS_PREFIX", redis.prefix())];
    if backend == Backend::Redis {
        settings.push(("PILLARBOX_PROGRESS__REDIS_URL", &url));
    }
    settings.push(("PILLARBOX_POOL_MAX", "10"));
    // A busy machine must not close connections that a worker is about to use again.
    settings.push(("PILLARBOX_HEAD_TIMEOUT_MS", "200000"));
    Replica::start_with(&database.url(), "api,maintain", &settings)
}

/// One round: every worker marks its item, all at once. In every other round some of them are too late: the total is lower than
/// the number of items. Returns the id of the project and its total.
async fn race(clients: &[Client], round: usize) -> (String, usize) {
    let workers = if round.is_multiple_of(test_size(CROWDED, 1)) { WORKERS } else { WORKERS / 5 };
    let total = workers - workers / 10 * (round % 2);
    let id = create_with(&clients[0], total).await;
    let marks = (0..workers).map(async |number| {
        let item = format!("item-{number}");
        let answer = mark(&clients[number % clients.len()], &id, &[&item]).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        // A message to the worker is delivered again.
        if number % 10 == 0 {
            let again = mark(&clients[(number + 1) % clients.len()], &id, &[&item]).await;
            assert_eq!((again.status, &again.json()["counted"]), (200, &Value::from(0)), "{again:?}");
        }
        answer.json()["counted"].as_u64().unwrap() as usize
    });
    let counted: usize = futures_util::future::join_all(marks).await.into_iter().sum();
    assert_eq!(counted, total, "what comes after the finish line has no effect");
    let shown = show(&clients[1], &id).await;
    assert_eq!(counts(&shown), ("DONE".to_owned(), total as i64, total as i64, 0));
    (id, total)
}

async fn one_worker_completes_each_project(backend: Backend) {
    let (database, redis) = (TestDatabase::new(&migrations()).await, TestRedis::new());
    let replicas = [start(&database, backend, &redis), start(&database, backend, &redis)];
    let clients = [replicas[0].admin().await, replicas[1].admin().await];
    let rounds = test_size(100, 1_000);
    let races = stream::iter(0..rounds).map(|round| race(&clients, round));
    let finished: BTreeMap<String, usize> = races.buffer_unordered(ROUNDS_AT_ONCE).collect().await;

    // The answer to the request that completes a project follows the commit of its message, so all of them are there.
    let mut messages = BTreeMap::<String, Vec<Value>>::new();
    for payload in completed(database.pool()).await {
        messages.entry(payload["project_id"].as_str().unwrap().to_owned()).or_default().push(payload);
    }
    assert_eq!(messages.keys().collect::<Vec<_>>(), finished.keys().collect::<Vec<_>>());
    for (id, messages) in &messages {
        assert_eq!(messages.len(), 1, "{id}: {messages:?}");
        let total = Value::from(finished[id]);
        assert_eq!((&messages[0]["total"], &messages[0]["done"]), (&total, &total));
    }
    for mut replica in replicas {
        assert!(replica.process.terminate().await.success(), "{}", replica.process.logs());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_hundred_racing_workers_one_completes_the_project_on_redis() {
    one_worker_completes_each_project(Backend::Redis).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_hundred_racing_workers_one_completes_the_project_on_postgres() {
    one_worker_completes_each_project(Backend::Postgres).await;
}

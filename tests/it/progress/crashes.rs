//! A server process is killed at any step, again and again, while projects complete: one message for each project.

use std::collections::BTreeMap;
use std::time::Duration;

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, TestDatabase, TestRedis, eventually};
use uuid::Uuid;

use crate::hub::fixture::test_size;
use crate::hub::process::Replica;
use crate::progress::fixture::{BOTH, Backend, PROJECTS, completed, counts, create_with, show, wait_until_completed};
use crate::support::{DEADLINE, lock_waits};

const ITEMS: usize = 3;

/// Sends a request until it is answered; a server that was killed answers nothing.
async fn send(client: &Client, method: Method, path: &str, body: Value) -> Option<u16> {
    client.try_send(method, path, Some(body)).await.ok().map(|answer| answer.status)
}

/// Drives one project to its end as far as the server lives: every step is repeated later.
async fn drive(client: &Client, id: &str) {
    send(client, Method::POST, PROJECTS, json!({"id": id})).await;
    let path = format!("{PROJECTS}/{id}");
    send(client, Method::PATCH, &path, json!({"total": ITEMS, "status": "PROCESSING"})).await;
    let items = (0..ITEMS).map(|number| {
        let items = format!("{path}/items");
        async move { send(client, Method::POST, &items, json!({"id": format!("item-{number}")})).await }
    });
    futures_util::future::join_all(items).await;
}

fn start(database: &TestDatabase, backend: Backend, redis: &TestRedis) -> Replica {
    let url = redis.url();
    let mut settings = vec![("PILLARBOX_REDIS_PREFIX", redis.prefix())];
    if backend == Backend::Redis {
        settings.push(("PILLARBOX_PROGRESS__REDIS_URL", &url));
    }
    Replica::start_with(&database.url(), "api,maintain", &settings)
}

async fn survive(backend: Backend, kills: usize) {
    let (database, redis) = (TestDatabase::new(&migrations()).await, TestRedis::new());
    let start = || start(&database, backend, &redis);
    let mut ids: Vec<String> = Vec::new();
    for kill in 0..kills {
        let mut replica = start();
        let client = replica.admin().await;
        let new: Vec<String> = (0..20).map(|_| Uuid::new_v4().to_string()).collect();
        let driving = futures_util::future::join_all(new.iter().map(|id| drive(&client, id)));
        // At another point of the work each time.
        let time = Duration::from_millis(20 + 25 * (kill as u64 % 8));
        let _ = tokio::time::timeout(time, driving).await;
        replica.process.kill9();
        ids.extend(new);
    }
    let mut replica = start();
    let client = replica.admin().await;
    eventually("every project ends", DEADLINE, async || {
        futures_util::future::join_all(ids.iter().map(|id| drive(&client, id))).await;
        let messages = completed(database.pool()).await;
        if messages.len() >= ids.len() { Ok(()) } else { Err(messages.len()) }
    })
    .await;
    let mut found = BTreeMap::<String, usize>::new();
    for message in completed(database.pool()).await {
        assert_eq!((&message["total"], &message["done"]), (&json!(ITEMS), &json!(ITEMS)), "{message}");
        *found.entry(message["project_id"].as_str().unwrap().to_owned()).or_default() += 1;
    }
    ids.sort_unstable();
    assert_eq!(found.keys().collect::<Vec<_>>(), ids.iter().collect::<Vec<_>>());
    assert!(found.values().all(|count| *count == 1), "{backend:?}: {found:?}");
    assert!(replica.process.terminate().await.success(), "{}", replica.process.logs());
}

/// The counts say DONE, and the server is killed before the row and the message commit.
#[tokio::test]
async fn a_project_whose_server_was_killed_between_its_counts_and_its_message_completes_once() {
    for backend in BOTH {
        let (database, redis) = (TestDatabase::new(&migrations()).await, TestRedis::new());
        let db = database.pool();
        let mut replica = start(&database, backend, &redis);
        let client = replica.admin().await;
        let id = create_with(&client, 1).await;
        // No process can commit a completion before this transaction ends.
        let mut blocks = db.begin().await.unwrap();
        let lock = "lock table pillarbox_progress.completed in access exclusive mode";
        sqlx::query(lock).execute(&mut *blocks).await.unwrap();
        let path = format!("{PROJECTS}/{id}/items");
        let marking = tokio::spawn(async move { send(&client, Method::POST, &path, json!({"id": "a"})).await });
        eventually("the message is about to be posted", DEADLINE, async || lock_waits(db).await > 0).await;
        replica.process.kill9();
        blocks.rollback().await.unwrap();
        assert_eq!(marking.await.unwrap(), None, "the request got no answer");
        assert_eq!(completed(db).await, [Value::Null; 0], "{backend:?}");

        let replica = start(&database, backend, &redis);
        assert_eq!(wait_until_completed(db, &id).await["done"], 1, "{backend:?}");
        let shown = show(&replica.admin().await, &id).await;
        assert_eq!(counts(&shown), ("DONE".to_owned(), 1, 1, 0), "{backend:?}");
        assert_eq!(completed(db).await.len(), 1, "{backend:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_at_any_step_posts_one_message_for_each_project() {
    let kills = test_size(2, 40);
    futures_util::future::join_all(BOTH.map(|backend| survive(backend, kills))).await;
}

//! The fixture of the progress service's tests: a server whose counts are in Redis or in PostgreSQL.

use hyper::Method;
use runtime::secret::Secret;
use serde_json::{Value, json};
use server::migrations;
use server::settings::Settings;
use sqlx::PgPool;
use testkit::{Client, Response, TestApp, TestDatabase, TestRedis, eventually};
use uuid::Uuid;

use crate::support::{DEADLINE, text};

pub(crate) const PROJECTS: &str = "/progress/v1/projects";

/// Where the counts are. Every test of behaviour runs with both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    Redis,
    Postgres,
}

pub(crate) const BOTH: [Backend; 2] = [Backend::Redis, Backend::Postgres];

pub(crate) struct Fixture {
    pub(crate) database: TestDatabase,
    pub(crate) redis: TestRedis,
    pub(crate) app: TestApp,
    /// A user.
    pub(crate) client: Client,
}

impl Fixture {
    pub(crate) async fn start(backend: Backend) -> Fixture {
        let (database, redis) = (TestDatabase::new(&migrations()).await, TestRedis::new());
        let app = TestApp::start_with(&database, configure(backend, &redis)).await;
        let client = app.user(Uuid::now_v7(), None);
        Fixture { database, redis, app, client }
    }

    pub(crate) fn db(&self) -> &PgPool {
        self.database.pool()
    }

    /// A connection to the database of Redis with the counts.
    pub(crate) async fn redis(&self) -> redis::aio::MultiplexedConnection {
        let client = redis::Client::open(format!("{}/1", self.redis.url())).unwrap();
        client.get_multiplexed_async_connection().await.unwrap()
    }

    /// The key of a project in Redis.
    pub(crate) fn key(&self, id: &str) -> String {
        self.redis.key(&format!("smap:proj:{id}"))
    }
}

/// The settings of a server whose counts are there.
pub(crate) fn configure(backend: Backend, redis: &TestRedis) -> impl FnOnce(&mut Settings) + use<> {
    let (url, prefix) = (redis.url(), redis.prefix().to_owned());
    move |settings| {
        settings.redis_prefix = prefix;
        if backend == Backend::Redis {
            settings.progress.redis_url = Some(Secret::new(url));
        }
    }
}

/// Creates a project, and returns its id.
pub(crate) async fn create(client: &Client) -> String {
    let made = client.post(PROJECTS, json!({})).await;
    assert_eq!(made.status, 201, "{made:?}");
    text(&made.json()["id"]).to_owned()
}

/// Creates a project that waits for this number of items.
pub(crate) async fn create_with(client: &Client, total: usize) -> String {
    let id = create(client).await;
    let changed = change(client, &id, json!({"total": total, "status": "PROCESSING"})).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    id
}

pub(crate) async fn change(client: &Client, id: &str, fields: Value) -> Response {
    client.send(Method::PATCH, &format!("{PROJECTS}/{id}"), Some(fields)).await
}

pub(crate) async fn show(client: &Client, id: &str) -> Response {
    client.get(&format!("{PROJECTS}/{id}")).await
}

/// Marks items that succeeded.
pub(crate) async fn mark(client: &Client, id: &str, items: &[&str]) -> Response {
    mark_all(client, id, items.iter().map(|id| json!({"id": id})).collect()).await
}

pub(crate) async fn mark_all(client: &Client, id: &str, items: Vec<Value>) -> Response {
    client.post(&format!("{PROJECTS}/{id}/items"), json!({"items": items})).await
}

/// Marks the items 0 to `count`, and returns the answer to the last request.
pub(crate) async fn mark_numbers(client: &Client, id: &str, count: usize) -> Response {
    let items = (0..count).map(|number| json!({"id": format!("item-{number}")})).collect();
    mark_all(client, id, items).await
}

pub(crate) async fn restart(client: &Client, id: &str) -> Response {
    client.send(Method::POST, &format!("{PROJECTS}/{id}/restart"), None).await
}

/// The status, the total, what is done, and the errors.
pub(crate) fn counts(answer: &Response) -> (String, i64, i64, i64) {
    assert_eq!(answer.status, 200, "{answer:?}");
    let body = answer.json();
    let number = |name: &str| body[name].as_i64().unwrap();
    (text(&body["status"]).to_owned(), number("total"), number("done"), number("errors"))
}

/// The payloads of all messages `job.completed`.
pub(crate) async fn completed(db: &PgPool) -> Vec<Value> {
    let query =
        "select payload::text from pillarbox.log where source = 'progress' and topic = 'job.completed' order by id";
    let payloads: Vec<String> = sqlx::query_scalar(query).fetch_all(db).await.unwrap();
    payloads.iter().map(|payload| serde_json::from_str(payload).unwrap()).collect()
}

/// Waits for the message of a project. Fails if there are several.
pub(crate) async fn wait_until_completed(db: &PgPool, id: &str) -> Value {
    let mut found = eventually("the project completes", DEADLINE, async || {
        let found: Vec<Value> = completed(db).await.into_iter().filter(|payload| payload["project_id"] == id).collect();
        (!found.is_empty()).then_some(found)
    })
    .await;
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

/// The project that the example of an operation needs.
pub(crate) async fn prepare(client: &Client, db: &PgPool, path: &str) -> String {
    let id = create(client).await;
    if path.ends_with("/events") {
        // A stream ends after the final state.
        change(client, &id, json!({"status": "FAILED"})).await;
    }
    if path.ends_with("/restart") {
        let expire = "update pillarbox_progress.state set expires_at = now() where project_id = $1";
        sqlx::query(expire).bind(&id).execute(db).await.unwrap();
    }
    id
}

//! Rows as fan-out and dispatch write them, for tests of the HTTP API that run without these roles.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use server::migrations;
use sqlx::PgPool;
use testkit::{Client, Reply, Response, TestApp, TestDatabase, eventually};
use uuid::Uuid;
use webhook_client::AllowedNetworks;

use crate::support::{lock_waits, uuid_of};

pub(crate) async fn start_api_only() -> (TestDatabase, TestApp) {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| {
        settings.hub.allowed_networks = Some(AllowedNetworks::loopback());
        // The test inserts the rows of fan-out and dispatch itself.
        settings.roles = vec![server::settings::Role::Api];
        // One caller gets half of the connections: enough for a race.
        settings.pool_max = 10;
    })
    .await;
    (database, app)
}

pub(crate) fn subscriber_fields(name: &str) -> Value {
    json!({"name": name, "url": "https://example.com/hook", "event_types": ["order.*"]})
}

pub(crate) async fn create_subscriber(client: &Client, name: &str) -> Uuid {
    let made = client.post("/hub/v1/subscribers", subscriber_fields(name)).await;
    assert_eq!(made.status, 201, "{made:?}");
    uuid_of(&made.json()["id"])
}

/// A hub event as ingest writes it to the log.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LoggedEvent {
    pub(crate) id: Uuid,
    shard: i16,
    pub(crate) log_id: i64,
    at: DateTime<Utc>,
}

pub(crate) async fn insert_event(db: &PgPool, tenant: &str, event_type: &str, payload: &str) -> LoggedEvent {
    let id = Uuid::now_v7();
    let (shard, log_id, at) = sqlx::query_as(
        "insert into pillarbox.log (shard, message_id, source, tenant, topic, key, headers, payload)
         values (pillarbox.shard_of($2, 'k'), $1, 'hub', $2, $3, 'k', '{}', $4::json) returning shard, id, at",
    )
    .bind(id)
    .bind(tenant)
    .bind(event_type)
    .bind(payload)
    .fetch_one(db)
    .await
    .unwrap();
    LoggedEvent { id, shard, log_id, at }
}

/// Inserts a hub message as fan-out does.
pub(crate) async fn insert_message(db: &PgPool, n: i64, subscriber: Uuid, event: LoggedEvent) {
    sqlx::query(
        "insert into pillarbox_hub.message (n, at, subscriber, lane, seq, log_shard, log_id, log_at)
         values ($1, clock_timestamp(), $2, 'k', $1, $3, $4, $5)",
    )
    .bind(n)
    .bind(subscriber)
    .bind(event.shard)
    .bind(event.log_id)
    .bind(event.at)
    .execute(db)
    .await
    .unwrap();
}

/// Inserts an attempt as the dispatcher does.
pub(crate) async fn insert_attempt(db: &PgPool, subscriber: Uuid, n: i64, number: i16, outcome: &str, status: i16) {
    sqlx::query(
        "insert into pillarbox_hub.attempt (at, subscriber, n, attempt, outcome, status, latency_ms, detail)
         values (clock_timestamp(), $1, $2, $3, $4, $5, 7, 'test detail')",
    )
    .bind(subscriber)
    .bind(n)
    .bind(number)
    .bind(outcome)
    .bind(status)
    .execute(db)
    .await
    .unwrap();
}

/// Inserts a dead letter as the dispatcher does. Returns its id.
pub(crate) async fn insert_dead_letter(
    db: &PgPool,
    tenant: &str,
    subscriber: Uuid,
    n: i64,
    (event, event_type): (LoggedEvent, &str),
    reason: &str,
) -> Uuid {
    let id = Uuid::now_v7();
    let snapshot = format!(
        r#"{{"event_id":"{}","event_type":"{event_type}","source":"hub","created_at":"{}","payload":{{"amount": 1.50}}}}"#,
        event.id,
        event.at.to_rfc3339(),
    );
    sqlx::query(
        "insert into pillarbox_hub.dead_letter
             (id, tenant, subscriber, n, lane, event_id, event_type, log_shard, log_id, log_at, event_snapshot,
              subscriber_snapshot, reason, detail, attempts, moved_to_dlq_at, ordering_key)
         values ($1, $2, $3, $4, 'k', $5, $6, $7, $8, $9, $11::json, '{\"name\": \"then\"}', $10, 'test detail', 4,
              clock_timestamp(), 'k')",
    )
    .bind(id)
    .bind(tenant)
    .bind(subscriber)
    .bind(n)
    .bind(event.id)
    .bind(event_type)
    .bind(event.shard)
    .bind(event.log_id)
    .bind(event.at)
    .bind(reason)
    .bind(snapshot)
    .execute(db)
    .await
    .unwrap();
    id
}

/// The operator commands in the log, in order: topic, key and payload.
pub(crate) async fn logged_commands(db: &PgPool) -> Vec<(String, String, Value)> {
    sqlx::query_as("select topic, key, payload::jsonb from pillarbox.log where source = 'hub.control' order by id")
        .fetch_all(db)
        .await
        .unwrap()
}

/// A receiver's reply to every request.
pub(crate) fn reply_with(status: u16, body: &'static str) -> impl FnMut(&testkit::Received) -> Reply + Send + 'static {
    move |_| Reply { body: body.to_owned(), ..Reply::status(status) }
}

/// Runs twenty racers for one row. The row stays locked until some of them wait for the lock. The first racer waits first, so
/// PostgreSQL gives it the row first. Returns their answers.
pub(crate) async fn race_for_row(
    db: &PgPool,
    (lock, id): (&'static str, Uuid),
    racer: impl AsyncFn(usize) -> Response + Clone + 'static,
) -> Vec<Response> {
    let mut lock_tx = db.begin().await.unwrap();
    sqlx::query(lock).bind(id).execute(&mut *lock_tx).await.unwrap();
    let local = tokio::task::LocalSet::new();
    let start = |number: usize| {
        let racer = racer.clone();
        local.spawn_local(async move { racer(number).await })
    };
    let release = async {
        let mut racing = vec![start(0)];
        eventually("the first racer waits", Duration::from_secs(5), async || lock_waits(db).await == 1).await;
        racing.extend((1..20).map(start));
        eventually("some racers wait for the lock", Duration::from_secs(5), async || lock_waits(db).await >= 3).await;
        lock_tx.commit().await.unwrap();
        let mut answers = Vec::new();
        for racer in racing {
            answers.push(racer.await.unwrap());
        }
        answers
    };
    local.run_until(release).await
}

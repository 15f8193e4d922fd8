//! What the hub's tests share: an app whose webhooks may stay on this machine, and the rows that fan-out and dispatch would
//! write.

use std::time::Duration;

use chrono::{DateTime, Utc};
use hub::address::Allowed;
use mailbox::database::migrations;
use serde_json::{Value, json};
use sqlx::PgPool;
use testkit::{Answer, Client, Reply, TestApp, TestDatabase, drain};
use uuid::Uuid;

pub(crate) async fn start() -> (TestDatabase, TestApp) {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| {
        settings.hub.allowed_networks = Some(Allowed::loopback());
        // The rows of fan-out and dispatch are this test's to write.
        settings.roles = vec![pillarbox::settings::Role::Api];
    })
    .await;
    (database, app)
}

pub(crate) fn subscriber_fields(name: &str) -> Value {
    json!({"name": name, "url": "https://example.com/hook", "event_types": ["order.*"]})
}

pub(crate) async fn subscriber(client: &Client, name: &str) -> Uuid {
    let made = client.post("/hub/v1/subscribers", subscriber_fields(name)).await;
    assert_eq!(made.status, 201, "{made:?}");
    id_of(&made.json()["id"])
}

pub(crate) fn id_of(value: &Value) -> Uuid {
    value.as_str().unwrap().parse().unwrap()
}

pub(crate) fn pointers(answer: &Answer) -> Vec<String> {
    answer.assert_problem(422, "validation-failed");
    let errors = answer.json()["errors"].as_array().unwrap().clone();
    errors.iter().map(|error| error["pointer"].as_str().unwrap().to_owned()).collect()
}

/// Every item of a list, page by page.
pub(crate) async fn walk(client: &Client, path: &str) -> Vec<Value> {
    let (mut all, mut next) = (Vec::new(), path.to_owned());
    loop {
        let answer = client.get(&next).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        all.extend(answer.json()["items"].as_array().unwrap().clone());
        if answer.json()["next_cursor"].is_null() {
            return all;
        }
        next = answer.header("link").trim_start_matches('<').split_once('>').unwrap().0.to_owned();
    }
}

/// An event as ingest posts it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Posted {
    pub(crate) id: Uuid,
    shard: i16,
    log_id: i64,
    at: DateTime<Utc>,
}

pub(crate) async fn post_event(db: &PgPool, tenant: &str, event_type: &str, payload: &str) -> Posted {
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
    Posted { id, shard, log_id, at }
}

/// A message as fan-out makes it.
pub(crate) async fn make_message(db: &PgPool, n: i64, subscriber: Uuid, event: Posted) {
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

/// An attempt as dispatch keeps it.
pub(crate) async fn attempt(db: &PgPool, subscriber: Uuid, n: i64, number: i16, outcome: &str, status: i16) {
    sqlx::query(
        "insert into pillarbox_hub.attempt (at, subscriber, n, attempt, outcome, status, latency_ms, detail)
         values (clock_timestamp(), $1, $2, $3, $4, $5, 7, 'said so')",
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

/// A dead letter as dispatch keeps it.
pub(crate) async fn bury(
    db: &PgPool,
    tenant: &str,
    subscriber: Uuid,
    n: i64,
    (event, event_type): (Posted, &str),
    reason: &str,
) -> Uuid {
    let id = Uuid::now_v7();
    sqlx::query(
        "insert into pillarbox_hub.dead_letter
             (id, tenant, subscriber, n, lane, event_id, event_type, log_shard, log_id, log_at, event_snapshot,
              subscriber_snapshot, reason, detail, attempts, moved_to_dlq_at)
         values ($1, $2, $3, $4, 'k', $5, $6, $7, $8, $9, '{\"amount\": 1.50}', '{\"name\": \"then\"}', $10, 'said so', 4,
              clock_timestamp())",
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
    .execute(db)
    .await
    .unwrap();
    id
}

/// What people have asked of the owners of shards, in the order of asking: topic, key and payload.
pub(crate) async fn commands(db: &PgPool) -> Vec<(String, String, Value)> {
    sqlx::query_as("select topic, key, payload::jsonb from pillarbox.log where source = 'hub.control' order by id")
        .fetch_all(db)
        .await
        .unwrap()
}

/// To be answered by a receiver of webhooks, whatever comes.
pub(crate) fn always(status: u16, body: &'static str) -> impl FnMut(&testkit::Received) -> Reply + Send + 'static {
    move |_| Reply { body: body.to_owned(), ..Reply::status(status) }
}

/// Lets twenty race for a row: it is held until some of them stand in front of it, and then let go.
pub(crate) async fn race(
    db: &PgPool,
    (lock, id): (&'static str, Uuid),
    racer: impl AsyncFn(usize) -> Answer + Clone + 'static,
) -> Vec<Answer> {
    let mut holding = db.begin().await.unwrap();
    sqlx::query(lock).bind(id).execute(&mut *holding).await.unwrap();
    let local = tokio::task::LocalSet::new();
    let racing: Vec<_> = (0..20)
        .map(|number| {
            let racer = racer.clone();
            local.spawn_local(async move { racer(number).await })
        })
        .collect();
    let letting_go = async {
        let waiting = async || {
            let query = "select count(*) from pg_stat_activity
                         where datname = current_database() and wait_event_type = 'Lock'";
            sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap() >= 3
        };
        drain("some stand in front of the row", Duration::from_secs(5), waiting).await;
        holding.commit().await.unwrap();
        let mut answers = Vec::new();
        for racer in racing {
            answers.push(racer.await.unwrap());
        }
        answers
    };
    local.run_until(letting_go).await
}

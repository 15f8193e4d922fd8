//! The status of consumers and messages, for operators and for metrics.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{FromRow, PgExecutor, PgPool, Row};

use super::dead_letters::{self, Selection};
use crate::database::{SHORT_STEP_TIME_MAX, step};
use crate::log::{LogRef, Message};

/// The time limit of one measurement. It reads a few rows of every consumer.
const MEASURE_TIME_MAX: Duration = SHORT_STEP_TIME_MAX;

/// A consumer, and how far it has read.
#[derive(Debug, Clone, Serialize)]
pub struct ConsumerStatus {
    /// Its name.
    pub consumer: String,
    /// `relay` publishes to the broker, `handler` acts in this database, `fan-out` creates the messages of subscribers.
    pub kind: String,
    /// The consumer has read all messages of the log up to this id.
    pub read_to: i64,
    /// The age of the oldest unread message; 0 if there is none.
    pub lag_seconds: f64,
    /// When the lag was measured, by the database's clock.
    pub measured_at: DateTime<Utc>,
    /// The number of unread messages of the log, whether they match the consumer's filter or not.
    pub lag_messages: i64,
    /// How many messages wait for a retry, or for one that does.
    pub parked: i64,
    /// How many messages were given up.
    pub dead: i64,
    /// The number of messages that a route published and no queue took; counted up to 1,000.
    pub unrouted: i64,
    /// The number of unfinished replays.
    pub replays: i64,
    /// The processes that work for the consumer, with the number of shards that each one owns.
    pub workers: Vec<WorkerStatus>,
    /// When the consumer lapsed because it was too far behind. It needs `cursors reset` or `cursors drop`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lapsed_at: Option<DateTime<Utc>>,
}

/// A process that works for a consumer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Its name.
    pub name: String,
    /// How many shards it owns.
    pub shards: i64,
}

/// Returns the status of every consumer, sorted by name. The cost does not depend on the backlog.
pub async fn consumers(db: impl PgExecutor<'_>) -> sqlx::Result<Vec<ConsumerStatus>> {
    sqlx::query_as(
        "with ahead as (
             select cursor.consumer, oldest.at, oldest.id
             from pillarbox.cursor cross join pillarbox.shards() as slot (shard)
             left join lateral pillarbox.latest_position(cursor.consumer, slot.shard) as latest on true
             left join lateral (
                 select id, at from pillarbox.log
                 where log.shard = slot.shard and id > greatest(latest.old_id, latest.last_id, 0) order by id limit 1
             ) oldest on true
         )
         select cursor.consumer, cursor.kind, cursor.lapsed_at, clock_timestamp() as measured_at,
                coalesce(extract(epoch from clock_timestamp() - min(ahead.at)), 0)::float8 as lag_seconds,
                coalesce((select last_value from pillarbox.log_id) - min(ahead.id) + 1, 0) as lag_messages,
                coalesce(min(ahead.id) - 1, (select last_value from pillarbox.log_id)) as read_to,
                (select count(*) from pillarbox.parked where parked.consumer = cursor.consumer) as parked,
                (select count(*) from pillarbox.dead_letter where dead_letter.consumer = cursor.consumer) as dead,
                -- Bounded, because there can be as many as messages in the log.
                (select count(*) from (select from pillarbox.unrouted
                                       where unrouted.consumer = cursor.consumer and unrouted.at >= cursor.created_at
                                       limit 1000) as counted) as unrouted,
                (select count(distinct replay.id) from pillarbox.replay
                 join pillarbox.replay_shard on replay_shard.replay = replay.id and not done
                 where replay.consumer = cursor.consumer) as replays,
                (select coalesce(json_agg(json_build_object('name', name, 'shards', shards) order by name), '[]')
                 from (select replica.name, count(lease.shard) as shards
                       from pillarbox.shard_worker join pillarbox.replica on replica.id = shard_worker.replica
                       left join pillarbox.lease
                         on lease.consumer = shard_worker.consumer and lease.owner = shard_worker.owner
                       where shard_worker.consumer = cursor.consumer and replica.until > now()
                       group by replica.name) as worker) as workers
         from pillarbox.cursor join ahead on ahead.consumer = cursor.consumer
         group by cursor.consumer order by cursor.consumer",
    )
    .fetch_all(db)
    .await
}

impl FromRow<'_, PgRow> for ConsumerStatus {
    fn from_row(row: &PgRow) -> sqlx::Result<ConsumerStatus> {
        let Json(workers) = row.try_get("workers")?;
        Ok(ConsumerStatus {
            consumer: row.try_get("consumer")?,
            kind: row.try_get("kind")?,
            read_to: row.try_get("read_to")?,
            lag_seconds: row.try_get("lag_seconds")?,
            measured_at: row.try_get("measured_at")?,
            lag_messages: row.try_get("lag_messages")?,
            parked: row.try_get("parked")?,
            dead: row.try_get("dead")?,
            unrouted: row.try_get("unrouted")?,
            replays: row.try_get("replays")?,
            workers,
            lapsed_at: row.try_get("lapsed_at")?,
        })
    }
}

/// Counters of the log.
#[derive(Debug, Clone, Copy)]
pub struct LogTotals {
    /// The messages that were posted, and those of transactions that rolled back.
    pub posted: i64,
}

/// Reads the counters of the log. The cost does not depend on its size.
pub async fn log_totals(db: impl PgExecutor<'_>) -> sqlx::Result<LogTotals> {
    let query = "select case when is_called then last_value else 0 end from pillarbox.log_id";
    Ok(LogTotals { posted: sqlx::query_scalar(query).fetch_one(db).await? })
}

/// Returns the names of all processes that run, as far as their last heartbeats tell.
pub async fn processes(db: impl PgExecutor<'_>) -> sqlx::Result<Vec<String>> {
    let query = "select name from pillarbox.replica where until > now() order by name";
    sqlx::query_scalar(query).fetch_all(db).await
}

/// Returns the names of everything that running processes work on by shard: consumers, and shard assignments.
pub async fn active_names(db: impl PgExecutor<'_>) -> sqlx::Result<BTreeSet<String>> {
    let query = "select distinct consumer from pillarbox.shard_worker
                 join pillarbox.replica on replica.id = shard_worker.replica where replica.until > now()";
    Ok(sqlx::query_scalar(query).fetch_all(db).await?.into_iter().collect())
}

/// The status of one message for one consumer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MessageStatus {
    /// The consumer.
    pub consumer: String,
    /// `pending`, `sent`, `unrouted` (published, but no queue was bound for it), `parked`, `dead` or `discarded`.
    pub status: String,
    /// When the consumer processed it, as far as that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent_at: Option<DateTime<Utc>>,
    /// How often it was tried.
    pub attempts: i32,
    /// When a parked message is retried. Absent if it waits for an earlier message of its key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_retry_at: Option<DateTime<Utc>>,
    /// Why the last attempt failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// Returns the status of a message for each consumer whose filter it matches.
pub async fn message_statuses(db: impl PgExecutor<'_>, message: &Message) -> sqlx::Result<Vec<MessageStatus>> {
    sqlx::query_as(
        "select consumer, status, sent_at, attempts, next_retry_at, last_error from pillarbox.outbox_status
         where shard = $1 and log_id = $2 and created_at = $3 order by consumer",
    )
    .bind(message.shard)
    .bind(message.id)
    .bind(message.at)
    .fetch_all(db)
    .await
}

impl FromRow<'_, PgRow> for MessageStatus {
    fn from_row(row: &PgRow) -> sqlx::Result<MessageStatus> {
        let (consumer, status, sent_at, attempts, next_retry_at, last_error) = FromRow::from_row(row)?;
        Ok(MessageStatus { consumer, status, sent_at, attempts, next_retry_at, last_error })
    }
}

/// Returns the `status` of each message for one consumer, by the message's id in the log. A message that the consumer's
/// filter does not match is missing.
pub async fn statuses_of(
    db: impl PgExecutor<'_>,
    messages: &[LogRef],
    consumer: &str,
) -> sqlx::Result<HashMap<i64, String>> {
    let rows: Vec<(i64, String)> = sqlx::query_as(
        "select message.id, found.status from unnest($1::smallint[], $2::bigint[], $3::timestamptz[]) as message (shard, id, at)
         cross join lateral (
             select status from pillarbox.outbox_status
             where outbox_status.shard = message.shard and log_id = message.id and created_at = message.at and consumer = $4
         ) found",
    )
    .bind(messages.iter().map(|message| message.shard).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.id).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.at).collect::<Vec<_>>())
    .bind(consumer)
    .fetch_all(db)
    .await?;
    Ok(rows.into_iter().collect())
}

/// The gauges of all consumers.
#[derive(Debug, Default)]
pub struct LagGauges {
    /// The consumers that were measured.
    consumers: Mutex<BTreeSet<String>>,
}

impl LagGauges {
    /// Measures all consumers. If that fails, their lag is unknown: a gauge that kept its last value would show a lag of 0
    /// while nothing is read.
    pub async fn update(&self, db: &PgPool) -> sqlx::Result<()> {
        let measured = step(db, "measure the lag", MEASURE_TIME_MAX, self.measure(db)).await;
        if measured.is_err() {
            for consumer in self.consumers().iter() {
                set_lag(consumer, f64::NAN, f64::NAN);
            }
        }
        measured
    }

    async fn measure(&self, db: &PgPool) -> sqlx::Result<()> {
        let consumers = consumers(db).await?;
        for status in &consumers {
            set_lag(&status.consumer, status.lag_seconds, status.lag_messages as f64);
            let labels = [("consumer", status.consumer.clone())];
            metrics::gauge!("pillarbox_consumer_parked", &labels).set(status.parked as f64);
            metrics::gauge!("pillarbox_consumer_dead_letters", &labels).set(status.dead as f64);
            metrics::gauge!("pillarbox_consumer_lapsed", &labels).set(f64::from(u8::from(status.lapsed_at.is_some())));
        }
        *self.consumers() = consumers.into_iter().map(|status| status.consumer).collect();
        // Dead letters of queues that are read into the log have no consumer.
        for (consumer, dead) in dead_letters::without_consumer(db, &Selection::default()).await? {
            metrics::gauge!("pillarbox_consumer_dead_letters", "consumer" => consumer).set(dead as f64);
        }
        // This process's clock, so that a stopped measurement shows even if the database cannot be asked.
        metrics::gauge!("pillarbox_lag_measured_timestamp_seconds").set(Utc::now().timestamp() as f64);
        Ok(())
    }

    fn consumers(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.consumers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn set_lag(consumer: &str, seconds: f64, messages: f64) {
    let labels = [("consumer", consumer.to_owned())];
    metrics::gauge!("pillarbox_consumer_lag_seconds", &labels).set(seconds);
    metrics::gauge!("pillarbox_consumer_lag_messages", &labels).set(messages);
}

//! The inbox: ids of messages that a handler has already processed. A message takes effect once for each consumer and
//! run, however often it is delivered.

use std::collections::HashSet;

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use super::processor::Delivery;

/// How much older than its row in the log the time in a message's id may be. The inbox is partitioned by the time in the id, so
/// the row of an older one would be dropped too early; see [`insert_old`].
pub(crate) const ID_AGE_MAX: TimeDelta = TimeDelta::days(1);

/// Whether the time in a message's id is older than its row in the log: the clock of the process that posted it was behind, or
/// the message waited in a queue.
fn has_old_id(message_id: Uuid, at: DateTime<Utc>) -> bool {
    let seconds = message_id.get_timestamp().map(|time| time.to_unix().0);
    seconds
        .and_then(|seconds| i64::try_from(seconds).ok())
        .is_some_and(|seconds| seconds < (at - ID_AGE_MAX).timestamp())
}

/// Records that the transaction processes these messages. Returns those (id and run) that were not processed before.
pub async fn insert(
    tx: &mut PgConnection,
    consumer: &str,
    deliveries: &[&Delivery],
) -> sqlx::Result<HashSet<(Uuid, i32)>> {
    let id = |delivery: &&Delivery| (delivery.message.message_id, delivery.run);
    let mut new = insert_by_day(tx, consumer, &deliveries.iter().map(id).collect::<Vec<_>>()).await?;
    let has_old_id = |delivery: &&&Delivery| has_old_id(delivery.message.message_id, delivery.message.at);
    let old: Vec<_> = deliveries.iter().filter(has_old_id).map(id).collect();
    if !old.is_empty() {
        let new_old = insert_old(tx, consumer, &old).await?;
        new.retain(|message| new_old.contains(message) || !old.contains(message));
    }
    Ok(new)
}

/// Records messages with [`has_old_id`] a second time, in the table whose rows are deleted by their own age. Returns those
/// that were not processed before.
async fn insert_old(
    tx: &mut PgConnection,
    consumer: &str,
    messages: &[(Uuid, i32)],
) -> sqlx::Result<HashSet<(Uuid, i32)>> {
    let text = |(id, run): &(Uuid, i32)| format!("{id}/{run}");
    let new = insert_foreign(tx, consumer, &messages.iter().map(text).collect::<Vec<_>>()).await?;
    Ok(messages.iter().filter(|message| new.contains(&text(message))).copied().collect())
}

/// Records the messages in the partitions of the days in their ids. Returns those that were not processed before.
async fn insert_by_day(
    tx: &mut PgConnection,
    consumer: &str,
    messages: &[(Uuid, i32)],
) -> sqlx::Result<HashSet<(Uuid, i32)>> {
    let (ids, runs): (Vec<Uuid>, Vec<i32>) = messages.iter().copied().unzip();
    let new: Vec<(Uuid, i32)> = sqlx::query_as(
        "insert into pillarbox.inbox (consumer, message_id, run) select $1, * from unnest($2::uuid[], $3::integer[])
         on conflict do nothing returning message_id, run",
    )
    .bind(consumer)
    .bind(ids)
    .bind(runs)
    .fetch_all(tx)
    .await?;
    Ok(new.into_iter().collect())
}

/// Records that the transaction processes messages of other producers, whose ids can be any text. Returns those that were
/// not processed before.
pub async fn insert_foreign(tx: &mut PgConnection, consumer: &str, ids: &[String]) -> sqlx::Result<HashSet<String>> {
    let new: Vec<String> = sqlx::query_scalar(
        "insert into pillarbox.inbox_foreign (consumer, message_id) select distinct $1, id from unnest($2::text[]) as id
         on conflict do nothing returning message_id",
    )
    .bind(consumer)
    .bind(ids)
    .fetch_all(tx)
    .await?;
    Ok(new.into_iter().collect())
}

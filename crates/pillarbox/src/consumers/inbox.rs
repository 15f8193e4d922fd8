//! The inbox: ids of messages that a handler has already processed. A message takes effect once for each consumer and
//! run, however often it is delivered.

use std::collections::HashSet;

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use super::processor::Delivery;
use crate::log::created_at;

/// How much older than its row in the log the time in a message's id may be. The inbox is partitioned by the time in the id, so
/// the row of an older one would be dropped too early; see [`has_near_time`].
pub(crate) const ID_AGE_MAX: TimeDelta = TimeDelta::days(1);

/// Whether the message belongs to the day of the inbox that contains the time in its id. Otherwise it is recorded in the table
/// whose rows are deleted by their own age: the id is older than its row in the log, because the clock of the process that posted
/// it was behind or the message waited in a queue; or the id has no time or a later one, because its producer has chosen it, so
/// that no day of the inbox would ever contain it, or be dropped.
fn has_near_time(message_id: Uuid, at: DateTime<Utc>) -> bool {
    created_at(message_id).is_some_and(|time| (at - ID_AGE_MAX..=at + ID_AGE_MAX).contains(&time))
}

/// Records that the transaction processes these messages. Returns those (id and run) that were not processed before.
pub async fn insert(
    tx: &mut PgConnection,
    consumer: &str,
    deliveries: &[&Delivery],
) -> sqlx::Result<HashSet<(Uuid, i32)>> {
    let (near, others): (Vec<&Delivery>, Vec<&Delivery>) =
        deliveries.iter().partition(|one| has_near_time(one.message.message_id, one.message.at));
    let entries = |of: &[&Delivery]| of.iter().map(|one| (one.message.message_id, one.run)).collect::<Vec<_>>();
    let mut new = insert_by_day(tx, consumer, &entries(&near)).await?;
    if !others.is_empty() {
        new.extend(insert_by_age(tx, consumer, &entries(&others)).await?);
    }
    Ok(new)
}

/// Records messages in the table whose rows are deleted by their own age. Returns those that were not processed before, nor with
/// an earlier row of the log that had the time in their id.
async fn insert_by_age(
    tx: &mut PgConnection,
    consumer: &str,
    messages: &[(Uuid, i32)],
) -> sqlx::Result<HashSet<(Uuid, i32)>> {
    let (ids, runs): (Vec<Uuid>, Vec<i32>) = messages.iter().copied().unzip();
    let new: Vec<String> = sqlx::query_scalar(
        "insert into pillarbox.inbox_foreign (consumer, message_id)
         select distinct $1, id || '/' || run from unnest($2::uuid[], $3::integer[]) as message (id, run)
         where not exists (select from pillarbox.inbox where inbox.consumer = $1 and inbox.message_id = message.id
                               and inbox.run = message.run)
         on conflict do nothing returning message_id",
    )
    .bind(consumer)
    .bind(ids)
    .bind(runs)
    .fetch_all(tx)
    .await?;
    let is_new = |(id, run): &&(Uuid, i32)| new.contains(&format!("{id}/{run}"));
    Ok(messages.iter().filter(is_new).copied().collect())
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

/// Returns those ids of other producers that no committed transaction has recorded.
pub async fn unknown_foreign(db: &mut PgConnection, consumer: &str, ids: &[String]) -> sqlx::Result<HashSet<String>> {
    let query = "select id from unnest($2::text[]) as id
                 where not exists (select from pillarbox.inbox_foreign where consumer = $1 and message_id = id)";
    let unknown: Vec<String> = sqlx::query_scalar(query).bind(consumer).bind(ids).fetch_all(db).await?;
    Ok(unknown.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ids_with_a_near_time_belong_to_a_day_of_the_inbox() {
        let at = Utc::now();
        let id_at = |time: DateTime<Utc>| {
            let (seconds, nanoseconds) = (time.timestamp() as u64, time.timestamp_subsec_nanos());
            Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, seconds, nanoseconds))
        };
        for (id, expected) in [
            (id_at(at), true),
            (id_at(at - TimeDelta::hours(23)), true),
            (id_at(at - TimeDelta::hours(25)), false),
            (id_at(at + TimeDelta::hours(25)), false),
            (Uuid::from_u128(0x7c5d2a7e_0000_4000_8000_000000000001), false),
            (Uuid::nil(), false),
        ] {
            assert_eq!(has_near_time(id, at), expected, "{id}");
        }
    }
}

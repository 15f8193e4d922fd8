//! The inbox: ids of messages that a handler has already processed. A message takes effect once for each consumer and
//! run, however often it is delivered.

use std::collections::HashSet;

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use super::processor::Delivery;
use crate::log::created_at;

/// How much older than its row in the log the time in a message's id may be. The inbox is partitioned by the time in the id, so
/// the row of an older one would be dropped too early; see [`insert_by_age`].
pub(crate) const ID_AGE_MAX: TimeDelta = TimeDelta::days(1);

/// How the time in a message's id relates to the time of its row in the log. It decides where the message is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IdTime {
    /// About the same.
    Near,
    /// Older: the clock of the process that posted it was behind, or the message waited in a queue.
    Old,
    /// The id has no time, or a later one: its producer has chosen it. No day of the inbox would ever contain it, or be
    /// dropped.
    Unrelated,
}

impl IdTime {
    pub(crate) fn of(message_id: Uuid, at: DateTime<Utc>) -> IdTime {
        match created_at(message_id) {
            Some(time) if time < at - ID_AGE_MAX => IdTime::Old,
            Some(time) if time <= at + ID_AGE_MAX => IdTime::Near,
            Some(_) | None => IdTime::Unrelated,
        }
    }
}

/// Records that the transaction processes these messages. Returns those (id and run) that were not processed before.
pub async fn insert(
    tx: &mut PgConnection,
    consumer: &str,
    deliveries: &[&Delivery],
) -> sqlx::Result<HashSet<(Uuid, i32)>> {
    // An old id is recorded twice, because earlier versions look for it in the inbox only.
    let (mut dated, mut by_age) = (Vec::with_capacity(deliveries.len()), Vec::new());
    for Delivery { message, run, .. } in deliveries {
        let (entry, id_time) = ((message.message_id, *run), IdTime::of(message.message_id, message.at));
        if id_time != IdTime::Unrelated {
            dated.push(entry);
        }
        if id_time != IdTime::Near {
            by_age.push(entry);
        }
    }
    let mut new = insert_by_day(tx, consumer, &dated).await?;
    if !by_age.is_empty() {
        let new_by_age = insert_by_age(tx, consumer, &by_age).await?;
        new.retain(|entry| new_by_age.contains(entry) || !by_age.contains(entry));
        new.extend(new_by_age.into_iter().filter(|entry| !dated.contains(entry)));
    }
    Ok(new)
}

/// Records messages whose ids are [`IdTime::Old`] or [`IdTime::Unrelated`] in the table whose rows are deleted by their own
/// age. Returns those that were not processed before.
async fn insert_by_age(
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
            (id_at(at), IdTime::Near),
            (id_at(at - TimeDelta::hours(23)), IdTime::Near),
            (id_at(at - TimeDelta::hours(25)), IdTime::Old),
            (id_at(at + TimeDelta::hours(25)), IdTime::Unrelated),
            (Uuid::from_u128(0x7c5d2a7e_0000_4000_8000_000000000001), IdTime::Unrelated),
            (Uuid::nil(), IdTime::Unrelated),
        ] {
            assert_eq!(IdTime::of(id, at), expected, "{id}");
        }
    }
}

//! Compares what several consumers have done with the same messages, by message and not only by position.

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::log::time_search::{self, MARGIN};

/// The number of ids of the log that one statement scans.
const RANGE_IDS: i64 = 10_000;

/// What a consumer has done with a message that its filter matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageState {
    /// The number of the message in the log.
    pub log_id: i64,
    /// The id of the message.
    pub message_id: Uuid,
    /// When it was posted.
    pub at: DateTime<Utc>,
    /// The consumer.
    pub consumer: String,
    /// As in [`MessageStatus`](super::status::MessageStatus), and `skipped`: the consumer was created after the message was
    /// posted, or was reset past it.
    pub state: String,
}

/// The range of the log that a comparison reads, in steps.
#[derive(Debug)]
pub struct Comparison {
    consumers: Vec<String>,
    from: DateTime<Utc>,
    to: DateTime<Utc>,
    next_id: i64,
    end_id: i64,
}

impl Comparison {
    /// Compares the messages that were posted from `from` to before `to`.
    pub async fn new(
        db: &mut PgConnection,
        consumers: &[&str],
        (from, to): (DateTime<Utc>, DateTime<Utc>),
    ) -> sqlx::Result<Comparison> {
        let next_id = time_search::around(db, None, from - MARGIN).await?.0.max(0);
        let end_id = time_search::around(db, None, to + MARGIN).await?.1;
        let consumers = consumers.iter().map(|&consumer| consumer.to_owned()).collect();
        Ok(Comparison { consumers, from, to, next_id, end_id })
    }

    /// Returns the states of the next messages, in the order of the log; None at the end of the range. The states of a message
    /// for all consumers are those of one moment.
    pub async fn next(&mut self, db: &mut PgConnection) -> sqlx::Result<Option<Vec<MessageState>>> {
        if self.next_id >= self.end_id {
            return Ok(None);
        }
        let end = self.end_id.min(self.next_id + RANGE_IDS);
        let query = sqlx::query_as(STATES).bind(&self.consumers).bind(self.next_id).bind(end);
        let rows: Vec<(i64, Uuid, DateTime<Utc>, String, String)> =
            query.bind(self.from).bind(self.to).fetch_all(db).await?;
        let state =
            |(log_id, message_id, at, consumer, state)| MessageState { log_id, message_id, at, consumer, state };
        let states = rows.into_iter().map(state).collect();
        self.next_id = end;
        Ok(Some(states))
    }
}

/// Returns which of these messages a handler has processed, according to its inbox.
pub async fn processed(db: &mut PgConnection, consumer: &str, ids: &[Uuid]) -> sqlx::Result<HashSet<Uuid>> {
    // Ids that contain no time, or an old one, are in the other table.
    let query = "select message_id from pillarbox.inbox where consumer = $1 and run = 0 and message_id = any($2)
                 union
                 select id from unnest($2) as id
                 join pillarbox.inbox_foreign on consumer = $1 and inbox_foreign.message_id = id || '/0'";
    let found: Vec<Uuid> = sqlx::query_scalar(query).bind(consumer).bind(ids).fetch_all(db).await?;
    Ok(found.into_iter().collect())
}

/// The positions of the consumers are read once, and not for each message. A *jump* is a position that the consumer did not reach by
/// reading: where it started, or where an operator has reset it to. What is between the position before it and the jump was skipped.
const STATES: &str = "
with side as materialized (
    select cursor.consumer, cursor.included, cursor.excluded, cursor.created_at, slot.shard, latest.old, latest.new,
           latest.last_id
    from pillarbox.cursor cross join pillarbox.shards() as slot (shard)
    left join lateral pillarbox.latest_position(cursor.consumer, slot.shard) as latest on true
    where cursor.consumer = any($1)
), jump as materialized (
    select cursor.consumer, slot.shard, landed.old, landed.new, landed.last_id, before.old as before_old,
           before.new as before_new, before.last_id as before_last_id
    from pillarbox.cursor cross join lateral (values (cursor.created_at), (cursor.since)) as moved (at)
    cross join pillarbox.shards() as slot (shard)
    cross join lateral (
        select n, old, new, last_ids[array_position(shards, slot.shard)] as last_id from pillarbox.position
        where position.consumer = cursor.consumer and position.at >= moved.at and slot.shard = any (shards)
        order by position.at, n limit 1
    ) landed
    left join lateral (
        select old, new, last_ids[array_position(shards, slot.shard)] as last_id from pillarbox.position
        where position.consumer = cursor.consumer and position.n < landed.n and slot.shard = any (shards)
        order by n desc limit 1
    ) before on true
    where cursor.consumer = any($1)
)
select log.id as log_id, log.message_id, log.at, side.consumer,
       case
           when exists (select from pillarbox.dead_letter
                        where dead_letter.consumer = side.consumer and dead_letter.message_id = log.message_id
                          and dead_letter.log_id = log.id) then 'dead'
           when exists (select from pillarbox.parked
                        where parked.consumer = side.consumer and parked.message_id = log.message_id
                          and not parked.discarded) then 'parked'
           when exists (select from pillarbox.discarded
                        where discarded.consumer = side.consumer and discarded.message_id = log.message_id) then 'discarded'
           when not coalesce(log.id <= (select floor_id from pillarbox.cluster_identity)
                             or pg_visible_in_snapshot(log.xid, side.old)
                             or (pg_visible_in_snapshot(log.xid, side.new) and log.id <= side.last_id), false) then 'pending'
           when exists (
               select from jump
               where jump.consumer = side.consumer and jump.shard = log.shard
                 and (pg_visible_in_snapshot(log.xid, jump.old)
                      or (pg_visible_in_snapshot(log.xid, jump.new) and log.id <= jump.last_id))
                 and not coalesce(pg_visible_in_snapshot(log.xid, jump.before_old)
                                  or (pg_visible_in_snapshot(log.xid, jump.before_new) and log.id <= jump.before_last_id),
                                  false))
               and not exists (
                   select from pillarbox.replay join pillarbox.replay_shard on replay_shard.replay = replay.id
                   where replay.consumer = side.consumer and replay.from_at <= log.at and replay.to_at > log.at
                     and replay_shard.shard = log.shard and (replay_shard.done or replay_shard.last_id >= log.id))
               then 'skipped'
           when exists (select from pillarbox.unrouted
                        where unrouted.consumer = side.consumer and unrouted.log_id = log.id
                          and unrouted.at >= greatest(side.created_at, log.at - interval '1 hour')) then 'unrouted'
           else 'sent'
       end as state
from pillarbox.shards() as slot (shard)
cross join lateral (
    select * from pillarbox.log
    where log.shard = slot.shard and log.id >= $2 and log.id < $3 and log.at >= $4 and log.at < $5
) log
join side on side.shard = log.shard
 and pillarbox.subject(log.source, log.topic, log.aggregate_type) ~ side.included
 and (side.excluded is null or pillarbox.subject(log.source, log.topic, log.aggregate_type) !~ side.excluded)
order by log.id, side.consumer";

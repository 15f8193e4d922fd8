//! The writes of fan-out: hub messages, skipped subscribers and operator commands.

pub(crate) mod recovery;

use std::collections::HashSet;

use chrono::{DateTime, TimeDelta, Utc};
use pillarbox::log::{LogRef, Message};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::deliveries::command::OperatorCommand;
use crate::directory::domain::DirectoryVersion;
use crate::directory::store::VersionColumns;
use crate::rows::LogColumns;

/// Rows that one statement processes, so that a large batch does not exceed the statement timeout.
const ROWS_MAX: usize = 10_000;
/// Allowance for clock skew between replicas.
const CLOCK_SKEW: TimeDelta = TimeDelta::hours(1);

/// A hub message to append.
pub(crate) struct NewMessage {
    pub(crate) subscriber: Uuid,
    pub(crate) lane: Option<String>,
    pub(crate) seq: Option<i64>,
    pub(crate) log_ref: LogRef,
    /// The dead letter that this message retries.
    pub(crate) dead_letter: Option<Uuid>,
    /// The replay that creates this message.
    pub(crate) replay: Option<Uuid>,
}

/// The subscribers that an event matched by its type, but that get no message.
pub(crate) struct NewSkipped {
    pub(crate) log_id: i64,
    pub(crate) filtered: Vec<Uuid>,
    pub(crate) inactive: Vec<Uuid>,
}

/// What a transaction of fan-out starts from.
#[derive(sqlx::FromRow)]
pub(crate) struct FanOutStart {
    /// The number of the newest hub message.
    pub(crate) newest: i64,
    #[sqlx(flatten, try_from = "VersionColumns")]
    pub(crate) version: DirectoryVersion,
}

/// Returns what the transaction starts from. Turns off synchronous commit for this
/// transaction: if a crash loses its commit, fan-out creates the same rows from the log again.
pub(crate) async fn begin(tx: &mut PgConnection) -> sqlx::Result<FanOutStart> {
    sqlx::query_as(
        "select set_config('synchronous_commit', 'off', true),
                coalesce((select n_to from pillarbox_hub.fanout_batch order by n_to desc limit 1), 0) as newest,
                (select version from pillarbox_hub.directory) as version,
                (select id from pillarbox.incarnation) as incarnation",
    )
    .fetch_one(tx)
    .await
}

/// The log ids of those messages that were fanned out before: they have a hub message, a stream message or a skipped
/// subscriber, or are deferred.
pub(crate) async fn fanned_out(tx: &mut PgConnection, messages: &[&Message]) -> sqlx::Result<HashSet<i64>> {
    let ids: Vec<i64> = messages.iter().map(|message| message.id).collect();
    let (Some(first), Some(last)) = (ids.iter().min(), ids.iter().max()) else { return Ok(HashSet::new()) };
    let from = messages.iter().map(|message| message.at).min().unwrap_or_default() - CLOCK_SKEW;
    // The range is for the BRIN indexes, which support ranges only.
    let found: Vec<i64> = sqlx::query_scalar(
        "select log_id from pillarbox_hub.message where log_id between $1 and $2 and log_id = any ($3) and at >= $4
         union
         select log_id from pillarbox_hub.skipped where log_id between $1 and $2 and log_id = any ($3) and at >= $4
         union
         select log_id from pillarbox_hub.stream_message where log_id between $1 and $2 and log_id = any ($3) and at >= $4
         union
         select log_id from pillarbox_hub.deferred_event where log_id = any ($3)",
    )
    .bind(first)
    .bind(last)
    .bind(&ids)
    .bind(from)
    .fetch_all(tx)
    .await?;
    Ok(found.into_iter().collect())
}

/// The newest sequence number of each lane, in the given order; 0 for a lane without messages.
pub(crate) async fn newest_sequences(tx: &mut PgConnection, lanes: &[(Uuid, String)]) -> sqlx::Result<Vec<i64>> {
    let mut sequences = Vec::with_capacity(lanes.len());
    for chunk in lanes.chunks(ROWS_MAX) {
        sequences.extend(newest_sequences_chunk(tx, chunk).await?);
    }
    Ok(sequences)
}

async fn newest_sequences_chunk(tx: &mut PgConnection, lanes: &[(Uuid, String)]) -> sqlx::Result<Vec<i64>> {
    sqlx::query_scalar(
        "select coalesce((select seq from pillarbox_hub.message
                          where message.subscriber = wanted.subscriber and message.lane = wanted.lane
                          order by n desc limit 1), 0)
         from unnest($1::uuid[], $2::text[]) with ordinality as wanted (subscriber, lane, ordinal) order by wanted.ordinal",
    )
    .bind(lanes.iter().map(|(subscriber, _)| *subscriber).collect::<Vec<_>>())
    .bind(lanes.iter().map(|(_, lane)| lane.as_str()).collect::<Vec<_>>())
    .fetch_all(tx)
    .await
}

/// Appends messages with the numbers after `after`, and announces them, and new commands for the subscribers in `also_for`,
/// to dispatchers. Usually in one statement.
pub(crate) async fn append(
    tx: &mut PgConnection,
    after: i64,
    messages: &[NewMessage],
    also_for: &[Uuid],
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    let (first, rest) = messages.split_at(messages.len().min(ROWS_MAX));
    append_chunk(tx, after, first, also_for, now).await?;
    for (at, chunk) in rest.chunks(ROWS_MAX).enumerate() {
        append_chunk(tx, after + (ROWS_MAX * (at + 1)) as i64, chunk, &[], now).await?;
    }
    Ok(())
}

async fn append_chunk(
    tx: &mut PgConnection,
    after: i64,
    messages: &[NewMessage],
    also_for: &[Uuid],
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    let mut subscribers: Vec<Uuid> =
        messages.iter().map(|message| message.subscriber).chain(also_for.iter().copied()).collect();
    subscribers.sort_unstable();
    subscribers.dedup();
    if subscribers.is_empty() {
        return Ok(());
    }
    // A batch with commands and without messages also uses up a number: dispatchers poll for numbers.
    let to = after + (messages.len() as i64).max(1);
    sqlx::query(
        "with appended as (
             insert into pillarbox_hub.message (n, at, subscriber, lane, seq, log_shard, log_id, log_at, dead_letter, replay)
             select $1 + m.ordinal, $2, m.subscriber, m.lane, m.seq, m.log_shard, m.log_id, m.log_at, m.dead_letter, m.replay
             from unnest($3::uuid[], $4::text[], $5::bigint[], $6::smallint[], $7::bigint[], $8::timestamptz[], $9::uuid[],
                         $13::uuid[])
                  with ordinality as m (subscriber, lane, seq, log_shard, log_id, log_at, dead_letter, replay, ordinal))
         insert into pillarbox_hub.fanout_batch (n_from, n_to, subscribers, at, has_commands)
         values ($1, $10, $11, $2, $12)",
    )
    .bind(after)
    .bind(now)
    .bind(messages.iter().map(|message| message.subscriber).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.lane.as_deref()).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.seq).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.log_ref.shard).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.log_ref.id).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.log_ref.at).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.dead_letter).collect::<Vec<_>>())
    .bind(to)
    .bind(subscribers)
    .bind(!also_for.is_empty())
    .bind(messages.iter().map(|message| message.replay).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}

pub(crate) async fn insert_skipped(
    tx: &mut PgConnection,
    skipped: &[NewSkipped],
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    if skipped.is_empty() {
        return Ok(());
    }
    // PostgreSQL's arrays of arrays must be rectangular, so each list is bound as the text of an array.
    let text = |ids: &[Uuid]| format!("{{{}}}", ids.iter().map(Uuid::to_string).collect::<Vec<_>>().join(","));
    let query = "insert into pillarbox_hub.skipped (log_id, at, filtered, inactive)
                 select s.log_id, $4, s.filtered::uuid[], s.inactive::uuid[]
                 from unnest($1::bigint[], $2::text[], $3::text[]) as s (log_id, filtered, inactive)";
    sqlx::query(query)
        .bind(skipped.iter().map(|skipped| skipped.log_id).collect::<Vec<_>>())
        .bind(skipped.iter().map(|skipped| text(&skipped.filtered)).collect::<Vec<_>>())
        .bind(skipped.iter().map(|skipped| text(&skipped.inactive)).collect::<Vec<_>>())
        .bind(now)
        .execute(tx)
        .await
        .map(drop)
}

/// A dead letter with what its retry needs.
#[derive(sqlx::FromRow)]
pub(crate) struct DeadLetterToRetry {
    #[sqlx(rename = "id")]
    pub(crate) dead_letter: Uuid,
    pub(crate) subscriber: Uuid,
    pub(crate) n: i64,
    pub(crate) lane: Option<String>,
    /// The replay that has created the message. Its retry belongs to the same one.
    pub(crate) replay: Option<Uuid>,
    #[sqlx(flatten, try_from = "LogColumns")]
    pub(crate) log_ref: LogRef,
    /// It is the head of a blocked lane.
    pub(crate) blocks_lane: bool,
}

/// Those of the dead letters whose subscriber still exists.
pub(crate) async fn dead_letters_to_retry(
    tx: &mut PgConnection,
    dead_letters: &[Uuid],
) -> sqlx::Result<Vec<DeadLetterToRetry>> {
    if dead_letters.is_empty() {
        return Ok(Vec::new());
    }
    sqlx::query_as(
        "select id, subscriber, n, lane, replay, log_shard, log_id, log_at,
                exists (select from pillarbox_hub.lane
                        where lane.subscriber = dead_letter.subscriber and head = n and next_at is null) as blocks_lane
         from pillarbox_hub.dead_letter
         where id = any ($1) and exists (select from pillarbox_hub.subscriber where subscriber.id = dead_letter.subscriber)",
    )
    .bind(dead_letters)
    .fetch_all(tx)
    .await
}

/// An operator command for the dispatcher that owns the subscriber.
pub(crate) struct NewCommand {
    pub(crate) subscriber: Uuid,
    pub(crate) n: i64,
    pub(crate) command: OperatorCommand,
    pub(crate) by: String,
}

/// Inserts the commands. Their ids have the order of `commands`.
pub(crate) async fn insert_commands(tx: &mut PgConnection, commands: &[NewCommand]) -> sqlx::Result<()> {
    if commands.is_empty() {
        return Ok(());
    }
    let query = "insert into pillarbox_hub.command (subscriber, n, action, by)
                 select c.subscriber, c.n, c.action, c.by
                 from unnest($1::uuid[], $2::bigint[], $3::text[], $4::text[]) with ordinality
                      as c (subscriber, n, action, by, ordinal) order by c.ordinal";
    sqlx::query(query)
        .bind(commands.iter().map(|command| command.subscriber).collect::<Vec<_>>())
        .bind(commands.iter().map(|command| command.n).collect::<Vec<_>>())
        .bind(commands.iter().map(|command| command.command.as_str()).collect::<Vec<_>>())
        .bind(commands.iter().map(|command| command.by.as_str()).collect::<Vec<_>>())
        .execute(tx)
        .await
        .map(drop)
}

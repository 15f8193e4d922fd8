//! SQL for the messages of streams: fan-out appends them, pulls read them, seeks search them.

use chrono::{DateTime, Utc};
use pillarbox::log::LogRef;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::rows::LogColumns;
use crate::streams::domain::ReadRange;

/// Batches that one poll reads at most.
const BATCHES_MAX: i64 = 1_000;

/// A stream message to append.
pub(crate) struct NewStreamMessage {
    pub(crate) stream: Uuid,
    pub(crate) part: i16,
    pub(crate) lane: Option<String>,
    pub(crate) seq: Option<i64>,
    pub(crate) log_ref: LogRef,
}

/// A message of a stream, without its content.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct StreamMessage {
    pub(crate) n: i64,
    pub(crate) part: i16,
    pub(crate) lane: Option<String>,
    pub(crate) seq: Option<i64>,
    #[sqlx(flatten, try_from = "LogColumns")]
    pub(crate) log_ref: LogRef,
}

/// Returns the number of the newest stream message; 0 if there was none.
pub(crate) async fn newest(db: &mut PgConnection) -> sqlx::Result<i64> {
    let query = "select coalesce((select n_to from pillarbox_hub.stream_batch order by n_to desc limit 1), 0)";
    sqlx::query_scalar(query).fetch_one(db).await
}

/// The newest sequence number of each lane, in the given order; 0 for a lane without messages.
pub(crate) async fn newest_sequences(tx: &mut PgConnection, lanes: &[(Uuid, String)]) -> sqlx::Result<Vec<i64>> {
    sqlx::query_scalar(
        "select coalesce((select seq from pillarbox_hub.stream_message as message
                          where message.stream = wanted.stream and message.lane = wanted.lane
                          order by n desc limit 1), 0)
         from unnest($1::uuid[], $2::text[]) with ordinality as wanted (stream, lane, ordinal) order by wanted.ordinal",
    )
    .bind(lanes.iter().map(|(stream, _)| *stream).collect::<Vec<_>>())
    .bind(lanes.iter().map(|(_, lane)| lane.as_str()).collect::<Vec<_>>())
    .fetch_all(tx)
    .await
}

/// Appends messages with the numbers after `after`, and announces them to pulls that wait.
pub(crate) async fn append(
    tx: &mut PgConnection,
    after: i64,
    messages: &[NewStreamMessage],
    streams: &[Uuid],
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    sqlx::query(
        "with appended as (
             insert into pillarbox_hub.stream_message (n, at, stream, part, lane, seq, log_shard, log_id)
             select $1 + m.ordinal, m.at, m.stream, m.part, m.lane, m.seq, m.log_shard, m.log_id
             from unnest($2::timestamptz[], $3::uuid[], $4::smallint[], $5::text[], $6::bigint[], $7::smallint[], $8::bigint[])
                  with ordinality as m (at, stream, part, lane, seq, log_shard, log_id, ordinal))
         insert into pillarbox_hub.stream_batch (n_from, n_to, streams, at) values ($1, $9, $10, $11)",
    )
    .bind(after)
    .bind(messages.iter().map(|message| message.log_ref.at).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.stream).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.part).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.lane.as_deref()).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.seq).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.log_ref.shard).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.log_ref.id).collect::<Vec<_>>())
    .bind(after + messages.len() as i64)
    .bind(streams)
    .bind(now)
    .execute(tx)
    .await
    .map(drop)
}

/// The batches after `after`: the number of the newest one that was read, and the streams of all of them. None if there are
/// none.
pub(crate) async fn batches_after(db: &mut PgConnection, after: i64) -> sqlx::Result<Option<(i64, Vec<Uuid>)>> {
    let query = "select n_to, streams from pillarbox_hub.stream_batch where n_to > $1 order by n_to limit $2";
    let batches: Vec<(i64, Vec<Uuid>)> = sqlx::query_as(query).bind(after).bind(BATCHES_MAX).fetch_all(db).await?;
    let newest = batches.last().map(|(to, _)| *to);
    let mut streams: Vec<Uuid> = batches.into_iter().flat_map(|(_, streams)| streams).collect();
    streams.sort_unstable();
    streams.dedup();
    Ok(newest.map(|newest| (newest, streams)))
}

/// Returns the first messages of these ranges, at most `max`, in the order of their numbers.
pub(crate) async fn read(
    db: &mut PgConnection,
    stream: Uuid,
    ranges: &[ReadRange],
    max: i64,
) -> sqlx::Result<Vec<StreamMessage>> {
    if ranges.is_empty() {
        return Ok(Vec::new());
    }
    // Part by part, each along the index. With an upper bound inside, the planner expects few rows, and sorts the whole backlog.
    sqlx::query_as(
        "select message.* from unnest($2::smallint[], $3::bigint[], $4::bigint[]) as wanted (part, after, up_to)
         cross join lateral (
             select n, part, lane, seq, log_shard, log_id, at as log_at from pillarbox_hub.stream_message
             where stream = $1 and stream_message.part = wanted.part and n > wanted.after
             order by n limit $5
         ) message
         where message.n <= wanted.up_to
         order by message.n limit $5",
    )
    .bind(stream)
    .bind(ranges.iter().map(|range| range.part).collect::<Vec<_>>())
    .bind(ranges.iter().map(|range| range.after).collect::<Vec<_>>())
    .bind(ranges.iter().map(|range| range.up_to.unwrap_or(i64::MAX)).collect::<Vec<_>>())
    .bind(max)
    .fetch_all(db)
    .await
}

/// Returns the first message, by number, of an event that was posted at `time` or later.
pub(crate) async fn first_since(
    db: &mut PgConnection,
    stream: Uuid,
    time: DateTime<Utc>,
) -> sqlx::Result<Option<StreamMessage>> {
    sqlx::query_as(
        "select message.* from generate_series(0, 15) as slot (part)
         cross join lateral (
             select n, part, lane, seq, log_shard, log_id, at as log_at from pillarbox_hub.stream_message
             where stream = $1 and stream_message.part = slot.part::smallint and at >= $2 order by n limit 1
         ) message
         order by message.n limit 1",
    )
    .bind(stream)
    .bind(time)
    .fetch_optional(db)
    .await
}

/// Returns the number of the first message of an event in a stream.
pub(crate) async fn of_event(db: &mut PgConnection, stream: Uuid, event: LogRef) -> sqlx::Result<Option<i64>> {
    let query = "select min(n) from pillarbox_hub.stream_message
                 where stream = $1 and log_id between $2 and $2 and at = $3 and log_shard = $4";
    sqlx::query_scalar(query).bind(stream).bind(event.id).bind(event.at).bind(event.shard).fetch_one(db).await
}

use std::collections::HashSet;

use chrono::{DateTime, TimeDelta, Utc};
use mailbox::log::{LogRef, Message};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

/// What one statement takes: a large batch must not run into its time.
const SLICE: usize = 10_000;
/// Clocks differ by less.
const MARGIN: TimeDelta = TimeDelta::hours(1);

/// A message to be appended.
pub(crate) struct NewMessage {
    pub(crate) subscriber: Uuid,
    pub(crate) lane: Option<String>,
    pub(crate) seq: Option<i64>,
    pub(crate) place: LogRef,
    pub(crate) dead_letter: Option<Uuid>,
}

/// The number of the newest message, and the directory's version. What this transaction writes is made from the log again
/// if it is lost, so the disk need not be waited for.
pub(crate) async fn begin(tx: &mut PgConnection) -> sqlx::Result<(i64, i64)> {
    let row = sqlx::query(
        "select set_config('synchronous_commit', 'off', true),
                coalesce((select n_to from pillarbox_hub.fanned order by n_to desc limit 1), 0) as n,
                (select version from pillarbox_hub.directory) as version",
    )
    .fetch_one(tx)
    .await?;
    Ok((row.try_get("n")?, row.try_get("version")?))
}

/// Of these, those that were fanned out before: something came of them, for anyone.
pub(crate) async fn fanned_out(tx: &mut PgConnection, messages: &[&Message]) -> sqlx::Result<HashSet<i64>> {
    let ids: Vec<i64> = messages.iter().map(|message| message.id).collect();
    let (Some(first), Some(last)) = (ids.iter().min(), ids.iter().max()) else { return Ok(HashSet::new()) };
    let from = messages.iter().map(|message| message.at).min().unwrap_or_default() - MARGIN;
    // The range is for the index, which knows of ranges only.
    let found: Vec<i64> = sqlx::query_scalar(
        "select log_id from pillarbox_hub.message where log_id between $1 and $2 and log_id = any ($3) and at >= $4
         union
         select log_id from pillarbox_hub.unsent where log_id between $1 and $2 and log_id = any ($3) and at >= $4",
    )
    .bind(first)
    .bind(last)
    .bind(&ids)
    .bind(from)
    .fetch_all(tx)
    .await?;
    Ok(found.into_iter().collect())
}

/// The newest place in each of these lanes; 0 in one without any.
pub(crate) async fn newest_seqs(tx: &mut PgConnection, lanes: &[(Uuid, String)]) -> sqlx::Result<Vec<i64>> {
    let mut seqs = Vec::with_capacity(lanes.len());
    for slice in lanes.chunks(SLICE) {
        seqs.extend(newest_seqs_of(tx, slice).await?);
    }
    Ok(seqs)
}

async fn newest_seqs_of(tx: &mut PgConnection, lanes: &[(Uuid, String)]) -> sqlx::Result<Vec<i64>> {
    sqlx::query_scalar(
        "select coalesce((select seq from pillarbox_hub.message
                          where message.subscriber = wanted.subscriber and message.lane = wanted.lane
                          order by n desc limit 1), 0)
         from unnest($1::uuid[], $2::text[]) with ordinality as wanted (subscriber, lane, place) order by wanted.place",
    )
    .bind(lanes.iter().map(|(subscriber, _)| *subscriber).collect::<Vec<_>>())
    .bind(lanes.iter().map(|(_, lane)| lane.as_str()).collect::<Vec<_>>())
    .fetch_all(tx)
    .await
}

/// Appends messages with the numbers behind `after`, and says for whom; most often in one statement.
pub(crate) async fn append(
    tx: &mut PgConnection,
    after: i64,
    messages: &[NewMessage],
    also_for: &[Uuid],
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    let (first, rest) = messages.split_at(messages.len().min(SLICE));
    append_slice(tx, after, first, also_for, now).await?;
    for (at, slice) in rest.chunks(SLICE).enumerate() {
        append_slice(tx, after + (SLICE * (at + 1)) as i64, slice, &[], now).await?;
    }
    Ok(())
}

async fn append_slice(
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
    // A number is used up by a batch without messages, too: it is how dispatchers notice it.
    let to = after + (messages.len() as i64).max(1);
    let column = |of: fn(&NewMessage) -> i64| messages.iter().map(of).collect::<Vec<_>>();
    sqlx::query(
        "with made as (
             insert into pillarbox_hub.message (n, at, subscriber, lane, seq, log_shard, log_id, log_at, dead_letter)
             select $1 + m.place, $2, m.subscriber, m.lane, m.seq, m.log_shard, m.log_id, m.log_at, m.dead_letter
             from unnest($3::uuid[], $4::text[], $5::bigint[], $6::smallint[], $7::bigint[], $8::timestamptz[], $9::uuid[])
                  with ordinality as m (subscriber, lane, seq, log_shard, log_id, log_at, dead_letter, place))
         insert into pillarbox_hub.fanned (n_from, n_to, subscribers, at) values ($1, $10, $11, $2)",
    )
    .bind(after)
    .bind(now)
    .bind(messages.iter().map(|message| message.subscriber).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.lane.as_deref()).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.seq).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.place.shard).collect::<Vec<_>>())
    .bind(column(|message| message.place.id))
    .bind(messages.iter().map(|message| message.place.at).collect::<Vec<_>>())
    .bind(messages.iter().map(|message| message.dead_letter).collect::<Vec<_>>())
    .bind(to)
    .bind(subscribers)
    .execute(tx)
    .await
    .map(drop)
}

/// Keeps who an event did not go to.
pub(crate) async fn keep_unsent(
    tx: &mut PgConnection,
    unsent: &[(i64, Vec<Uuid>, Vec<Uuid>)],
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    if unsent.is_empty() {
        return Ok(());
    }
    // An array of arrays must be even: each list travels as text.
    let text = |ids: &[Uuid]| format!("{{{}}}", ids.iter().map(Uuid::to_string).collect::<Vec<_>>().join(","));
    let query = "insert into pillarbox_hub.unsent (log_id, at, filtered, inactive)
                 select u.log_id, $4, u.filtered::uuid[], u.inactive::uuid[]
                 from unnest($1::bigint[], $2::text[], $3::text[]) as u (log_id, filtered, inactive)";
    sqlx::query(query)
        .bind(unsent.iter().map(|(log_id, _, _)| *log_id).collect::<Vec<_>>())
        .bind(unsent.iter().map(|(_, filtered, _)| text(filtered)).collect::<Vec<_>>())
        .bind(unsent.iter().map(|(_, _, inactive)| text(inactive)).collect::<Vec<_>>())
        .bind(now)
        .execute(tx)
        .await
        .map(drop)
}

/// What a dead letter's retry needs to know of it.
pub(crate) struct Retried {
    pub(crate) dead_letter: Uuid,
    pub(crate) subscriber: Uuid,
    pub(crate) n: i64,
    pub(crate) lane: Option<String>,
    pub(crate) place: LogRef,
    /// Its lane waits for it.
    pub(crate) blocks: bool,
}

/// Of these, those whose subscriber is still there.
pub(crate) async fn retried(tx: &mut PgConnection, dead_letters: &[Uuid]) -> sqlx::Result<Vec<Retried>> {
    if dead_letters.is_empty() {
        return Ok(Vec::new());
    }
    let rows = sqlx::query(
        "select id, subscriber, n, lane, log_shard, log_id, log_at,
                exists (select from pillarbox_hub.lane
                        where lane.subscriber = dead_letter.subscriber and head = n and next_at is null) as blocks
         from pillarbox_hub.dead_letter
         where id = any ($1) and exists (select from pillarbox_hub.subscriber where subscriber.id = dead_letter.subscriber)",
    )
    .bind(dead_letters)
    .fetch_all(tx)
    .await?;
    let retried = |row: &PgRow| {
        Ok(Retried {
            dead_letter: row.try_get("id")?,
            subscriber: row.try_get("subscriber")?,
            n: row.try_get("n")?,
            lane: row.try_get("lane")?,
            place: LogRef { shard: row.try_get("log_shard")?, id: row.try_get("log_id")?, at: row.try_get("log_at")? },
            blocks: row.try_get("blocks")?,
        })
    };
    rows.iter().map(retried).collect()
}

/// What someone wants done with a message.
pub(crate) struct NewCommand {
    pub(crate) subscriber: Uuid,
    pub(crate) n: i64,
    pub(crate) what: &'static str,
    pub(crate) by: String,
}

/// Leaves commands, in their order, for who sends to the subscribers.
pub(crate) async fn leave_commands(tx: &mut PgConnection, commands: &[NewCommand]) -> sqlx::Result<()> {
    if commands.is_empty() {
        return Ok(());
    }
    let query = "insert into pillarbox_hub.command (subscriber, n, what, by)
                 select c.subscriber, c.n, c.what, c.by
                 from unnest($1::uuid[], $2::bigint[], $3::text[], $4::text[]) with ordinality
                      as c (subscriber, n, what, by, place) order by c.place";
    sqlx::query(query)
        .bind(commands.iter().map(|command| command.subscriber).collect::<Vec<_>>())
        .bind(commands.iter().map(|command| command.n).collect::<Vec<_>>())
        .bind(commands.iter().map(|command| command.what).collect::<Vec<_>>())
        .bind(commands.iter().map(|command| command.by.as_str()).collect::<Vec<_>>())
        .execute(tx)
        .await
        .map(drop)
}

//! The reads of the dispatcher: stored state, polls for new messages, messages and commands.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use chrono::{DateTime, Utc};
use pillarbox::database::Incarnation;
use pillarbox::log::{self, LogRef};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::deliveries::command::PendingCommand;
use crate::deliveries::message::{EventSnapshot, HubEvent, HubMessage, LaneKey};
use crate::dispatch::changes::LaneRow;
use crate::dispatch::reads::{LaneReadRequest, NewMessages, QueueReadRequest, ReadRequest, ReadResult, StoredState};
use crate::rows::LogColumns;

/// Returns which subscribers have messages or commands after `after`, and the version of the directory.
pub(crate) async fn poll(db: &mut PgConnection, after: i64) -> sqlx::Result<NewMessages> {
    sqlx::query_as(
        "select (select version from pillarbox_hub.directory) as version,
                (select id from pillarbox.incarnation) as incarnation,
                coalesce(max(n_to), $1) as newest,
                coalesce(array_agg(distinct subscriber) filter (where subscriber is not null), '{}') as subscribers,
                coalesce(array_agg(distinct subscriber) filter (where subscriber is not null and has_commands), '{}') as commanded
         from (select n_to, subscribers, has_commands from pillarbox_hub.fanout_batch
               where n_to > $1 order by n_to limit 1000) as batch
         left join lateral unnest(batch.subscribers) as subscriber on true",
    )
    .bind(after)
    .fetch_one(db)
    .await
}

/// The number of the newest hub message, or 0.
pub(crate) async fn newest_number(db: &mut PgConnection) -> sqlx::Result<i64> {
    let query = "select coalesce((select n_to from pillarbox_hub.fanout_batch order by n_to desc limit 1), 0)";
    sqlx::query_scalar(query).fetch_one(db).await
}

/// The stored state of the deliveries of these subscribers.
pub(crate) async fn load(db: &mut PgConnection, subscribers: &[Uuid]) -> sqlx::Result<HashMap<Uuid, StoredState>> {
    let mut stored: HashMap<Uuid, StoredState> = HashMap::new();
    load_positions(db, subscribers, &mut stored).await?;
    load_lanes(db, subscribers, &mut stored).await?;
    load_completed(db, subscribers, &mut stored).await?;
    Ok(stored)
}

async fn load_positions(
    db: &mut PgConnection,
    subscribers: &[Uuid],
    stored: &mut HashMap<Uuid, StoredState>,
) -> sqlx::Result<()> {
    // Retention deletes a position with the messages before it. Without a position, reading starts at the oldest message.
    let positions: Vec<(Uuid, i64)> = sqlx::query_as(
        "select wanted.subscriber,
                coalesce(newest.n, oldest.n - 1,
                         (select n_to from pillarbox_hub.fanout_batch order by n_to desc limit 1), 0) as n
         from unnest($1::uuid[]) as wanted (subscriber)
         left join lateral (select n from pillarbox_hub.position
                            where position.subscriber = wanted.subscriber order by n desc limit 1) newest on true
         left join lateral (select n from pillarbox_hub.message
                            where newest.n is null and message.subscriber = wanted.subscriber
                            order by n limit 1) oldest on true",
    )
    .bind(subscribers)
    .fetch_all(db)
    .await?;
    for (subscriber, n) in positions {
        stored.entry(subscriber).or_default().position = n;
    }
    Ok(())
}

/// A detached lane with its first message that has no final outcome.
#[derive(sqlx::FromRow)]
struct StoredLane {
    subscriber: Uuid,
    lane: Option<String>,
    head: i64,
    next: i64,
    #[sqlx(try_from = "i16")]
    attempts: u16,
    next_at: Option<DateTime<Utc>>,
    manual_retry: bool,
}

async fn load_lanes(
    db: &mut PgConnection,
    subscribers: &[Uuid],
    stored: &mut HashMap<Uuid, StoredState>,
) -> sqlx::Result<()> {
    // The head of a lane is saved seldom: messages that were completed since are skipped.
    let lanes: Vec<StoredLane> = sqlx::query_as(
        "select lane.*, case when next_at is null or manual_retry or lane.lane is null then head
                             else coalesce(first.n, last.n + 1, head) end as next
         from pillarbox_hub.lane
         left join lateral (
             select n from pillarbox_hub.message
             where message.subscriber = lane.subscriber and message.lane = lane.lane and n >= lane.head
               and not exists (select from pillarbox_hub.attempt
                               where attempt.subscriber = lane.subscriber and attempt.n = message.n
                                 and outcome <> 'failed')
             order by n limit 1
         ) first on true
         left join lateral (
             select n from pillarbox_hub.message
             where message.subscriber = lane.subscriber and message.lane = lane.lane order by n desc limit 1
         ) last on true
         where lane.subscriber = any ($1)",
    )
    .bind(subscribers)
    .fetch_all(db)
    .await?;
    for StoredLane { subscriber, lane, head, next, attempts, next_at, manual_retry } in lanes {
        let attempts = if next == head { attempts } else { 0 };
        let row = LaneRow { head, lane: lane.map(Arc::from), attempts, next_at, manual_retry };
        stored.entry(subscriber).or_default().lanes.push((row, next));
    }
    Ok(())
}

async fn load_completed(
    db: &mut PgConnection,
    subscribers: &[Uuid],
    stored: &mut HashMap<Uuid, StoredState>,
) -> sqlx::Result<()> {
    let positions: Vec<i64> = subscribers.iter().map(|id| stored.get(id).map_or(0, |stored| stored.position)).collect();
    let completed: Vec<(Uuid, i64)> = sqlx::query_as(
        "select attempt.subscriber, attempt.n from unnest($1::uuid[], $2::bigint[]) as wanted (subscriber, n)
         join pillarbox_hub.attempt on attempt.subscriber = wanted.subscriber and attempt.n > wanted.n
         where outcome <> 'failed'",
    )
    .bind(subscribers)
    .bind(positions)
    .fetch_all(db)
    .await?;
    for (subscriber, n) in completed {
        stored.entry(subscriber).or_default().completed.insert(n);
    }
    Ok(())
}

/// Reads the requested messages and commands.
pub(crate) async fn read(db: &mut PgConnection, request: &ReadRequest) -> sqlx::Result<ReadResult> {
    let mut result = ReadResult::default();
    let queue_rows = read_queues(db, &request.queues).await?;
    if !request.commands.is_empty() {
        result.commands = read_commands(db, &request.commands).await?;
    }
    let lane_rows = read_lanes(db, &request.lanes).await?;
    let events = events(db, queue_rows.iter().chain(&lane_rows)).await?;
    let retried = retried_attempts(db, queue_rows.iter().chain(&lane_rows), &request.lanes).await?;
    let first = queue_rows.first().or(lane_rows.first());
    result.incarnation = first.and_then(|row| row.incarnation).map(Incarnation::from);
    for row in queue_rows {
        let (subscriber, message) = (row.subscriber, row.into_message(&events, &retried));
        result.queues.entry(subscriber).or_default().push(message);
    }
    for row in lane_rows {
        let (subscriber, message) = (row.subscriber, row.into_message(&events, &retried));
        result.lanes.entry((subscriber, message.lane_key())).or_default().push(message);
    }
    let all = result.queues.values_mut().chain(result.lanes.values_mut());
    all.for_each(|messages| messages.sort_by_key(|message| message.n));
    Ok(result)
}

/// A hub message without its content.
#[derive(sqlx::FromRow)]
struct MessageRow {
    subscriber: Uuid,
    n: i64,
    lane: Option<String>,
    seq: Option<i64>,
    #[sqlx(flatten, try_from = "LogColumns")]
    log_ref: LogRef,
    /// The dead letter that the message retries.
    dead_letter: Option<Uuid>,
    replay: Option<Uuid>,
    incarnation: Option<Uuid>,
}

impl MessageRow {
    fn into_message(self, events: &BTreeMap<LogRef, Arc<HubEvent>>, retried: &RetriedAttempts) -> HubMessage {
        HubMessage {
            n: self.n,
            lane: self.lane.map(Arc::from),
            seq: self.seq,
            attempts_before: retried.of(self.subscriber, self.n, self.dead_letter),
            replay: self.replay,
            event: events.get(&self.log_ref).cloned(),
        }
    }
}

async fn read_queues(db: &mut PgConnection, requests: &[QueueReadRequest]) -> sqlx::Result<Vec<MessageRow>> {
    if requests.is_empty() {
        return Ok(Vec::new());
    }
    sqlx::query_as(
        "select message.*, (select id from pillarbox.incarnation) as incarnation
         from unnest($1::uuid[], $2::bigint[], $3::bigint[]) as request (subscriber, after, row_limit)
         cross join lateral (
             select * from pillarbox_hub.message
             where message.subscriber = request.subscriber and n > request.after order by n limit request.row_limit
         ) message",
    )
    .bind(requests.iter().map(|request| request.subscriber).collect::<Vec<_>>())
    .bind(requests.iter().map(|request| request.after).collect::<Vec<_>>())
    .bind(requests.iter().map(|request| request.limit as i64).collect::<Vec<_>>())
    .fetch_all(db)
    .await
}

async fn read_lanes(db: &mut PgConnection, requests: &[(Uuid, LaneReadRequest)]) -> sqlx::Result<Vec<MessageRow>> {
    if requests.is_empty() {
        return Ok(Vec::new());
    }
    let name = |key: &LaneKey| key.name().map(|name| name.to_string());
    sqlx::query_as(
        "select message.*, (select id from pillarbox.incarnation) as incarnation
         from unnest($1::uuid[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[])
              as request (subscriber, lane, after, upto, row_limit)
         cross join lateral (
             (select * from pillarbox_hub.message
              where message.subscriber = request.subscriber and message.lane = request.lane
                and n > request.after and n <= request.upto order by n limit request.row_limit)
             union all
             (select * from pillarbox_hub.message
              where request.lane is null and message.subscriber = request.subscriber and n = request.upto)
         ) message",
    )
    .bind(requests.iter().map(|(subscriber, _)| *subscriber).collect::<Vec<_>>())
    .bind(requests.iter().map(|(_, request)| name(&request.key)).collect::<Vec<_>>())
    .bind(requests.iter().map(|(_, request)| request.after).collect::<Vec<_>>())
    .bind(requests.iter().map(|(_, request)| request.to).collect::<Vec<_>>())
    .bind(requests.iter().map(|(_, request)| request.limit as i64).collect::<Vec<_>>())
    .fetch_all(db)
    .await
}

/// A command, whose action this version may not know.
#[derive(sqlx::FromRow)]
struct CommandRow {
    id: i64,
    subscriber: Uuid,
    n: i64,
    action: String,
    by: String,
    lane: Option<String>,
}

async fn read_commands(db: &mut PgConnection, subscribers: &[Uuid]) -> sqlx::Result<Vec<(Uuid, PendingCommand)>> {
    let query = "select command.id, command.subscriber, command.n, command.action, command.by, message.lane
                 from pillarbox_hub.command
                 join pillarbox_hub.message on message.subscriber = command.subscriber and message.n = command.n
                 where command.subscriber = any ($1) order by command.id";
    let rows: Vec<CommandRow> = sqlx::query_as(query).bind(subscribers).fetch_all(db).await?;
    let mut commands = Vec::with_capacity(rows.len());
    for CommandRow { id, subscriber, n, action, by, lane } in rows {
        // The row stays: a newer version that knows the command can execute it.
        let Ok(command) = action.parse() else {
            tracing::error!(id, %subscriber, action, "this version does not know this operator command; it is not executed");
            continue;
        };
        let key = LaneKey::new(lane.map(Arc::from), n);
        commands.push((subscriber, PendingCommand { id, n, key, command, by }));
    }
    Ok(commands)
}

/// The attempts before the retries of these messages. Messages that were not retried, which are almost all, have none: then
/// nothing is queried.
async fn retried_attempts(
    db: &mut PgConnection,
    rows: impl Iterator<Item = &MessageRow>,
    lanes: &[(Uuid, LaneReadRequest)],
) -> sqlx::Result<RetriedAttempts> {
    let mut retried = RetriedAttempts::default();
    let dead_letters: Vec<Uuid> = rows.filter_map(|row| row.dead_letter).collect();
    let heads = lanes.iter().filter_map(|(subscriber, request)| Some((*subscriber, request.retried_head?)));
    let (subscribers, heads): (Vec<Uuid>, Vec<i64>) = heads.unzip();
    if dead_letters.is_empty() && heads.is_empty() {
        return Ok(retried);
    }
    let query = "select id, subscriber, n, attempts from pillarbox_hub.dead_letter
                 where id = any ($1) or (subscriber, n) in (select * from unnest($2::uuid[], $3::bigint[]))";
    let found: Vec<(Uuid, Uuid, i64, i16)> =
        sqlx::query_as(query).bind(dead_letters).bind(subscribers).bind(heads).fetch_all(db).await?;
    for (id, subscriber, n, attempts) in found {
        retried.by_id.insert(id, attempts.unsigned_abs());
        retried.by_message.insert((subscriber, n), attempts.unsigned_abs());
    }
    Ok(retried)
}

/// The attempts of dead letters, by their id and by the message that died.
#[derive(Default)]
struct RetriedAttempts {
    by_id: HashMap<Uuid, u16>,
    by_message: HashMap<(Uuid, i64), u16>,
}

impl RetriedAttempts {
    /// A message at the head of its lane that died always has a dead letter, whether it was a retry or not.
    fn of(&self, subscriber: Uuid, n: i64, dead_letter: Option<Uuid>) -> u16 {
        let own = self.by_message.get(&(subscriber, n));
        own.or_else(|| self.by_id.get(&dead_letter?)).copied().unwrap_or_default()
    }
}

/// The content of a message that only its dead letter has.
#[derive(sqlx::FromRow)]
struct SnapshotRow {
    #[sqlx(flatten, try_from = "LogColumns")]
    log_ref: LogRef,
    #[sqlx(json)]
    event_snapshot: EventSnapshot,
    ordering_key: Option<String>,
}

/// The content of these messages, each event once for all subscribers: from the log, or from a dead letter.
async fn events(
    db: &mut PgConnection,
    rows: impl Iterator<Item = &MessageRow> + Clone,
) -> sqlx::Result<BTreeMap<LogRef, Arc<HubEvent>>> {
    let mut log_refs: Vec<LogRef> = rows.clone().map(|row| row.log_ref).collect();
    log_refs.sort_unstable();
    log_refs.dedup();
    if log_refs.is_empty() {
        return Ok(BTreeMap::new());
    }
    let messages = log::load_messages(db, &log_refs).await?;
    let mut events: BTreeMap<LogRef, Arc<HubEvent>> =
        messages.iter().map(|message| (message.log_ref(), Arc::new(HubEvent::from_log(message)))).collect();
    // A message that retries a dead letter names it. A dead message at the head of a blocked lane has its own.
    let (mut dead_letters, mut subscribers, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows.filter(|row| !events.contains_key(&row.log_ref)) {
        if let Some(dead_letter) = row.dead_letter {
            dead_letters.push(dead_letter);
        } else {
            subscribers.push(row.subscriber);
            numbers.push(row.n);
        }
    }
    if !dead_letters.is_empty() || !numbers.is_empty() {
        let query = "select log_shard, log_id, log_at, event_snapshot, ordering_key from pillarbox_hub.dead_letter
                     where event_snapshot is not null
                       and (id = any ($1) or (subscriber, n) in (select * from unnest($2::uuid[], $3::bigint[])))";
        let found: Vec<SnapshotRow> =
            sqlx::query_as(query).bind(dead_letters).bind(subscribers).bind(numbers).fetch_all(db).await?;
        for SnapshotRow { log_ref, event_snapshot, ordering_key } in found {
            events.insert(log_ref, Arc::new(HubEvent::from_snapshot(event_snapshot, ordering_key)));
        }
    }
    Ok(events)
}

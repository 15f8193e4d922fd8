//! SQL for replays.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, TimeDelta, Utc};
use pillarbox::database::work_lock;
use pillarbox::log::Tenant;
use sqlx::PgConnection;
use sqlx::types::Json;
use uuid::Uuid;

use crate::directory::domain::EventTypes;
use crate::replays::domain::ReplayState;
use crate::replays::replay::{Replay, ReplayOutcomes};

/// The number of locks that the tenants share. A tenant keeps one for the short transaction that creates a replay.
const LOCK_SLOTS: u8 = 64;
/// Allowance for clock skew between replicas.
const CLOCK_SKEW: TimeDelta = TimeDelta::hours(1);
/// For how long the messages of an ended replay count for the limit of waiting messages.
const ENDED_COUNTS: TimeDelta = TimeDelta::hours(1);
/// Rows that one statement deletes at most.
const DELETED_MAX: i64 = 1_000;

pub(crate) async fn insert(tx: &mut PgConnection, replay: &Replay) -> sqlx::Result<()> {
    let Replay { selection, events, .. } = replay;
    sqlx::query(
        "insert into pillarbox_hub.replay (id, tenant, kind, subscriber, mode, from_at, to_at, event_types, filter,
             event_log_shards, event_log_ids, event_log_ats, rate_per_second, requested_by, created_at, state)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)",
    )
    .bind(replay.id)
    .bind(&replay.tenant)
    .bind(replay.kind.as_str())
    .bind(replay.subscriber)
    .bind(selection.mode.as_str())
    .bind(selection.from)
    .bind(selection.to)
    .bind(selection.event_types.iter().map(EventTypes::as_str).collect::<Vec<_>>())
    .bind(selection.filter.as_ref().map(Json))
    .bind(events.as_ref().map(|events| events.iter().map(|event| event.shard).collect::<Vec<_>>()))
    .bind(events.as_ref().map(|events| events.iter().map(|event| event.id).collect::<Vec<_>>()))
    .bind(events.as_ref().map(|events| events.iter().map(|event| event.at).collect::<Vec<_>>()))
    .bind(replay.rate.map(|rate| rate as i32))
    .bind(&replay.requested_by)
    .bind(replay.created_at)
    .bind(replay.status.state.as_str())
    .execute(tx)
    .await
    .map(drop)
}

/// The number of active replays of a tenant. Requests of a tenant count one after the other, until their transactions end.
pub(crate) async fn count_active(tx: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<i64> {
    let slot = tenant.as_str().bytes().fold(0_u8, |slot, byte| slot.wrapping_mul(31).wrapping_add(byte)) % LOCK_SLOTS;
    work_lock(tx, &format!("hub.replays {slot}")).await?;
    let query = "select count(*) from pillarbox_hub.replay where tenant = $1 and ended_at is null";
    sqlx::query_scalar(query).bind(tenant.as_str()).fetch_one(tx).await
}

/// The replays that fan-out has to advance, oldest first.
pub(crate) async fn runnable(db: &mut PgConnection) -> sqlx::Result<Vec<Uuid>> {
    let query = "select id from pillarbox_hub.replay
                 where ended_at is null and state in ('pending', 'running') order by id";
    sqlx::query_scalar(query).fetch_all(db).await
}

/// The replay, locked until the transaction ends; None if fan-out must not advance it now.
pub(crate) async fn lock_runnable(tx: &mut PgConnection, id: Uuid) -> sqlx::Result<Option<Replay>> {
    let query = "select * from pillarbox_hub.replay where id = $1 and state in ('pending', 'running') for update";
    sqlx::query_as(query).bind(id).fetch_optional(tx).await
}

/// A replay of the tenant, locked until the transaction ends.
pub(crate) async fn lock(tx: &mut PgConnection, tenant: &Tenant, id: Uuid) -> sqlx::Result<Option<Replay>> {
    let query = "select * from pillarbox_hub.replay where id = $1 and tenant = $2 for update";
    sqlx::query_as(query).bind(id).bind(tenant.as_str()).fetch_optional(tx).await
}

/// Saves state and progress.
pub(crate) async fn save(tx: &mut PgConnection, replay: &Replay) -> sqlx::Result<()> {
    let Replay { status, progress, .. } = replay;
    sqlx::query(
        "update pillarbox_hub.replay
         set state = $2, error = $3, started_at = $4, ended_at = $5, paused_at = $6, timed_from = $7, read_to = $8,
             read_until = $9, first_id = $10, last_id = $11, position_id = $12, until_id = $13, events_done = $14,
             after = $15, position_at = $16, matched = $17, created = $18, waits_for = $19
         where id = $1",
    )
    .bind(replay.id)
    .bind(status.state.as_str())
    .bind(&status.error)
    .bind(status.started_at)
    .bind(status.ended_at)
    .bind(status.paused_at)
    .bind(status.timed_from)
    .bind(&progress.read_to)
    .bind(&progress.read_until)
    .bind(progress.first_id)
    .bind(progress.last_id)
    .bind(progress.position_id)
    .bind(progress.until_id)
    .bind(progress.events_done as i32)
    .bind(progress.after)
    .bind(progress.position_at)
    .bind(progress.matched)
    .bind(progress.created)
    .bind(progress.waits_for)
    .execute(tx)
    .await
    .map(drop)
}

/// Records that a backfill has covered the deferred events of its tenant, and makes its subscriber live: the version of the
/// directory changes in the same transaction.
pub(crate) async fn end_backfill(tx: &mut PgConnection, id: Uuid) -> sqlx::Result<()> {
    let query = "update pillarbox_hub.replay
                 set deferred_to = coalesce((select max(deferred_event.id) from pillarbox_hub.deferred_event
                                             where deferred_event.tenant = replay.tenant), 0)
                 where id = $1";
    sqlx::query(query).bind(id).execute(&mut *tx).await?;
    sqlx::query("update pillarbox_hub.directory set version = version + 1").execute(tx).await.map(drop)
}

/// Counts messages that fan-out has created: subscriber and number.
pub(crate) async fn add_created(tx: &mut PgConnection, id: Uuid, created: &[(Uuid, i64)]) -> sqlx::Result<()> {
    if created.is_empty() {
        return Ok(());
    }
    let query = "insert into pillarbox_hub.replay_created as counted (replay, subscriber, created)
                 select $1, c.subscriber, c.created from unnest($2::uuid[], $3::bigint[]) as c (subscriber, created)
                 on conflict (replay, subscriber) do update set created = counted.created + excluded.created";
    let (subscribers, counts): (Vec<Uuid>, Vec<i64>) = created.iter().copied().unzip();
    sqlx::query(query).bind(id).bind(subscribers).bind(counts).execute(tx).await.map(drop)
}

/// Counts final outcomes: replay, subscriber, delivered and dead messages.
pub(crate) async fn add_outcomes(
    tx: &mut PgConnection,
    outcomes: &[((Uuid, Uuid), ReplayOutcomes)],
) -> sqlx::Result<()> {
    if outcomes.is_empty() {
        return Ok(());
    }
    let query = "insert into pillarbox_hub.replay_outcome as counted (replay, subscriber, delivered, dead)
                 select * from unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::bigint[])
                 on conflict (replay, subscriber) do update
                 set delivered = counted.delivered + excluded.delivered, dead = counted.dead + excluded.dead";
    sqlx::query(query)
        .bind(outcomes.iter().map(|((replay, _), _)| *replay).collect::<Vec<_>>())
        .bind(outcomes.iter().map(|((_, subscriber), _)| *subscriber).collect::<Vec<_>>())
        .bind(outcomes.iter().map(|(_, outcomes)| outcomes.delivered).collect::<Vec<_>>())
        .bind(outcomes.iter().map(|(_, outcomes)| outcomes.dead).collect::<Vec<_>>())
        .execute(tx)
        .await
        .map(drop)
}

/// Whether the subscriber exists now. The directory of fan-out is older than the rows that a later statement finds.
pub(crate) async fn subscriber_exists(db: &mut PgConnection, subscriber: Uuid) -> sqlx::Result<bool> {
    let query = "select exists (select from pillarbox_hub.subscriber where id = $1)";
    sqlx::query_scalar(query).bind(subscriber).fetch_one(db).await
}

/// How many messages of replays wait at each of these subscribers. Subscribers without any are left out.
pub(crate) async fn waiting(
    db: &mut PgConnection,
    tenant: &str,
    subscribers: &[Uuid],
    now: DateTime<Utc>,
) -> sqlx::Result<HashMap<Uuid, i64>> {
    let query = "select created.subscriber,
                        sum(created.created - coalesce(outcome.delivered + outcome.dead, 0))::bigint as waiting
                 from pillarbox_hub.replay
                 join pillarbox_hub.replay_created as created on created.replay = replay.id
                      and created.subscriber = any ($2)
                 left join pillarbox_hub.replay_outcome as outcome
                      on outcome.replay = created.replay and outcome.subscriber = created.subscriber
                 where tenant = $1 and (ended_at is null or ended_at > $3)
                 group by created.subscriber";
    let query = sqlx::query_as(query).bind(tenant).bind(subscribers).bind(now - ENDED_COUNTS);
    Ok(query.fetch_all(db).await?.into_iter().collect())
}

/// Those pairs of a subscriber and a log id for which there is a message. `from` is the time of the oldest event.
pub(crate) async fn with_message(
    db: &mut PgConnection,
    pairs: &[(Uuid, i64)],
    from: DateTime<Utc>,
) -> sqlx::Result<HashSet<(Uuid, i64)>> {
    let ids: Vec<i64> = pairs.iter().map(|(_, id)| *id).collect();
    let (Some(first), Some(last)) = (ids.iter().min(), ids.iter().max()) else { return Ok(HashSet::new()) };
    let subscribers: Vec<Uuid> = pairs.iter().map(|(subscriber, _)| *subscriber).collect();
    // The range is for the BRIN indexes, which support ranges only.
    let query = "select subscriber, log_id from pillarbox_hub.message
                 where log_id between $1 and $2 and log_id = any ($3) and subscriber = any ($4) and at >= $5";
    let found = sqlx::query_as(query)
        .bind(first)
        .bind(last)
        .bind(&ids)
        .bind(&subscribers)
        .bind(from - CLOCK_SKEW)
        .fetch_all(db)
        .await?;
    Ok(found.into_iter().collect())
}

/// A replay of the tenant, with its outcomes.
pub(crate) async fn find(
    db: &mut PgConnection,
    tenant: &Tenant,
    id: Uuid,
) -> sqlx::Result<Option<(Replay, ReplayOutcomes)>> {
    let query = "select * from pillarbox_hub.replay where id = $1 and tenant = $2";
    let replays = sqlx::query_as(query).bind(id).bind(tenant.as_str()).fetch_all(&mut *db).await?;
    Ok(with_outcomes(db, replays).await?.pop())
}

/// Replays of the tenant, newest first, those with ids below `before`.
pub(crate) async fn list(
    db: &mut PgConnection,
    tenant: &Tenant,
    subscriber: Option<Uuid>,
    state: Option<ReplayState>,
    before: Option<Uuid>,
    limit: u32,
) -> sqlx::Result<Vec<(Replay, ReplayOutcomes)>> {
    let query = "select * from pillarbox_hub.replay
                 where tenant = $1 and ($2::uuid is null or subscriber = $2) and ($3::text is null or state = $3)
                   and ($4::uuid is null or id < $4)
                 order by id desc limit $5";
    let replays = sqlx::query_as(query)
        .bind(tenant.as_str())
        .bind(subscriber)
        .bind(state.map(ReplayState::as_str))
        .bind(before)
        .bind(i64::from(limit))
        .fetch_all(&mut *db)
        .await?;
    with_outcomes(db, replays).await
}

#[derive(sqlx::FromRow)]
struct CountedOutcomes {
    replay: Uuid,
    #[sqlx(flatten)]
    outcomes: ReplayOutcomes,
}

async fn with_outcomes(db: &mut PgConnection, replays: Vec<Replay>) -> sqlx::Result<Vec<(Replay, ReplayOutcomes)>> {
    let query = "select replay, sum(created)::bigint as created, coalesce(sum(delivered), 0)::bigint as delivered, coalesce(sum(dead), 0)::bigint as dead,
                        coalesce(sum(created - coalesce(delivered + dead, 0)) filter (
                            where not exists (select from pillarbox_hub.subscriber where subscriber.id = created.subscriber)
                        ), 0)::bigint as dropped
                 from pillarbox_hub.replay_created as created
                 left join pillarbox_hub.replay_outcome as outcome using (replay, subscriber)
                 where replay = any ($1) group by replay";
    let ids: Vec<Uuid> = replays.iter().map(|replay| replay.id).collect();
    let counted: Vec<CountedOutcomes> = sqlx::query_as(query).bind(ids).fetch_all(db).await?;
    let mut outcomes: HashMap<Uuid, ReplayOutcomes> =
        counted.into_iter().map(|counted| (counted.replay, counted.outcomes)).collect();
    let with_outcomes = |replay: Replay| {
        let outcomes = outcomes.remove(&replay.id).unwrap_or_default();
        (replay, outcomes)
    };
    Ok(replays.into_iter().map(with_outcomes).collect())
}

/// The number of active replays by state.
pub(crate) async fn count_by_state(db: &mut PgConnection) -> sqlx::Result<HashMap<String, i64>> {
    let query = "select state, count(*) as count from pillarbox_hub.replay where ended_at is null group by state";
    Ok(sqlx::query_as(query).fetch_all(db).await?.into_iter().collect())
}

/// Ends all active replays as failed: what they have read means nothing in a restored database. Their subscribers are live.
pub(crate) async fn fail_all(tx: &mut PgConnection, error: &str, now: DateTime<Utc>) -> sqlx::Result<u64> {
    let query = "update pillarbox_hub.replay set state = 'failed', error = $1, ended_at = $2 where ended_at is null";
    let failed = sqlx::query(query).bind(error).bind(now).execute(&mut *tx).await?.rows_affected();
    if failed > 0 {
        sqlx::query("update pillarbox_hub.directory set version = version + 1").execute(tx).await?;
    }
    Ok(failed)
}

/// When the oldest event that an active backfill still has to read was posted, at the latest. A replay holds nothing: what
/// the log has lost cannot be sent again.
pub(crate) async fn oldest_unread(db: &mut PgConnection) -> sqlx::Result<Option<DateTime<Utc>>> {
    let query = "select min(coalesce(position_at, from_at)) from pillarbox_hub.replay
                 where ended_at is null and kind = 'backfill'";
    sqlx::query_scalar(query).fetch_one(db).await
}

/// Deletes replays that have ended before `before`, and counts without a replay.
pub(crate) async fn delete_ended(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "delete from pillarbox_hub.replay where id in (
                     select id from pillarbox_hub.replay where ended_at < $1 limit $2)";
    sqlx::query(query).bind(before).bind(DELETED_MAX).execute(&mut *db).await?;
    for table in ["replay_created", "replay_outcome"] {
        let query = format!(
            "delete from pillarbox_hub.{table}
             where not exists (select from pillarbox_hub.replay where replay.id = {table}.replay)"
        );
        sqlx::query(sqlx::AssertSqlSafe(query)).execute(&mut *db).await?;
    }
    Ok(())
}

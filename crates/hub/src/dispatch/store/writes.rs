//! The writes of the dispatcher: attempts, dead letters, lanes, positions and executed commands.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::deliveries::attempt_result::Attempt;
use crate::deliveries::domain::Outcome;
use crate::dispatch::changes::{Changes, LaneRow, NewDeadLetter};
use crate::replays::replay::ReplayOutcomes;
use crate::{dead_letters, health, replays};

/// A subscriber that was switched off.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct DisabledSubscriber {
    pub(crate) id: Uuid,
    pub(crate) tenant: String,
    pub(crate) name: String,
    #[sqlx(rename = "inactive_reason")]
    pub(crate) reason: String,
}

/// Saves all changes in the caller's transaction. Returns the subscribers that were switched off.
pub(crate) async fn save(
    tx: &mut PgConnection,
    changes: &Changes,
    now: DateTime<Utc>,
) -> sqlx::Result<Vec<DisabledSubscriber>> {
    insert_attempts(tx, &changes.attempts).await?;
    replays::store::add_outcomes(tx, &replay_outcomes(&changes.attempts)).await?;
    insert_dead_letters(tx, &changes.dead_letters).await?;
    dead_letters::store::close_replayed(tx, &changes.attempts, now).await?;
    // Delete first: a lane whose head has moved has one row to delete and another to insert, with the same name.
    delete_lanes(tx, &changes.deleted_lanes).await?;
    upsert_lanes(tx, &changes.saved_lanes).await?;
    insert_positions(tx, &changes.positions, now).await?;
    let disabled = deactivate_subscribers(tx, &changes.gone_subscribers, now).await?;
    health::store::add_minutes(tx, &changes.health.minutes).await?;
    health::store::save_states(tx, &changes.health.states, now).await?;
    reset_retries(tx, &changes.rejected_retries).await?;
    if !changes.executed_commands.is_empty() {
        let query = sqlx::query("delete from pillarbox_hub.command where id = any ($1)");
        query.bind(&changes.executed_commands).execute(tx).await?;
    }
    Ok(disabled)
}

async fn delete_lanes(tx: &mut PgConnection, lanes: &[(Uuid, i64)]) -> sqlx::Result<()> {
    if lanes.is_empty() {
        return Ok(());
    }
    let query = "delete from pillarbox_hub.lane where (subscriber, head) in
                     (select * from unnest($1::uuid[], $2::bigint[]))";
    let (subscribers, heads): (Vec<Uuid>, Vec<i64>) = lanes.iter().copied().unzip();
    sqlx::query(query).bind(subscribers).bind(heads).execute(tx).await.map(drop)
}

async fn upsert_lanes(tx: &mut PgConnection, lanes: &[(Uuid, LaneRow)]) -> sqlx::Result<()> {
    if lanes.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "insert into pillarbox_hub.lane (subscriber, head, lane, attempts, next_at, manual_retry)
         select * from unnest($1::uuid[], $2::bigint[], $3::text[], $4::smallint[], $5::timestamptz[], $6::boolean[])
         on conflict (subscriber, head) do update
         set lane = excluded.lane, attempts = excluded.attempts, next_at = excluded.next_at,
             manual_retry = excluded.manual_retry",
    )
    .bind(lanes.iter().map(|(subscriber, _)| *subscriber).collect::<Vec<_>>())
    .bind(lanes.iter().map(|(_, row)| row.head).collect::<Vec<_>>())
    .bind(lanes.iter().map(|(_, row)| row.lane.as_deref()).collect::<Vec<_>>())
    .bind(lanes.iter().map(|(_, row)| row.attempts as i16).collect::<Vec<_>>())
    .bind(lanes.iter().map(|(_, row)| row.next_at).collect::<Vec<_>>())
    .bind(lanes.iter().map(|(_, row)| row.manual_retry).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}

async fn insert_positions(tx: &mut PgConnection, positions: &[(Uuid, i64)], now: DateTime<Utc>) -> sqlx::Result<()> {
    if positions.is_empty() {
        return Ok(());
    }
    let query = "insert into pillarbox_hub.position (subscriber, n, at)
                 select *, $3 from unnest($1::uuid[], $2::bigint[])";
    let (subscribers, numbers): (Vec<Uuid>, Vec<i64>) = positions.iter().copied().unzip();
    sqlx::query(query).bind(subscribers).bind(numbers).bind(now).execute(tx).await.map(drop)
}

/// Switches off the subscribers that answered 410, or a status that they treat alike, unless they have changed since (their
/// version differs). Returns those that it has switched off.
async fn deactivate_subscribers(
    tx: &mut PgConnection,
    gone: &[(Uuid, i64, u16)],
    now: DateTime<Utc>,
) -> sqlx::Result<Vec<DisabledSubscriber>> {
    if gone.is_empty() {
        return Ok(Vec::new());
    }
    let query = "update pillarbox_hub.subscriber
                 set is_active = false, version = subscriber.version + 1, updated_at = $4,
                     inactive_reason = 'it answered ' || case gone.status when 410 then '410 Gone' else gone.status::text end
                 from unnest($1::uuid[], $2::bigint[], $3::smallint[]) as gone (id, version, status)
                 where subscriber.id = gone.id and subscriber.version = gone.version and is_active
                 returning subscriber.id, tenant, name, inactive_reason";
    sqlx::query_as(query)
        .bind(gone.iter().map(|(subscriber, ..)| *subscriber).collect::<Vec<_>>())
        .bind(gone.iter().map(|(_, version, _)| *version).collect::<Vec<_>>())
        .bind(gone.iter().map(|(.., status)| *status as i16).collect::<Vec<_>>())
        .bind(now)
        .fetch_all(tx)
        .await
}

/// Makes dead letters retryable again whose retry came too late.
async fn reset_retries(tx: &mut PgConnection, dead_letters: &[(Uuid, i64)]) -> sqlx::Result<()> {
    if dead_letters.is_empty() {
        return Ok(());
    }
    let query = "update pillarbox_hub.dead_letter set manual_retry_by = null, manual_retry_at = null
                 where (subscriber, n) in (select * from unnest($1::uuid[], $2::bigint[]))";
    let (subscribers, numbers): (Vec<Uuid>, Vec<i64>) = dead_letters.iter().copied().unzip();
    sqlx::query(query).bind(subscribers).bind(numbers).execute(tx).await.map(drop)
}

/// The final outcomes of messages of replays, by replay and subscriber: each message counts once, also one that was dead and
/// was retried. In order, so that two transactions lock the rows in
/// the same one.
fn replay_outcomes(attempts: &[Attempt]) -> Vec<((Uuid, Uuid), ReplayOutcomes)> {
    let mut outcomes = BTreeMap::<(Uuid, Uuid), ReplayOutcomes>::new();
    for attempt in attempts.iter().filter(|attempt| attempt.outcome.is_final()) {
        let Some(replay) = attempt.replay else { continue };
        let counted = outcomes.entry((replay, attempt.subscriber)).or_default();
        match (attempt.outcome, attempt.was_dead) {
            (Outcome::Delivered, was_dead) => {
                counted.delivered += 1;
                counted.dead -= i64::from(was_dead);
            }
            (_, was_dead) => counted.dead += i64::from(!was_dead),
        }
    }
    outcomes.into_iter().collect()
}

async fn insert_attempts(tx: &mut PgConnection, attempts: &[Attempt]) -> sqlx::Result<()> {
    if attempts.is_empty() {
        return Ok(());
    }
    let text = |field: fn(&Attempt) -> Option<&str>| attempts.iter().map(field).collect::<Vec<_>>();
    sqlx::query(
        "insert into pillarbox_hub.attempt (at, subscriber, n, attempt, outcome, status, latency_ms, error, detail, excerpt)
         select * from unnest($1::timestamptz[], $2::uuid[], $3::bigint[], $4::smallint[], $5::text[], $6::smallint[],
                              $7::integer[], $8::text[], $9::text[], $10::text[])",
    )
    .bind(attempts.iter().map(|attempt| attempt.at).collect::<Vec<_>>())
    .bind(attempts.iter().map(|attempt| attempt.subscriber).collect::<Vec<_>>())
    .bind(attempts.iter().map(|attempt| attempt.n).collect::<Vec<_>>())
    .bind(attempts.iter().map(|attempt| attempt.attempt as i16).collect::<Vec<_>>())
    .bind(text(|attempt| Some(attempt.outcome.as_str())))
    .bind(attempts.iter().map(|attempt| attempt.result.status.map(|status| status as i16)).collect::<Vec<_>>())
    .bind(attempts.iter().map(|attempt| attempt.result.latency.as_millis() as i32).collect::<Vec<_>>())
    .bind(text(|attempt| attempt.result.error))
    .bind(text(|attempt| attempt.result.detail.as_deref()))
    .bind(text(|attempt| attempt.result.excerpt.as_deref()))
    .execute(tx)
    .await
    .map(drop)
}

async fn insert_dead_letters(tx: &mut PgConnection, dead_letters: &[NewDeadLetter]) -> sqlx::Result<()> {
    if dead_letters.is_empty() {
        return Ok(());
    }
    let event = |dead: &NewDeadLetter| dead.message.event.clone();
    // As text: jsonb would change the payload that was posted.
    let snapshots: Vec<Option<String>> =
        dead_letters.iter().map(|dead| event(dead).map(|event| event.snapshot())).collect();
    // The reference to the log is that of the message.
    sqlx::query(
        "insert into pillarbox_hub.dead_letter
             (id, tenant, subscriber, n, lane, event_id, event_type, log_shard, log_id, log_at, event_snapshot,
              subscriber_snapshot, reason, detail, attempts, moved_to_dlq_at, ordering_key, replay)
         select d.id, d.tenant, d.subscriber, d.n, d.lane, d.event_id, d.event_type, m.log_shard, m.log_id, m.log_at,
                d.event_snapshot::json, d.subscriber_snapshot::jsonb, d.reason, d.detail, d.attempts, d.at,
                d.ordering_key, m.replay
         from unnest($1::uuid[], $2::text[], $3::uuid[], $4::bigint[], $5::text[], $6::uuid[], $7::text[], $8::text[],
                     $9::text[], $10::text[], $11::text[], $12::smallint[], $13::timestamptz[], $14::text[])
              as d (id, tenant, subscriber, n, lane, event_id, event_type, event_snapshot, subscriber_snapshot, reason,
                    detail, attempts, at, ordering_key)
         join pillarbox_hub.message as m on m.subscriber = d.subscriber and m.n = d.n
         -- A dead letter that was retried at the head of its lane, and failed again, can be retried again.
         on conflict (subscriber, n) do update
         set subscriber_snapshot = excluded.subscriber_snapshot, reason = excluded.reason, detail = excluded.detail,
             attempts = excluded.attempts, moved_to_dlq_at = excluded.moved_to_dlq_at,
             manual_retry_by = null, manual_retry_at = null
         where dead_letter.moved_to_dlq_at < excluded.moved_to_dlq_at",
    )
    .bind(dead_letters.iter().map(|_| Uuid::now_v7()).collect::<Vec<_>>())
    .bind(dead_letters.iter().map(|dead| &*dead.recipient.tenant).collect::<Vec<_>>())
    .bind(dead_letters.iter().map(|dead| dead.recipient.id).collect::<Vec<_>>())
    .bind(dead_letters.iter().map(|dead| dead.message.n).collect::<Vec<_>>())
    .bind(dead_letters.iter().map(|dead| dead.message.lane.as_deref()).collect::<Vec<_>>())
    .bind(dead_letters.iter().map(|dead| event(dead).map(|event| event.id)).collect::<Vec<_>>())
    .bind(dead_letters.iter().map(|dead| event(dead).map(|event| event.topic.clone())).collect::<Vec<_>>())
    .bind(snapshots)
    .bind(dead_letters.iter().map(|dead| dead.recipient.snapshot.to_string()).collect::<Vec<_>>())
    .bind(dead_letters.iter().map(|dead| dead.reason.as_str()).collect::<Vec<_>>())
    .bind(dead_letters.iter().map(|dead| dead.detail.as_str()).collect::<Vec<_>>())
    .bind(dead_letters.iter().map(|dead| dead.attempts as i16).collect::<Vec<_>>())
    .bind(dead_letters.iter().map(|dead| dead.at).collect::<Vec<_>>())
    .bind(dead_letters.iter().map(|dead| event(dead).and_then(|event| event.key.clone())).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}

//! The statements of `pillarbox recover --skip`: dead letters for everything that is pending.

use chrono::{DateTime, Utc};
use pillarbox::log::LogRef;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::deliveries::domain::Reason;
use crate::deliveries::message::HubEvent;
use crate::rows::LogColumns;
use crate::subscribers::domain::Subscriber;

const DETAIL: &str = "given up by pillarbox recover --skip";

/// Disables the statement timeout for this transaction.
pub(crate) async fn disable_statement_timeout(tx: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query("set local statement_timeout = 0").execute(tx).await.map(drop)
}

/// The numbers of a subscriber's messages without a final outcome, in order.
pub(crate) async fn pending_messages(tx: &mut PgConnection, subscriber: Uuid) -> sqlx::Result<Vec<i64>> {
    sqlx::query_scalar(
        "select n from (
             select n from pillarbox_hub.message
             where subscriber = $1 and n > coalesce((select n from pillarbox_hub.position
                                                     where position.subscriber = $1 order by n desc limit 1), 0)
             union
             select message.n from pillarbox_hub.lane
             join pillarbox_hub.message on message.subscriber = lane.subscriber
                  and (message.n = lane.head or (message.lane = lane.lane and message.n > lane.head))
             where lane.subscriber = $1
         ) as candidate
         where not exists (select from pillarbox_hub.attempt
                           where attempt.subscriber = $1 and attempt.n = candidate.n and outcome <> 'failed')
         order by n",
    )
    .bind(subscriber)
    .fetch_all(tx)
    .await
}

/// The log entries with the content of these messages.
pub(crate) async fn log_refs(tx: &mut PgConnection, subscriber: Uuid, messages: &[i64]) -> sqlx::Result<Vec<LogRef>> {
    let query =
        "select distinct log_shard, log_id, log_at from pillarbox_hub.message where subscriber = $1 and n = any ($2)";
    let rows: Vec<LogColumns> = sqlx::query_as(query).bind(subscriber).bind(messages).fetch_all(tx).await?;
    Ok(rows.into_iter().map(LogRef::from).collect())
}

/// Inserts a dead letter and a final attempt for each of these messages, which are in order. The content of a message that
/// retries a dead letter may be in that dead letter only.
pub(crate) async fn insert_dead_letters(
    tx: &mut PgConnection,
    subscriber: &Subscriber,
    messages: &[i64],
    events: &[(i64, HubEvent)],
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    sqlx::query(
        "with given_up as (
             -- The attempts of a retry are numbered after those of the dead letter that it retries.
             select message.*, new.id, (greatest((select max(attempt) from pillarbox_hub.attempt
                                                  where attempt.subscriber = $1 and attempt.n = message.n),
                                                 (select attempts from pillarbox_hub.dead_letter as retried
                                                  where retried.id = message.dead_letter), 0) + 1)::smallint as attempts
             from unnest($2::bigint[], $12::uuid[]) as new (n, id)
             join pillarbox_hub.message on message.subscriber = $1 and message.n = new.n
         ), final_attempt as (
             insert into pillarbox_hub.attempt (at, subscriber, n, attempt, outcome, latency_ms, error, detail)
             select $3, subscriber, n, attempts, 'dead', 0, $4, $5 from given_up)
         insert into pillarbox_hub.dead_letter
             (id, tenant, subscriber, n, lane, event_id, event_type, log_shard, log_id, log_at, event_snapshot,
              subscriber_snapshot, reason, detail, attempts, moved_to_dlq_at, ordering_key, replay)
         select given_up.id, $6, $1, given_up.n, given_up.lane, coalesce(event.id, retried.event_id),
                coalesce(event.type, retried.event_type), given_up.log_shard, given_up.log_id, given_up.log_at,
                coalesce(event.snapshot::json, retried.event_snapshot), $7, $4, $5, given_up.attempts, $3,
                coalesce(event.key, retried.ordering_key), given_up.replay
         from given_up
         left join unnest($8::bigint[], $9::uuid[], $10::text[], $11::text[], $13::text[])
                   as event (log_id, id, type, snapshot, key)
              on event.log_id = given_up.log_id
         left join pillarbox_hub.dead_letter as retried on retried.id = given_up.dead_letter
         on conflict (subscriber, n) do nothing",
    )
    .bind(subscriber.id)
    .bind(messages)
    .bind(now)
    .bind(Reason::Manual.as_str())
    .bind(DETAIL)
    .bind(subscriber.tenant.as_str())
    .bind(subscriber.snapshot())
    .bind(events.iter().map(|(log_id, _)| *log_id).collect::<Vec<_>>())
    .bind(events.iter().map(|(_, event)| event.id).collect::<Vec<_>>())
    .bind(events.iter().map(|(_, event)| event.topic.as_str()).collect::<Vec<_>>())
    // As text: jsonb would change the payload that was posted.
    .bind(events.iter().map(|(_, event)| event.snapshot()).collect::<Vec<_>>())
    // Ascending ids: dead letters are retried in the order of their ids.
    .bind(messages.iter().map(|_| Uuid::now_v7()).collect::<Vec<_>>())
    .bind(events.iter().map(|(_, event)| event.key.as_deref()).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}

/// Moves every subscriber's position to the newest message, and deletes all detached lanes.
pub(crate) async fn skip_to_newest(tx: &mut PgConnection, now: DateTime<Utc>) -> sqlx::Result<()> {
    let positions = "insert into pillarbox_hub.position (subscriber, n, at)
                  select subscriber.id, newest.n, $1 from pillarbox_hub.subscriber
                  cross join (select max(n_to) as n from pillarbox_hub.fanout_batch) newest where newest.n is not null";
    sqlx::query(positions).bind(now).execute(&mut *tx).await?;
    // Operator commands stay: the next dispatcher finds that they come too late, and rejects them.
    sqlx::query("delete from pillarbox_hub.lane").execute(tx).await.map(drop)
}

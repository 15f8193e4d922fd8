use chrono::{DateTime, Utc};
use mailbox::log::LogRef;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::dispatch::Event;
use crate::domain::{Reason, Subscriber};

const DETAIL: &str = "set aside by pillarbox recover --skip";

/// The statements of this transaction may take as long as they need.
pub(crate) async fn take_time(tx: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query("set local statement_timeout = 0").execute(tx).await.map(drop)
}

/// The messages of a subscriber that have no outcome, in order.
pub(crate) async fn waiting(tx: &mut PgConnection, subscriber: Uuid) -> sqlx::Result<Vec<i64>> {
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
         ) as made
         where not exists (select from pillarbox_hub.attempt
                           where attempt.subscriber = $1 and attempt.n = made.n and outcome <> 'failed')
         order by n",
    )
    .bind(subscriber)
    .fetch_all(tx)
    .await
}

/// Where in the log these messages have their content.
pub(crate) async fn places(tx: &mut PgConnection, subscriber: Uuid, messages: &[i64]) -> sqlx::Result<Vec<LogRef>> {
    let query =
        "select distinct log_shard, log_id, log_at from pillarbox_hub.message where subscriber = $1 and n = any ($2)";
    let rows = sqlx::query(query).bind(subscriber).bind(messages).fetch_all(tx).await?;
    let place = |row: &PgRow| {
        Ok(LogRef { shard: row.try_get("log_shard")?, id: row.try_get("log_id")?, at: row.try_get("log_at")? })
    };
    rows.iter().map(place).collect()
}

/// These messages, which are in order, are dead. Content that the log no longer has may be in the dead letter that one is a retry of.
pub(crate) async fn bury(
    tx: &mut PgConnection,
    subscriber: &Subscriber,
    messages: &[i64],
    events: &[(i64, Event)],
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    sqlx::query(
        "with dying as (
             select message.*, new.id, (coalesce((select max(attempt) from pillarbox_hub.attempt
                                          where attempt.subscriber = $1 and attempt.n = message.n), 0) + 1)::smallint as tried
             from unnest($2::bigint[], $12::uuid[]) as new (n, id)
             join pillarbox_hub.message on message.subscriber = $1 and message.n = new.n
         ), tried as (
             insert into pillarbox_hub.attempt (at, subscriber, n, attempt, outcome, latency_ms, error, detail)
             select $3, subscriber, n, tried, 'dead', 0, $4, $5 from dying)
         insert into pillarbox_hub.dead_letter
             (id, tenant, subscriber, n, lane, event_id, event_type, log_shard, log_id, log_at, event_snapshot,
              subscriber_snapshot, reason, detail, attempts, moved_to_dlq_at)
         select dying.id, $6, $1, dying.n, dying.lane, coalesce(event.id, retried.event_id),
                coalesce(event.type, retried.event_type), dying.log_shard, dying.log_id, dying.log_at,
                coalesce(event.snapshot::json, retried.event_snapshot), $7, $4, $5, dying.tried, $3
         from dying
         left join unnest($8::bigint[], $9::uuid[], $10::text[], $11::text[]) as event (log_id, id, type, snapshot)
              on event.log_id = dying.log_id
         left join pillarbox_hub.dead_letter as retried on retried.id = dying.dead_letter
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
    // As text: jsonb would change what was posted.
    .bind(events.iter().map(|(_, event)| event.snapshot()).collect::<Vec<_>>())
    // In the order of the messages: it is the order in which they are retried.
    .bind(messages.iter().map(|_| Uuid::now_v7()).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}

/// Everyone goes on behind the newest message, with nothing to do before it.
pub(crate) async fn pass_all(tx: &mut PgConnection, now: DateTime<Utc>) -> sqlx::Result<()> {
    let passed = "insert into pillarbox_hub.position (subscriber, n, at)
                  select subscriber.id, newest.n, $1 from pillarbox_hub.subscriber
                  cross join (select max(n_to) as n from pillarbox_hub.fanned) newest where newest.n is not null";
    sqlx::query(passed).bind(now).execute(&mut *tx).await?;
    // What people have asked for stays: who sends next finds that it is too late, and says so.
    sqlx::query("delete from pillarbox_hub.lane").execute(tx).await.map(drop)
}

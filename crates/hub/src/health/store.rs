//! SQL for the health of subscribers.

pub(crate) mod overview;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::health::counts::{AttemptCounts, HealthMinute, RANGES, SubscriberState};

/// Adds the counts to the rows of their minutes.
pub(crate) async fn add_minutes(tx: &mut PgConnection, minutes: &[HealthMinute]) -> sqlx::Result<()> {
    if minutes.is_empty() {
        return Ok(());
    }
    let count =
        |of: fn(&AttemptCounts) -> i64| minutes.iter().map(|minute| of(&minute.counts) as i32).collect::<Vec<_>>();
    // Arrays of arrays cannot be unnested into rows, so all ranges are one array.
    let latency: Vec<i32> = minutes.iter().flat_map(|minute| minute.counts.latency.map(|count| count as i32)).collect();
    sqlx::query(
        "insert into pillarbox_hub.health as old (at, subscriber, delivered, failed, dead, latency)
         select m.at, m.subscriber, m.delivered, m.failed, m.dead,
                ($6::integer[])[((m.n - 1) * $7 + 1)::integer : (m.n * $7)::integer]
         from unnest($1::timestamptz[], $2::uuid[], $3::integer[], $4::integer[], $5::integer[]) with ordinality
              as m (at, subscriber, delivered, failed, dead, n)
         order by m.subscriber, m.at
         on conflict (subscriber, at) do update
         set delivered = old.delivered + excluded.delivered, failed = old.failed + excluded.failed,
             dead = old.dead + excluded.dead,
             latency = array(select coalesce(one, 0) + coalesce(other, 0)
                             from unnest(old.latency, excluded.latency) with ordinality as both_of (one, other, n) order by n)",
    )
    .bind(minutes.iter().map(|minute| minute.at).collect::<Vec<_>>())
    .bind(minutes.iter().map(|minute| minute.subscriber).collect::<Vec<_>>())
    .bind(count(|counts| counts.delivered))
    .bind(count(|counts| counts.failed))
    .bind(count(|counts| counts.dead))
    .bind(latency)
    .bind(RANGES as i32)
    .execute(tx)
    .await
    .map(drop)
}

/// Saves the states. A subscriber that was failing before stays failing since then: a dispatcher that has just become its owner
/// does not know it.
pub(crate) async fn save_states(
    tx: &mut PgConnection,
    states: &[SubscriberState],
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    if states.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "insert into pillarbox_hub.subscriber_state as old (subscriber, failing_since, is_breaker_open, updated_at)
         select *, $4 from unnest($1::uuid[], $2::timestamptz[], $3::boolean[]) as s (id, since, is_open) order by s.id
         on conflict (subscriber) do update
         set failing_since = case when excluded.failing_since is null then null
                                  else coalesce(old.failing_since, excluded.failing_since) end,
             is_breaker_open = excluded.is_breaker_open, updated_at = excluded.updated_at",
    )
    .bind(states.iter().map(|state| state.subscriber).collect::<Vec<_>>())
    .bind(states.iter().map(|state| state.failing_since).collect::<Vec<_>>())
    .bind(states.iter().map(|state| state.is_breaker_open).collect::<Vec<_>>())
    .bind(now)
    .execute(tx)
    .await
    .map(drop)
}

/// The state of a subscriber. None: no attempt was made.
pub(crate) async fn find_state(db: &mut PgConnection, subscriber: Uuid) -> sqlx::Result<Option<SubscriberState>> {
    let query =
        "select subscriber, failing_since, is_breaker_open from pillarbox_hub.subscriber_state where subscriber = $1";
    sqlx::query_as(query).bind(subscriber).fetch_optional(db).await
}

/// The attempts of a subscriber in the unit of time that begins at `start`.
#[derive(sqlx::FromRow)]
pub(crate) struct CountsSince {
    pub(crate) start: DateTime<Utc>,
    #[sqlx(flatten)]
    pub(crate) counts: AttemptCounts,
}

/// The counts of a subscriber from `from` to `to`, summed up by `unit` (minute, hour or day, in UTC), oldest first. A
/// time without attempts is left out.
pub(crate) async fn counts(
    db: &mut PgConnection,
    subscriber: Uuid,
    from: DateTime<Utc>,
    to: DateTime<Utc>,
    unit: &str,
) -> sqlx::Result<Vec<CountsSince>> {
    let ranges: Vec<String> = (1..=RANGES).map(|at| format!("sum(latency[{at}])")).collect();
    let query = format!(
        "select date_trunc($4, at, 'UTC') as start, sum(delivered) as delivered, sum(failed) as failed, sum(dead) as dead,
                array[{}]::bigint[] as latency
         from pillarbox_hub.health where subscriber = $1 and at >= $2 and at < $3 group by start order by start",
        ranges.join(", ")
    );
    let query = sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(subscriber).bind(from).bind(to).bind(unit);
    query.fetch_all(db).await
}

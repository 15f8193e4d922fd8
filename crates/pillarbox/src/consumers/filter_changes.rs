//! Changes of the filters of consumers, and the replays that routes then need.
//!
//! A message belongs to one route, by the filters of all routes. If they change, a message that another route had and has not
//! published yet can belong to a route that has passed it already: neither would publish it. So the new route replays what
//! its former filter did not match. The replay begins where the other routes were before the change, and is requested when no
//! shard worker reads with a former filter any more: until then, messages are passed as before.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use sqlx::{Connection, PgConnection};

use super::consumer::{Consumer, ConsumerKind};
use super::leases::has_unknown_workers;
use super::replica::Replica;
use crate::log::Filter;

/// The routes of a process are registered one after the other. The first ones have begun to read with their new filters when
/// the last one is registered, so the positions of this many minutes before count.
const ROUTES_CHANGE_MINUTES: i32 = 10;
/// The time of a snapshot is read before the snapshot is taken, so it can contain messages that are later.
const MARGIN: &str = "interval '1 minute'";

/// Records the former filter, if this one differs. Returns whether it does. The consumer must exist; its row is locked.
pub(super) async fn record(tx: &mut PgConnection, consumer: &Consumer) -> sqlx::Result<bool> {
    let query = "select included, excluded from pillarbox.cursor
                 where consumer = $1 and (included, excluded) is distinct from ($2, $3) for update";
    let former: Option<(String, Option<String>)> = sqlx::query_as(query)
        .bind(&consumer.name)
        .bind(consumer.filter.included())
        .bind(consumer.filter.excluded())
        .fetch_optional(&mut *tx)
        .await?;
    let Some((included, excluded)) = former else { return Ok(false) };
    let replay_from = match consumer.kind {
        ConsumerKind::Relay => replay_from(tx, &consumer.name).await?,
        ConsumerKind::Handler => None,
    };
    let query = "insert into pillarbox.filter_change (consumer, read_to, included, excluded, replay_from)
                 select $1, coalesce(max(new_at), 'epoch'), $2, $3, $4
                 from pillarbox.shards() as shard cross join lateral pillarbox.latest_position($1, shard)";
    sqlx::query(query).bind(&consumer.name).bind(included).bind(excluded).bind(replay_from).execute(tx).await?;
    Ok(true)
}

/// Returns the time from which on another route may not have published its messages before the filters of the routes
/// changed. None if there is no other route. A new route has had no messages before it was created. A lapsed one does not
/// count: it has given its messages up, and says so.
async fn replay_from(tx: &mut PgConnection, consumer: &str) -> sqlx::Result<Option<DateTime<Utc>>> {
    let query = format!(
        "select min(coalesce(position.old_at, cursor.since)) - {MARGIN}
         from pillarbox.cursor cross join pillarbox.shards() as shard
         left join lateral (
             select old_at from pillarbox.position
             where position.consumer = cursor.consumer and shard = any (position.shards)
               and position.at <= now() - make_interval(mins => $2)
             order by position.at desc limit 1
         ) as position on true
         where cursor.consumer <> $1 and kind = $3 and lapsed_at is null"
    );
    sqlx::query_scalar(sqlx::AssertSqlSafe(query))
        .bind(consumer)
        .bind(ROUTES_CHANGE_MINUTES)
        .bind(ConsumerKind::Relay.as_str())
        .fetch_one(tx)
        .await
}

/// Requests the replays that the consumer needs because its filter has changed, unless a live shard worker reads with another
/// filter. Then it returns the names of the processes of these workers.
pub(super) async fn request_replays(
    db: &mut PgConnection,
    consumer: &str,
    filter: &Filter,
    replica: &Replica,
) -> sqlx::Result<Option<Vec<String>>> {
    let mut tx = db.begin().await?;
    // One of the shard workers requests them.
    let query = "select from pillarbox.cursor where consumer = $1 for update";
    sqlx::query(query).bind(consumer).execute(&mut *tx).await?;
    let query = "select distinct replica.name
                 from pillarbox.shard_worker join pillarbox.replica on replica.id = shard_worker.replica
                 where shard_worker.consumer = $1 and replica.until > now()
                   and shard_worker.filter is distinct from md5(concat_ws(E'\\n', $2::text, $3::text))
                 order by replica.name";
    let query = sqlx::query_scalar(query).bind(consumer).bind(filter.included()).bind(filter.excluded());
    let others: Vec<String> = query.fetch_all(&mut *tx).await?;
    if !others.is_empty() || has_unknown_workers(&mut tx, consumer, replica.lease_time()).await? {
        return Ok(Some(others));
    }
    let query = format!(
        "with due as (
             select id, replay_from, included, excluded from pillarbox.filter_change
             where consumer = $1 and replay_from is not null for update
         ), cleared as (update pillarbox.filter_change set replay_from = null from due where filter_change.id = due.id
         ), requested as (
             insert into pillarbox.replay (consumer, run, from_at, to_at, former_included, former_excluded)
             select $1, 0, replay_from, now() + {MARGIN}, included, excluded from due returning id
         ), shards as (insert into pillarbox.replay_shard (replay, shard) select id, pillarbox.shards() from requested)
         select id from requested order by id"
    );
    let requested: Vec<i64> = sqlx::query_scalar(sqlx::AssertSqlSafe(query)).bind(consumer).fetch_all(&mut *tx).await?;
    tx.commit().await?;
    if !requested.is_empty() {
        tracing::info!(consumer, replays = ?requested, "requested replays, because the filter of the route has changed");
    }
    Ok(None)
}

/// How long a shard worker has waited for other processes before a replay can be requested. Processes are replaced one by one,
/// so that a short wait is normal; processes with lastingly different routes wait for ever, which an operator must see.
#[derive(Debug, Default)]
pub(super) struct ReplayWait {
    since: Option<Instant>,
    reported_at: Option<Instant>,
}

impl ReplayWait {
    /// A wait is reported after this time.
    const REPORT_AFTER: Duration = Duration::from_secs(60);
    /// The time between two reports.
    const REPORT_PAUSE: Duration = Duration::from_secs(600);

    /// Records whether the worker waits, and for which processes.
    pub(super) fn observe(&mut self, consumer: &str, waits_for: Option<&[String]>) {
        self.observe_at(consumer, waits_for, Instant::now());
    }

    /// Returns whether it has logged a warning.
    fn observe_at(&mut self, consumer: &str, waits_for: Option<&[String]>, now: Instant) -> bool {
        let set = |waited: Duration| {
            metrics::gauge!("pillarbox_route_replay_waiting_seconds", "consumer" => consumer.to_owned())
                .set(waited.as_secs_f64());
        };
        let Some(processes) = waits_for else {
            if std::mem::take(self).since.is_some() {
                set(Duration::ZERO);
            }
            return false;
        };
        let waited = now.duration_since(*self.since.get_or_insert(now));
        set(waited);
        let is_due = self.reported_at.is_none_or(|at| now.duration_since(at) >= ReplayWait::REPORT_PAUSE);
        if waited < ReplayWait::REPORT_AFTER || !is_due {
            return false;
        }
        self.reported_at = Some(now);
        tracing::warn!(
            consumer,
            ?processes,
            waited_seconds = waited.as_secs(),
            "messages between the former and the new filter of this route are not published until all processes have the same \
             routes; give all processes the same version and the same relay.routes, or stop those that differ"
        );
        true
    }
}

/// Deletes the former filters of a consumer that no longer exists.
pub(crate) async fn delete(tx: &mut PgConnection, consumer: &str) -> sqlx::Result<()> {
    let query = "delete from pillarbox.filter_change where consumer = $1";
    sqlx::query(query).bind(consumer).execute(tx).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_reported_after_a_minute_and_then_every_ten_minutes() {
        let (mut wait, start) = (ReplayWait::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let others = ["other:1".to_owned()];
        let reported: Vec<u64> =
            (0..1_500).filter(|&seconds| wait.observe_at("relay.a", Some(&others), at(seconds))).collect();
        assert_eq!(reported, [60, 660, 1_260]);
        // All processes have the same routes now. Later they differ again.
        assert!(!wait.observe_at("relay.a", None, at(1_500)));
        assert!(!wait.observe_at("relay.a", Some(&others), at(1_501)));
        assert!(wait.observe_at("relay.a", Some(&others), at(1_561)));
    }
}

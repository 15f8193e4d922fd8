//! The number of waiting hub messages per tenant.

use sqlx::PgConnection;

/// Tenants with fewer waiting messages have no row.
const COUNT_MIN: i64 = 100;

/// Counts the messages of each tenant that wait: beyond the positions of its subscribers, in detached lanes, and those that
/// deferred events will lead to. Counts at most `max` messages of a subscriber, and of a lane.
pub(crate) async fn count(db: &mut PgConnection, max: i64) -> sqlx::Result<()> {
    sqlx::query(
        "with waiting as (
             select subscriber.tenant, beyond.count + lanes.count as count
             from pillarbox_hub.subscriber
             left join lateral (select n from pillarbox_hub.position
                                where position.subscriber = subscriber.id order by n desc limit 1) newest on true
             cross join lateral (
                 select count(*) from (select from pillarbox_hub.message
                                       where message.subscriber = subscriber.id and n > coalesce(newest.n, 0)
                                       limit $1) as counted
             ) beyond
             cross join lateral (
                 select coalesce(sum(greatest(depth.count, 1)), 0)::bigint as count from pillarbox_hub.lane
                 cross join lateral (
                     select count(*) from (select from pillarbox_hub.message
                                           where message.subscriber = lane.subscriber and message.lane = lane.lane
                                             and n > lane.head and n <= newest.n limit $1) as counted
                 ) depth
                 where lane.subscriber = subscriber.id
             ) lanes
             union all
             select tenant, sum(matches) from pillarbox_hub.deferred_event group by tenant
         ), counted as (
             select tenant, sum(count)::bigint as count from waiting group by tenant having sum(count) >= $2
         ), few as (
             delete from pillarbox_hub.tenant_backlog where tenant not in (select tenant from counted)
         )
         insert into pillarbox_hub.tenant_backlog (tenant, waiting, counted_at)
         select tenant, count, now() from counted
         on conflict (tenant) do update set waiting = excluded.waiting, counted_at = excluded.counted_at",
    )
    .bind(max)
    .bind(COUNT_MIN)
    .execute(db)
    .await
    .map(drop)
}

/// The tenants with at least `max` waiting messages, and how many they are.
pub(crate) async fn above(db: &mut PgConnection, max: i64) -> sqlx::Result<Vec<(String, i64)>> {
    // Old counts do not apply: the process that counts may be gone.
    let query = "select tenant, waiting from pillarbox_hub.tenant_backlog
                 where waiting >= $1 and counted_at > now() - interval '15 minutes'";
    sqlx::query_as(query).bind(max).fetch_all(db).await
}

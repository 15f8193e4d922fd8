//! SQL of the exchange of demands. An empty subject is the heartbeat of a process.

use http_kit::admission::limit::Demand;
use sqlx::PgConnection;
use uuid::Uuid;

/// How old a demand may be.
const AGE_MAX: &str = "interval '3 seconds'";

/// Stores the demands of this process, and that it runs. Old rows are deleted along the way.
pub(super) async fn report(db: &mut PgConnection, process: Uuid, demands: &[Demand]) -> sqlx::Result<()> {
    sqlx::query(
        "with old as (
             delete from pillarbox_admin.rate_demand
             where at < now() - interval '1 minute' and process <> $1
         )
         insert into pillarbox_admin.rate_demand (subject, process, demand, at)
         select subject, $1, demand, clock_timestamp()
         from (select '', 0 union all select * from unnest($2::text[], $3::integer[])) as own (subject, demand)
         on conflict (subject, process) do update set demand = excluded.demand, at = excluded.at",
    )
    .bind(process)
    .bind(demands.iter().map(|demand| demand.subject.as_str()).collect::<Vec<_>>())
    .bind(demands.iter().map(|demand| i32::try_from(demand.count).unwrap_or(i32::MAX)).collect::<Vec<_>>())
    .execute(db)
    .await
    .map(drop)
}

/// The demands of other processes for the same subjects.
pub(super) async fn others(db: &mut PgConnection, process: Uuid, own: &[Demand]) -> sqlx::Result<Vec<Demand>> {
    if own.is_empty() {
        return Ok(Vec::new());
    }
    let query = format!(
        "select subject, demand from pillarbox_admin.rate_demand
         where subject = any($1) and process <> $2 and at > clock_timestamp() - {AGE_MAX}"
    );
    let subjects: Vec<&str> = own.iter().map(|demand| demand.subject.as_str()).collect();
    let rows: Vec<(String, i32)> =
        sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(subjects).bind(process).fetch_all(db).await?;
    Ok(rows.into_iter().map(|(subject, demand)| Demand { subject, count: demand.unsigned_abs() }).collect())
}

/// The number of processes that exchange demands, this one included.
pub(super) async fn count_processes(db: &mut PgConnection) -> sqlx::Result<u32> {
    let query = format!(
        "select count(*) from pillarbox_admin.rate_demand where subject = '' and at > clock_timestamp() - {AGE_MAX}"
    );
    let count: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(db).await?;
    Ok(u32::try_from(count).unwrap_or(u32::MAX))
}

pub(super) async fn remove(db: &mut PgConnection, process: Uuid) -> sqlx::Result<()> {
    let query = "delete from pillarbox_admin.rate_demand where process = $1";
    sqlx::query(query).bind(process).execute(db).await.map(drop)
}

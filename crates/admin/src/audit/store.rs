//! SQL of the audit trail.

use chrono::{DateTime, Utc};
use pillarbox::log::{InvalidTenant, Tenant};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::AuditLine;

/// Selects lines; None matches any.
#[derive(Debug, Clone, Default)]
pub(crate) struct AuditFilter {
    pub(crate) tenant: Option<Tenant>,
    pub(crate) key_id: Option<Uuid>,
    pub(crate) from: Option<DateTime<Utc>>,
    pub(crate) to: Option<DateTime<Utc>>,
}

/// Inserts lines. The commit does not wait for the disk: a later commit that does includes these lines.
pub(super) async fn insert(db: &mut PgConnection, lines: &[AuditLine]) -> sqlx::Result<()> {
    sqlx::query(
        "with commit as materialized (select set_config('synchronous_commit', 'off', true) as mode)
         insert into pillarbox_admin.audit (id, at, key_id, tenant, method, route, status, trace_id)
         select line.* from commit cross join unnest($1::uuid[], $2::timestamptz[], $3::uuid[], $4::text[], $5::text[],
             $6::text[], $7::smallint[], $8::text[]) as line
         where commit.mode is not null
         on conflict (id) do nothing",
    )
    .bind(lines.iter().map(|line| line.id).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.at).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.key_id).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.tenant.as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.method.as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.route.as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.status.map(|status| status as i16)).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.trace_id.as_str()).collect::<Vec<_>>())
    .execute(db)
    .await
    .map(drop)
}

/// Sets the statuses of the responses.
pub(super) async fn set_statuses(db: &mut PgConnection, statuses: &[(Uuid, u16)]) -> sqlx::Result<()> {
    sqlx::query(
        "with commit as materialized (select set_config('synchronous_commit', 'off', true) as mode)
         update pillarbox_admin.audit set status = answered.status
         from commit cross join unnest($1::uuid[], $2::smallint[]) as answered (id, status)
         where audit.id = answered.id and commit.mode is not null",
    )
    .bind(statuses.iter().map(|(id, _)| *id).collect::<Vec<_>>())
    .bind(statuses.iter().map(|(_, status)| *status as i16).collect::<Vec<_>>())
    .execute(db)
    .await
    .map(drop)
}

/// Returns lines newest first, those with ids below `before`.
pub(super) async fn list(
    db: &mut PgConnection,
    filter: &AuditFilter,
    before: Option<Uuid>,
    limit: i64,
) -> sqlx::Result<Vec<AuditLine>> {
    let rows = sqlx::query(
        "select id, at, key_id, tenant, method, route, status, trace_id from pillarbox_admin.audit
         where ($1::text is null or tenant = $1) and ($2::uuid is null or key_id = $2)
           and ($3::timestamptz is null or at >= $3) and ($4::timestamptz is null or at < $4)
           and ($5::uuid is null or id < $5)
         order by id desc limit $6",
    )
    .bind(filter.tenant.as_ref().map(Tenant::as_str))
    .bind(filter.key_id)
    .bind(filter.from)
    .bind(filter.to)
    .bind(before)
    .bind(limit)
    .fetch_all(db)
    .await?;
    rows.iter().map(line).collect()
}

/// Deletes at most `limit` lines from before this time. Returns how many.
pub(super) async fn delete(db: &mut PgConnection, before: DateTime<Utc>, limit: i64) -> sqlx::Result<u64> {
    let query = "delete from pillarbox_admin.audit
                 where id in (select id from pillarbox_admin.audit where at < $1 order by at limit $2)";
    Ok(sqlx::query(query).bind(before).bind(limit).execute(db).await?.rows_affected())
}

fn line(row: &PgRow) -> sqlx::Result<AuditLine> {
    let tenant: &str = row.try_get("tenant")?;
    Ok(AuditLine {
        id: row.try_get("id")?,
        at: row.try_get("at")?,
        key_id: row.try_get("key_id")?,
        tenant: tenant.parse().map_err(|error: InvalidTenant| sqlx::Error::Decode(error.into()))?,
        method: row.try_get("method")?,
        route: row.try_get("route")?,
        status: row.try_get::<Option<i16>, _>("status")?.map(i16::unsigned_abs),
        trace_id: row.try_get("trace_id")?,
    })
}

//! The tenants of this database, as far as producers and consumers of the log need them. Operators manage them elsewhere.

use kit::auth::{Tenant, TenantStanding};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

/// The columns from which [`standing_of`] reads, of the table `pillarbox.tenant`.
pub const STANDING_COLUMNS: &str =
    "tenant.suspended_at is not null as is_suspended, tenant.events_per_second_max, tenant.payload_bytes_max";

/// Reads the [`STANDING_COLUMNS`] of a row.
pub fn standing_of(row: &PgRow) -> sqlx::Result<TenantStanding> {
    let limit = |column: &str| Ok::<_, sqlx::Error>(row.try_get::<Option<i32>, _>(column)?.map(i32::unsigned_abs));
    Ok(TenantStanding {
        is_suspended: row.try_get("is_suspended")?,
        events_per_second_max: limit("events_per_second_max")?,
        payload_bytes_max: limit("payload_bytes_max")?,
    })
}

/// Returns those of the names that are no tenants. `main` always is one, so a list of only `main` costs no query.
pub async fn unknown_tenants(db: &mut PgConnection, names: &[&str]) -> sqlx::Result<Vec<String>> {
    let mut others: Vec<&str> = names.iter().copied().filter(|name| *name != Tenant::MAIN).collect();
    others.sort_unstable();
    others.dedup();
    if others.is_empty() {
        return Ok(Vec::new());
    }
    let query = "select name from unnest($1::text[]) as given (name)
                 where not exists (select from pillarbox.tenant where tenant.name = given.name and deleted_at is null)";
    sqlx::query_scalar(query).bind(others).fetch_all(db).await
}

/// Locks the tenant until the end of the transaction, so that it is not deleted meanwhile. Returns its `subscribers_max`; None
/// if there is no such tenant.
pub async fn lock_tenant(db: &mut PgConnection, name: &Tenant) -> sqlx::Result<Option<Option<i32>>> {
    let query = "select subscribers_max from pillarbox.tenant where name = $1 and deleted_at is null for share";
    sqlx::query_scalar(query).bind(name.as_str()).fetch_optional(db).await
}

/// What to do about a tenant that does not exist.
pub fn unknown_tenant_text(name: &str) -> String {
    format!(
        "the tenant `{name}` does not exist in this database: check the spelling, or create it with POST /admin/v1/tenants or \
         `pillarbox tenants create {name}`"
    )
}

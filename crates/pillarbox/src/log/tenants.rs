//! The tenants of this database, as far as producers and consumers of the log need them. Operators manage them elsewhere.

use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

/// The name of a tenant. The data of one tenant is not visible to another. Cheap to clone: every
/// message has one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tenant(Arc<str>);

impl Tenant {
    /// The tenant of all users and of the services.
    pub const MAIN: &str = "main";

    /// The tenant `main`.
    pub fn main() -> Tenant {
        Tenant(Tenant::MAIN.into())
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A text that is not a valid name of a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must have 1 to 63 characters of a-z, 0-9, - and _, and start with a letter or digit")]
pub struct InvalidTenant;

impl TryFrom<String> for Tenant {
    type Error = InvalidTenant;

    fn try_from(name: String) -> Result<Tenant, InvalidTenant> {
        let is_alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let is_valid = name.len() <= 63
            && name.bytes().next().is_some_and(is_alphanumeric)
            && name.bytes().all(|byte| is_alphanumeric(byte) || byte == b'-' || byte == b'_');
        if is_valid { Ok(Tenant(name.into())) } else { Err(InvalidTenant) }
    }
}

impl FromStr for Tenant {
    type Err = InvalidTenant;

    fn from_str(text: &str) -> Result<Tenant, InvalidTenant> {
        Tenant::try_from(text.to_owned())
    }
}

impl From<Tenant> for String {
    fn from(tenant: Tenant) -> String {
        tenant.0.as_ref().to_owned()
    }
}

/// What the operator has decided about a tenant. None: the limit of the installation applies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TenantStanding {
    /// It neither sends nor receives.
    pub is_suspended: bool,
    /// Its limit of events per second.
    pub events_per_second_max: Option<u32>,
    /// Its limit of the size of a payload.
    pub payload_bytes_max: Option<u32>,
}

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

/// Returns those of the names that do not belong to a tenant. `main` always is one, so a list of only `main` costs no query.
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

/// Locks the tenant until the end of the transaction, so that it is not deleted until then. Returns its `subscribers_max`; None
/// if there is no such tenant.
pub async fn lock_tenant(db: &mut PgConnection, name: &Tenant) -> sqlx::Result<Option<Option<i32>>> {
    let query = "select subscribers_max from pillarbox.tenant where name = $1 and deleted_at is null for share";
    sqlx::query_scalar(query).bind(name.as_str()).fetch_optional(db).await
}

/// Returns the tenants that have a separate limit on payloads, with its bytes.
pub async fn payload_limits(db: &mut PgConnection) -> sqlx::Result<Vec<(Tenant, usize)>> {
    let query = "select name, payload_bytes_max from pillarbox.tenant
                 where payload_bytes_max is not null and deleted_at is null";
    let rows: Vec<(String, i32)> = sqlx::query_as(query).fetch_all(db).await?;
    let limit = |(name, bytes): (String, i32)| {
        let name = Tenant::try_from(name).map_err(|error| sqlx::Error::Decode(error.into()))?;
        Ok((name, bytes.unsigned_abs() as usize))
    };
    rows.into_iter().map(limit).collect()
}

/// What to do about a tenant that does not exist.
pub fn unknown_tenant_text(name: &str) -> String {
    format!(
        "the tenant `{name}` does not exist in this database: check the spelling, or create it with POST /admin/v1/tenants or \
         `pillarbox tenants create {name}`"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_tenant_names_are_rejected() {
        assert!("acme-2_b".parse::<Tenant>().is_ok());
        for name in ["", "-a", "Acme", "a b", "a/b", &"a".repeat(64)] {
            assert!(name.parse::<Tenant>().is_err(), "{name}");
        }
    }
}

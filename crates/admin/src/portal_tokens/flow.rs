//! Use cases of portal tokens, one transaction each.

use chrono::{DateTime, TimeDelta, Utc};
use http_kit::auth::Caller;
use http_kit::field::printable;
use pillarbox::database::{Database, time};
use pillarbox::log::Tenant;
use pillarbox::log::lock_tenant;
use runtime::secret::{Secret, digest, random_text};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use super::{Error, NewPortalToken, PortalToken, store};

const PREFIX: &str = "pbxp_";
const RANDOM_CHARS: usize = 40;
const NAME_CHARS_MAX: usize = 100;
const SECONDS_MAX: i64 = 86_400;

/// Creates a token of the caller's tenant. The second value is the token itself; it is not stored. Fails if a field is invalid.
pub async fn create(
    db: &mut PgConnection,
    caller: &Caller,
    new: NewPortalToken,
) -> Result<(PortalToken, Secret<String>), Error> {
    if let Some(name) = &new.name {
        printable(name, NAME_CHARS_MAX).map_err(|error| Error::Invalid("/name", error.to_string()))?;
    }
    if !(1..=SECONDS_MAX).contains(&new.expires_in_seconds) {
        let detail = format!("must be a number from 1 to {SECONDS_MAX}");
        return Err(Error::Invalid("/expires_in_seconds", detail));
    }
    if lock_tenant(db, &caller.tenant).await?.is_none() {
        return Err(Error::NoTenant(caller.tenant.as_str().to_owned()));
    }
    let now = time::now(db).await?;
    let secret = format!("{PREFIX}{}", random_text(RANDOM_CHARS));
    let token = PortalToken {
        id: Uuid::now_v7(),
        name: new.name,
        tenant: caller.tenant.clone(),
        access: new.access,
        created_at: now,
        expires_at: now + TimeDelta::seconds(new.expires_in_seconds),
    };
    store::insert(db, &token, digest(&secret), &caller.principal.to_string()).await?;
    tracing::info!(token = %token.id, tenant = token.tenant.as_str(), "created a portal token");
    Ok((token, Secret::new(secret)))
}

/// Lists the tokens of a tenant that have not expired, newest first, those with ids below `before`.
pub(crate) async fn list(
    db: &Database,
    tenant: &Tenant,
    before: Option<Uuid>,
    limit: u32,
) -> Result<Vec<PortalToken>, Error> {
    Ok(store::list(&mut *db.acquire().await?, tenant.as_str(), before, i64::from(limit)).await?)
}

/// Returns the name of a token, and when it expires. None if it does not exist.
pub(crate) async fn name_and_expiry(
    db: &Database,
    id: Uuid,
) -> Result<Option<(Option<String>, Option<DateTime<Utc>>)>, Error> {
    Ok(store::name_and_expiry(&mut *db.acquire().await?, id).await?)
}

/// Revokes a token. Fails if the tenant has no such token.
pub async fn revoke(db: &mut PgConnection, tenant: &Tenant, id: Uuid) -> Result<(), Error> {
    if !store::delete(db, tenant.as_str(), id).await? {
        return Err(Error::NotFound);
    }
    tracing::info!(token = %id, "revoked a portal token");
    Ok(())
}

/// Deletes expired tokens.
pub(crate) async fn remove_expired(db: &PgPool) -> Result<(), sqlx::Error> {
    store::delete_expired(&mut *db.acquire().await?).await
}

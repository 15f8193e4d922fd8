//! Use cases of API keys, one transaction each.

use chrono::{DateTime, Utc};
use http_kit::auth::{Caller, Role};
use http_kit::field::printable;
use pillarbox::database::{Database, time};
use pillarbox::log::Tenant;
use pillarbox::log::lock_tenant;
use runtime::secret::{MasterKey, Secret, digest, random_text};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use super::{ApiKey, Error, NewKey, store};

const PREFIX: &str = "pbx_";
const RANDOM_CHARS: usize = 40;
/// The longest name of a key, in characters.
const NAME_CHARS_MAX: usize = 100;
const HINT_CHARS: usize = PREFIX.len() + 4;

/// Creates a key, in the caller's transaction. The second value is the key itself; it is not stored. Fails when the name or the
/// expiry is invalid, or the tenant does not exist.
pub async fn create(db: &mut PgConnection, new: NewKey) -> Result<(ApiKey, Secret<String>), Error> {
    // The lock makes a deletion of the tenant wait, which also deletes the key.
    if lock_tenant(db, &new.tenant).await?.is_none() {
        return Err(Error::NoTenant(new.tenant.as_str().to_owned()));
    }
    let (key, secret) = generate(new, time::now(db).await?)?;
    store::insert(db, &key, digest(secret.reveal())).await?;
    tracing::info!(key = %key.id, role = %key.role, tenant = key.tenant.as_str(), "created an API key");
    Ok((key, secret))
}

/// Lists keys older than `before`, newest first. Without a tenant: the keys of all tenants.
pub(crate) async fn list(
    db: &Database,
    tenant: Option<&Tenant>,
    before: Option<Uuid>,
    limit: u32,
) -> Result<Vec<ApiKey>, Error> {
    Ok(store::list(&mut *db.acquire().await?, tenant.map(Tenant::as_str), before, i64::from(limit)).await?)
}

/// Returns the caller of the key or the portal token with this digest.
pub(crate) async fn find_caller(db: &mut PgConnection, digest: [u8; 32]) -> sqlx::Result<Option<Caller>> {
    store::find_caller(db, digest).await
}

/// Returns the name of a key, and when it expires. None if it does not exist.
pub(crate) async fn name_and_expiry(db: &Database, id: Uuid) -> Result<Option<(String, Option<DateTime<Utc>>)>, Error> {
    Ok(store::name_and_expiry(&mut *db.acquire().await?, id).await?)
}

/// Revokes a key. A repeated call changes nothing. Fails if the key does not exist in the tenant.
pub(crate) async fn revoke(db: &Database, id: Uuid, tenant: Option<&Tenant>) -> Result<(), Error> {
    if !store::revoke(&mut *db.acquire().await?, id, tenant.map(Tenant::as_str)).await? {
        return Err(Error::NotFound);
    }
    tracing::info!(key = %id, "revoked an API key");
    Ok(())
}

/// The fingerprint of the installation's secret key. `None` if the database has no installation, or is not migrated.
pub async fn fingerprint(db: &mut PgConnection) -> sqlx::Result<Option<String>> {
    if store::has_installations(db).await? { store::fingerprint(db).await } else { Ok(None) }
}

/// The id of the installation. `None` if the database is not migrated.
pub async fn installation_id(db: &mut PgConnection) -> sqlx::Result<Option<Uuid>> {
    if store::has_installations(db).await? { store::installation_id(db).await.map(Some) } else { Ok(None) }
}

/// The installation that a process belongs to.
pub struct ClaimedInstallation {
    pub id: Uuid,
    /// The first admin key, if this start created it.
    pub first_admin_key: Option<Secret<String>>,
}

/// Records the secret key of the installation and ensures that there is an admin key. Fails when the database belongs to another
/// secret key.
pub async fn claim_installation(
    db: &PgPool,
    keys: &[MasterKey],
    admin_key_given: bool,
) -> Result<ClaimedInstallation, Error> {
    let fingerprints: Vec<String> = keys.iter().map(MasterKey::fingerprint).collect();
    let current = fingerprints.first().ok_or(Error::OtherSecretKey)?;
    let mut tx = db.begin().await?;
    let known = store::lock_installation(&mut tx, current).await?;
    if !fingerprints.contains(&known.secret_key_fingerprint) {
        return Err(Error::OtherSecretKey);
    }
    if known.secret_key_fingerprint != *current {
        store::set_fingerprint(&mut tx, current).await?;
    }
    let mut first_admin_key = None;
    if !admin_key_given && !store::has_admin_key(&mut tx).await? {
        let new =
            NewKey { name: "first admin".to_owned(), role: Role::Admin, tenant: Tenant::main(), expires_at: None };
        let (key, secret) = generate(new, time::now(&mut tx).await?)?;
        store::insert(&mut tx, &key, digest(secret.reveal())).await?;
        first_admin_key = Some(secret);
    }
    tx.commit().await?;
    Ok(ClaimedInstallation { id: known.id, first_admin_key })
}

fn generate(new: NewKey, now: DateTime<Utc>) -> Result<(ApiKey, Secret<String>), Error> {
    printable(&new.name, NAME_CHARS_MAX).map_err(|error| Error::InvalidName(error.to_string()))?;
    if new.expires_at.is_some_and(|at| at <= now) {
        return Err(Error::ExpiresInThePast);
    }
    let secret = format!("{PREFIX}{}", random_text(RANDOM_CHARS));
    let key = ApiKey {
        id: Uuid::now_v7(),
        name: new.name,
        hint: secret[..HINT_CHARS].to_owned(),
        role: new.role,
        tenant: new.tenant,
        created_at: now,
        expires_at: new.expires_at,
        revoked_at: None,
    };
    Ok((key, Secret::new(secret)))
}

//! `migrate`, `token` and `key`, and how a command finds its database and its secret key.

use std::time::Duration;

use chrono::Utc;
use kit::auth::{Role, Tenant, TokenSigner};
use kit::config::InvalidSetting;
use kit::secret::MasterKey;
use mailbox::database::{self, PoolLimits};
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;
use uuid::Uuid;

use super::Failure;
use super::table::{self, print_line};
use crate::data_dir::DataDir;
use crate::embedded;
use crate::keys::{NewKey, flow};
use crate::pools::check_reachable;
use crate::settings::Settings;

pub(super) async fn migrate(settings: &Settings) -> Result<(), Failure> {
    let data_dir = DataDir::at(&settings.data_dir)?;
    require_database(settings, &data_dir)?;
    let options = database_options(settings, &data_dir)?;
    check_reachable(settings, &options).await?;
    let applied = database::migrate(&options).await?;
    print_line(&match applied.as_slice() {
        [] => "The database's schema is up to date.".to_owned(),
        [only] => format!("Migration {only} is applied. The database's schema is up to date."),
        [first, .., last] => format!("Migrations {first} to {last} are applied. The database's schema is up to date."),
    })?;
    Ok(())
}

pub(super) fn token(settings: &Settings, user: Uuid, role: Option<Role>, ttl_seconds: u32) -> Result<(), Failure> {
    let master = match settings.master_key_given()? {
        Some(key) => key,
        None => DataDir::at(&settings.data_dir)?.secret_key()?,
    };
    let ttl = Duration::from_secs(u64::from(ttl_seconds));
    let token = TokenSigner::new(&master).sign(user, role, Utc::now(), ttl);
    print_line(&token.map_err(|error| Failure::Other(format!("signing: {error}")))?)?;
    Ok(())
}

pub(super) async fn create_key(settings: &Settings, role: Role, tenant: Tenant, name: String) -> Result<(), Failure> {
    let db = connect(settings)?;
    let new = NewKey { name, role, tenant, expires_at: None };
    let (key, secret) = flow::create(&mut *db.acquire().await?, new, Utc::now()).await?;
    // Standard output has only the key, so that a script can read it.
    print_line(secret.reveal()).map_err(|error| {
        let id = key.id;
        Failure::Other(format!(
            "the key was created but could not be printed ({error}); revoke it with `pillarbox key revoke {id}`"
        ))
    })?;
    eprintln!(
        "Created key {} with the role {} in the tenant {}. It is not shown again.",
        key.id,
        key.role,
        key.tenant.as_str()
    );
    Ok(())
}

pub(super) async fn list_keys(settings: &Settings, tenant: Option<Tenant>, json: bool) -> Result<(), Failure> {
    const PAGE: u32 = 100;
    let db = connect(settings)?;
    if !json {
        print_line(&format!(
            "{:36}  {:8}  {:6}  {:12}  {:20}  {:7}  NAME",
            "ID", "HINT", "ROLE", "TENANT", "CREATED", "STATE"
        ))?;
    }
    let mut before = None;
    loop {
        let keys = flow::list(&db, tenant.as_ref(), before, PAGE).await?;
        for key in &keys {
            if json {
                table::print_json(key)?;
                continue;
            }
            let state = match () {
                () if key.revoked_at.is_some() => "revoked",
                () if key.expires_at.is_some_and(|at| at <= Utc::now()) => "expired",
                () => "valid",
            };
            let created = key.created_at.format("%Y-%m-%d %H:%M:%SZ");
            let (role, tenant) = (key.role.as_str(), key.tenant.as_str());
            print_line(&format!(
                "{}  {:8}  {role:6}  {tenant:12}  {created}  {state:7}  {}",
                key.id, key.hint, key.name
            ))?;
        }
        match keys.last() {
            Some(last) if keys.len() == PAGE as usize => before = Some(last.id),
            _ => return Ok(()),
        }
    }
}

pub(super) async fn revoke_key(settings: &Settings, id: Uuid) -> Result<(), Failure> {
    flow::revoke(&connect(settings)?, id, None, Utc::now()).await?;
    print_line(&format!("Key {id} is revoked; all servers refuse it within 2 s."))?;
    Ok(())
}

/// The current secret key first, then the former ones. Creates the key in the data folder if there is none.
pub(super) fn master_keys(settings: &Settings, data_dir: &DataDir) -> Result<Vec<MasterKey>, Failure> {
    let current = match settings.master_key_given()? {
        Some(key) => key,
        None => data_dir.secret_key_or_new()?,
    };
    let mut keys = vec![current];
    keys.extend(settings.previous_master_keys()?);
    Ok(keys)
}

/// PostgreSQL itself: the configured one, or the private one of the data folder.
pub(super) fn database_options(settings: &Settings, data_dir: &DataDir) -> Result<PgConnectOptions, InvalidSetting> {
    Ok(settings.database()?.unwrap_or_else(|| embedded::connect_options(data_dir)))
}

/// Fails when the command needs the private PostgreSQL and no server runs it.
fn require_database(settings: &Settings, data_dir: &DataDir) -> Result<(), Failure> {
    if settings.database_url.is_some() || data_dir.holder().is_some() {
        return Ok(());
    }
    let folder = data_dir.path().display();
    Err(Failure::Other(format!(
        "no server runs in the data folder {folder}: start `pillarbox up` with this --data-dir first, or set --database-url"
    )))
}

/// A pool for one command. Fails when there is no database to connect to.
pub(super) fn connect(settings: &Settings) -> Result<PgPool, Failure> {
    let data_dir = DataDir::at(&settings.data_dir)?;
    require_database(settings, &data_dir)?;
    Ok(pool(database_options(settings, &data_dir)?))
}

pub(super) fn pool(options: PgConnectOptions) -> PgPool {
    database::pool(options, PoolLimits { connections_min: 0, connections_max: 2, ..PoolLimits::default() })
}

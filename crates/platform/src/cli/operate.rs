//! The commands for operators: they run beside a server and end.

use std::io::Write;
use std::time::Duration;

use chrono::Utc;
use kit::auth::{Role, Tenant, TokenSigner};
use kit::config::BadSetting;
use kit::secret::MasterKey;
use mailbox::database::{self, PoolLimits};
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;
use uuid::Uuid;

use super::{Failure, table};
use crate::app;
use crate::data_dir::DataDir;
use crate::embedded;
use crate::keys::{NewKey, flow};
use crate::settings::Settings;

pub(super) async fn migrate(settings: &Settings) -> Result<(), Failure> {
    let data_dir = DataDir::at(&settings.data_dir)?;
    require_database(settings, &data_dir)?;
    let options = database_options(settings, &data_dir)?;
    app::reach(settings, &options).await?;
    let applied = database::migrate(&options).await?;
    say(&match applied.as_slice() {
        [] => "The database's schema is up to date.".to_owned(),
        [only] => format!("Migration {only} is applied: the database's schema is up to date."),
        [first, .., last] => format!("Migrations {first} to {last} are applied: the database's schema is up to date."),
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
    say(&token.map_err(|error| Failure::Other(format!("signing: {error}")))?)?;
    Ok(())
}

pub(super) async fn create_key(settings: &Settings, role: Role, tenant: Tenant, name: String) -> Result<(), Failure> {
    let db = connect(settings)?;
    let new = NewKey { name, role, tenant, expires_at: None };
    let (key, secret) = flow::create(&mut *db.acquire().await?, new, Utc::now()).await?;
    // The key alone on standard output, so that a script can take it.
    say(secret.reveal()).map_err(|error| {
        let id = key.id;
        Failure::Other(format!(
            "the key was made, but could not be shown ({error}); revoke it: pillarbox key revoke {id}"
        ))
    })?;
    eprintln!("key {} with the role {} in tenant {}; it is not shown again", key.id, key.role, key.tenant.as_str());
    Ok(())
}

pub(super) async fn list_keys(settings: &Settings, tenant: Option<Tenant>, json: bool) -> Result<(), Failure> {
    const PAGE: u32 = 100;
    let db = connect(settings)?;
    if !json {
        say(&format!(
            "{:36}  {:8}  {:6}  {:12}  {:20}  {:7}  NAME",
            "ID", "HINT", "ROLE", "TENANT", "CREATED", "STATE"
        ))?;
    }
    let mut before = None;
    loop {
        let keys = flow::list(&db, tenant.as_ref(), before, PAGE).await?;
        for key in &keys {
            if json {
                table::json(key)?;
                continue;
            }
            let state = match () {
                () if key.revoked_at.is_some() => "revoked",
                () if key.expires_at.is_some_and(|at| at <= Utc::now()) => "expired",
                () => "good",
            };
            let created = key.created_at.format("%Y-%m-%d %H:%M:%SZ");
            let (role, tenant) = (key.role.as_str(), key.tenant.as_str());
            say(&format!("{}  {:8}  {role:6}  {tenant:12}  {created}  {state:7}  {}", key.id, key.hint, key.name))?;
        }
        match keys.last() {
            Some(last) if keys.len() == PAGE as usize => before = Some(last.id),
            _ => return Ok(()),
        }
    }
}

pub(super) async fn revoke_key(settings: &Settings, id: Uuid) -> Result<(), Failure> {
    flow::revoke(&connect(settings)?, id, None, Utc::now()).await?;
    say(&format!("Key {id} is revoked; servers refuse it within 2 s."))?;
    Ok(())
}

/// The current key first, then those it replaced.
pub(super) fn master_keys(settings: &Settings, data_dir: &DataDir) -> Result<Vec<MasterKey>, Failure> {
    let current = match settings.master_key_given()? {
        Some(key) => key,
        None => data_dir.secret_key_or_new()?,
    };
    let mut keys = vec![current];
    keys.extend(settings.previous_master_keys()?);
    Ok(keys)
}

pub(super) fn database_options(settings: &Settings, data_dir: &DataDir) -> Result<PgConnectOptions, BadSetting> {
    Ok(settings.database()?.unwrap_or_else(|| embedded::connect_options(data_dir)))
}

fn require_database(settings: &Settings, data_dir: &DataDir) -> Result<(), Failure> {
    if settings.database_url.is_some() || data_dir.holder().is_some() {
        return Ok(());
    }
    let folder = data_dir.path().display();
    Err(Failure::Other(format!(
        "no server runs from {folder}: start `pillarbox up` with this --data-dir first, or give --database-url"
    )))
}

pub(super) fn connect(settings: &Settings) -> Result<PgPool, Failure> {
    let data_dir = DataDir::at(&settings.data_dir)?;
    require_database(settings, &data_dir)?;
    Ok(pool(database_options(settings, &data_dir)?))
}

pub(super) fn pool(options: PgConnectOptions) -> PgPool {
    database::pool(options, PoolLimits { connections_min: 0, connections_max: 2, ..PoolLimits::default() })
}

/// One line on standard output; `println!` would panic when nobody reads it.
pub(super) fn say(line: &str) -> Result<(), std::io::Error> {
    writeln!(std::io::stdout(), "{line}")
}

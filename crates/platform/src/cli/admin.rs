//! `migrate`, `token`, `key` and `user`.

use std::time::Duration;

use chrono::Utc;
use identity::{SetRoleError, UserRole};
use kit::auth::{Role, Tenant, TokenSigner};
use mailbox::database::{self, LockHolder, LockWait};
use uuid::Uuid;

use super::Failure;
use super::installation::{check_installation, connect, database_options, pool, require_database};
use super::table::{self, print_line};
use crate::data_dir::DataDir;
use crate::keys::{NewKey, flow};
use crate::pools::check_reachable;
use crate::settings::Settings;
use crate::tenants::flow::adopt;

/// Applies the missing migrations. Fails if the database cannot be reached or a migration fails.
pub(super) async fn migrate(settings: &Settings) -> Result<(), Failure> {
    let data_dir = DataDir::at(&settings.data_dir)?;
    require_database(settings, &data_dir)?;
    let options = database_options(settings, &data_dir)?;
    check_reachable(settings, &options).await?;
    let report = |holder: &LockHolder| eprintln!("waiting for the lock of migrations, held by {holder}");
    let applied = database::migrate_reporting(&options, LockWait::default(), report).await?;
    adopt(&pool(options)).await?;
    print_line(&match applied.as_slice() {
        [] => "The database's schema is up to date.".to_owned(),
        [only] => format!("Migration {only} is applied. The database's schema is up to date."),
        [first, .., last] => format!("Migrations {first} to {last} are applied. The database's schema is up to date."),
    })?;
    Ok(())
}

/// Prints a token. Fails if the installation has no secret key yet.
pub(super) fn token(settings: &Settings, user: Uuid, role: Option<Role>, ttl: Duration) -> Result<(), Failure> {
    let secret_key = match settings.master_key_given()? {
        Some(key) => key,
        None => {
            let data_dir = DataDir::at(&settings.data_dir)?;
            check_installation(settings, &data_dir)?;
            data_dir.secret_key()?
        }
    };
    let signer = TokenSigner::new(&secret_key);
    let signer = match &settings.public_url {
        Some(address) => signer.with_issuer(address),
        None => signer,
    };
    let token = signer.sign(user, role, Utc::now(), ttl);
    print_line(&token.map_err(|error| Failure::Other(format!("the token cannot be signed: {error}")))?)?;
    Ok(())
}

/// Creates a key and prints it. Fails if the name is invalid or the key cannot be stored or printed.
pub(super) async fn create_key(settings: &Settings, role: Role, tenant: Tenant, name: String) -> Result<(), Failure> {
    let db = connect(settings)?;
    let new = NewKey { name, role, tenant, expires_at: None };
    let mut tx = db.begin().await?;
    let (key, secret) = flow::create(&mut tx, new).await?;
    tx.commit().await?;
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

/// Prints the keys. Fails if the database cannot be reached.
pub(super) async fn list_keys(settings: &Settings, tenant: Option<Tenant>, json: bool) -> Result<(), Failure> {
    const PAGE: u32 = 100;
    let db = connect(settings)?;
    if !json {
        print_line(&format!(
            "{:36}  {:8}  {:6}  {:12}  {:20}  {:7}  NAME",
            "ID", "HINT", "ROLE", "TENANT", "CREATED", "STATE"
        ))?;
    }
    let (mut before, now) = (None, database::time::now(&mut *db.acquire().await?).await?);
    loop {
        let keys = flow::list(&db, tenant.as_ref(), before, PAGE).await?;
        for key in &keys {
            if json {
                table::print_json(key)?;
                continue;
            }
            let state = match () {
                () if key.revoked_at.is_some() => "revoked",
                () if key.expires_at.is_some_and(|at| at <= now) => "expired",
                () => "valid",
            };
            let created = table::format_time(key.created_at);
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

/// Revokes a key. Fails if it does not exist.
pub(super) async fn revoke_key(settings: &Settings, id: Uuid) -> Result<(), Failure> {
    flow::revoke(&connect(settings)?, id, None).await?;
    print_line(&format!("Key {id} is revoked; all servers refuse it within 2 s."))?;
    Ok(())
}

/// Sets the role of a user. Fails if no account has the address.
pub(super) async fn set_role(settings: &Settings, email: &str, role: UserRole) -> Result<(), Failure> {
    let id = identity::set_role(&connect(settings)?, email, role).await.map_err(|error| match error {
        SetRoleError::Database(cause) => Failure::Database(cause),
        other => Failure::Other(other.to_string()),
    })?;
    print_line(&match role {
        UserRole::Admin => format!("User {id} is an admin; sign in again, or refresh the tokens, to use the role."),
        UserRole::User => {
            format!("User {id} is no admin, and is signed out; tokens of the former role end within 5 min.")
        }
    })?;
    Ok(())
}

/// Requests that the contacts of all verified users are announced again. Fails if the database cannot be reached.
pub(super) async fn announce_users(settings: &Settings) -> Result<(), Failure> {
    let users = identity::announce_all_again(&connect(settings)?).await?;
    print_line(&format!(
        "{} announced again, as soon as a process runs the service identity with the role maintain.",
        table::count(users, "user is", "users are")
    ))?;
    Ok(())
}

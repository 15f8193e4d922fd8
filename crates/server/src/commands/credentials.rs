//! `token`, `key create` and `user`.

use std::time::Duration;

use admin::keys::{NewKey, flow};
use chrono::Utc;
use cli::table::{self, print_line, print_note};
use http_kit::auth::{Role, TokenSigner};
use identity::{SetRoleError, UserRole};
use pillarbox::log::Tenant;
use uuid::Uuid;

use super::Failure;
use super::installation::{check_installation, connect};
use crate::data_dir::DataDir;
use crate::settings::Settings;

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
    print_note(&format!(
        "Created key {} with the role {} in the tenant {}. It is not shown again.",
        key.id,
        key.role,
        key.tenant.as_str()
    ));
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
            format!("User {id} is not an admin, and is signed out; tokens of the former role end within 5 min.")
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

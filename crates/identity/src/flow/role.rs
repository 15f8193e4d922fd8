//! Users as operators see them, and their roles.

use chrono::{DateTime, Utc};
use sqlx::PgPool;
use uuid::Uuid;

use super::{EndedSessions, Tx};
use crate::Identity;
use crate::domain::{Account, Role};
use crate::error::Error;
use crate::store::audit::{self, AuditAction};
use crate::store::{account as store, session};

/// The accounts whose address begins with `prefix`, newest first.
pub(crate) async fn list(
    identity: &Identity,
    prefix: Option<&str>,
    before: Option<Uuid>,
    limit: u32,
) -> Result<Vec<Account>, Error> {
    Ok(store::list(&mut *identity.db.acquire().await?, prefix, before, limit).await?)
}

/// Sets the role of a user. New tokens have it. A user who is no longer an admin is signed out, so that no token with the
/// former role is renewed.
pub(crate) async fn set(
    tx: &mut Tx<'_>,
    user: Uuid,
    role: Role,
    actor: &str,
    ended: &EndedSessions,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let account = store::lock(tx, user).await?.ok_or(Error::UserNotFound)?;
    if account.role == role {
        return Ok(());
    }
    let action = match role {
        Role::Admin => AuditAction::RoleGranted,
        Role::User => AuditAction::RoleWithdrawn,
    };
    if role == Role::User {
        ended.add(session::delete_of_user(tx, user).await?);
    }
    audit::insert(tx, user, action, actor, now).await?;
    store::update(tx, &Account { role, updated_at: now, version: account.version + 1, ..account }).await?;
    Ok(())
}

/// The reason why a command could not set a role.
#[derive(Debug, thiserror::Error)]
pub enum SetRoleError {
    #[error("{0}")]
    InvalidAddress(String),
    #[error("no account has this address")]
    NoAccount,
    #[error("the database failed: {0}")]
    Database(#[from] sqlx::Error),
    #[error("{0}")]
    Other(String),
}

/// Sets the role of the user with this address, for the command line. Returns the id of the user.
pub async fn set_role(db: &PgPool, email: &str, role: Role) -> Result<Uuid, SetRoleError> {
    let normalised = crate::fields::email(email).map_err(|errors| {
        let details = errors.into_iter().map(|(_, detail)| detail);
        SetRoleError::InvalidAddress(format!("the address {}", details.collect::<Vec<_>>().join("; ")))
    })?;
    let mut tx = db.begin().await?;
    let now = pillarbox::database::time::now(&mut tx).await?;
    let account = store::lock_by_email(&mut tx, &normalised).await?.ok_or(SetRoleError::NoAccount)?;
    set(&mut tx, account.id, role, "command", &EndedSessions::default(), now).await.map_err(|error| match error {
        Error::Database(cause) => SetRoleError::Database(cause),
        other => SetRoleError::Other(other.to_string()),
    })?;
    tx.commit().await?;
    Ok(account.id)
}

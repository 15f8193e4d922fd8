//! Accounts with a password and a contact, inserted as identity and notify would have them.

use argon2::{Argon2, PasswordHasher};
use sqlx::PgPool;
use uuid::Uuid;

use crate::Outcome;

pub(super) const PASSWORD: &str = "correct horse battery staple";

/// The e-mail address of an account.
pub(super) fn address(account: Uuid) -> String {
    format!("user-{}@example.org", account.as_u128())
}

/// Inserts verified accounts, all with the same password.
pub(super) async fn insert_accounts(db: &PgPool, accounts: &[Uuid]) -> Outcome<()> {
    let hash = Argon2::default().hash_password(PASSWORD.as_bytes()).map_err(|error| error.to_string())?.to_string();
    let addresses: Vec<String> = accounts.iter().map(|account| address(*account)).collect();
    sqlx::query(
        "insert into pillarbox_identity.account
             (id, email, name, locale, password_hash, verified_at, created_at, updated_at, announced_version)
         select id, address, 'User', 'en', $3, now(), now(), now(), 1
         from unnest($1::uuid[], $2::text[]) as account (id, address)",
    )
    .bind(accounts)
    .bind(&addresses)
    .bind(hash)
    .execute(db)
    .await?;
    sqlx::query(
        "insert into pillarbox_notify.contact (user_id, email, name, locale, version)
         select id, address, 'User', 'en', 1 from unnest($1::uuid[], $2::text[]) as account (id, address)",
    )
    .bind(accounts)
    .bind(&addresses)
    .execute(db)
    .await?;
    Ok(())
}

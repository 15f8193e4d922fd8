//! Changing and resetting passwords.

use chrono::{DateTime, Utc};
use runtime::secret::Secret;

use super::contact::announce;
use super::email::{Notice, send_notice};
use super::login::{confirm_password, open_session};
use super::throttle::LOGIN_ACCOUNT;
use super::{ClientInfo, EndedSessions, Tx};
use crate::Identity;
use crate::domain::{Account, TokenKind};
use crate::error::Error;
use crate::fields::{Checks, new_password};
use crate::hash_pool::HashCaller;
use crate::store::{account as store, one_time_token, session, throttle};
use crate::view::Tokens;

/// The current and the new password of a request.
pub(crate) struct PasswordChange {
    pub(crate) current: Secret<String>,
    pub(crate) new: Secret<String>,
}

/// A change of a password whose current one was verified, to be used in the transaction that follows.
pub(crate) struct VerifiedChange {
    account: Account,
    password_hash: String,
    user_agent: Option<String>,
}

/// Verifies the current password and hashes the new one. Fails if the current one is wrong, or the new one is not acceptable.
pub(crate) async fn verify_change(
    identity: &Identity,
    account: Account,
    change: PasswordChange,
    client: ClientInfo,
) -> Result<VerifiedChange, Error> {
    let new = checked(&change.new, &account)?;
    let caller = confirm_password(identity, &account, change.current, &client).await?;
    let password_hash = identity.hashes.hash(caller, new).await?;
    Ok(VerifiedChange { account, password_hash, user_agent: client.user_agent })
}

/// Changes the password of a user who is signed in. All their sessions end, and a new one begins: a copied refresh token cannot
/// be used afterwards.
pub(crate) async fn change(
    identity: &Identity,
    tx: &mut Tx<'_>,
    verified: VerifiedChange,
    ended: &EndedSessions,
    now: DateTime<Utc>,
) -> Result<Tokens, Error> {
    let VerifiedChange { account, password_hash, user_agent } = verified;
    let current = store::lock(tx, account.id).await?.ok_or(Error::SessionEnded)?;
    // Another change of the password came first.
    if current.password_hash != account.password_hash {
        return Err(Error::WrongPassword);
    }
    let saved = save(tx, current, password_hash, now).await?;
    ended.add(session::delete_of_user(tx, account.id).await?);
    open_session(identity, tx, &saved, user_agent, ended, now).await
}

/// A new password, to be set in the transaction that follows.
pub(crate) struct PreparedReset {
    password: Secret<String>,
    /// The digest of the token, and the hash of the password; None if the token is not valid.
    token_and_hash: Option<([u8; 32], String)>,
    network: [u8; 32],
}

/// Hashes a new password. Fails if it is not acceptable.
pub(crate) async fn prepare_reset(
    identity: &Identity,
    digest: Option<[u8; 32]>,
    password: Secret<String>,
    client: &ClientInfo,
) -> Result<PreparedReset, Error> {
    let checked = checked_alone(&password)?;
    // Without a valid token no hash is computed, because any client could occupy the threads. The transaction refuses the
    // request, unless it is a repeat.
    let network = identity.digests.of_network(client.network);
    let token_and_hash = match digest {
        Some(digest) if is_valid(identity, &digest).await? => {
            let caller = HashCaller { network, account: digest };
            Some((digest, identity.hashes.hash(caller, checked).await?))
        }
        _ => None,
    };
    Ok(PreparedReset { password, token_and_hash, network })
}

/// Sets a new password with the token of an e-mail, and ends all sessions of the user. The token also proves that the user
/// reads the address, and that the client's network is one of theirs. Fails if the token is not valid, or the password is not acceptable.
pub(crate) async fn reset(
    identity: &Identity,
    tx: &mut Tx<'_>,
    prepared: PreparedReset,
    ended: &EndedSessions,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let (token, password_hash) = prepared.token_and_hash.ok_or(Error::TokenNotFound)?;
    let kind = TokenKind::PasswordReset;
    let user = one_time_token::find(tx, kind, &token, now).await?.ok_or(Error::TokenNotFound)?;
    // The account first, as everywhere: two transactions that lock in another order can deadlock.
    let account = store::lock(tx, user).await?.ok_or(Error::TokenNotFound)?;
    checked(&prepared.password, &account)?;
    one_time_token::consume(tx, kind, &token, now).await?.ok_or(Error::TokenNotFound)?;
    let (was_verified, verified_at) = (account.verified_at.is_some(), account.verified_at.or(Some(now)));
    let saved = save(tx, Account { verified_at, ..account }, password_hash, now).await?;
    if !was_verified {
        announce(tx, &[&saved], now).await?;
    }
    ended.add(session::delete_of_user(tx, user).await?);
    forgive(identity, tx, &saved, &prepared.network, now).await
}

/// Whether the token can be used now.
async fn is_valid(identity: &Identity, digest: &[u8; 32]) -> Result<bool, Error> {
    let mut db = identity.db.acquire().await?;
    Ok(one_time_token::find(&mut db, TokenKind::PasswordReset, digest, identity.clock.now()).await?.is_some())
}

/// Forgets the failed sign-ins of a user who has proved to read the address, and remembers the network. Otherwise strangers
/// who guess passwords would lock out the user who has just set a new one.
async fn forgive(
    identity: &Identity,
    tx: &mut Tx<'_>,
    account: &Account,
    network: &[u8; 32],
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let (everywhere, here) =
        (identity.digests.of_email(&account.email), identity.digests.of_email_in(&account.email, network));
    throttle::delete(tx, &[LOGIN_ACCOUNT], &[everywhere, here]).await?;
    Ok(store::remember_network(tx, account.id, network, now).await?)
}

/// Saves the hash and tells the user. Tokens that were sent before are no longer valid.
async fn save(tx: &mut Tx<'_>, account: Account, password_hash: String, now: DateTime<Utc>) -> Result<Account, Error> {
    let version = account.version + 1;
    let changed = Account { password_hash, needs_password: false, updated_at: now, version, ..account };
    store::update(tx, &changed).await?;
    one_time_token::delete_of_user(tx, changed.id).await?;
    send_notice(tx, &changed, Notice::PasswordChanged, now).await?;
    Ok(changed)
}

fn checked(password: &Secret<String>, account: &Account) -> Result<Secret<String>, Error> {
    let mut checks = Checks::default();
    let checked = checks.check("/new_password", new_password(password, &account.email, &account.name));
    checks.finish(checked).map_err(Error::Invalid)
}

/// Checks a new password before its user is known.
fn checked_alone(password: &Secret<String>) -> Result<Secret<String>, Error> {
    let mut checks = Checks::default();
    let checked = checks.check("/new_password", new_password(password, "", ""));
    checks.finish(checked).map_err(Error::Invalid)
}

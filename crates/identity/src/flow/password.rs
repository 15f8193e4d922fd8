//! Changing and resetting passwords.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use http::StatusCode;
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::problem::Problem;
use runtime::secret::Secret;
use service::idempotency::{StoreResponse, run_once};

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

/// The current and the new password of a request.
pub(crate) struct PasswordChange {
    pub(crate) current: Secret<String>,
    pub(crate) new: Secret<String>,
}

/// Changes the password of a user who is signed in. All their sessions end, and a new one begins: whoever has copied a
/// refresh token cannot use it afterwards. Fails if the current password is
/// wrong, or the new one is not acceptable.
pub(crate) async fn change(
    identity: &Arc<Identity>,
    account: Account,
    change: PasswordChange,
    client: ClientInfo,
    request: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let new = checked(&change.new, &account)?;
    let caller = confirm_password(identity, &account, change.current, &client).await?;
    let password_hash = identity.hashes.hash(caller, new).await.map_err(Error::from)?;
    let (owner, ended, now) = (identity.clone(), EndedSessions::default(), identity.clock.now());
    let ends = ended.clone();
    let changed = run_once(&identity.db, request.as_ref(), StoreResponse::WithoutBody, |tx| {
        Box::pin(async move {
            let current = store::lock(tx, account.id).await.map_err(Error::from)?.ok_or(Error::SessionEnded)?;
            // Another change of the password came first.
            if current.password_hash != account.password_hash {
                return Err(Error::WrongPassword.into());
            }
            let saved = save(tx, current, password_hash, now).await?;
            ends.add(session::delete_of_user(tx, account.id).await.map_err(Error::from)?);
            let tokens = open_session(&owner, tx, &saved, (client.user_agent, now), &ends).await?;
            let next_step = "sign in with the new password";
            Ok(StoredResponse::json(StatusCode::OK, &tokens).shown_once(next_step))
        })
    });
    let response = changed.await?;
    ended.apply(&identity.tokens);
    Ok(response)
}

/// Sets a new password with the token of an e-mail, and ends all sessions of the user. The token also proves that the user
/// reads the address, and that the client's network is one of theirs. Fails if the token is not valid, or the password is not acceptable.
pub(crate) async fn reset(
    identity: &Arc<Identity>,
    digest: Option<[u8; 32]>,
    new: Secret<String>,
    client: &ClientInfo,
    request: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let password = checked_alone(&new)?;
    // Without a valid token no hash is computed: anybody could occupy the threads. The transaction refuses the request, unless
    // it is a repeat.
    let network = identity.digests.of_network(client.network);
    let caller = HashCaller { network, account: digest.unwrap_or_default() };
    let password_hash = match is_valid(identity, digest).await? {
        true => Some(identity.hashes.hash(caller, password).await.map_err(Error::from)?),
        false => None,
    };
    let (owner, ended, now) = (identity.clone(), EndedSessions::default(), identity.clock.now());
    let ends = ended.clone();
    let reset = run_once(&identity.db, request.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let (token, password_hash) = digest.zip(password_hash).ok_or(Error::TokenNotFound)?;
            let token = (TokenKind::PasswordReset, &token);
            let user = one_time_token::find(tx, token, now).await.map_err(Error::from)?.ok_or(Error::TokenNotFound)?;
            // The account first, as everywhere: two transactions that lock in another order can deadlock.
            let account = store::lock(tx, user).await.map_err(Error::from)?.ok_or(Error::TokenNotFound)?;
            checked(&new, &account)?;
            let consumed = one_time_token::consume(tx, token, now).await.map_err(Error::from)?;
            consumed.ok_or(Error::TokenNotFound)?;
            let (was_verified, verified_at) = (account.verified_at.is_some(), account.verified_at.or(Some(now)));
            let saved = save(tx, Account { verified_at, ..account }, password_hash, now).await?;
            if !was_verified {
                announce(tx, &[&saved], now).await?;
            }
            ends.add(session::delete_of_user(tx, user).await.map_err(Error::from)?);
            forgive(&owner, tx, &saved, &network, now).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    });
    let response = reset.await?;
    ended.apply(&identity.tokens);
    Ok(response)
}

/// Whether the token can be used now.
async fn is_valid(identity: &Identity, digest: Option<[u8; 32]>) -> Result<bool, Error> {
    let Some(digest) = digest else { return Ok(false) };
    let mut db = identity.db.acquire().await?;
    Ok(one_time_token::find(&mut db, (TokenKind::PasswordReset, &digest), identity.clock.now()).await?.is_some())
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

/// Checks a new password before it is known whose it is.
fn checked_alone(password: &Secret<String>) -> Result<Secret<String>, Error> {
    let mut checks = Checks::default();
    let checked = checks.check("/new_password", new_password(password, "", ""));
    checks.finish(checked).map_err(Error::Invalid)
}

//! Signing in.

use chrono::{DateTime, TimeDelta, Utc};
use runtime::secret::Secret;
use uuid::Uuid;

use super::throttle::{check, confirmation_subject, count_if_allowed, login_subjects};
use super::{ClientInfo, EndedSessions, Tx};
use crate::Identity;
use crate::domain::{Account, Session};
use crate::error::Error;
use crate::hash_pool::{HashCaller, Verified};
use crate::secrets::NewToken;
use crate::store::throttle::Subject;
use crate::store::{account as store, session};
use crate::view::Tokens;

/// The number of sessions that a user may have. The oldest ones end.
const SESSIONS_MAX: i64 = 100;

/// An address and a password, both normalised.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub(crate) email: String,
    pub(crate) password: Secret<String>,
}

/// Verified credentials, to be used in the transaction that follows.
pub(crate) struct VerifiedLogin {
    account: Account,
    /// The hash with the current parameters, if the stored one has others.
    new_hash: Option<String>,
    subjects: [Subject; 2],
    network: [u8; 32],
    user_agent: Option<String>,
}

/// Verifies credentials. The answers to an unknown address and to a wrong password, and their times, do not differ: the same
/// statements run, and a hash is computed that costs as much as that of some account. Fails if the credentials are wrong, or a
/// limit is reached.
pub(crate) async fn verify(
    identity: &Identity,
    credentials: Credentials,
    client: ClientInfo,
) -> Result<VerifiedLogin, Error> {
    let Credentials { email, password } = credentials;
    let _entered = identity.hashes.enter(client.network).await?;
    let network = identity.digests.of_network(client.network);
    let (found, stand_in, subjects) = {
        let mut db = identity.db.acquire().await?;
        let found = store::find_for_login(&mut db, &email, &network).await?;
        let is_known = found.as_ref().is_some_and(|found| found.is_network_known);
        let subjects = login_subjects(identity, &email, &network, is_known);
        check(&mut db, &subjects, identity.clock.now()).await?;
        // Hashes with former parameters take another time. So an unknown address is treated like some account, always like the
        // same one: no address takes a time that only accounts take.
        let stand_in = store::password_hash_at(&mut db, identity.digests.fraction_of_email(&email)).await?;
        (found.map(|found| found.account), stand_in, subjects)
    };
    // A known network has a separate share, as it has a separate count.
    let caller = HashCaller { network, account: subjects[0].digest };
    let verified = match &found {
        Some(account) => Some(identity.hashes.verify(caller, password.clone(), &account.password_hash).await?),
        None => {
            identity.hashes.verify_nothing(caller, password.clone(), stand_in.as_deref()).await?;
            None
        }
    };
    let (Some(account), Some(Verified { is_correct: true, is_outdated })) = (found, verified) else {
        return Err(count_failure(identity, &subjects).await.unwrap_or_else(|error| error));
    };
    // Without a new hash the old one stays valid, so a full queue does not refuse the user.
    let new_hash = if is_outdated { identity.hashes.hash(caller, password).await.ok() } else { None };
    Ok(VerifiedLogin { account, new_hash, subjects, network, user_agent: client.user_agent })
}

/// Counts a failed sign-in. Returns the error for the caller.
async fn count_failure<const COUNT: usize>(identity: &Identity, subjects: &[Subject; COUNT]) -> Result<Error, Error> {
    metrics::counter!("pillarbox_identity_logins_total", "outcome" => "failure").increment(1);
    let now = identity.clock.now();
    let mut tx = identity.db.begin().await?;
    // Concurrent attempts may all have passed the first check. Those above the limit learn nothing.
    match count_if_allowed(&mut tx, subjects, now).await {
        Ok(()) => tx.commit().await?,
        Err(limited) => return Ok(limited),
    }
    Ok(Error::WrongCredentials)
}

/// Checks the password of a user who is signed in, for a change that needs it. Wrong ones count against a limit of
/// the user. Returns the caller that the hashes of the request count for.
pub(crate) async fn confirm_password(
    identity: &Identity,
    account: &Account,
    password: Secret<String>,
    client: &ClientInfo,
) -> Result<HashCaller, Error> {
    let _entered = identity.hashes.enter(client.network).await?;
    let subjects = confirmation_subject(identity, account.id);
    let caller = HashCaller {
        network: identity.digests.of_network(client.network),
        account: identity.digests.of_user(account.id),
    };
    check(&mut *identity.db.acquire().await?, &subjects, identity.clock.now()).await?;
    let verified = identity.hashes.verify(caller, password, &account.password_hash).await?;
    if verified.is_correct {
        // A correct guess among many concurrent ones, which all have passed the first check: the others have been counted by
        // now, or are being counted, one after the other.
        let mut counting = identity.db.begin().await?;
        count_if_allowed(&mut counting, &subjects, identity.clock.now()).await?;
        counting.rollback().await?;
        return Ok(caller);
    }
    match count_failure(identity, &subjects).await? {
        Error::WrongCredentials => Err(Error::WrongPassword),
        limited => Err(limited),
    }
}

/// Starts a session. Fails if the credentials are no longer right, a limit is reached, or the address is not verified.
pub(crate) async fn start_session(
    identity: &Identity,
    tx: &mut Tx<'_>,
    verified: VerifiedLogin,
    ended: &EndedSessions,
    now: DateTime<Utc>,
) -> Result<Tokens, Error> {
    let VerifiedLogin { account, new_hash, subjects, network, user_agent } = verified;
    // A correct guess among many concurrent ones: the others have been counted by now.
    check(tx, &subjects, now).await?;
    let current = store::lock(tx, account.id).await?.ok_or(Error::WrongCredentials)?;
    if current.needs_password {
        return Err(Error::WrongCredentials);
    }
    // The password was changed while it was verified, which has ended all sessions, or another sign-in has hashed it again.
    if current.password_hash != account.password_hash {
        return Err(Error::HashReplaced);
    }
    if current.verified_at.is_none() {
        return Err(Error::NotVerified);
    }
    if let Some(password_hash) = new_hash {
        store::update(tx, &Account { password_hash, ..current.clone() }).await?;
    }
    store::remember_network(tx, current.id, &network, now).await?;
    open_session(identity, tx, &current, user_agent, ended, now).await
}

/// Creates a session of a locked account, with its first tokens.
pub(super) async fn open_session(
    identity: &Identity,
    tx: &mut Tx<'_>,
    account: &Account,
    user_agent: Option<String>,
    ended: &EndedSessions,
    now: DateTime<Utc>,
) -> Result<Tokens, Error> {
    let expires_at = now + TimeDelta::days(i64::from(identity.settings.session_days));
    let session = Session { id: Uuid::now_v7(), user_id: account.id, user_agent, created_at: now, expires_at };
    session::insert(tx, &session).await?;
    let token = NewToken::generate();
    session::insert_token(tx, session.id, &token.digest, None, token_expiry(identity, &session, now)).await?;
    ended.add(session::delete_oldest(tx, account.id, SESSIONS_MAX).await?);
    tokens(identity, account, session.id, token, now)
}

/// When a new refresh token expires: not after its session.
pub(super) fn token_expiry(identity: &Identity, session: &Session, now: DateTime<Utc>) -> DateTime<Utc> {
    session.expires_at.min(now + TimeDelta::days(i64::from(identity.settings.refresh_token_days)))
}

/// Signs the access token of a session.
pub(super) fn tokens(
    identity: &Identity,
    account: &Account,
    session: Uuid,
    refresh_token: NewToken,
    now: DateTime<Utc>,
) -> Result<Tokens, Error> {
    let seconds = identity.settings.access_token_seconds;
    let ttl = std::time::Duration::from_secs(u64::from(seconds));
    let signed = identity.signer.sign_for_session(account.id, account.role.in_token(), session, now, ttl);
    let access_token = signed.map_err(|_| Error::Unsignable)?;
    Ok(Tokens {
        access_token: Secret::new(access_token),
        refresh_token: refresh_token.text,
        token_type: "Bearer",
        expires_in: seconds,
    })
}

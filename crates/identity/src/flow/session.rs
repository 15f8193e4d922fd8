//! Refreshing, listing and ending sessions.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::login::{token_expiry, tokens};
use super::{EndedSessions, Tx};
use crate::Identity;
use crate::domain::{Account, Refresh, SessionView, refresh};
use crate::error::Error;
use crate::secrets::NewToken;
use crate::store::{account, session as store};
use crate::view::Tokens;

/// Exchanges a refresh token for new tokens. Fails if it is unknown or has expired. A token that was used before ends the
/// session, except shortly after it was replaced; the caller commits this in spite of the error.
pub(crate) async fn exchange(
    identity: &Identity,
    tx: &mut Tx<'_>,
    digest: Option<[u8; 32]>,
    ended: &EndedSessions,
    now: DateTime<Utc>,
) -> Result<Tokens, Error> {
    let digest = digest.ok_or(Error::InvalidRefreshToken)?;
    let session = store::lock_by_token(tx, &digest).await?.ok_or(Error::InvalidRefreshToken)?;
    let token = store::find_token(tx, &digest, session.id).await?.ok_or(Error::InvalidRefreshToken)?;
    match refresh(token, &session, identity.settings.refresh_grace(), now) {
        Refresh::Exchange | Refresh::Repeat => {}
        Refresh::Expired => return Err(Error::InvalidRefreshToken),
        Refresh::Reused => {
            store::delete(tx, session.user_id, session.id).await?;
            ended.add([session.id]);
            metrics::counter!("pillarbox_identity_reused_tokens_total").increment(1);
            tracing::warn!(session = %session.id, "a refresh token was used again; its session has ended");
            return Err(Error::RefreshTokenReused);
        }
    }
    // The role may have changed since the last token was signed.
    let account = account::find_by_session(tx, session.user_id, session.id, now).await?;
    let account = account.ok_or(Error::InvalidRefreshToken)?;
    store::replace_current(tx, session.id, now).await?;
    let new = NewToken::generate();
    store::insert_token(tx, session.id, &new.digest, Some(&digest), token_expiry(identity, &session, now)).await?;
    tokens(identity, &account, session.id, new, now)
}

/// Finds the account of a live session: the session was not ended, and the account was not deleted, in any process.
pub(crate) async fn find_account(identity: &Identity, user: Uuid, session: Uuid) -> Result<Account, Error> {
    let mut db = identity.db.acquire().await?;
    let found = account::find_by_session(&mut db, user, session, identity.clock.now()).await?;
    found.ok_or(Error::SessionEnded)
}

/// The live sessions of a user, newest first.
pub(crate) async fn list(
    identity: &Identity,
    user: Uuid,
    before: Option<(DateTime<Utc>, Uuid)>,
    limit: u32,
) -> Result<Vec<SessionView>, Error> {
    Ok(store::list(&mut *identity.db.acquire().await?, user, identity.clock.now(), before, limit).await?)
}

/// Ends one session of a user. Fails if there is none with this id.
pub(crate) async fn end(tx: &mut Tx<'_>, user: Uuid, session: Uuid, ended: &EndedSessions) -> Result<(), Error> {
    if !store::delete(tx, user, session).await? {
        return Err(Error::SessionNotFound);
    }
    ended.add([session]);
    Ok(())
}

/// Ends all sessions of a user.
pub(crate) async fn end_all(tx: &mut Tx<'_>, user: Uuid, ended: &EndedSessions) -> Result<(), Error> {
    ended.add(store::delete_of_user(tx, user).await?);
    Ok(())
}

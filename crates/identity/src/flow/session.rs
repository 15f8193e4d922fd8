//! Refreshing, listing and ending sessions.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use http::{HeaderValue, StatusCode, header};
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::problem::Problem;
use service::idempotency::{StoreResponse, run_once};
use uuid::Uuid;

use super::login::{token_expiry, tokens};
use super::{EndedSessions, Tx};
use crate::Identity;
use crate::domain::{Account, Refresh, Session, SessionView, refresh};
use crate::error::Error;
use crate::secrets::NewToken;
use crate::store::{account, session as store};
use crate::view::Tokens;

/// Exchanges a refresh token for new tokens. Fails if it is unknown or has expired. A token that was used before ends the
/// session, except shortly after it was replaced.
pub(crate) async fn exchange(
    identity: &Arc<Identity>,
    digest: Option<[u8; 32]>,
    request: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let (owner, ended, now) = (identity.clone(), EndedSessions::default(), identity.clock.now());
    let ends = ended.clone();
    let exchanged = run_once(&identity.db, request.as_ref(), StoreResponse::WithoutBody, |tx| {
        Box::pin(async move {
            let digest = digest.ok_or(Error::InvalidRefreshToken)?;
            let next_step = "refresh again without the key, within the grace after the first request, or sign in again";
            match exchange_token(&owner, tx, &digest, &ends, now).await {
                Ok(tokens) => Ok(StoredResponse::json(StatusCode::OK, &tokens).shown_once(next_step)),
                // Not an error of the transaction: the end of the session must be committed.
                Err(Error::RefreshTokenReused) => Ok(refused(Error::RefreshTokenReused)),
                Err(error) => Err(error.into()),
            }
        })
    });
    let response = exchanged.await?;
    ended.apply(&identity.tokens);
    Ok(response)
}

fn refused(error: Error) -> StoredResponse {
    let challenge = HeaderValue::from_static("Bearer realm=\"pillarbox\"");
    StoredResponse::problem(&error.into()).with_header(header::WWW_AUTHENTICATE, challenge)
}

async fn exchange_token(
    identity: &Identity,
    tx: &mut Tx<'_>,
    digest: &[u8; 32],
    ended: &EndedSessions,
    now: DateTime<Utc>,
) -> Result<Tokens, Error> {
    let session = store::lock_by_token(tx, digest).await?.ok_or(Error::InvalidRefreshToken)?;
    let token = store::find_token(tx, digest, &session).await?.ok_or(Error::InvalidRefreshToken)?;
    match refresh(token, identity.settings.refresh_grace(), now) {
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
    let account = account::find_by_session(tx, (session.user_id, session.id), now).await?;
    let account = account.ok_or(Error::InvalidRefreshToken)?;
    store::replace_current(tx, session.id, now).await?;
    issue(identity, tx, &account, &session, digest, now).await
}

async fn issue(
    identity: &Identity,
    tx: &mut Tx<'_>,
    account: &Account,
    session: &Session,
    parent: &[u8; 32],
    now: DateTime<Utc>,
) -> Result<Tokens, Error> {
    let token = NewToken::generate();
    let expires_at = token_expiry(identity, session, now);
    store::insert_token(tx, session.id, (&token.digest, Some(parent)), expires_at).await?;
    tokens(identity, account, session.id, token, now)
}

/// Finds the account of a live session: the session was not ended, and the account was not deleted, in any process.
pub(crate) async fn find_account(identity: &Identity, user: Uuid, session: Uuid) -> Result<Account, Error> {
    let mut db = identity.db.acquire().await?;
    let found = account::find_by_session(&mut db, (user, session), identity.clock.now()).await?;
    found.ok_or(Error::SessionEnded)
}

/// The live sessions of a user, newest first.
pub(crate) async fn list(
    identity: &Identity,
    user: Uuid,
    page: (Option<(DateTime<Utc>, Uuid)>, u32),
) -> Result<Vec<SessionView>, Error> {
    Ok(store::list(&mut *identity.db.acquire().await?, user, identity.clock.now(), page).await?)
}

/// Ends one session of a user. Fails if there is none with this id.
pub(crate) async fn end(tx: &mut Tx<'_>, user: Uuid, session: Uuid, ended: &EndedSessions) -> Result<(), Error> {
    match store::delete(tx, user, session).await? {
        true => ended.add([session]),
        false => return Err(Error::SessionNotFound),
    }
    Ok(())
}

/// Ends all sessions of a user.
pub(crate) async fn end_all(tx: &mut Tx<'_>, user: Uuid, ended: &EndedSessions) -> Result<(), Error> {
    ended.add(store::delete_of_user(tx, user).await?);
    Ok(())
}

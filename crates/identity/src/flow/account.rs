//! Changing and deleting accounts.

use chrono::{DateTime, Utc};
use contracts::identity::{ACCOUNT_DELETED, AccountDeleted, SUBSCRIPTION_CANCELLED};
use http_kit::auth::Principal;
use http_kit::etag::IfMatch;
use pillarbox::database::Database;
use pillarbox::log::Tenant;
use pillarbox::log::{Post, blank_key, post};
use serde_json::value::to_raw_value;
use uuid::Uuid;

use super::contact::announce;
use super::email::MESSAGE_SOURCE;
use super::throttle::{CONFIRM_USER, EMAIL_ACCOUNT, LOGIN_ACCOUNT};
use super::{EndedSessions, Tx, subscription};
use crate::Identity;
use crate::domain::{Account, Status};
use crate::error::Error;
use crate::secrets::DigestKey;
use crate::store::audit::{self, AuditAction};
use crate::store::{accepted_request, account as store, expiry, session, subscription as subscriptions, throttle};

/// The fields that a user changes; absent ones stay.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) name: Option<String>,
    pub(crate) locale: Option<String>,
}

/// Changes the name or the locale. Returns the old account if nothing differs. Fails if the account has changed since
/// `if_match`.
pub(crate) async fn update(
    tx: &mut Tx<'_>,
    user: Uuid,
    changes: Changes,
    if_match: &IfMatch,
    now: DateTime<Utc>,
) -> Result<Account, Error> {
    let old = store::lock(tx, user).await?.ok_or(Error::SessionEnded)?;
    if_match.check(old.version, old.updated_at).map_err(Error::PreconditionFailed)?;
    let name = changes.name.unwrap_or_else(|| old.name.clone());
    let locale = changes.locale.unwrap_or_else(|| old.locale.clone());
    if (&name, &locale) == (&old.name, &old.locale) {
        return Ok(old);
    }
    let new = Account { name, locale, updated_at: now, version: old.version + 1, ..old };
    store::update(tx, &new).await?;
    announce(tx, &[&new], now).await?;
    Ok(new)
}

/// Deletes the account of a user who has confirmed the password.
pub(crate) async fn delete(
    identity: &Identity,
    tx: &mut Tx<'_>,
    user: Uuid,
    ended: &EndedSessions,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let actor = Principal::User(user).to_string();
    let current = store::lock(tx, user).await?.ok_or(Error::SessionEnded)?;
    erase(tx, &identity.digests, &current, AuditAction::Deleted, &actor, ended, now).await
}

/// Deletes a locked account and everything that belongs to it, and tells the other services. An audit entry with the id
/// remains.
async fn erase(
    tx: &mut Tx<'_>,
    digests: &DigestKey,
    account: &Account,
    action: AuditAction,
    actor: &str,
    ended: &EndedSessions,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    for live in subscriptions::lock_live(tx, account.id).await? {
        let cancelled = live.change_to(Status::Cancelled, now)?;
        subscription::post_change(tx, SUBSCRIPTION_CANCELLED, &cancelled, Some(live.status)).await?;
    }
    ended.add(session::delete_of_user(tx, account.id).await?);
    let mut subjects = vec![digests.of_email(&account.email), digests.of_user(account.id)];
    for network in throttle::known_networks(tx, account.id).await? {
        let network = network.try_into().unwrap_or([0; 32]);
        subjects.push(digests.of_email_in(&account.email, &network));
    }
    throttle::delete(tx, &[LOGIN_ACCOUNT, EMAIL_ACCOUNT, CONFIRM_USER], &subjects).await?;
    accepted_request::delete_of_email(tx, &account.email).await?;
    store::delete(tx, account.id).await?;
    audit::insert(tx, account.id, action, actor, now).await?;
    // The e-mails that wait to be sent contain the address.
    let key = account.id.to_string();
    blank_key(tx, &Tenant::main(), &key, "the account was deleted").await?;
    let payload = to_raw_value(&AccountDeleted { user_id: account.id })?;
    post(tx, &MESSAGE_SOURCE, &Post::new(ACCOUNT_DELETED, payload).with_key(key)).await?;
    Ok(())
}

/// Deletes accounts that were created before this time and never verified. Returns how many.
pub(crate) async fn erase_unverified(
    db: &Database,
    digests: &DigestKey,
    before: DateTime<Utc>,
    now: DateTime<Utc>,
    limit: i64,
) -> Result<usize, Error> {
    let (mut tx, ended) = (db.begin().await?, EndedSessions::default());
    let ids = expiry::unverified(&mut tx, before, limit).await?;
    for id in &ids {
        if let Some(account) = store::lock(&mut tx, *id).await? {
            erase(&mut tx, digests, &account, AuditAction::Expired, "system", &ended, now).await?;
        }
    }
    tx.commit().await?;
    Ok(ids.len())
}

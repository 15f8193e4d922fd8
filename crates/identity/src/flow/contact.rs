//! How to reach a user, for the services that write to users. Posted in the transaction that verifies the address, or that
//! changes the name or the locale.

use chrono::{DateTime, TimeDelta, Utc};
use contracts::identity::{ACCOUNT_CONTACT_CHANGED, CONTACTS_SOURCE, ContactChanged};
use pillarbox::database::{Database, time};
use pillarbox::log::{Post, Source, post_all};
use runtime::worker::Round;
use serde_json::value::to_raw_value;
use sqlx::PgPool;
use uuid::Uuid;

use super::Tx;
use crate::domain::Account;
use crate::error::Error;
use crate::store::account as store;

/// Until then, every service is expected to have processed the message. It contains an address, so it is blanked.
const MESSAGE_TIME: TimeDelta = TimeDelta::days(7);
/// Accounts that one statement changes.
const RESET_BATCH: i64 = 10_000;
/// Accounts per transaction.
const BATCH: i64 = 500;

/// Tells the other services how to reach these users, as far as their addresses are verified.
pub(super) async fn announce(tx: &mut Tx<'_>, accounts: &[&Account], now: DateTime<Utc>) -> Result<(), Error> {
    let verified: Vec<&Account> = accounts.iter().copied().filter(|account| account.verified_at.is_some()).collect();
    let posts = verified.iter().map(|account| message(account, now)).collect::<Result<Vec<Post>, Error>>()?;
    post_all(tx, &Source::new(CONTACTS_SOURCE), &posts).await?;
    let versions: Vec<_> = verified.iter().map(|account| (account.id, account.version)).collect();
    Ok(store::mark_announced(tx, &versions).await?)
}

/// Requests that all verified accounts are announced again, for a service that has lost them. Returns how many.
pub async fn announce_all_again(db: &PgPool) -> sqlx::Result<u64> {
    let (mut after, mut count) = (Uuid::nil(), 0);
    while let Some((last, accounts)) = store::reset_announced(&mut *db.acquire().await?, after, RESET_BATCH).await? {
        after = last;
        count += accounts;
    }
    Ok(count)
}

/// Announces verified accounts whose current version was not announced, as after [`announce_all_again`].
pub(crate) async fn announce_known(db: &Database) -> Result<Round, Error> {
    let mut tx = db.begin().await?;
    let accounts = store::lock_unannounced(&mut tx, BATCH).await?;
    if accounts.is_empty() {
        return Ok(Round::Idle);
    }
    let now = time::now(&mut tx).await?;
    announce(&mut tx, &accounts.iter().collect::<Vec<_>>(), now).await?;
    tx.commit().await?;
    Ok(Round::Busy)
}

fn message(account: &Account, now: DateTime<Utc>) -> Result<Post, Error> {
    let contact = ContactChanged {
        user_id: account.id,
        version: account.version,
        email: account.email.clone(),
        name: account.name.clone(),
        locale: account.locale.clone(),
    };
    let post = Post::new(ACCOUNT_CONTACT_CHANGED, to_raw_value(&contact)?).with_key(account.id.to_string());
    Ok(post.confidential_until(now + MESSAGE_TIME))
}

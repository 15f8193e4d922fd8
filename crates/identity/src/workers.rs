//! Periodic tasks. Every process with the role runs them; row locks in the database distribute the work.

use chrono::TimeDelta;
use pillarbox::database::{Database, time};
use runtime::worker::Round;

use crate::error::Error;
use crate::flow;
use crate::secrets::DigestKey;
use crate::store::expiry;

/// Rows per statement.
const BATCH: i64 = 1_000;
/// Accounts per transaction.
const ACCOUNTS: i64 = 50;
/// How long a network from which a user has signed in is remembered.
const NETWORK_TIME: TimeDelta = TimeDelta::days(90);

/// Deletes what has expired, by the database's time: sessions, tokens, counts, networks, and accounts that were never
/// verified.
pub(crate) async fn delete_expired(db: &Database, digests: &DigestKey, unverified: TimeDelta) -> Result<Round, Error> {
    let now = time::now(&mut *db.acquire().await?).await?;
    let rows = expiry::delete(&mut *db.acquire().await?, now, BATCH).await?;
    let networks = expiry::delete_networks(&mut *db.acquire().await?, now - NETWORK_TIME, BATCH).await?;
    let accounts = flow::account::erase_unverified(db, digests, now - unverified, now, ACCOUNTS).await?;
    let is_full = rows.max(networks) >= BATCH as u64 || accounts >= ACCOUNTS as usize;
    Ok(if is_full { Round::Busy } else { Round::Idle })
}

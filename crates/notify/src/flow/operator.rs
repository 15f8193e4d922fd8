//! The use cases of operators: read the list of e-mails, and retry e-mails and notifications that were given up.

use chrono::TimeDelta;
use pillarbox::database::Database;
use sqlx::{Postgres, Transaction};

use crate::address;
use crate::domain::Status;
use crate::error::Error;
use crate::store::notifications::{self, DeadNotifications};
use crate::store::{self, DeadMails, GivenUp, MailFilter, MailRecord};
use crate::view::BulkRetry;

pub(crate) async fn list(
    db: &Database,
    filter: &MailFilter,
    before: Option<i64>,
    limit: u32,
) -> Result<Vec<MailRecord>, Error> {
    Ok(store::list(&mut *db.acquire().await?, filter, before, limit).await?)
}

/// Returns an e-mail. Fails if it does not exist.
pub(crate) async fn show(db: &Database, id: i64) -> Result<MailRecord, Error> {
    // The list is in descending order, so the e-mail with this id is the first one below the next id.
    let found = list(db, &MailFilter::default(), id.checked_add(1), 1).await?;
    found.into_iter().find(|mail| mail.id == id).ok_or(Error::NotFound)
}

/// Queues a dead e-mail again, with the full time for retries. Fails unless it is dead and its bodies still exist.
pub(crate) async fn retry(tx: &mut Transaction<'_, Postgres>, id: i64, retry_time: TimeDelta) -> Result<(), Error> {
    let mail = store::lock(tx, id).await?.ok_or(Error::NotFound)?;
    if mail.status != Status::Dead {
        return Err(Error::NotDead);
    }
    if !mail.has_bodies {
        return Err(Error::Erased);
    }
    Ok(store::queue_again(tx, id, retry_time).await?)
}

impl DeadMails {
    /// Selects those to an address, in upper or lower case, and of a template.
    pub fn new(to: Option<String>, template: Option<String>) -> DeadMails {
        DeadMails { recipient: to.map(stored_address), template }
    }
}

/// Returns the address as it is stored: with an ASCII domain.
pub(crate) fn stored_address(to: String) -> String {
    address::parse(&to).map_or(to, |address| address.to_string())
}

/// The number of rows in each transaction of a bulk retry.
const STEP: i64 = 1_000;
/// The number of rows after which a bulk retry ends; the caller repeats it for more.
const BULK_MAX: u64 = 100_000;
/// Counts stop here, so that the cost does not grow with a backlog.
const COUNT_MAX: i64 = 100_000;

/// How many e-mails and notifications were given up and can be retried, each counted up to 100,000.
pub async fn given_up(db: &Database) -> sqlx::Result<GivenUp> {
    store::count_dead(&mut *db.acquire().await?, COUNT_MAX).await
}

/// Queues the selected dead e-mails again, in steps, each of them once: an e-mail that dies again in between stays dead. Skips those
/// whose text was erased. Committed steps stay if the database fails.
pub async fn retry_dead_mails(db: &Database, selection: &DeadMails, retry_time: TimeDelta) -> sqlx::Result<BulkRetry> {
    let mut steps = BulkSteps::default();
    loop {
        let db = &mut *db.acquire().await?;
        let queued = store::queue_dead_again(db, selection, steps.after, STEP, retry_time).await?;
        if let Some(result) = steps.add(&queued) {
            return Ok(result);
        }
    }
}

/// Makes the selected dead notifications due again, in steps, each of them once: one that dies again in between stays dead.
/// Committed steps stay if the database fails.
pub async fn retry_dead_notifications(db: &Database, selection: &DeadNotifications) -> sqlx::Result<BulkRetry> {
    let mut steps = BulkSteps::default();
    loop {
        let retried = notifications::retry_dead(&mut *db.acquire().await?, selection, steps.after, STEP).await?;
        if let Some(result) = steps.add(&retried) {
            return Ok(result);
        }
    }
}

/// How far a bulk retry has come.
#[derive(Debug, Default)]
struct BulkSteps {
    count: u64,
    /// The last id.
    after: i64,
}

impl BulkSteps {
    /// Adds the ids of a step. Returns the result after the last step.
    fn add(&mut self, ids: &[i64]) -> Option<BulkRetry> {
        self.count += ids.len() as u64;
        self.after = ids.iter().copied().max().unwrap_or(self.after);
        let more = ids.len() as i64 == STEP;
        (!more || self.count >= BULK_MAX).then_some(BulkRetry { count: self.count, more })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bulk_retry_ends_with_a_step_that_is_not_full_or_at_its_limit() {
        let mut steps = BulkSteps::default();
        let full: Vec<i64> = (1..=STEP).rev().collect();
        assert_eq!((steps.add(&full), steps.after), (None, STEP));
        assert_eq!(steps.add(&[]), Some(BulkRetry { count: 1_000, more: false }));
        let mut steps = BulkSteps::default();
        let results: Vec<_> = (0..100).map(|_| steps.add(&full)).collect();
        assert_eq!(results.iter().position(Option::is_some), Some(99));
        assert_eq!(results[99], Some(BulkRetry { count: 100_000, more: true }));
    }
}

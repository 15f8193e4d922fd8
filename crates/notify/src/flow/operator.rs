//! What operators do: read the list of e-mails, and retry a dead one.

use chrono::TimeDelta;
use mailbox::database::Database;
use sqlx::{Postgres, Transaction};

use crate::domain::Status;
use crate::error::Error;
use crate::store::{self, MailFilter, MailRecord};

pub(crate) async fn list(
    db: &Database,
    filter: &MailFilter,
    before: Option<i64>,
    limit: u32,
) -> Result<Vec<MailRecord>, Error> {
    Ok(store::list(&mut *db.acquire().await?, filter, before, limit).await?)
}

/// Queues a dead e-mail again, with the full time for retries. Fails unless it is dead and its bodies still exist.
pub(crate) async fn retry(tx: &mut Transaction<'_, Postgres>, id: i64, retry_time: TimeDelta) -> Result<(), Error> {
    match store::lock(tx, id).await?.ok_or(Error::NotFound)? {
        (Status::Dead, true) => Ok(store::queue_again(tx, id, retry_time).await?),
        (Status::Dead, false) => Err(Error::Erased),
        (Status::Queued | Status::Sent | Status::Captured | Status::Expired | Status::Shadowed, _) => {
            Err(Error::NotDead)
        }
    }
}

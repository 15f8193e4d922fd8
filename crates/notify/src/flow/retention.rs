//! Retention: e-mails that have expired, are old, or belong to deleted accounts.

use chrono::TimeDelta;
use kit::worker::Round;
use mailbox::database::{Database, cluster_identity};
use mailbox::operations::maintenance::Retention;

use crate::settings::MailSettings;
use crate::store;

/// The number of rows that one statement changes.
const BATCH: i64 = 1_000;
/// Counts of the metrics stop here.
const COUNT_MAX: i64 = 100_000;
/// A request for an e-mail may have been processed at the same time as the deletion of its account. Transactions are
/// shorter than this.
const RECENT: TimeDelta = TimeDelta::hours(1);

/// A dead letter is retained until an operator decides about it. After this time, nobody is expected to retry a request
/// for an account that was deleted.
const DEAD_LETTER_DAYS: u32 = 90;

/// How long the id of a deleted account is retained: as long as a request for it may be processed.
fn deleted_account_time(log: Retention) -> TimeDelta {
    // The day of the message is retained as a whole.
    let log_days = log.log_days.max(log.behind_days) + 1;
    TimeDelta::days(i64::from(log_days + DEAD_LETTER_DAYS))
}

/// Deletes and erases what is due, by the database's time, and sets the gauges of the queue.
pub(crate) async fn maintain(db: &Database, settings: &MailSettings, log: Retention) -> Result<Round, sqlx::Error> {
    let mut db = db.acquire().await?;
    if cluster_identity::is_restored(&mut db).await? {
        return Ok(Round::Idle);
    }
    let retention = TimeDelta::days(i64::from(settings.retention_days));
    let capture = TimeDelta::hours(i64::from(settings.capture_hours));
    let changed = [
        store::delete_of_deleted_accounts(&mut db, RECENT).await?,
        store::delete_old_deletions(&mut db, deleted_account_time(log), BATCH).await?,
        store::expire(&mut db, BATCH).await?,
        store::delete_captured(&mut db, capture, i64::from(settings.capture_max), BATCH).await?,
        store::delete_older(&mut db, retention, BATCH).await?,
    ];
    let state = store::queue_state(&mut db, COUNT_MAX).await?;
    metrics::gauge!("pillarbox_mail_queued").set(state.queued as f64);
    metrics::gauge!("pillarbox_mail_dead").set(state.dead as f64);
    metrics::gauge!("pillarbox_mail_oldest_seconds").set(state.oldest_seconds);
    let is_full = changed.iter().any(|count| *count >= BATCH.unsigned_abs());
    Ok(if is_full { Round::Busy } else { Round::Idle })
}

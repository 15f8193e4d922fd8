//! Retention: e-mails that have expired or are old, events that have ended, notifications and their events, and what belongs to
//! deleted accounts.

use chrono::{DateTime, TimeDelta, Utc};
use pillarbox::database::{Database, cluster_identity, time};
use pillarbox::operations::maintenance::Retention;
use runtime::worker::Round;
use tokio::sync::Mutex;
use uuid::Uuid;

use crate::settings::{MailSettings, NotifySettings, Settings};
use crate::store;
use crate::store::notifications;

/// The number of rows that one statement changes.
const BATCH: i64 = 1_000;
/// Counts of the metrics stop here.
const COUNT_MAX: i64 = 100_000;
/// A request for an e-mail may have been processed at the same time as the deletion of its account. Transactions are
/// shorter than this.
const RECENT: TimeDelta = TimeDelta::hours(1);

/// How long an event that has ended is known: no message about it is expected any more.
const ENDED: TimeDelta = TimeDelta::days(90);

/// How long the time of the last announcement of a change is known: longer than the longest pause.
const CHANGE_ANNOUNCED: TimeDelta = TimeDelta::days(2);

/// Events whose participants one round checks.
const EVENTS_MAX: i64 = 1_000;

/// How far the check of participants of unknown events has come, by the ids of the events.
#[derive(Debug, Default)]
pub(crate) struct UnknownEvents {
    checked_to: Mutex<Uuid>,
}

/// A dead letter is retained until an operator decides about it. After this time, no operator is expected to retry a request
/// for an account that was deleted.
const DEAD_LETTER_DAYS: u32 = 90;

/// How long the id of a deleted account is retained: as long as a request for it may be processed.
fn deleted_account_time(log: Retention) -> TimeDelta {
    // The day of the message is retained as a whole.
    let log_days = log.log_days.max(log.behind_days) + 1;
    TimeDelta::days(i64::from(log_days + DEAD_LETTER_DAYS))
}

/// The results of the steps of a round. A step that fails must not prevent the others: secrets would not be erased.
#[derive(Debug, Default)]
struct Steps {
    is_full: bool,
    error: Option<sqlx::Error>,
}

impl Steps {
    fn add(&mut self, changed: sqlx::Result<u64>) {
        match changed {
            Ok(count) => self.is_full |= count >= BATCH.unsigned_abs(),
            Err(error) => self.error = self.error.take().or(Some(error)),
        }
    }

    fn result(self) -> sqlx::Result<Round> {
        match self.error {
            Some(error) => Err(error),
            None if self.is_full => Ok(Round::Busy),
            None => Ok(Round::Idle),
        }
    }
}

/// Deletes and erases what is due, by the database's time, and sets the gauges of the queues. Fails with the first error, after
/// all steps.
pub(crate) async fn maintain(
    db: &Database,
    settings: &Settings,
    log: Retention,
    unknown_events: &UnknownEvents,
) -> Result<Round, sqlx::Error> {
    if cluster_identity::is_restored(&mut *db.acquire().await?).await? {
        return Ok(Round::Idle);
    }
    let mut steps = Steps::default();
    // First what must not be there any more: secrets in e-mails, and data of deleted accounts.
    steps.add(store::expire(&mut *db.acquire().await?, BATCH).await);
    steps.add(delete_of_deleted_accounts(db).await.map(|()| 0));
    maintain_mails(db, &settings.mail, &mut steps).await?;
    maintain_notifications(db, &settings.notify, log, &mut steps).await?;
    steps.add(delete_of_unknown_events(db, unknown_events).await);
    steps.result()
}

/// Deletes again what belongs to accounts that were deleted lately: a message about them may have been processed at the same time.
async fn delete_of_deleted_accounts(db: &Database) -> sqlx::Result<()> {
    let mut after = Uuid::nil();
    loop {
        let mut tx = db.begin().await?;
        let users = store::accounts::recently_deleted(&mut tx, RECENT, after, BATCH).await?;
        store::accounts::delete_of_users(&mut tx, &users).await?;
        tx.commit().await?;
        match users.last().filter(|_| users.len() as i64 == BATCH) {
            Some(last) => after = *last,
            None => return Ok(()),
        }
    }
}

async fn maintain_mails(db: &Database, settings: &MailSettings, steps: &mut Steps) -> sqlx::Result<()> {
    let mut db = db.acquire().await?;
    let retention = TimeDelta::days(i64::from(settings.retention_days));
    let capture = TimeDelta::hours(i64::from(settings.capture_hours));
    steps.add(store::delete_captured(&mut db, capture, i64::from(settings.capture_max), BATCH).await);
    steps.add(store::delete_older(&mut db, retention, BATCH).await);
    let state = store::queue_state(&mut db, COUNT_MAX).await.inspect(|state| {
        metrics::gauge!("pillarbox_mail_queued").set(state.queued as f64);
        metrics::gauge!("pillarbox_mail_dead").set(state.dead as f64);
        metrics::gauge!("pillarbox_mail_oldest_seconds").set(state.oldest_seconds);
    });
    steps.add(state.map(|_| 0));
    Ok(())
}

async fn maintain_notifications(
    db: &Database,
    settings: &NotifySettings,
    log: Retention,
    steps: &mut Steps,
) -> sqlx::Result<()> {
    let age = TimeDelta::days(i64::from(settings.retention_days));
    steps.add(delete_older_notifications(db, age).await);
    let mut db = db.acquire().await?;
    steps.add(notifications::delete_older_events(&mut db, age, BATCH).await);
    steps.add(store::participants::delete_ended(&mut db, ENDED, BATCH).await);
    steps.add(store::announcements::delete_old_changes(&mut db, CHANGE_ANNOUNCED, BATCH).await);
    let now = time::now(&mut db).await?;
    steps.add(store::expansion::delete_email_counts(&mut db, now, BATCH).await);
    steps.add(store::accounts::delete_old_deletions(&mut db, deleted_account_time(log), BATCH).await);
    let state = notifications::state(&mut db, COUNT_MAX).await.inspect(|state| {
        metrics::gauge!("pillarbox_notifications_due").set(state.due as f64);
        metrics::gauge!("pillarbox_notifications_dead").set(state.dead as f64);
        metrics::gauge!("pillarbox_notifications_oldest_seconds").set(state.oldest_seconds);
    });
    steps.add(state.map(|_| 0));
    Ok(())
}

/// Deletes participants of events that never became known, or that were deleted before a late message about a registration
/// arrived. Ids of events contain the time of their creation: a young event may become known yet. Returns how many.
async fn delete_of_unknown_events(db: &Database, unknown: &UnknownEvents) -> sqlx::Result<u64> {
    let mut db = db.acquire().await?;
    let mut checked_to = unknown.checked_to.lock().await;
    let before = first_id_at(time::now(&mut db).await? - ENDED);
    let events = store::participants::events_with_participants(&mut db, *checked_to, before, EVENTS_MAX).await?;
    let deleted = store::participants::delete_of_unknown(&mut db, &events, ENDED, BATCH).await?;
    // After a full batch, the same events are checked again; after the last event, the first ones.
    if deleted < BATCH.unsigned_abs() {
        let is_last = (events.len() as i64) < EVENTS_MAX;
        *checked_to = events.last().copied().filter(|_| !is_last).unwrap_or_default();
    }
    Ok(deleted)
}

/// The lowest id of version 7 with this time.
fn first_id_at(time: DateTime<Utc>) -> Uuid {
    let milliseconds = u64::try_from(time.timestamp_millis()).unwrap_or_default();
    uuid::Builder::from_unix_timestamp_millis(milliseconds, &[0; 10]).into_uuid()
}

async fn delete_older_notifications(db: &Database, age: TimeDelta) -> sqlx::Result<u64> {
    let mut tx = db.begin().await?;
    let deleted = notifications::delete_older(&mut tx, age, BATCH).await?;
    tx.commit().await?;
    Ok(deleted)
}

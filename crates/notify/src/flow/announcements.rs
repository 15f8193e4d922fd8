//! Announcements: notifications to many people, in steps, so that neither a transaction nor the wait of others takes long.

use chrono::TimeDelta;
use kit::worker::Round;
use mailbox::database::{Database, redacted_error};
use sqlx::{Postgres, Transaction};

use super::expansion::record;
use crate::domain::delivery_rules::Rules;
use crate::error::{Error, EventError};
use crate::store::announcements::{self as store, Announcement, AnnouncementRecord};

/// The users who are notified in one transaction.
const STEP: usize = 500;
/// After so many failed attempts in a row, for about half an hour, an announcement is given up.
const ATTEMPTS_MAX: i32 = 30;
/// The longest pause after a failed attempt.
const PAUSE_MAX: TimeDelta = TimeDelta::seconds(60);

/// Notifies the next users of the announcement that has waited for longest. One that fails is repeated later, and does not hold up
/// the others. Fails if the database fails.
pub(crate) async fn announce_next(db: &Database, default_rules: &Rules) -> Result<Round, EventError> {
    let mut tx = db.begin().await?;
    let Some(announcement) = store::lock_next(&mut tx).await? else { return Ok(Round::Idle) };
    match notify_next(&mut tx, default_rules, &announcement).await {
        Ok(()) => tx.commit().await?,
        Err(failure) => {
            tx.rollback().await?;
            let (error, business_event) = (redacted_error(&failure), announcement.business_event);
            let pause = pause_after(announcement.attempts);
            store::record_failure(&mut *db.acquire().await?, business_event, &error, pause).await?;
            match pause {
                Some(_) => tracing::warn!(%business_event, error, "an announcement failed and is repeated"),
                None => tracing::error!(
                    %business_event,
                    error,
                    "an announcement was given up; GET /admin/v1/announcements?given_up=true lists it, and POST \
                     /admin/v1/announcements/{{id}}/retry continues it"
                ),
            }
        }
    }
    Ok(Round::Busy)
}

async fn notify_next(
    tx: &mut Transaction<'static, Postgres>,
    default_rules: &Rules,
    announcement: &Announcement,
) -> Result<(), EventError> {
    let Announcement { business_event, addressees, last_user, .. } = announcement;
    let users = store::users_after(tx, addressees, *last_user, STEP as i64).await?;
    let last = users.last().copied().filter(|_| users.len() == STEP);
    // Without its business event, which retention has deleted, there is nothing to notify of any more.
    if let Some(event) = store::business_event(tx, *business_event).await? {
        record(tx, default_rules, vec![(event, users)]).await?;
    }
    match last {
        Some(last) => store::advance(tx, *business_event, last).await?,
        None => store::delete(tx, *business_event).await?,
    }
    Ok(())
}

/// Announcements that are not complete, newest first. `given_up`: None matches all.
pub(crate) async fn list(
    db: &Database,
    given_up: Option<bool>,
    before: Option<i64>,
    limit: u32,
) -> Result<Vec<AnnouncementRecord>, Error> {
    Ok(store::list(&mut *db.acquire().await?, given_up, before, limit).await?)
}

/// Makes an announcement that was given up due again. Fails if it was not.
pub(crate) async fn retry(tx: &mut Transaction<'_, Postgres>, id: i64) -> Result<(), Error> {
    match store::lock(tx, id).await? {
        Some(true) => Ok(store::retry(tx, id).await?),
        Some(false) => Err(Error::AnnouncementNotGivenUp),
        None => Err(Error::AnnouncementNotFound),
    }
}

/// The pause before the next attempt; None after the last one.
fn pause_after(attempts: i32) -> Option<TimeDelta> {
    let pause = TimeDelta::seconds(1 << attempts.clamp(0, 10)).min(PAUSE_MAX);
    (attempts + 1 < ATTEMPTS_MAX).then_some(pause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_is_repeated_with_growing_pauses_and_given_up_at_last() {
        let pauses: Vec<i64> = (0..ATTEMPTS_MAX).map_while(pause_after).map(|pause| pause.num_seconds()).collect();
        assert_eq!(pauses[..7], [1, 2, 4, 8, 16, 32, 60]);
        assert!(pauses.len() == 29 && pauses.is_sorted());
    }
}

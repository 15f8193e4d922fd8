//! Announcements: notifications to many people, in steps, so that neither a transaction nor the wait of others takes long.

use chrono::TimeDelta;
use contracts::events::{EventStatus, UPDATED};
use pillarbox::database::{Database, redacted_error, time};
use runtime::worker::Round;
use serde_json::value::to_raw_value;
use sqlx::{Postgres, Transaction};

use super::expansion::{Addressed, record};
use crate::domain::business_event::BusinessEvent;
use crate::domain::participants::{Addressees, EventFacts, JoinableEvent, Previous};
use crate::domain::policy::{Cause, Policy};
use crate::error::{Error, EventError};
use crate::store::announcements::{self as store, Announcement, AnnouncementRecord};
use crate::store::{expansion, participants};

/// The users who are notified in one transaction.
const STEP: usize = 500;
/// After so many failed attempts in a row, for about half an hour, an announcement is given up.
const ATTEMPTS_MAX: i32 = 30;
/// The shortest pause before it is checked again whether a draft was published.
const DRAFT_PAUSE_MIN: TimeDelta = TimeDelta::minutes(1);
/// The longest pause after a failed attempt.
const PAUSE_MAX: TimeDelta = TimeDelta::seconds(60);

/// Notifies the next users of the announcement that has waited for longest. One that fails is repeated later, and does not hold up
/// the others. Fails if the database fails.
pub(crate) async fn announce_next(db: &Database, policy: &Policy) -> Result<Round, EventError> {
    let mut tx = db.begin().await?;
    let Some(announcement) = store::lock_next(&mut tx).await? else { return Ok(Round::Idle) };
    match notify_next(&mut tx, policy, &announcement).await {
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
    policy: &Policy,
    announcement: &Announcement,
) -> Result<(), EventError> {
    let Announcement { business_event, addressees, last_user, previous, .. } = announcement;
    let cause = match addressees {
        Addressees::Participants(event_id) => {
            // Without a lock: a transaction that changes the event waits for the lock of its announcement.
            let event = participants::find_event(tx, *event_id).await?;
            if let Some(previous) = previous
                && !begin_change(tx, policy, announcement, previous, event.as_ref()).await?
            {
                return Ok(());
            }
            let organizer = event.map_or(*event_id, |event| event.owner_id);
            Cause::Organizer { organizer, event_id: *event_id }
        }
        Addressees::Recipients { aggregate_type, aggregate_id } => {
            Cause::Announcement { aggregate: format!("{aggregate_type}:{aggregate_id}") }
        }
    };
    let users = store::users_after(tx, addressees, *last_user, STEP as i64).await?;
    let last = users.last().copied().filter(|_| users.len() == STEP);
    // Without its business event, which retention has deleted, there is nothing to notify of any more.
    if let Some(event) = store::business_event(tx, *business_event).await? {
        record(tx, policy, vec![Addressed { event, users, cause }]).await?;
    }
    match last {
        Some(last) => store::advance(tx, *business_event, last).await?,
        None => store::delete(tx, *business_event).await?,
    }
    Ok(())
}

/// Begins to announce what has changed since `previous`: all changes up to now. Returns false if there is nothing to announce, at
/// least not now.
async fn begin_change(
    tx: &mut Transaction<'static, Postgres>,
    policy: &Policy,
    &Announcement { business_event, joined_since, .. }: &Announcement,
    previous: &Previous,
    event: Option<&JoinableEvent>,
) -> Result<bool, EventError> {
    let Some(event) = event.filter(|event| event.status != EventStatus::Canceled) else {
        // Those who had joined a canceled event are notified of the cancellation.
        store::delete(tx, business_event).await?;
        return Ok(false);
    };
    if event.status == EventStatus::Draft {
        // It is announced if the event is published again.
        store::postpone(tx, business_event, policy.change_pause.max(DRAFT_PAUSE_MIN)).await?;
        return Ok(false);
    }
    // If it is as before, those who have joined in between know another state.
    if event.location_and_time() == *previous && !joined_since {
        store::delete(tx, business_event).await?;
        return Ok(false);
    }
    let payload = to_raw_value(&EventFacts { previous: Some(previous.clone()), ..event.facts() })?;
    let (event_type, at) = (UPDATED.to_owned(), time::now(tx).await?);
    let changed =
        BusinessEvent { id: business_event, event_type, aggregate_type: None, aggregate_id: None, payload, at };
    expansion::insert_events(tx, &[&changed]).await?;
    store::begin_change(tx, business_event, event.event_id).await?;
    Ok(true)
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
    let is_given_up = store::lock(tx, id).await?.ok_or(Error::AnnouncementNotFound)?;
    if !is_given_up {
        return Err(Error::AnnouncementNotGivenUp);
    }
    Ok(store::retry(tx, id).await?)
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

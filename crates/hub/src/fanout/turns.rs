//! The turns in which fan-out processes the deferred events of one tenant.

use std::collections::HashMap;
use std::time::Instant;

use pillarbox::consumers::ConsumerError;
use pillarbox::log::{LogRef, Message, load_messages};
use sqlx::PgConnection;
use uuid::Uuid;

use super::FanOut;
use super::batch::Batch;
use super::checks::CHECKED_TOGETHER_MAX;
use super::matching::{Origin, add_messages};
use super::shares::{MATCHING_TIME_MAX, Turn};
use crate::events;
use crate::events::store::deferred::DeferredEvent;

/// Deferred events that one turn reads. Their content is in memory.
const TURN_EVENTS_MAX: usize = 100;

impl FanOut {
    /// Adds a hub message for at most `room` of the subscribers that a deferred event matches and that have none yet, and
    /// until `end`. Returns the last one, if others follow.
    fn match_part(
        &mut self,
        message: &Message,
        event: &DeferredEvent,
        room: usize,
        end: Instant,
        batch: &mut Batch,
    ) -> Option<Uuid> {
        let (interests, matching) = self.directory.matching(message);
        // The directory has the order of the subscribers' ids.
        let from = event.after.map_or(0, |after| matching.partition_point(|at| interests[*at].subscriber <= after));
        let rest = &matching[from..];
        let part = rest.iter().take(room).map(|at| &interests[*at]);
        // Nothing for a subscriber that was created after the event was posted.
        let origin = match event.accepted_at {
            Some(accepted_at) => Origin::Accepted(accepted_at),
            None => Origin::Deferred(event.id),
        };
        let done = add_messages(message, origin, part, Some(end), batch);
        rest[..done].last().filter(|_| done < rest.len()).map(|at| interests[*at].subscriber)
    }

    /// The tenant whose turn it is, and the id up to which its deferred events are processed.
    fn next_tenant(&self) -> Option<(String, i64)> {
        let next = self.backlog.as_ref()?.next(|tenant| self.checks.is_running(tenant));
        next.map(|(tenant, done)| (tenant.to_owned(), done))
    }

    /// Processes the next deferred events of the tenant whose turn it is. None if there are none.
    pub(super) async fn run_turn(&mut self, tx: &mut PgConnection) -> Result<Option<(Batch, Turn)>, ConsumerError> {
        let Some((tenant, done)) = self.next_tenant() else { return Ok(None) };
        let (started_at, share) = (Instant::now(), self.pace.begin_turn());
        self.last_turns.tenant = Some(tenant.clone());
        let found = events::store::deferred::next(tx, &tenant, done, TURN_EVENTS_MAX).await?;
        let chosen = within_share(&found, share);
        let log_refs: Vec<LogRef> = chosen.iter().map(|event| event.log_ref).collect();
        let messages: HashMap<LogRef, Message> =
            load_messages(tx, &log_refs).await?.into_iter().map(|message| (message.log_ref(), message)).collect();
        let (mut batch, mut partial, mut processed, mut lost) = (Batch::default(), None, Vec::new(), Vec::new());
        let end = Instant::now() + MATCHING_TIME_MAX;
        for event in chosen {
            // More subscribers may match than when the event was deferred.
            if batch.size >= share || (batch.size > 0 && Instant::now() >= end) {
                break;
            }
            let verdict = if event.is_checked { Some(None) } else { self.checks.remove_verdict(event.log_ref.id) };
            let Some(refusal) = verdict else {
                self.checks.start(&tenant, unchecked_from(&found, event.id));
                break;
            };
            match (messages.get(&event.log_ref), refusal) {
                (Some(message), Some(refusal)) => batch.reject(message, refusal),
                (Some(message), None) => {
                    let last = self.match_part(message, event, share - batch.size, end, &mut batch);
                    partial = last.map(|last| (event.id, last));
                }
                (None, _) => lost.push(event.log_ref.id),
            }
            if partial.is_some() {
                break;
            }
            processed.push(event.id);
        }
        if processed.is_empty() && partial.is_none() && !found.is_empty() {
            // The first event waits for its check.
            self.pace.cancel_turn();
            return Ok(None);
        }
        events::store::deferred::advance(tx, &tenant, &processed, partial).await?;
        let done = processed.last().copied().unwrap_or(done);
        let is_last = found.len() < TURN_EVENTS_MAX && processed.len() == found.len();
        Ok(Some((batch, Turn { tenant, done, is_last, started_at, lost })))
    }
}

/// The events from this one on that have to be checked, at most as many as are checked together.
fn unchecked_from(events: &[DeferredEvent], first: i64) -> Vec<LogRef> {
    let unchecked = events.iter().filter(|event| event.id >= first && !event.is_checked);
    unchecked.take(CHECKED_TOGETHER_MAX).map(|event| event.log_ref).collect()
}

/// The first events whose matches are within a tenant's share together; at least one.
fn within_share(events: &[DeferredEvent], share: usize) -> &[DeferredEvent] {
    let (mut matches, mut count) = (0, 0);
    while matches < share && count < events.len() {
        matches += events[count].matches.max(1);
        count += 1;
    }
    &events[..count]
}

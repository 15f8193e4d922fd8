//! The turns in which fan-out processes the deferred events of one tenant.

use std::collections::HashMap;
use std::time::Instant;

use mailbox::consumers::ConsumerError;
use mailbox::log::{LogRef, Message, load_messages};
use sqlx::PgConnection;
use uuid::Uuid;

use super::batch::Batch;
use super::shares::{Backlog, Turn};
use super::{FanOut, Origin, add_messages};
use crate::store::deferred_event::{self, DeferredEvent};

/// Deferred events that one turn reads. Their content is in memory.
const TURN_EVENTS_MAX: usize = 100;

impl FanOut {
    /// Adds a hub message for at most `room` of the subscribers that a deferred event matches and that have none yet. Returns
    /// the last one, if others follow.
    fn match_part(&mut self, message: &Message, event: &DeferredEvent, room: usize, batch: &mut Batch) -> Option<Uuid> {
        let (interests, matching) = self.directory.matching(message);
        // The directory has the order of the subscribers' ids.
        let from = event.after.map_or(0, |after| matching.partition_point(|at| interests[*at].subscriber <= after));
        let (part, rest) = matching[from..].split_at(room.min(matching.len() - from));
        // Nothing for a subscriber that was created after the event was posted.
        add_messages(message, Origin::Deferred(event.id), part.iter().map(|at| &interests[*at]), batch);
        part.last().filter(|_| !rest.is_empty()).map(|at| interests[*at].subscriber)
    }

    /// Processes the next deferred events of the tenant whose turn it is. None if there are none.
    pub(super) async fn run_turn(&mut self, tx: &mut PgConnection) -> Result<Option<(Batch, Turn)>, ConsumerError> {
        let Some((tenant, done)) = self.backlog.as_ref().and_then(Backlog::next) else { return Ok(None) };
        let (tenant, mut done) = (tenant.to_owned(), done);
        let (started_at, share) = (Instant::now(), self.pace.begin_turn());
        self.last_turn = Some(tenant.clone());
        let found = deferred_event::next(tx, &tenant, done, TURN_EVENTS_MAX).await?;
        let chosen = within_share(&found, share);
        let log_refs: Vec<LogRef> = chosen.iter().map(|event| event.log_ref).collect();
        let messages: HashMap<LogRef, Message> =
            load_messages(tx, &log_refs).await?.into_iter().map(|message| (message.log_ref(), message)).collect();
        let (mut batch, mut partial, mut lost) = (Batch::default(), None, Vec::new());
        for event in chosen {
            match messages.get(&event.log_ref) {
                // More subscribers may match than when the event was deferred.
                Some(_) if batch.size >= share => break,
                Some(message) => {
                    let last = self.match_part(message, event, share - batch.size, &mut batch);
                    partial = last.map(|last| (event.id, last));
                }
                None => lost.push(event.log_ref.id),
            }
            if partial.is_some() {
                break;
            }
            done = event.id;
        }
        deferred_event::advance(tx, &tenant, done, partial).await?;
        let is_last = found.len() < TURN_EVENTS_MAX && found.last().is_none_or(|last| last.id == done);
        Ok(Some((batch, Turn { tenant, done, is_last, started_at, lost })))
    }
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

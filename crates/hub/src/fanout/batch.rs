//! The results of one batch of log messages: hub messages, stream messages, skipped subscribers and operator commands.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use chrono::{DateTime, Utc};
use pillarbox::log::{LogRef, Message};
use uuid::Uuid;

use crate::deliveries::command::{CommandRequest, DeadLetterRequest, OperatorCommand, RetryRequest};
use crate::deliveries::message::{FannedBatch, HubEvent, HubMessage};
use crate::directory::domain::DirectoryVersion;
use crate::event_types::cache::Refusal;
use crate::events::store::deferred::NewDeferred;
use crate::events::store::rejected::NewRejection;
use crate::events::store::retention_hold::OLD_REFERENCE_AGE;
use crate::fanout::store::{DeadLetterToRetry, NewCommand, NewMessage, NewSkipped};
use crate::streams::store::messages::NewStreamMessage;

#[derive(Default)]
pub(super) struct Batch {
    pub(super) messages: Vec<NewMessage>,
    /// The content of each message; None for a retried dead letter, whose content is in the database.
    events: Vec<Option<Arc<HubEvent>>>,
    pub(super) skipped: Vec<NewSkipped>,
    pub(super) stream_messages: Vec<NewStreamMessage>,
    pub(super) commands: Vec<NewCommand>,
    /// Events to defer, and their tenants.
    pub(super) deferred: Vec<NewDeferred>,
    pub(super) deferred_tenants: HashSet<String>,
    /// Matching subscribers of all events that are not deferred, whether they get a message or are skipped, and rejected events.
    pub(super) size: usize,
    pub(super) rejected: Vec<NewRejection>,
    /// Replays were created or changed.
    pub(super) has_changed_replays: bool,
    /// Events were accepted that were rejected before; they are deferred.
    pub(super) has_accepted_events: bool,
    /// Those of events with more than [`NARROW`](super::shares::NARROW) matches.
    pub(super) wide: usize,
}

impl Batch {
    pub(super) fn add_message(
        &mut self,
        subscriber: Uuid,
        lane: Option<String>,
        log_ref: LogRef,
        event: Arc<HubEvent>,
    ) {
        self.messages.push(NewMessage { subscriber, lane, seq: None, log_ref, dead_letter: None, replay: None });
        self.events.push(Some(event));
    }

    /// Adds a message of a replay.
    pub(super) fn add_replayed(
        &mut self,
        replay: Uuid,
        subscriber: Uuid,
        lane: Option<String>,
        log_ref: LogRef,
        event: Arc<HubEvent>,
    ) {
        self.add_message(subscriber, lane, log_ref, event);
        if let Some(message) = self.messages.last_mut() {
            message.replay = Some(replay);
        }
    }

    pub(super) fn add_skipped(&mut self, log_id: i64, filtered: Vec<Uuid>, inactive: Vec<Uuid>) {
        if !filtered.is_empty() || !inactive.is_empty() {
            self.skipped.push(NewSkipped { log_id, filtered, inactive });
        }
    }

    pub(super) fn defer(&mut self, event: NewDeferred) {
        if !self.deferred_tenants.contains(&event.tenant) {
            self.deferred_tenants.insert(event.tenant.clone());
        }
        self.deferred.push(event);
    }

    pub(super) fn reject(&mut self, message: &Message, refusal: Refusal) {
        self.rejected.push(NewRejection {
            log_ref: message.log_ref(),
            tenant: message.tenant.clone(),
            message_id: message.message_id,
            event_type: message.topic.clone(),
            version: refusal.version,
            errors: refusal.errors,
        });
        self.size += 1;
    }

    /// From when on the log has to be retained for this batch; None if the periodic renewal of the hold is early enough. The
    /// content of a retried dead letter is in the dead letter.
    pub(super) fn needs_retention_hold(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let sent =
            self.messages.iter().filter(|message| message.dead_letter.is_none()).map(|message| message.log_ref.at);
        let deferred = self.deferred.iter().map(|event| event.log_ref.at);
        let streamed = self.stream_messages.iter().map(|message| message.log_ref.at);
        sent.chain(deferred).chain(streamed).min().filter(|oldest| *oldest < now - OLD_REFERENCE_AGE)
    }

    /// Adds what an operator requested. The retry of a dead letter that blocks its lane is a command for the dispatcher; any
    /// other retry is a new message. A dead letter whose subscriber was deleted is not in `dead_letters`.
    pub(super) fn add_command(&mut self, request: CommandRequest, dead_letters: &mut HashMap<Uuid, DeadLetterToRetry>) {
        match request {
            CommandRequest::Retry(RetryRequest { dead_letter }) => match dead_letters.remove(&dead_letter) {
                Some(DeadLetterToRetry { subscriber, n, blocks_lane: true, .. }) => {
                    let (command, by) = (OperatorCommand::Retry, String::new());
                    self.commands.push(NewCommand { subscriber, n, command, by });
                }
                Some(DeadLetterToRetry { subscriber, lane, replay, log_ref, blocks_lane: false, .. }) => {
                    let dead_letter = Some(dead_letter);
                    self.messages.push(NewMessage { subscriber, lane, seq: None, log_ref, dead_letter, replay });
                    self.events.push(None);
                }
                None => {}
            },
            CommandRequest::ReplayChanged(_) => self.has_changed_replays = true,
            CommandRequest::EventAccepted(_) => self.has_accepted_events = true,
            CommandRequest::DeadLetter(DeadLetterRequest { subscriber, n, by }) => {
                self.commands.push(NewCommand { subscriber, n, command: OperatorCommand::DeadLetter, by });
            }
        }
    }

    /// The batch for a dispatcher in this process; `after` is the newest number before it.
    pub(super) fn into_fanned(self, after: i64, directory_version: DirectoryVersion) -> FannedBatch {
        // Commands alone use up a number.
        let used_numbers = self.messages.len().max(usize::from(!self.commands.is_empty()));
        let to = after + used_numbers as i64;
        let mut messages: HashMap<Uuid, Vec<HubMessage>> = HashMap::new();
        let mut is_complete = self.commands.is_empty();
        for ((n, message), event) in (after + 1..).zip(self.messages).zip(self.events) {
            is_complete &= event.is_some();
            let (lane, replay) = (message.lane.map(Arc::from), message.replay);
            // A message that was retried is not handed over, so it has no earlier attempts.
            let message_of = |seq| HubMessage { n, lane, seq, attempts_before: 0, replay, event };
            messages.entry(message.subscriber).or_default().push(message_of(message.seq));
        }
        // Commands, and the content of retried dead letters, are in the database only: a batch with any of them is not
        // handed over. The next batch then has a gap before it, and the dispatcher polls.
        if is_complete {
            FannedBatch { after, to, messages, directory_version }
        } else {
            FannedBatch { after: to, to, messages: HashMap::new(), directory_version }
        }
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;
    use crate::deliveries::message::fixtures::event;
    use crate::directory::domain::fixtures::directory_version;

    fn log_ref() -> LogRef {
        LogRef { shard: 0, id: 1, at: DateTime::UNIX_EPOCH }
    }

    fn dead_letter(blocks_lane: bool) -> DeadLetterToRetry {
        let (dead_letter, subscriber) = (Uuid::now_v7(), Uuid::now_v7());
        DeadLetterToRetry { dead_letter, subscriber, n: 3, lane: None, replay: None, log_ref: log_ref(), blocks_lane }
    }

    #[test]
    fn messages_are_handed_over_with_the_numbers_after_the_newest() {
        let (mut batch, subscriber) = (Batch::default(), Uuid::now_v7());
        (0..2).for_each(|_| batch.add_message(subscriber, None, log_ref(), Arc::new(event(0))));
        let fanned = batch.into_fanned(10, directory_version(1));
        let numbers: Vec<i64> = fanned.messages[&subscriber].iter().map(|message| message.n).collect();
        assert_eq!((fanned.after, fanned.to, numbers), (10, 12, vec![11, 12]));
    }

    #[test]
    fn only_references_to_old_entries_need_a_retention_hold_at_once() {
        let (mut batch, now) = (Batch::default(), DateTime::UNIX_EPOCH + TimeDelta::days(9));
        let at = |at| LogRef { shard: 0, id: 1, at };
        let (young, old, older) = (now - TimeDelta::hours(1), now - TimeDelta::days(2), now - TimeDelta::days(3));
        batch.add_message(Uuid::now_v7(), None, at(young), Arc::new(event(0)));
        let retried = NewMessage {
            subscriber: Uuid::now_v7(),
            lane: None,
            seq: None,
            log_ref: at(older),
            dead_letter: Some(Uuid::now_v7()),
            replay: None,
        };
        batch.messages.push(retried);
        batch.defer(NewDeferred { tenant: "acme".to_owned(), log_ref: at(young), matches: 1, is_checked: true });
        assert_eq!(batch.needs_retention_hold(now), None);
        batch.defer(NewDeferred { tenant: "acme".to_owned(), log_ref: at(old), matches: 1, is_checked: true });
        assert_eq!(batch.needs_retention_hold(now), Some(old));
        let mut batch = Batch::default();
        batch.add_message(Uuid::now_v7(), None, at(older), Arc::new(event(0)));
        assert_eq!(batch.needs_retention_hold(now), Some(older));
    }

    #[test]
    fn a_batch_with_a_command_or_a_retry_is_not_handed_over() {
        for blocks_lane in [false, true] {
            let (mut batch, found) = (Batch::default(), dead_letter(blocks_lane));
            let request = CommandRequest::Retry(RetryRequest { dead_letter: found.dead_letter });
            batch.add_command(request, &mut HashMap::from([(found.dead_letter, found)]));
            assert_eq!((batch.messages.len(), batch.commands.len()), if blocks_lane { (0, 1) } else { (1, 0) });
            let fanned = batch.into_fanned(10, directory_version(1));
            assert_eq!((fanned.after, fanned.to, fanned.messages.len()), (11, 11, 0));
        }
    }
}

//! The commands of operators for the messages of one subscriber.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};

use super::SubscriberQueue;
use super::lanes::Lane;
use crate::deliveries::command::{OperatorCommand, PendingCommand};

#[derive(Debug)]
pub(super) struct Commands {
    /// The database may have commands that were not read yet. They are read even if the queue needs no messages.
    pub(super) need_read: bool,
    /// Commands that were read. A read returns them again until they are executed and their rows are deleted.
    seen: HashSet<i64>,
    /// Messages to dead-letter when their turn comes: the command's id, and who requested it.
    dead_letter_requests: HashMap<i64, (i64, String)>,
    pub(super) executed: Vec<i64>,
    /// Dead letters whose retry came too late, because their lane has moved on.
    pub(super) rejected_retries: Vec<i64>,
}

impl Commands {
    pub(super) fn new() -> Commands {
        Commands {
            need_read: true,
            seen: HashSet::new(),
            dead_letter_requests: HashMap::new(),
            executed: Vec::new(),
            rejected_retries: Vec::new(),
        }
    }

    /// Whether the message is to be dead-lettered when its turn comes.
    pub(super) fn has_dead_letter_request(&self, n: i64) -> bool {
        self.dead_letter_requests.contains_key(&n)
    }
}

impl SubscriberQueue {
    /// The database may have commands for this subscriber.
    pub(in crate::dispatch) fn mark_has_commands(&mut self) {
        self.commands.need_read = true;
    }

    /// Returns whether commands have to be read, and assumes that the caller reads them.
    pub(in crate::dispatch) fn start_command_read(&mut self) -> bool {
        std::mem::take(&mut self.commands.need_read)
    }

    /// Executes a command, or remembers it until it is the turn of its message. Until it is executed it stays in the
    /// database, where the next process that owns the subscriber finds it.
    pub(in crate::dispatch) fn execute(&mut self, pending: PendingCommand, now: DateTime<Utc>) {
        let PendingCommand { id, key, n, command, by } = pending;
        if !self.commands.seen.insert(id) {
            return;
        }
        let is_undecided =
            self.is_beyond_position(n) || self.lanes.get(&key).is_some_and(|lane| lane.detached.is_some());
        let lane = self.lanes.get_mut(&key).filter(|lane| lane.has_head(n));
        match (command, lane) {
            (OperatorCommand::Retry, Some(lane)) if lane.is_blocked => {
                lane.unblock(true);
                self.lanes.schedule_at(&key, n, now);
                self.commands.executed.push(id);
            }
            (OperatorCommand::Retry, _) => {
                self.commands.rejected_retries.push(n);
                self.commands.executed.push(id);
            }
            // The head is a dead letter already; the lane continues after it.
            (OperatorCommand::DeadLetter, Some(lane)) if lane.is_blocked => {
                lane.unblock(false);
                self.lanes.schedule_at(&key, n, now);
                if let Some(detached) = self.lanes.get_mut(&key).and_then(|lane| lane.detached.as_mut()) {
                    detached.read_to = n;
                }
                self.commands.executed.push(id);
            }
            (OperatorCommand::DeadLetter, Some(_)) => {
                self.commands.dead_letter_requests.insert(n, (id, by));
                self.lanes.expedite(&key, n, now);
            }
            (OperatorCommand::DeadLetter, None) if is_undecided => {
                self.commands.dead_letter_requests.insert(n, (id, by));
            }
            // The message has its final outcome.
            (OperatorCommand::DeadLetter, None) => self.commands.executed.push(id),
        }
    }

    /// Who requested to dead-letter this message, now that it is its turn. The command counts as executed.
    pub(in crate::dispatch) fn pop_dead_letter_request(&mut self, n: i64) -> Option<String> {
        let (id, by) = self.commands.dead_letter_requests.remove(&n)?;
        self.commands.executed.push(id);
        Some(by)
    }
}

impl Lane {
    fn unblock(&mut self, retries_head: bool) {
        (self.is_blocked, self.attempts) = (false, 0);
        self.manual_retry |= retries_head;
    }
}

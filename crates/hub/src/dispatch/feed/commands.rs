//! What people want done.

use chrono::{DateTime, Utc};

use super::{Feed, Key, Lane};

/// What people can want done with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    GiveUp,
    Retry,
}

/// That someone wants it.
#[derive(Debug, Clone)]
pub(crate) struct Command {
    pub(crate) id: i64,
    pub(crate) key: Key,
    pub(crate) n: i64,
    pub(crate) what: What,
    pub(crate) by: String,
}

impl Feed {
    /// Someone wants a message given up, or the lane that it blocks tried again. It is carried out when it is the message's
    /// turn; until then it is remembered, and told again to who goes on from here.
    pub(crate) fn command(&mut self, command: Command, now: DateTime<Utc>) {
        let Command { id, key, n, what, by } = command;
        if !self.heard.insert(id) {
            return;
        }
        let is_head = |lane: &Lane| match (lane.queue.front(), &lane.aside) {
            (Some(first), _) => first.n == n,
            (None, Some(aside)) => aside.read_to == n - 1,
            (None, None) => false,
        };
        let may_come = n > self.position() || self.lanes.get(&key).is_some_and(|lane| lane.aside.is_some());
        match (what, self.lanes.get_mut(&key).filter(|lane| is_head(lane))) {
            (What::Retry, Some(lane)) if lane.blocked => {
                (lane.blocked, lane.again, lane.attempts) = (false, true, 0);
                self.put_off(&key, n, now);
                self.commands_done.push(id);
            }
            (What::Retry, _) => {
                self.unretried.push(n);
                self.commands_done.push(id);
            }
            // It is dead already; the lane goes on without it.
            (What::GiveUp, Some(lane)) if lane.blocked => {
                (lane.blocked, lane.attempts) = (false, 0);
                self.put_off(&key, n, now);
                if let Some(aside) = self.lanes.get_mut(&key).and_then(|lane| lane.aside.as_mut()) {
                    aside.read_to = n;
                }
                self.commands_done.push(id);
            }
            (What::GiveUp, Some(lane)) => {
                self.given_up.insert(n, (id, by));
                if let Some(next_at) = lane.next_at {
                    self.due.remove(&(next_at, key.clone()));
                    self.put_off(&key, n, now);
                }
            }
            (What::GiveUp, None) if may_come => {
                self.given_up.insert(n, (id, by));
            }
            (What::GiveUp, None) => self.commands_done.push(id),
        }
    }

    /// Who wants it given up, now that its turn has come.
    pub(crate) fn given_up_by(&mut self, n: i64) -> Option<String> {
        let (id, by) = self.given_up.remove(&n)?;
        self.commands_done.push(id);
        Some(by)
    }
}

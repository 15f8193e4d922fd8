//! What a feed knows that the database must know, too.

use std::collections::HashSet;
use std::sync::Arc;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{Came, Feed, Key};
use crate::dispatch::{Mail, Recipient};
use crate::domain::{Outcome, Reason};

/// How often a position, or the head of a lane that goes well, is written down. A restart finds out the rest.
const SAVE_PAUSE: chrono::Duration = chrono::Duration::milliseconds(250);

/// What a lane that is aside has in the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LaneRow {
    pub(crate) head: i64,
    pub(crate) lane: Option<Arc<str>>,
    pub(crate) attempts: u16,
    /// None: blocked.
    pub(crate) next_at: Option<DateTime<Utc>>,
    /// Its head has died, and is sent again all the same.
    pub(crate) again: bool,
}

/// An attempt to be kept.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) at: DateTime<Utc>,
    pub(crate) subscriber: Uuid,
    pub(crate) n: i64,
    pub(crate) attempt: u16,
    pub(crate) outcome: Outcome,
    pub(crate) came: Came,
}

/// A message that is given up.
#[derive(Debug)]
pub(crate) struct Death {
    pub(crate) recipient: Arc<Recipient>,
    pub(crate) mail: Mail,
    pub(crate) reason: Reason,
    pub(crate) detail: String,
    pub(crate) attempts: u16,
    pub(crate) at: DateTime<Utc>,
}

/// What is to be kept of a feed.
#[derive(Debug, Default)]
pub(crate) struct Save {
    pub(crate) attempts: Vec<Attempt>,
    pub(crate) deaths: Vec<Death>,
    pub(crate) positions: Vec<(Uuid, i64)>,
    /// Rows that go: subscriber and head.
    pub(crate) ended: Vec<(Uuid, i64)>,
    pub(crate) waiting: Vec<(Uuid, LaneRow)>,
    /// Subscribers that answered 410, and the versions of them that did.
    pub(crate) gone: Vec<(Uuid, i64)>,
    /// Commands that were carried out.
    pub(crate) done: Vec<i64>,
    /// Dead letters, by subscriber and message, that were not retried after all.
    pub(crate) unretried: Vec<(Uuid, i64)>,
}

impl Save {
    pub(crate) fn is_empty(&self) -> bool {
        let Save { attempts, deaths, positions, ended, waiting, gone, done, unretried } = self;
        attempts.is_empty()
            && deaths.is_empty()
            && positions.is_empty()
            && ended.is_empty()
            && waiting.is_empty()
            && gone.is_empty()
            && done.is_empty()
            && unretried.is_empty()
    }
}

impl Feed {
    /// Everything up to here is settled, or stands in a row of its lane.
    pub(crate) fn position(&self) -> i64 {
        self.open.first().map_or(self.read_to, |first| first - 1)
    }

    /// Adds what is to be kept. Once it is asked for, it counts as kept: if it cannot be, the feed is loaded anew.
    pub(crate) fn save(&mut self, now: DateTime<Utc>, into: &mut Save) {
        let subscriber = self.recipient.id;
        into.attempts.append(&mut self.attempts);
        into.deaths.append(&mut self.deaths);
        into.done.append(&mut self.commands_done);
        into.unretried.extend(self.unretried.drain(..).map(|n| (subscriber, n)));
        into.ended.extend(self.ended_rows.drain(..).map(|head| (subscriber, head)));
        if self.is_gone && self.recipient.is_open {
            into.gone.push((subscriber, self.recipient.version));
        }
        let mut later = HashSet::new();
        let mut is_new = false;
        for key in std::mem::take(&mut self.touched) {
            let Some(lane) = self.lanes.get_mut(&key) else { continue };
            let Some(aside) = &mut lane.aside else { continue };
            let head = lane.queue.front().map_or(aside.head, |first| first.n);
            let row = LaneRow {
                head,
                lane: match &key {
                    Key::Lane(lane) => Some(lane.clone()),
                    Key::Alone(_) => None,
                },
                attempts: lane.attempts,
                next_at: if lane.blocked { None } else { Some(lane.next_at.unwrap_or(now)) },
                again: lane.again,
            };
            let only_moved = aside.saved.as_ref().is_some_and(|saved| {
                let goes_well = |row: &LaneRow| row.attempts == 0 && row.next_at.is_some() && !row.again;
                goes_well(saved) && goes_well(&row)
            });
            if only_moved && aside.saved_at.is_some_and(|at| now - at < SAVE_PAUSE * 4) {
                later.insert(key);
                continue;
            }
            is_new |= aside.saved.is_none();
            if aside.saved.as_ref() != Some(&row) {
                into.ended.extend(aside.saved.take().map(|saved| (subscriber, saved.head)));
                aside.saved = Some(row.clone());
                aside.saved_at = Some(now);
                into.waiting.push((subscriber, row));
            }
        }
        self.touched = later;
        if !is_new && now - self.saved_at < SAVE_PAUSE {
            return;
        }
        self.saved_at = now;
        let position = self.position();
        // A row and the position that goes past it are kept together.
        if position > self.saved_position {
            self.saved_position = position;
            into.positions.push((subscriber, position));
        }
    }

    /// When there is something to keep that waits, if there is.
    pub(super) fn next_keeping(&self) -> Option<DateTime<Utc>> {
        let waits = !self.touched.is_empty() || self.position() > self.saved_position;
        waits.then(|| self.saved_at + SAVE_PAUSE)
    }

    /// Whether there is something to keep now.
    pub(crate) fn has_news(&self, now: DateTime<Utc>) -> bool {
        !self.attempts.is_empty()
            || !self.deaths.is_empty()
            || !self.ended_rows.is_empty()
            || !self.commands_done.is_empty()
            || self.next_keeping().is_some_and(|at| at <= now)
    }
}

//! What a feed wants to read, and what it does with what was read for it.

use chrono::{DateTime, Utc};

use super::{Aside, Feed, Key, LaneWish};
use crate::dispatch::Mail;

/// How many messages wait in memory before no more are read.
const AHEAD: usize = 512;
/// So many of one lane; the rest is read when it is their turn.
const LANE_AHEAD: usize = 64;
/// About as much is read at a time; fewer, if they are large.
const READ_BYTES: usize = 2 * 1024 * 1024;
/// What one takes besides its payload.
const MAIL_BYTES_LEAST: usize = 512;
/// Before the first has come.
pub(super) const MAIL_BYTES_AT_FIRST: usize = 64 * 1024;

impl Feed {
    /// Where to read on, and how many, if there is more and room for it.
    pub(crate) fn wish(&self) -> Option<(i64, usize)> {
        // With the breaker open, more is read only when there is nothing else to probe with.
        let has_more = !(self.ready.is_empty() && self.due.is_empty() && self.hungry.is_empty() && self.in_flight == 0);
        let room = if self.is_broken() { !has_more } else { self.waiting <= self.ahead() / 4 };
        let wants = self.behind && !self.reading && self.is_open() && room;
        wants.then_some((self.read_to, self.ahead()))
    }

    /// How many messages may wait in memory.
    fn ahead(&self) -> usize {
        (READ_BYTES / self.mail_bytes.max(1)).clamp(1, AHEAD)
    }

    fn weigh(&mut self, mails: &[Mail]) {
        if !mails.is_empty() {
            let bytes: usize =
                mails.iter().filter_map(|mail| mail.event.as_ref()).map(|event| event.payload.len()).sum();
            self.mail_bytes = bytes / mails.len() + MAIL_BYTES_LEAST;
        }
    }

    /// What was read behind [`Feed::wish`]: all there is if `complete`.
    pub(crate) fn offer(&mut self, mails: Vec<Mail>, complete: bool) {
        self.weigh(&mails);
        self.behind |= !complete;
        for mail in mails {
            self.read_to = self.read_to.max(mail.n);
            self.take_in(mail);
        }
    }

    /// What was just made, if nothing lies between it and what was read before.
    pub(crate) fn hand_over(&mut self, mut mails: Vec<Mail>) {
        // A read may have found it first.
        mails.retain(|mail| mail.n > self.read_to);
        if mails.is_empty() {
            return;
        }
        if self.behind || self.reading || self.waiting > self.ahead() || !self.is_open() {
            self.behind = true;
            return;
        }
        self.offer(mails, true);
    }

    fn take_in(&mut self, mail: Mail) {
        if self.done.remove(&mail.n) {
            return;
        }
        let key = mail.key();
        let lane = self.lanes.entry(key.clone()).or_default();
        if let Some(aside) = &mut lane.aside {
            // It reads for itself, and may have read this one.
            if matches!(key, Key::Alone(_)) || mail.n <= aside.read_to {
                return;
            }
            if aside.behind || aside.reading || lane.queue.len() >= LANE_AHEAD {
                aside.behind = true;
                return;
            }
            aside.read_to = mail.n;
        } else {
            self.open.insert(mail.n);
        }
        lane.queue.push_back(mail);
        self.waiting += 1;
        if lane.queue.len() == 1 && !lane.in_flight {
            self.ready.push_back(key);
        } else if lane.aside.is_none() && lane.queue.len() > LANE_AHEAD {
            self.put_aside(&key);
        }
    }

    /// From now on the lane has a row, and the position does not wait for it.
    pub(super) fn put_aside(&mut self, key: &Key) {
        let Some(lane) = self.lanes.get_mut(key) else { return };
        if lane.aside.is_some() {
            return;
        }
        for mail in &lane.queue {
            self.open.remove(&mail.n);
        }
        let (Some(first), Some(last)) = (lane.queue.front(), lane.queue.back()) else { return };
        let (head, read_to) = (first.n, last.n);
        lane.aside = Some(Aside { saved: None, saved_at: None, head, read_to, behind: false, reading: false });
        self.touched.insert(key.clone());
    }

    /// The lanes that must read before they can go on.
    pub(crate) fn lane_wishes(&mut self, now: DateTime<Utc>, most: usize) -> Vec<LaneWish> {
        self.wake_due(now);
        if !self.is_open() || self.hungry.is_empty() || self.in_flight + self.ready.len() >= AHEAD {
            return Vec::new();
        }
        let most = if self.is_broken() { 1 } else { most };
        let chunk = self.ahead().min(LANE_AHEAD);
        let keys: Vec<Key> = self.hungry.iter().take(most).cloned().collect();
        let mut wishes = Vec::new();
        for key in keys {
            self.hungry.remove(&key);
            let Some(aside) = self.lanes.get_mut(&key).and_then(|lane| lane.aside.as_mut()) else { continue };
            (aside.reading, aside.behind) = (true, false);
            let to = match key {
                Key::Alone(n) => n,
                Key::Lane(_) => self.read_to.max(aside.read_to + 1),
            };
            wishes.push(LaneWish { after: aside.read_to, to, key, most: chunk });
        }
        wishes
    }

    /// What was read for a lane: all up to where it wished if there are fewer than it wished for.
    pub(crate) fn offer_lane(&mut self, wish: &LaneWish, mails: Vec<Mail>) {
        let complete = mails.len() < wish.most;
        self.weigh(&mails);
        // The feed comes to those as well, when the lane may be over.
        self.done.extend(mails.iter().map(|mail| mail.n).filter(|n| *n > self.read_to));
        let Some(lane) = self.lanes.get_mut(&wish.key) else { return };
        let Some(aside) = &mut lane.aside else { return };
        aside.reading = false;
        aside.behind |= !complete;
        aside.read_to = match (complete, mails.last()) {
            (true, _) => wish.to,
            (false, last) => last.map_or(wish.after, |last| last.n),
        };
        self.waiting += mails.len();
        lane.queue.extend(mails);
        if lane.queue.is_empty() {
            match aside.behind {
                true => drop(self.hungry.insert(wish.key.clone())),
                false => self.end_lane(&wish.key),
            }
        } else if !lane.in_flight {
            self.ready.push_back(wish.key.clone());
        }
    }

    /// A lane could not be read for: it is done again.
    pub(crate) fn unread(&mut self, wish: LaneWish) {
        if let Some(aside) = self.lanes.get_mut(&wish.key).and_then(|lane| lane.aside.as_mut()) {
            (aside.reading, aside.behind) = (false, true);
            self.hungry.insert(wish.key);
        }
    }
}

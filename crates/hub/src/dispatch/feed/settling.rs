//! What an answer leads to.

use chrono::{DateTime, Utc};

use super::{Attempt, Came, Death, Feed, Key, Lane};
use crate::domain::{OnExhausted, Outcome, Reason, Verdict, backoff};

impl Feed {
    /// What came of a message that was under way. Chance, from 0 to 1, spreads what is tried again.
    pub(crate) fn finished(&mut self, key: &Key, came: Came, now: DateTime<Utc>, chance: f64) {
        self.in_flight = self.in_flight.saturating_sub(1);
        let Some(lane) = self.lanes.get_mut(key) else { return };
        lane.in_flight = false;
        let Some(mail) = lane.queue.front().cloned() else { return };
        lane.attempts += 1;
        let (tried, verdict) = (lane.attempts, came.verdict);
        match verdict {
            Verdict::Delivered => (self.failures, self.probe_at) = (0, None),
            Verdict::Retry => self.failures = self.failures.saturating_add(1),
            Verdict::Refused | Verdict::Gone => {}
        }
        let pause = came.retry_after.filter(|_| verdict == Verdict::Retry);
        if let Some(pause) = pause {
            self.left_alone_until = self.left_alone_until.max(Some(now + pause));
        }
        let again = match verdict {
            Verdict::Retry => backoff(&self.recipient.backoff, u32::from(tried), chance),
            Verdict::Delivered | Verdict::Refused | Verdict::Gone => None,
        };
        let (outcome, death) = match (verdict, again) {
            (Verdict::Delivered, _) => (Outcome::Delivered, None),
            (Verdict::Retry, Some(_)) => (Outcome::Failed, None),
            (Verdict::Retry, None) => (Outcome::Dead, Some(Reason::Exhausted)),
            (Verdict::Refused, _) => (Outcome::Dead, Some(came.unsent.unwrap_or(Reason::Refused))),
            (Verdict::Gone, _) => (Outcome::Dead, Some(Reason::Gone)),
        };
        let detail = came.why();
        let subscriber = self.recipient.id;
        self.attempts.push(Attempt { at: now, subscriber, n: mail.n, attempt: tried, outcome, came });
        if verdict == Verdict::Gone {
            self.is_gone = true;
        }
        match (again, death) {
            (Some(again), _) => self.put_off(key, mail.n, now + again.max(pause.unwrap_or_default())),
            (None, None) => self.settle(key),
            (None, Some(reason)) => {
                let (head, recipient) = (mail.n, self.recipient.clone());
                self.deaths.push(Death { recipient, mail, reason, detail, attempts: tried, at: now });
                let blocks = self.recipient.on_exhausted == OnExhausted::Block && matches!(key, Key::Lane(_));
                match blocks && matches!(reason, Reason::Exhausted | Reason::Refused) {
                    true => self.block(key, head),
                    false => self.settle(key),
                }
            }
        }
    }

    /// The lane goes on with `head` at that time.
    pub(super) fn put_off(&mut self, key: &Key, head: i64, next_at: DateTime<Utc>) {
        if let Some(lane) = self.stop(key, head) {
            lane.next_at = Some(next_at);
            self.due.insert((next_at, key.clone()));
        }
    }

    /// The lane waits for someone to retry its head.
    fn block(&mut self, key: &Key, head: i64) {
        if let Some(lane) = self.stop(key, head) {
            (lane.blocked, lane.again, lane.next_at) = (true, false, None);
        }
    }

    /// Puts the lane aside before `head`, with nothing of it in memory: it is read again when it goes on.
    fn stop(&mut self, key: &Key, head: i64) -> Option<&mut Lane> {
        self.put_aside(key);
        let lane = self.lanes.get_mut(key)?;
        self.waiting -= lane.queue.len();
        for mail in lane.queue.drain(..) {
            self.done.remove(&mail.n);
        }
        if let Some(aside) = &mut lane.aside {
            (aside.head, aside.read_to, aside.behind) = (head, head - 1, true);
        }
        self.touched.insert(key.clone());
        Some(lane)
    }

    /// The first of the lane has its outcome; the next may go.
    fn settle(&mut self, key: &Key) {
        let Some(lane) = self.lanes.get_mut(key) else { return };
        (lane.attempts, lane.again) = (0, false);
        if let Some(mail) = lane.queue.pop_front() {
            self.waiting -= 1;
            self.open.remove(&mail.n);
            if let Some(aside) = &mut lane.aside {
                aside.head = mail.n;
            }
        }
        let is_behind = lane.aside.as_ref().is_some_and(|aside| aside.behind || aside.reading);
        if !lane.queue.is_empty() {
            self.ready.push_back(key.clone());
            if lane.aside.is_some() {
                self.touched.insert(key.clone());
            }
        } else if is_behind {
            self.hungry.insert(key.clone());
            self.touched.insert(key.clone());
        } else {
            self.end_lane(key);
        }
    }

    /// Nothing of the lane is left to send.
    pub(super) fn end_lane(&mut self, key: &Key) {
        if let Some(lane) = self.lanes.remove(key)
            && let Some(saved) = lane.aside.and_then(|aside| aside.saved)
        {
            self.ended_rows.push(saved.head);
        }
        self.hungry.remove(key);
        self.touched.remove(key);
    }
}

impl Came {
    fn why(&self) -> String {
        match (self.status, &self.detail) {
            (Some(status), _) => format!("answered {status}"),
            (None, Some(detail)) => detail.clone(),
            (None, None) => self.error.unwrap_or("failed").to_owned(),
        }
    }
}

//! All that is known of one subscriber while this process sends to it: what waits, what is under way, how far everything
//! is settled. It decides what is sent next and what an answer leads to. It does nothing itself, and is told the time.
//!
//! Messages come in the order of their numbers. Those of a lane are sent one after the other, the next only when the one
//! before is settled; lanes take turns. A lane that fails, or that has more waiting than others should wait for, is put
//! *aside*: it gets a row, the position moves on past it, and it reads its messages for itself until it has caught up.

mod commands;
mod keeping;
mod reading;
mod settling;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};

pub(crate) use self::commands::{Command, What};
pub(crate) use self::keeping::{Attempt, Death, LaneRow, Save};
use super::{Mail, Recipient};
use crate::domain::{Reason, Verdict};

/// After so many failures in a row only one message is tried at a time.
const BREAKER_FAILURES: u32 = 20;
/// While the breaker is open, the next try waits at least this long.
const PROBE_PAUSE: Duration = Duration::from_millis(500);

/// A lane, or a message without one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Key {
    Lane(Arc<str>),
    Alone(i64),
}

/// What came of an attempt.
#[derive(Debug, Clone)]
pub(crate) struct Came {
    pub(crate) verdict: Verdict,
    pub(crate) retry_after: Option<Duration>,
    pub(crate) status: Option<u16>,
    pub(crate) latency: Duration,
    pub(crate) error: Option<&'static str>,
    pub(crate) detail: Option<String>,
    pub(crate) excerpt: Option<String>,
    /// It was not sent at all, and why.
    pub(crate) unsent: Option<Reason>,
}

/// Messages of a lane that is to be read: those behind `after`, up to `to`.
#[derive(Debug, Clone)]
pub(crate) struct LaneWish {
    pub(crate) key: Key,
    pub(crate) after: i64,
    pub(crate) to: i64,
    pub(crate) most: usize,
}

#[derive(Debug, Default)]
struct Lane {
    /// In order; the first may be under way.
    queue: VecDeque<Mail>,
    in_flight: bool,
    /// Failures of the first.
    attempts: u16,
    next_at: Option<DateTime<Utc>>,
    /// Waits for someone to retry its head.
    blocked: bool,
    /// Someone has.
    again: bool,
    aside: Option<Aside>,
}

#[derive(Debug, Clone)]
struct Aside {
    /// As the database has it; None: it has no row yet.
    saved: Option<LaneRow>,
    saved_at: Option<DateTime<Utc>>,
    /// A message of this lane: the next, or the last that was settled. No other lane's row has it.
    head: i64,
    /// Of this lane everything up to here was read.
    read_to: i64,
    /// There is more, up to where the feed has read.
    behind: bool,
    reading: bool,
}

pub(crate) struct Feed {
    pub(crate) recipient: Arc<Recipient>,
    /// What was sent for another feed of the same subscriber is not this one's.
    pub(crate) generation: u64,
    /// Everything up to here was read, or is a lane's that is aside.
    read_to: i64,
    pub(crate) behind: bool,
    pub(crate) reading: bool,
    /// There may be commands for it, which are read whether it wishes for messages or not.
    pub(crate) commanded: bool,
    lanes: HashMap<Key, Lane>,
    /// Lanes with something to send, by turns.
    ready: VecDeque<Key>,
    /// Lanes that wait, by when.
    due: BTreeSet<(DateTime<Utc>, Key)>,
    /// Lanes that are due, or go well, and must read before they can go on.
    hungry: BTreeSet<Key>,
    /// Read and not settled, of lanes that are not aside.
    open: BTreeSet<i64>,
    /// Settled, by what the database has, though the position has not passed it.
    done: HashSet<i64>,
    in_flight: usize,
    waiting: usize,
    failures: u32,
    probe_at: Option<DateTime<Utc>>,
    left_alone_until: Option<DateTime<Utc>>,
    allowance: Allowance,
    /// Lanes whose row may have to change.
    touched: HashSet<Key>,
    ended_rows: Vec<i64>,
    saved_position: i64,
    saved_at: DateTime<Utc>,
    attempts: Vec<Attempt>,
    deaths: Vec<Death>,
    is_gone: bool,
    /// By number: the commands that ask for it, and whose they are.
    given_up: HashMap<i64, (i64, String)>,
    commands_done: Vec<i64>,
    /// Commands that were read: they are read again until it is kept that they are done.
    heard: HashSet<i64>,
    /// Messages whose retry came too late, since their lane has gone on.
    unretried: Vec<i64>,
    /// How large messages are, by the last that came.
    mail_bytes: usize,
}

/// A rate limit: so many at once as come together in a tenth of a second.
#[derive(Debug)]
struct Allowance {
    left: f64,
    at: DateTime<Utc>,
}

impl Feed {
    pub(crate) fn new(
        recipient: Arc<Recipient>,
        position: i64,
        rows: Vec<(LaneRow, i64)>,
        done: HashSet<i64>,
        now: DateTime<Utc>,
    ) -> Feed {
        let mut feed = Feed {
            recipient,
            generation: 0,
            read_to: position,
            behind: true,
            reading: false,
            commanded: true,
            lanes: HashMap::new(),
            ready: VecDeque::new(),
            due: BTreeSet::new(),
            hungry: BTreeSet::new(),
            open: BTreeSet::new(),
            done,
            in_flight: 0,
            waiting: 0,
            failures: 0,
            probe_at: None,
            left_alone_until: None,
            allowance: Allowance { left: 0.0, at: now },
            touched: HashSet::new(),
            ended_rows: Vec::new(),
            saved_position: position,
            saved_at: now,
            attempts: Vec::new(),
            deaths: Vec::new(),
            is_gone: false,
            given_up: HashMap::new(),
            commands_done: Vec::new(),
            heard: HashSet::new(),
            unretried: Vec::new(),
            mail_bytes: reading::MAIL_BYTES_AT_FIRST,
        };
        for (row, next) in rows {
            let key = row.lane.clone().map_or(Key::Alone(row.head), Key::Lane);
            let aside = Aside {
                read_to: next - 1,
                saved: Some(row.clone()),
                saved_at: Some(now),
                head: row.head,
                behind: true,
                reading: false,
            };
            if let Some(next_at) = row.next_at {
                feed.due.insert((next_at, key.clone()));
            }
            let lane = Lane {
                attempts: row.attempts,
                next_at: row.next_at,
                blocked: row.next_at.is_none(),
                again: row.again,
                aside: Some(aside),
                ..Lane::default()
            };
            feed.lanes.insert(key, lane);
        }
        feed
    }

    /// Whether anything may be sent at all.
    fn is_open(&self) -> bool {
        self.recipient.is_open && !self.is_gone
    }

    /// True when nothing is in memory that the database does not have.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.attempts.is_empty() && self.deaths.is_empty() && self.touched.is_empty()
    }

    /// Whether it could go on if it were read for.
    pub(crate) fn is_hungry(&self) -> bool {
        self.wish().is_some() || (!self.hungry.is_empty() && self.is_open())
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    // ---- sending

    /// The next message to send, if one may be sent now.
    pub(crate) fn next(&mut self, now: DateTime<Utc>) -> Option<(Key, Mail)> {
        self.wake_due(now);
        if self.ready.is_empty() || !self.may_send(now) {
            return None;
        }
        let key = self.ready.pop_front()?;
        let lane = self.lanes.get_mut(&key)?;
        let mail = lane.queue.front()?.clone();
        lane.in_flight = true;
        self.in_flight += 1;
        self.allowance.left -= 1.0;
        if self.is_broken() {
            self.probe_at = Some(now + PROBE_PAUSE);
        }
        Some((key, mail))
    }

    fn may_send(&mut self, now: DateTime<Utc>) -> bool {
        if !self.is_open() || self.left_alone_until.is_some_and(|until| until > now) {
            return false;
        }
        let most = if self.is_broken() { 1 } else { self.recipient.max_in_flight };
        let probes = self.is_broken() && self.probe_at.is_some_and(|at| at > now);
        if self.in_flight >= most || probes {
            return false;
        }
        self.recipient.rate.is_none_or(|rate| self.allowance.allows(rate, now))
    }

    fn is_broken(&self) -> bool {
        self.failures >= BREAKER_FAILURES
    }

    /// When to look again, if nothing else happens before.
    pub(crate) fn next_look(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let to_keep = self.next_keeping();
        if !self.is_open() {
            return to_keep;
        }
        let due = self.due.first().map(|(at, _)| *at);
        let rate = self.recipient.rate.filter(|_| self.allowance.left < 1.0);
        let allowed = rate.map(|rate| now + Duration::from_secs_f64(1.0 / f64::from(rate)));
        let holds = [self.left_alone_until, self.probe_at.filter(|_| self.is_broken()), allowed];
        // What is over holds nothing back any more; without any, it is an answer that is waited for.
        let held_back = holds.into_iter().flatten().filter(|at| *at > now && !self.ready.is_empty()).max();
        [due, held_back, to_keep].into_iter().flatten().min()
    }

    fn wake_due(&mut self, now: DateTime<Utc>) {
        while self.due.first().is_some_and(|(at, _)| *at <= now) {
            let Some((_, key)) = self.due.pop_first() else { break };
            let Some(lane) = self.lanes.get_mut(&key) else { continue };
            lane.next_at = None;
            if lane.queue.is_empty() {
                self.hungry.insert(key);
            } else {
                self.ready.push_back(key);
            }
        }
    }

    /// Its owner has changed something.
    pub(crate) fn change(&mut self, recipient: Arc<Recipient>) {
        if recipient.version != self.recipient.version {
            self.is_gone = false;
            self.left_alone_until = None;
        }
        self.recipient = recipient;
    }
}

impl Mail {
    fn key(&self) -> Key {
        self.lane.clone().map_or(Key::Alone(self.n), Key::Lane)
    }
}

impl Came {
    /// For a message that is not sent at all.
    pub(crate) fn unsent(reason: Reason, detail: &str) -> Came {
        Came {
            verdict: Verdict::Refused,
            retry_after: None,
            status: None,
            latency: Duration::ZERO,
            error: Some(reason.as_str()),
            detail: Some(detail.to_owned()),
            excerpt: None,
            unsent: Some(reason),
        }
    }
}

impl Allowance {
    fn allows(&mut self, rate: u32, now: DateTime<Utc>) -> bool {
        let passed = (now - self.at).to_std().unwrap_or_default().as_secs_f64();
        self.left = (self.left + passed * f64::from(rate)).min((f64::from(rate) / 10.0).max(1.0));
        self.at = now;
        self.left >= 1.0
    }
}

#[cfg(test)]
mod tests;

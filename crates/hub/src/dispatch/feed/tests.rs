//! A feed against a model: messages come, are sent, fail and die at random, and the process that knows it dies, too. What
//! the database has is kept here by hand, as the statements would.

mod claims;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::dispatch::tests;
use crate::domain::{OnExhausted, Outcome};

fn recipient(max_in_flight: usize, on_exhausted: OnExhausted) -> Arc<Recipient> {
    Arc::new(Recipient { max_in_flight, on_exhausted, ..tests::recipient() })
}

fn came(verdict: Verdict) -> Came {
    let (status, error) = match verdict {
        Verdict::Delivered => (Some(200), None),
        Verdict::Retry => (Some(500), Some("status")),
        Verdict::Refused => (Some(400), Some("status")),
        Verdict::Gone => (Some(410), Some("status")),
    };
    Came {
        verdict,
        retry_after: None,
        status,
        latency: Duration::ZERO,
        error,
        detail: None,
        excerpt: None,
        unsent: None,
    }
}

/// What the database has, and what the endpoint has seen.
#[derive(Default)]
struct World {
    messages: BTreeMap<i64, Option<Arc<str>>>,
    position: i64,
    lanes: BTreeMap<i64, LaneRow>,
    /// Outcomes that end a message.
    settled: BTreeMap<i64, Outcome>,
    attempts: HashMap<i64, u16>,
    /// What was sent, in order.
    sent: Vec<i64>,
    delivered: HashSet<i64>,
    payload_bytes: usize,
}

impl World {
    fn mail(&self, n: i64) -> Mail {
        let event = tests::event(self.payload_bytes);
        Mail { n, lane: self.messages[&n].clone(), seq: None, event: Some(Arc::new(event)) }
    }

    fn load(&self, recipient: Arc<Recipient>, now: DateTime<Utc>) -> Feed {
        let first_open = |row: &LaneRow| {
            let of_lane = self.messages.range(row.head..).filter(|(_, lane)| row.lane.is_some() && **lane == row.lane);
            let last = of_lane.clone().next_back().map_or(row.head, |(n, _)| *n + 1);
            of_lane.map(|(n, _)| *n).find(|n| !self.settled.contains_key(n)).unwrap_or(last)
        };
        let rows = self.lanes.values().map(|row| {
            let is_fixed = row.next_at.is_none() || row.again || row.lane.is_none();
            let next = if is_fixed { row.head } else { first_open(row) };
            (LaneRow { attempts: if next == row.head { row.attempts } else { 0 }, ..row.clone() }, next)
        });
        let done = self.settled.range(self.position + 1..).map(|(n, _)| *n).collect();
        Feed::new(recipient, self.position, rows.collect(), done, now)
    }

    fn keep(&mut self, save: Save) {
        for attempt in save.attempts {
            self.attempts.insert(attempt.n, attempt.attempt);
            if attempt.outcome != Outcome::Failed {
                self.settled.insert(attempt.n, attempt.outcome);
            }
        }
        for (_, head) in save.ended {
            self.lanes.remove(&head);
        }
        for (_, row) in save.waiting {
            let other = self.lanes.get(&row.head);
            assert!(other.is_none_or(|other| other.lane == row.lane), "a row is one lane's");
            assert!(self.messages[&row.head] == row.lane, "a row's head is of its lane");
            assert!(
                !self
                    .lanes
                    .values()
                    .any(|other| other.lane.is_some() && other.lane == row.lane && other.head != row.head),
                "a lane has one row"
            );
            self.lanes.insert(row.head, row);
        }
        for (_, position) in save.positions {
            assert!(position >= self.position, "a position goes forward");
            self.position = position;
        }
        // What the position has passed is settled, or a lane answers for it.
        for (n, lane) in self.messages.range(..=self.position) {
            let is_in_a_lane = self.lanes.values().any(|row| match &row.lane {
                Some(_) => row.lane == *lane && row.head <= *n,
                None => row.head == *n,
            });
            assert!(self.settled.contains_key(n) || is_in_a_lane, "{n} is lost: passed, and in no lane");
        }
    }

    /// Reads for the feed what it wishes, as the statements would.
    fn read(&self, feed: &mut Feed, now: DateTime<Utc>) {
        self.begin_reading(feed, now).end(feed);
    }

    /// What is made from now on is not read.
    fn begin_reading(&self, feed: &mut Feed, now: DateTime<Utc>) -> Reading {
        let mut reading = Reading::default();
        if let Some((after, most)) = feed.wish() {
            (feed.reading, feed.behind) = (true, false);
            let mails: Vec<Mail> = self.messages.range(after + 1..).take(most).map(|(n, _)| self.mail(*n)).collect();
            reading.feed = Some((mails, most));
        }
        for wish in feed.lane_wishes(now, 8) {
            let of_lane = |(n, lane): &(&i64, &Option<Arc<str>>)| match &wish.key {
                Key::Lane(name) => lane.as_ref() == Some(name),
                Key::Alone(alone) => **n == *alone,
            };
            let mails: Vec<Mail> = self
                .messages
                .range(wish.after + 1..=wish.to)
                .filter(of_lane)
                .take(wish.most)
                .map(|(n, _)| self.mail(*n))
                .collect();
            reading.lanes.push((wish, mails));
        }
        reading
    }

    /// A message may be sent only when every earlier one of its lane is settled, in what the endpoint has seen or in what
    /// is known of it.
    fn check_order(&self, mail: &Mail, dead: &HashSet<i64>) {
        let Some(lane) = &mail.lane else { return };
        for (n, other) in self.messages.range(..mail.n) {
            if other.as_ref() == Some(lane) {
                let is_over = self.settled.contains_key(n) || self.delivered.contains(n) || dead.contains(n);
                assert!(is_over, "{} was sent before {n} was over", mail.n);
            }
        }
    }
}

/// What was read, and is not there yet.
#[derive(Default)]
struct Reading {
    feed: Option<(Vec<Mail>, usize)>,
    lanes: Vec<(LaneWish, Vec<Mail>)>,
}

impl Reading {
    fn end(self, feed: &mut Feed) {
        if let Some((mails, most)) = self.feed {
            feed.reading = false;
            let complete = mails.len() < most;
            feed.offer(mails, complete);
        }
        for (wish, mails) in self.lanes {
            feed.offer_lane(&wish, mails);
        }
    }
}

fn run(seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let lanes: Vec<Arc<str>> = (0..random.random_range(1..8)).map(|lane| Arc::from(format!("lane {lane}"))).collect();
    let on_exhausted = if seed.is_multiple_of(2) { OnExhausted::Block } else { OnExhausted::Skip };
    let recipient = recipient(random.random_range(1..20), on_exhausted);
    let (fails, dies) = (random.random_range(0.0..0.4), random.random_range(0.0..0.05));
    let count = random.random_range(1..600);
    let mut world = World::default();
    let mut now = DateTime::<Utc>::UNIX_EPOCH + TimeDelta::days(20_000);
    let mut feed = world.load(recipient.clone(), now);
    let mut under_way: Vec<(Key, Mail)> = Vec::new();
    let mut dead: HashSet<i64> = HashSet::new();
    let mut repeats_allowed: HashSet<i64> = HashSet::new();
    let (mut made, mut commands) = (0, 0);
    let mut reading: Option<Reading> = None;
    // What fan-out has handed over, and up to where the feed was told.
    let mut handed_over: VecDeque<(i64, i64)> = VecDeque::new();
    let mut told_to = 0;
    for step in 0..200_000 {
        assert!(step < 199_999, "seed {seed} does not come to an end: {} of {made} settled", world.settled.len());
        let is_idle = under_way.is_empty();
        match random.random_range(0..100) {
            // A batch comes: handed over, or told of.
            0..10 if made < count => {
                let from = made + 1;
                made = (made + random.random_range(1..80)).min(count);
                for n in from..=made {
                    let lane = random.random_bool(0.7).then(|| lanes[random.random_range(0..lanes.len())].clone());
                    world.messages.insert(n, lane);
                }
                if random.random_bool(0.8) {
                    handed_over.push_back((from, made));
                }
            }
            10..15 => {
                if let Some((from, to)) = handed_over.pop_front()
                    && told_to == from - 1
                {
                    told_to = to;
                    feed.hand_over((from..=to).map(|n| world.mail(n)).collect());
                }
            }
            15 if told_to < made => (feed.behind, told_to) = (true, made),
            16..23 if reading.is_none() => reading = Some(world.begin_reading(&mut feed, now)),
            23..30 => drop(reading.take().map(|reading| reading.end(&mut feed))),
            30..60 => {
                while let Some((key, mail)) = feed.next(now) {
                    assert!(under_way.len() < recipient.max_in_flight);
                    world.check_order(&mail, &dead);
                    assert!(!under_way.iter().any(|(other, _)| *other == key), "two of a lane at once");
                    let is_new = !world.delivered.contains(&mail.n);
                    let is_allowed = is_new || repeats_allowed.remove(&mail.n);
                    assert!(is_allowed, "seed {seed}: {} is sent again for no reason", mail.n);
                    world.sent.push(mail.n);
                    under_way.push((key, mail));
                }
            }
            60..90 if !is_idle => {
                let (key, mail) = under_way.swap_remove(random.random_range(0..under_way.len()));
                let verdict = match random.random::<f64>() {
                    chance if chance < dies => Verdict::Refused,
                    chance if chance < dies + fails => Verdict::Retry,
                    _ => Verdict::Delivered,
                };
                if verdict == Verdict::Delivered {
                    world.delivered.insert(mail.n);
                } else if world.delivered.contains(&mail.n) {
                    repeats_allowed.insert(mail.n); // what is sent again may fail, and is tried again
                }
                let deaths = feed.deaths.len();
                feed.finished(&key, came(verdict), now, random.random());
                dead.extend(feed.deaths[deaths..].iter().map(|death| death.mail.n));
            }
            90..96 => {
                let mut save = Save::default();
                feed.save(now, &mut save);
                world.keep(save);
            }
            96 if random.random_bool(0.2) => {
                // It dies: what was under way, or not yet kept, is sent again.
                under_way.clear();
                let is_known = |n: &i64| world.settled.get(n) == Some(&Outcome::Delivered);
                repeats_allowed = world.delivered.iter().copied().filter(|n| !is_known(n)).collect();
                dead.retain(|n| world.settled.contains_key(n));
                feed = world.load(recipient.clone(), now);
                (reading, told_to) = (None, made);
            }
            97..100 => now += TimeDelta::milliseconds(random.random_range(1..20_000)),
            _ => {}
        }
        // Blocked lanes are freed by hand.
        if random.random_bool(0.02) {
            let blocked: Vec<i64> =
                world.lanes.values().filter(|row| row.next_at.is_none()).map(|row| row.head).collect();
            for n in blocked {
                let what = if random.random() { What::Retry } else { What::GiveUp };
                let key = world.messages[&n].clone().map_or(Key::Alone(n), Key::Lane);
                commands += 1;
                feed.command(Command { id: commands, key, n, what, by: String::new() }, now);
            }
        }
        let all = made == count && world.settled.len() == world.messages.len();
        if all && under_way.is_empty() && feed.is_idle() && world.lanes.is_empty() && world.position == count {
            break;
        }
    }
    let settled: BTreeSet<i64> = world.settled.keys().copied().collect();
    assert_eq!(settled, world.messages.keys().copied().collect(), "seed {seed}");
    // First sight is in order, lane by lane.
    let mut seen: HashSet<i64> = HashSet::new();
    let mut last: HashMap<Arc<str>, i64> = HashMap::new();
    for n in world.sent {
        if let (Some(lane), true) = (&world.messages[&n], seen.insert(n)) {
            let before = last.insert(lane.clone(), n);
            assert!(before.is_none_or(|before| before < n), "seed {seed}: {n} after {before:?}");
        }
    }
}

#[test]
fn lanes_keep_their_order_and_nothing_is_lost_whatever_fails_and_dies() {
    let seeds = if std::env::var_os("PBX_SOAK").is_some() { 5_000 } else { 100 };
    (0..seeds).for_each(run);
}

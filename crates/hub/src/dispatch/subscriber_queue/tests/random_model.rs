//! Random runs: messages arrive, are sent, fail and become dead letters, and the process crashes and starts again.
//!
//! Checked all the time: at most one message of a lane is in flight, a message is sent only after all earlier ones of its
//! lane have a final outcome, no message is sent again without a reason, none is lost, and every run comes to an end.

use std::collections::{BTreeSet, HashMap, VecDeque};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::operator_command::{OperatorCommand, PendingCommand};

const STEPS_MAX: usize = 200_000;

struct Simulation {
    seed: u64,
    random: StdRng,
    now: DateTime<Utc>,
    database: Database,
    endpoint: Endpoint,
    recipient: Arc<Recipient>,
    queue: SubscriberQueue,
    read: Option<ReadInFlight>,
    fanout: FanOut,
    in_flight: Vec<(LaneKey, HubMessage)>,
    /// Messages that became dead letters, saved or not.
    dead: HashSet<i64>,
    commands: i64,
}

/// What the subscriber's endpoint has received, and how it answers.
#[derive(Default)]
struct Endpoint {
    /// In the order of sending.
    sent: Vec<i64>,
    delivered: HashSet<i64>,
    /// Delivered messages that may be sent again: a crash has lost their outcome.
    may_repeat: HashSet<i64>,
    failure_rate: f64,
    refusal_rate: f64,
}

/// The messages that fan-out creates, and how it announces them.
struct FanOut {
    lanes: Vec<Arc<str>>,
    created: i64,
    total: i64,
    /// Batches on their way to the dispatcher: first and last number.
    handed_over: VecDeque<(i64, i64)>,
    /// The last number that was announced to the queue.
    announced: i64,
}

impl Simulation {
    fn new(seed: u64) -> Simulation {
        let mut random = StdRng::seed_from_u64(seed);
        let lanes = (0..random.random_range(1..8)).map(|lane| Arc::from(format!("lane {lane}"))).collect();
        let on_exhausted = if seed.is_multiple_of(2) { OnExhausted::Block } else { OnExhausted::Skip };
        let recipient = recipient(random.random_range(1..20), on_exhausted);
        let (failure_rate, refusal_rate) = (random.random_range(0.0..0.4), random.random_range(0.0..0.05));
        let total = random.random_range(1..600);
        let database = Database::default();
        Simulation {
            seed,
            random,
            now: now(),
            queue: database.load(recipient.clone(), now()),
            database,
            endpoint: Endpoint { failure_rate, refusal_rate, ..Endpoint::default() },
            recipient,
            read: None,
            fanout: FanOut { lanes, created: 0, total, handed_over: VecDeque::new(), announced: 0 },
            in_flight: Vec::new(),
            dead: HashSet::new(),
            commands: 0,
        }
    }

    fn run(mut self) {
        for step in 0.. {
            let (completed, created) = (self.database.completed.len(), self.fanout.created);
            assert!(step < STEPS_MAX, "seed {} does not come to an end: {completed} of {created} completed", self.seed);
            self.step();
            if self.random.random_bool(0.02) {
                self.command_blocked_lanes();
            }
            self.queue.lanes.check_invariants();
            if self.is_finished() {
                break;
            }
        }
        self.check_end();
    }

    fn step(&mut self) {
        match self.random.random_range(0..100) {
            0..10 => self.create_messages(),
            10..15 => self.hand_over(),
            15 => self.announce_by_poll(),
            16..23 if self.read.is_none() => self.read = Some(self.database.start_read(&mut self.queue, self.now)),
            23..30 => drop(self.read.take().map(|read| read.finish(&mut self.queue))),
            30..60 => self.send(),
            60..90 => self.finish_attempt(),
            90..96 => self.save(),
            96 if self.random.random_bool(0.2) => self.crash(),
            97..100 => self.now += TimeDelta::milliseconds(self.random.random_range(1..20_000)),
            _ => {}
        }
    }

    fn create_messages(&mut self) {
        if self.fanout.created == self.fanout.total {
            return;
        }
        let first = self.fanout.created + 1;
        self.fanout.created = (self.fanout.created + self.random.random_range(1..80)).min(self.fanout.total);
        for n in first..=self.fanout.created {
            let lane = self.random.random_range(0..self.fanout.lanes.len());
            let lane = self.random.random_bool(0.7).then(|| self.fanout.lanes[lane].clone());
            self.database.messages.insert(n, lane);
        }
        if self.random.random_bool(0.8) {
            self.fanout.handed_over.push_back((first, self.fanout.created));
        }
    }

    /// The dispatcher receives a batch; with a gap before it, it is ignored.
    fn hand_over(&mut self) {
        if let Some((first, last)) = self.fanout.handed_over.pop_front()
            && self.fanout.announced == first - 1
        {
            self.fanout.announced = last;
            let messages = (first..=last).map(|n| self.database.message(n)).collect();
            self.queue.receive(messages, Origin::HandedOver);
        }
    }

    fn announce_by_poll(&mut self) {
        if self.fanout.announced < self.fanout.created {
            self.queue.mark_has_more();
            self.fanout.announced = self.fanout.created;
        }
    }

    fn send(&mut self) {
        while let Some((key, message)) = self.queue.start_next(self.now) {
            assert!(self.in_flight.len() < self.recipient.limits.max_in_flight);
            assert!(!self.in_flight.iter().any(|(other, _)| *other == key), "two messages of a lane in flight");
            self.check_order(&message);
            let is_new = !self.endpoint.delivered.contains(&message.n);
            let is_allowed = is_new || self.endpoint.may_repeat.remove(&message.n);
            assert!(is_allowed, "seed {}: {} is sent again without a reason", self.seed, message.n);
            self.endpoint.sent.push(message.n);
            self.in_flight.push((key, message));
        }
    }

    /// Every earlier message of the lane must have a final outcome, saved or not.
    fn check_order(&self, message: &HubMessage) {
        let Some(lane) = &message.lane else { return };
        for (n, other) in self.database.messages.range(..message.n) {
            if other.as_ref() == Some(lane) {
                let is_saved = self.database.completed.contains_key(n);
                let is_completed = is_saved || self.endpoint.delivered.contains(n) || self.dead.contains(n);
                assert!(is_completed, "{} was sent before {n} was completed", message.n);
            }
        }
    }

    fn finish_attempt(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        let (key, message) = self.in_flight.swap_remove(self.random.random_range(0..self.in_flight.len()));
        if self.random.random_bool(0.03) {
            // The lease may have expired, so it was not sent.
            if self.endpoint.delivered.contains(&message.n) {
                self.endpoint.may_repeat.insert(message.n);
            }
            return self.queue.cancel_attempt(&key, self.now);
        }
        let verdict = match self.random.random::<f64>() {
            chance if chance < self.endpoint.refusal_rate => Verdict::Refused,
            chance if chance < self.endpoint.refusal_rate + self.endpoint.failure_rate => Verdict::Retry,
            _ => Verdict::Delivered,
        };
        if verdict == Verdict::Delivered {
            self.endpoint.delivered.insert(message.n);
        } else if self.endpoint.delivered.contains(&message.n) {
            self.endpoint.may_repeat.insert(message.n); // A repetition that fails is retried.
        }
        let before = self.queue.unsaved.dead_letters.len();
        self.queue.finish_attempt(&key, result(verdict), self.now, self.random.random());
        let dead_letters = &self.queue.unsaved.dead_letters[before..];
        self.dead.extend(dead_letters.iter().map(|dead_letter| dead_letter.message.n));
    }

    fn save(&mut self) {
        let mut changes = Changes::default();
        self.queue.drain_changes(self.now, &mut changes);
        self.database.save(changes);
    }

    /// The process crashes: attempts in flight and unsaved outcomes are lost, and another process loads the queue.
    fn crash(&mut self) {
        self.in_flight.clear();
        let is_saved = |n: &i64| self.database.completed.get(n) == Some(&Outcome::Delivered);
        self.endpoint.may_repeat = self.endpoint.delivered.iter().copied().filter(|n| !is_saved(n)).collect();
        self.dead.retain(|n| self.database.completed.contains_key(n));
        self.queue = self.database.load(self.recipient.clone(), self.now);
        (self.read, self.fanout.announced) = (None, self.fanout.created);
    }

    /// An operator retries or dead-letters the heads of all blocked lanes.
    fn command_blocked_lanes(&mut self) {
        let rows = self.database.lanes.values();
        let blocked: Vec<i64> = rows.filter(|row| row.next_at.is_none()).map(|row| row.head).collect();
        for n in blocked {
            let command = if self.random.random() { OperatorCommand::Retry } else { OperatorCommand::DeadLetter };
            let key = LaneKey::new(self.database.messages[&n].clone(), n);
            self.commands += 1;
            let pending = PendingCommand { id: self.commands, key, n, command, by: String::new() };
            self.queue.execute(pending, self.now);
        }
    }

    fn is_finished(&self) -> bool {
        self.fanout.created == self.fanout.total
            && self.database.completed.len() == self.database.messages.len()
            && self.database.lanes.is_empty()
            && self.database.position == self.fanout.total
            && self.in_flight.is_empty()
            && !self.queue.has_unsaved_outcomes()
    }

    fn check_end(self) {
        let completed: BTreeSet<i64> = self.database.completed.keys().copied().collect();
        assert_eq!(completed, self.database.messages.keys().copied().collect(), "seed {}", self.seed);
        // Lane by lane, messages are sent in order when they are sent for the first time.
        let mut seen: HashSet<i64> = HashSet::new();
        let mut last: HashMap<Arc<str>, i64> = HashMap::new();
        for n in self.endpoint.sent {
            if let (Some(lane), true) = (&self.database.messages[&n], seen.insert(n)) {
                let before = last.insert(lane.clone(), n);
                assert!(before.is_none_or(|before| before < n), "seed {}: {n} after {before:?}", self.seed);
            }
        }
    }
}

#[test]
fn lanes_stay_in_order_and_nothing_is_lost_whatever_fails() {
    let seeds = if std::env::var_os("PBX_SOAK").is_some() { 5_000 } else { 100 };
    (0..seeds).for_each(|seed| Simulation::new(seed).run());
}

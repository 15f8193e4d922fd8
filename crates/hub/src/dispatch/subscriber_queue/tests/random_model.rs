//! Random runs: messages arrive, are sent, fail and become dead letters, and the process crashes and starts again.
//!
//! Checked all the time: at most one request of a lane is in flight, a message is sent only after all earlier ones of its
//! lane have a final outcome, or together with them in one batch, no message is sent again without a reason, none is lost,
//! and every run comes to an end. A third of the runs sends batches, which never mix live messages and replays. In each run
//! messages of two replays, in separate lanes, and of a backfill, in the lanes of live messages, are between live ones.

use std::collections::{BTreeSet, HashMap, VecDeque};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::deliveries::command::{OperatorCommand, PendingCommand};
use crate::deliveries::message::replay_lane;

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
    in_flight: Vec<StartedBatch>,
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
    lanes: Vec<String>,
    replays: [Uuid; 2],
    backfill: Uuid,
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
        let lanes = (0..random.random_range(1..8)).map(|lane| format!("lane {lane}")).collect();
        let on_exhausted = if seed.is_multiple_of(2) { OnExhausted::Block } else { OnExhausted::Skip };
        let wait = Duration::from_millis(random.random_range(0..5_000));
        let batch = RecipientBatch { max: random.random_range(1..=100), wait };
        let recipient =
            with_batch(recipient(random.random_range(1..20), on_exhausted), seed.is_multiple_of(3).then_some(batch));
        let (failure_rate, refusal_rate) = (random.random_range(0.0..0.4), random.random_range(0.0..0.05));
        let total = random.random_range(1..600);
        let database = Database::default();
        let ([first, second, backfill], announced) = ([1, 2, 3].map(Uuid::from_u128), 0);
        let (replays, handed_over) = ([first, second], VecDeque::new());
        Simulation {
            seed,
            random,
            now: now(),
            queue: database.load(recipient.clone(), now()),
            database,
            endpoint: Endpoint { failure_rate, refusal_rate, ..Endpoint::default() },
            recipient,
            read: None,
            fanout: FanOut { lanes, replays, backfill, created: 0, total, handed_over, announced },
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
            let (replay, lane) = match self.random.random_range(0..10) {
                at @ 0..2 => {
                    let replay = self.fanout.replays[at];
                    (Some(replay), lane.map(|lane| replay_lane(replay, &lane)))
                }
                2..4 => (Some(self.fanout.backfill), lane),
                _ => (None, lane),
            };
            self.database.replays.extend(replay.map(|replay| (n, replay)));
            self.database.messages.insert(n, lane.map(Arc::from));
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
        while let Some(started) = start_request(&mut self.queue, self.now) {
            assert!(self.in_flight.len() < self.recipient.limits.max_in_flight);
            self.check_batch(&started);
            for (at, message) in started.messages.iter().enumerate() {
                self.check_order(message, &started.messages[..at]);
                let is_new = !self.endpoint.delivered.contains(&message.n);
                let is_allowed = is_new || self.endpoint.may_repeat.remove(&message.n);
                assert!(is_allowed, "seed {}: {} is sent again without a reason", self.seed, message.n);
                self.endpoint.sent.push(message.n);
            }
            self.in_flight.push(started);
        }
    }

    fn check_batch(&self, started: &StartedBatch) {
        let max = self.recipient.batch.map_or(1, |batch| batch.max);
        assert!((1..=max).contains(&started.messages.len()), "{} messages in a request", started.messages.len());
        let mut lanes = self.in_flight.iter().flat_map(|other| &other.lanes).collect::<Vec<_>>();
        for (key, count) in &started.lanes {
            assert!(!lanes.iter().any(|(other, _)| other == key), "two requests of a lane in flight");
            let of_lane = started.messages.iter().filter(|message| message.lane_key() == *key).count();
            assert_eq!(of_lane, *count, "a lane is in a batch once");
        }
        lanes.extend(&started.lanes);
        let replay = started.messages[0].replay;
        assert!(started.messages.iter().all(|message| message.replay == replay), "seed {}: a batch mixes", self.seed);
        let is_replay = |request: &&StartedBatch| request.messages[0].replay.is_some();
        let of_replays = self.in_flight.iter().chain([started]).filter(is_replay).count();
        let replays_max = (self.recipient.limits.max_in_flight * 3 / 4).max(1);
        assert!(of_replays <= replays_max || replay.is_none(), "{of_replays} requests of replays in flight");
        assert_eq!(started.lanes.iter().map(|(_, count)| count).sum::<usize>(), started.messages.len());
    }

    /// Every earlier message of the lane must have a final outcome, saved or not, or precede it in the same request.
    fn check_order(&self, message: &HubMessage, before: &[HubMessage]) {
        let Some(lane) = &message.lane else { return };
        for (n, other) in self.database.messages.range(..message.n) {
            if other.as_ref() == Some(lane) {
                let is_saved = self.database.completed.contains_key(n);
                let is_completed = is_saved || self.endpoint.delivered.contains(n) || self.dead.contains(n);
                let is_before = before.iter().any(|message| message.n == *n);
                assert!(is_completed || is_before, "{} was sent before {n} was completed", message.n);
            }
        }
    }

    fn finish_attempt(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        let request = self.in_flight.swap_remove(self.random.random_range(0..self.in_flight.len()));
        let numbers = request.messages.iter().map(|message| message.n);
        if self.random.random_bool(0.03) {
            // The lease may have expired, so it was not sent.
            self.endpoint.may_repeat.extend(numbers.filter(|n| self.endpoint.delivered.contains(n)));
            return cancel_request(&mut self.queue, &request, self.now);
        }
        let verdict = match self.random.random::<f64>() {
            chance if chance < self.endpoint.refusal_rate => Verdict::Refused,
            chance if chance < self.endpoint.refusal_rate + self.endpoint.failure_rate => Verdict::Retry,
            _ => Verdict::Delivered,
        };
        if verdict == Verdict::Delivered {
            self.endpoint.delivered.extend(numbers);
        } else {
            // A repetition that fails is retried.
            self.endpoint.may_repeat.extend(numbers.filter(|n| self.endpoint.delivered.contains(n)));
        }
        let before = self.queue.unsaved.dead_letters.len();
        finish_request(&mut self.queue, &request, result(verdict), self.now, self.random.random());
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
        assert!(self.queue.replays.allow(1, self.now), "no request of a replay is counted as in flight");
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

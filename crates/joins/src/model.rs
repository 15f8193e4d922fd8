//! The rules against a model that knows no batches, no heads of waitlists and no steps: one list of people.

use std::collections::BTreeMap;

use chrono::{DateTime, TimeDelta, Utc};
use contracts::events::EventStatus;
use contracts::joins::{Count, JoinStatus};
use kit::trace::TraceContext;
use proptest::prelude::*;
use uuid::Uuid;

use crate::domain::{
    Action, Actor, Ban, CLOSED, Changes, Command, Entry, Event, Line, Loaded, News, Order, Outcome, Roster, Told,
};

const USERS: u128 = 8;
/// The version of the last news: whatever else is said is older.
const LAST: i64 = 1_000_000;

fn user(n: u128) -> Uuid {
    Uuid::from_u128(n)
}

fn start() -> DateTime<Utc> {
    DateTime::from_timestamp(1_700_000_000, 0).unwrap()
}

fn event() -> Event {
    Event {
        id: Uuid::from_u128(1_000),
        owner_id: Uuid::from_u128(2_000),
        status: EventStatus::Published,
        capacity: 2,
        start_time: start(),
        end_time: start() + TimeDelta::minutes(30),
        event_version: 1,
        counts: Count { active: 0, waitlisted: 0, version: 0 },
        next_seq: 1,
        sweep_at: None,
        news_trace: None,
    }
}

fn order(command: Command) -> Order {
    let new_id = Uuid::now_v7();
    Order { event_id: event().id, command, actor: Actor::System, new_id, trace: TraceContext::start() }
}

fn news(version: i64, status: EventStatus, capacity: i32) -> News {
    let Event { id, owner_id, start_time, end_time, .. } = event();
    News { event_id: id, version, status, owner_id, capacity, start_time, end_time }
}

#[derive(Debug, Clone)]
enum Step {
    Join(u128),
    Cancel(u128),
    Kick(u128),
    Ban(u128, Option<i64>),
    Unban(u128),
    Change(EventStatus, i32),
    /// The event is canceled, for good.
    CallOff,
}

fn step() -> impl Strategy<Value = Step> {
    let who = 0..USERS;
    let status = prop_oneof![8 => Just(EventStatus::Published), 2 => Just(EventStatus::Draft)];
    prop_oneof![
        10 => who.clone().prop_map(Step::Join),
        5 => who.clone().prop_map(Step::Cancel),
        2 => who.clone().prop_map(Step::Kick),
        1 => (who.clone(), prop::option::of(1..10i64)).prop_map(|(who, minutes)| Step::Ban(who, minutes)),
        1 => who.prop_map(Step::Unban),
        2 => (status, 0..5).prop_map(|(status, capacity)| Step::Change(status, capacity)),
        1 => prop::bool::weighted(0.2).prop_map(|off| if off { Step::CallOff } else { Step::Join(0) }),
    ]
}

/// What comes together, and how many minutes go by after it; some are the event's last.
fn batch() -> impl Strategy<Value = (Vec<Step>, i64)> {
    (prop::collection::vec(step(), 1..8), 0..8i64)
}

/// As it would be told in a sentence or two.
#[derive(Debug, Default)]
struct Model {
    is_open: bool,
    is_off: bool,
    capacity: usize,
    /// In, in their order, and whether they have a seat.
    people: Vec<(u128, i64, bool)>,
    joined: i64,
    bans: BTreeMap<u128, Option<DateTime<Utc>>>,
}

impl Model {
    fn seated(&self) -> usize {
        self.people.iter().filter(|(_, _, seated)| *seated).count()
    }

    /// Before anybody is served, those are told for whom it is over.
    fn tell(&mut self, now: DateTime<Utc>) {
        let has_ended = now >= event().end_time;
        self.people.retain(|(_, _, seated)| !self.is_off && (*seated || !has_ended));
    }

    fn follow(&mut self, step: &Step, now: DateTime<Utc>) -> bool {
        let is_on = |model: &Model| model.is_open && !model.is_off && now < event().end_time;
        let is_in = |people: &[(u128, i64, bool)], who: &u128| people.iter().any(|(one, _, _)| one == who);
        let was = match step {
            Step::Join(who) => {
                let is_banned = self.bans.get(who).is_some_and(|end| end.is_none_or(|end| end > now));
                if is_on(self) && !is_banned && !is_in(&self.people, who) {
                    self.joined += 1;
                    self.people.push((*who, self.joined, false));
                }
                is_on(self) && !is_banned
            }
            Step::Cancel(who) | Step::Kick(who) => {
                let was_in = is_in(&self.people, who);
                self.people.retain(|(one, _, _)| one != who);
                was_in
            }
            Step::Ban(who, minutes) => {
                self.bans.insert(*who, minutes.map(|minutes| now + TimeDelta::minutes(minutes)));
                self.people.retain(|(one, _, _)| one != who);
                true
            }
            Step::Unban(who) => self.bans.remove(who).is_some(),
            Step::Change(status, capacity) => {
                if !self.is_off {
                    self.is_open = *status == EventStatus::Published;
                    self.capacity = *capacity as usize;
                }
                true
            }
            Step::CallOff => {
                self.is_off = true;
                true
            }
        };
        while is_on(self) && (self.capacity == 0 || self.seated() < self.capacity) {
            match self.people.iter_mut().find(|(_, _, seated)| !*seated) {
                Some(first) => first.2 = true,
                None => break,
            }
        }
        was
    }
}

/// What a database would have.
struct Kept {
    event: Event,
    entries: BTreeMap<Uuid, Entry>,
    bans: BTreeMap<Uuid, Ban>,
    lines: Vec<Line>,
}

impl Kept {
    fn with_status(&self, status: JoinStatus) -> Vec<Entry> {
        let mut found: Vec<Entry> = self.entries.values().filter(|entry| entry.status == status).cloned().collect();
        found.sort_by_key(|entry| entry.seq);
        found
    }

    /// Loads no more than is needed, and does what is due first.
    fn roster(&self, orders: &[Order], now: DateTime<Utc>) -> Roster {
        let users = || orders.iter().filter_map(|order| order.command.user());
        let head: Option<i32> = orders.iter().map(|order| order.command.frees()).sum();
        let mut waiting = self.with_status(JoinStatus::Waitlisted);
        let is_due = self.event.is_due(now);
        waiting.truncate(if is_due { usize::MAX } else { head.map_or(usize::MAX, |head| head as usize) });
        let is_off = is_due && self.event.status == EventStatus::Canceled;
        let seated = if is_off { self.with_status(JoinStatus::Active) } else { Vec::new() };
        let entries = users().filter_map(|user| self.entries.get(&user).cloned()).collect();
        let bans = users().filter_map(|user| self.bans.get(&user).cloned()).collect();
        let loaded = Loaded { entries, bans, waiting, seated, counted: None };
        let mut roster = Roster::new(self.event.clone(), loaded);
        if is_due {
            roster.apply(&order(Command::Sweep), now).unwrap();
        }
        roster
    }

    fn keep(&mut self, changes: Changes) {
        self.event = changes.event.unwrap_or_else(|| self.event.clone());
        self.entries.extend(changes.entries.into_iter().map(|entry| (entry.user_id, entry)));
        self.bans.extend(changes.bans.into_iter().map(|ban| (ban.user_id, ban)));
        for (_, user) in changes.bans_ended {
            self.bans.remove(&user);
        }
        self.lines.extend(changes.lines);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_orders_in_any_batches_lead_where_the_model_leads(batches in prop::collection::vec(batch(), 1..12)) {
        let mut model = Model { is_open: true, capacity: 2, ..Model::default() };
        let mut kept = Kept { event: event(), entries: BTreeMap::new(), bans: BTreeMap::new(), lines: Vec::new() };
        let (mut now, mut version) = (start(), 1);
        for (batch, minutes) in &batches {
            let orders: Vec<Order> = batch.iter().map(|step| order(match step {
                Step::Join(who) => Command::Join { user: user(*who) },
                Step::Cancel(who) => Command::Cancel { user: user(*who) },
                Step::Kick(who) => Command::Kick { user: user(*who), reason: None },
                Step::Ban(who, minutes) => {
                    let expires_at = minutes.map(|minutes| now + TimeDelta::minutes(minutes));
                    Command::Ban { user: user(*who), reason: None, expires_at }
                }
                Step::Unban(who) => Command::Unban { user: user(*who) },
                Step::Change(status, capacity) => {
                    version += 1;
                    Command::Learn { news: news(version, *status, *capacity) }
                }
                Step::CallOff => Command::Learn { news: news(LAST, EventStatus::Canceled, 3) },
            })).collect();
            let mut roster = kept.roster(&orders, now);
            model.tell(now);
            for (step, order) in batch.iter().zip(&orders) {
                let was = roster.apply(order, now).is_ok();
                prop_assert_eq!(was, model.follow(step, now), "{:?}", step);
            }
            kept.keep(roster.finish());
            now += TimeDelta::minutes(*minutes);
            let place = |entry: Entry| (entry.user_id.as_u128(), entry.seq, entry.status == JoinStatus::Active);
            let here: Vec<_> =
                kept.with_status(JoinStatus::Active).into_iter().chain(kept.with_status(JoinStatus::Waitlisted)).map(place).collect();
            prop_assert_eq!(&here, &model.people);
            let Count { active, waitlisted, version } = kept.event.counts;
            prop_assert_eq!((active as usize, waitlisted as usize), (model.seated(), model.people.len() - model.seated()));
            prop_assert_eq!(version as usize, kept.lines.len());
            prop_assert_eq!(kept.event.next_seq, model.joined + 1);
        }
        let versions: Vec<i64> = kept.lines.iter().map(|line| line.counts.version).collect();
        prop_assert_eq!(versions, (1..=kept.lines.len() as i64).collect::<Vec<_>>());
    }
}

#[test]
fn a_short_head_of_the_waitlist_delays_people_and_never_lets_one_pass() {
    let mut kept = Kept { event: event(), entries: BTreeMap::new(), bans: BTreeMap::new(), lines: Vec::new() };
    let orders: Vec<Order> = (0..6).map(|who| order(Command::Join { user: user(who) })).collect();
    let mut roster = kept.roster(&orders, start());
    orders.iter().for_each(|order| drop(roster.apply(order, start()).unwrap()));
    kept.keep(roster.finish());
    // Three seats more, but only the first who waits was read.
    let more = order(Command::Learn { news: news(2, EventStatus::Published, 5) });
    let mut waiting = kept.with_status(JoinStatus::Waitlisted);
    waiting.truncate(1);
    let mut roster = Roster::new(kept.event.clone(), Loaded { waiting, ..Loaded::default() });
    roster.apply(&more, start()).unwrap();
    let late = order(Command::Join { user: user(7) });
    let joined = roster.apply(&late, start()).unwrap();
    assert!(matches!(joined, Outcome::Joined(Entry { status: JoinStatus::Waitlisted, .. }, Some(4))), "{joined:?}");
    kept.keep(roster.finish());
    assert_eq!(kept.event.sweep_at, Some(start()), "the rest is due");
    kept.keep(kept.roster(&[], start()).finish());
    let seqs: Vec<i64> = kept.with_status(JoinStatus::Active).iter().map(|entry| entry.seq).collect();
    assert_eq!(seqs, [1, 2, 3, 4, 5]);
    assert_eq!(kept.event.sweep_at, Some(event().end_time));
}

#[test]
fn a_sweep_puts_counts_right_that_the_rows_contradict() {
    let mut wrong = Event { status: EventStatus::Canceled, capacity: CLOSED, sweep_at: Some(start()), ..event() };
    wrong.counts = Count { active: 3, waitlisted: 1, version: 4 };
    let mut roster = Roster::new(wrong, Loaded { counted: Some((0, 0)), ..Loaded::default() });
    roster.apply(&order(Command::Sweep), start()).unwrap();
    let changes = roster.finish();
    let event = changes.event.unwrap();
    assert_eq!((event.counts, event.sweep_at), (Count { active: 0, waitlisted: 0, version: 5 }, None));
    let lines: Vec<_> = changes.lines.iter().map(|line| (line.action, line.user_id, line.counts.version)).collect();
    assert_eq!(lines, [(Action::Recounted, None, 5)]);
}

#[test]
fn counts_are_said_anew_to_who_was_told_others_above_the_version_that_they_have() {
    let recounted = |told: (i32, i64), counted: (i32, i32)| {
        let counts = Count { active: 2, waitlisted: 0, version: 8 };
        let loaded = Loaded { counted: Some(counted), ..Loaded::default() };
        let mut roster = Roster::new(Event { counts, ..event() }, loaded);
        let told = Told { active: told.0, version: told.1 };
        roster.apply(&order(Command::Recount { told }), start()).unwrap();
        let lines = roster.finish().lines;
        lines.first().map(|line| (line.counts.active, line.counts.version))
    };
    assert_eq!(recounted((2, 8), (2, 0)), None);
    assert_eq!(recounted((2, 5), (2, 0)), None, "an older version with the right number");
    assert_eq!(recounted((7, 8), (2, 0)), Some((2, 9)));
    assert_eq!(recounted((7, 5), (2, 0)), Some((2, 9)));
    assert_eq!(recounted((2, 50), (2, 0)), Some((2, 51)), "set back");
    assert_eq!(recounted((2, 8), (3, 0)), Some((3, 9)), "wrong here");
}

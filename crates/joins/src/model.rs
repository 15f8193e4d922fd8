//! The rules against a model that knows no batches, no heads of waitlists and no sweeps: one list of people.

use std::collections::BTreeMap;

use chrono::{DateTime, TimeDelta, Utc};
use contracts::events::EventStatus;
use contracts::joins::{Count, JoinStatus};
use kit::trace::TraceContext;
use proptest::prelude::*;
use uuid::Uuid;

use crate::domain::{Actor, Ban, CLOSED, Changes, Command, Entry, Event, Line, Loaded, News, Order, Outcome, Roster};

const USERS: u128 = 8;

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
        end_time: start() + TimeDelta::hours(1),
        event_version: 1,
        counts: Count { active: 0, waitlisted: 0, version: 0 },
        next_seq: 1,
        sweep_at: None,
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
    /// Minutes go by.
    Wait(i64),
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
        1 => (1..5i64).prop_map(Step::Wait),
    ]
}

/// As it would be told in a sentence or two.
#[derive(Debug, Default)]
struct Model {
    is_open: bool,
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

    fn follow(&mut self, step: &Step, now: DateTime<Utc>) -> bool {
        let is_in = |people: &[(u128, i64, bool)], who: &u128| people.iter().any(|(one, _, _)| one == who);
        let was = match step {
            Step::Join(who) => {
                let is_banned = self.bans.get(who).is_some_and(|end| end.is_none_or(|end| end > now));
                if self.is_open && !is_banned && !is_in(&self.people, who) {
                    self.joined += 1;
                    self.people.push((*who, self.joined, false));
                }
                self.is_open && !is_banned
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
                self.is_open = *status == EventStatus::Published;
                self.capacity = *capacity as usize;
                true
            }
            Step::Wait(_) => true,
        };
        while self.is_open && (self.capacity == 0 || self.seated() < self.capacity) {
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

    /// Loads no more than is needed.
    fn roster(&self, orders: &[Order]) -> Roster {
        let users = || orders.iter().filter_map(|order| order.command.user());
        let head: Option<i32> = orders.iter().map(|order| order.command.frees()).sum();
        let mut waiting = self.with_status(JoinStatus::Waitlisted);
        waiting.truncate(head.map_or(usize::MAX, |head| head as usize));
        let entries = users().filter_map(|user| self.entries.get(&user).cloned()).collect();
        let bans = users().filter_map(|user| self.bans.get(&user).cloned()).collect();
        Roster::new(self.event.clone(), Loaded { entries, bans, waiting, ..Loaded::default() })
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
    fn any_orders_in_any_batches_lead_where_the_model_leads(batches in prop::collection::vec(prop::collection::vec(step(), 1..8), 1..12)) {
        let mut model = Model { is_open: true, capacity: 2, ..Model::default() };
        let mut kept = Kept { event: event(), entries: BTreeMap::new(), bans: BTreeMap::new(), lines: Vec::new() };
        let (mut now, mut version) = (start(), 1);
        for batch in &batches {
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
                    Command::Learn { news: news(version, *status, *capacity), force: false }
                }
                Step::Wait(_) => Command::Sweep,
            })).collect();
            let mut roster = kept.roster(&orders);
            for (step, order) in batch.iter().zip(&orders) {
                let was = roster.apply(order, now).is_ok();
                prop_assert_eq!(was, model.follow(step, now), "{:?}", step);
            }
            kept.keep(roster.finish());
            now += TimeDelta::minutes(batch.iter().map(|step| if let Step::Wait(minutes) = step { *minutes } else { 0 }).sum());
            if now >= kept.event.end_time {
                now = kept.event.end_time - TimeDelta::seconds(1);
            }
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
    let mut roster = kept.roster(&orders);
    orders.iter().for_each(|order| drop(roster.apply(order, start()).unwrap()));
    kept.keep(roster.finish());
    // Three seats more, but only the first who waits was read.
    let more = order(Command::Learn { news: news(2, EventStatus::Published, 5), force: false });
    let mut waiting = kept.with_status(JoinStatus::Waitlisted);
    waiting.truncate(1);
    let mut roster = Roster::new(kept.event.clone(), Loaded { waiting, ..Loaded::default() });
    roster.apply(&more, start()).unwrap();
    let late = order(Command::Join { user: user(7) });
    let joined = roster.apply(&late, start()).unwrap();
    assert!(matches!(joined, Outcome::Joined(Entry { status: JoinStatus::Waitlisted, .. }, Some(4))), "{joined:?}");
    kept.keep(roster.finish());
    assert_eq!(kept.event.sweep_at, Some(start()), "the rest is due");
    let sweep = order(Command::Sweep);
    let mut roster = kept.roster(std::slice::from_ref(&sweep));
    roster.apply(&sweep, start()).unwrap();
    kept.keep(roster.finish());
    let seqs: Vec<i64> = kept.with_status(JoinStatus::Active).iter().map(|entry| entry.seq).collect();
    assert_eq!(seqs, [1, 2, 3, 4, 5]);
    assert_eq!(kept.event.sweep_at, Some(event().end_time));
}

#[test]
fn a_sweep_that_finds_nobody_does_not_come_again_at_once() {
    let mut wrong = Event { status: EventStatus::Canceled, capacity: CLOSED, sweep_at: Some(start()), ..event() };
    wrong.counts.active = 3;
    let mut roster = Roster::new(wrong, Loaded::default());
    roster.apply(&order(Command::Sweep), start()).unwrap();
    assert!(roster.event().sweep_at > Some(start()));
}

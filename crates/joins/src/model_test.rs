//! Property test: the domain must agree with a simple model, a single list of registrations without batches, waitlist
//! heads and sweep steps.

use std::collections::BTreeMap;

use chrono::{DateTime, TimeDelta, Utc};
use contracts::events::EventStatus;
use contracts::joins::{Count, JoinStatus};
use proptest::prelude::*;
use runtime::trace::TraceContext;
use uuid::Uuid;

use crate::domain::{
    Actor, Ban, CLOSED, Changes, Command, CommandKind, Event, EventRegistrations, EventUpdate, HistoryAction,
    HistoryEntry, LoadedRegistrations, Outcome, Registration, ReportedCount, RowCounts,
};

const USERS: u128 = 8;
/// The version of the cancellation: every other update has a lower one.
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
        update_trace: None,
    }
}

fn command(kind: CommandKind) -> Command {
    let new_id = Uuid::now_v7();
    Command { event_id: event().id, kind, actor: Actor::System, new_id, trace: TraceContext::start() }
}

fn update(version: i64, status: EventStatus, capacity: i32) -> EventUpdate {
    let Event { id, owner_id, start_time, end_time, .. } = event();
    EventUpdate { event_id: id, version, status, owner_id, capacity, start_time, end_time }
}

#[derive(Debug, Clone)]
enum Step {
    Join(u128),
    Cancel(u128),
    Kick(u128),
    Ban(u128, Option<i64>),
    Unban(u128),
    Update(EventStatus, i32),
    /// Cancels the event permanently.
    CancelEvent,
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
        2 => (status, 0..5).prop_map(|(status, capacity)| Step::Update(status, capacity)),
        1 => prop::bool::weighted(0.2).prop_map(|cancel| if cancel { Step::CancelEvent } else { Step::Join(0) }),
    ]
}

/// The steps of one batch, and the minutes that pass after it. Some runs pass the end of the event.
fn batch() -> impl Strategy<Value = (Vec<Step>, i64)> {
    (prop::collection::vec(step(), 1..8), 0..8i64)
}

/// The rules in their simplest form.
#[derive(Debug, Default)]
struct Model {
    is_open: bool,
    is_canceled: bool,
    capacity: usize,
    /// User, sequence number and whether they have a seat, in the order of joining.
    registrations: Vec<(u128, i64, bool)>,
    last_seq: i64,
    bans: BTreeMap<u128, Option<DateTime<Utc>>>,
}

impl Model {
    fn active(&self) -> usize {
        self.registrations.iter().filter(|(_, _, has_seat)| *has_seat).count()
    }

    /// Expires registrations before the commands of a batch run.
    fn sweep(&mut self, now: DateTime<Utc>) {
        let has_ended = now >= event().end_time;
        self.registrations.retain(|(_, _, has_seat)| !self.is_canceled && (*has_seat || !has_ended));
    }

    /// Applies one step. Returns whether it is accepted.
    fn apply(&mut self, step: &Step, now: DateTime<Utc>) -> bool {
        let can_join = |model: &Model| model.is_open && !model.is_canceled && now < event().end_time;
        let has_joined = |all: &[(u128, i64, bool)], who: &u128| all.iter().any(|(user, _, _)| user == who);
        let is_accepted = match step {
            Step::Join(who) => {
                let is_banned = self.bans.get(who).is_some_and(|end| end.is_none_or(|end| end > now));
                if can_join(self) && !is_banned && !has_joined(&self.registrations, who) {
                    self.last_seq += 1;
                    self.registrations.push((*who, self.last_seq, false));
                }
                can_join(self) && !is_banned
            }
            Step::Cancel(who) | Step::Kick(who) => {
                let had_joined = has_joined(&self.registrations, who);
                self.registrations.retain(|(user, _, _)| user != who);
                had_joined
            }
            Step::Ban(who, minutes) => {
                self.bans.insert(*who, minutes.map(|minutes| now + TimeDelta::minutes(minutes)));
                self.registrations.retain(|(user, _, _)| user != who);
                true
            }
            Step::Unban(who) => self.bans.remove(who).is_some(),
            Step::Update(status, capacity) => {
                if !self.is_canceled {
                    self.is_open = *status == EventStatus::Published;
                    self.capacity = *capacity as usize;
                }
                true
            }
            Step::CancelEvent => {
                self.is_canceled = true;
                true
            }
        };
        while can_join(self) && (self.capacity == 0 || self.active() < self.capacity) {
            match self.registrations.iter_mut().find(|(_, _, has_seat)| !*has_seat) {
                Some(first) => first.2 = true,
                None => break,
            }
        }
        is_accepted
    }
}

/// The rows that a database would contain.
struct Database {
    event: Event,
    registrations: BTreeMap<Uuid, Registration>,
    bans: BTreeMap<Uuid, Ban>,
    history: Vec<HistoryEntry>,
}

impl Database {
    /// One event without registrations.
    fn new() -> Database {
        Database { event: event(), registrations: BTreeMap::new(), bans: BTreeMap::new(), history: Vec::new() }
    }

    fn with_status(&self, status: JoinStatus) -> Vec<Registration> {
        let mut found: Vec<Registration> =
            self.registrations.values().filter(|row| row.status == status).cloned().collect();
        found.sort_by_key(|row| row.seq);
        found
    }

    /// Loads only the rows that the commands need, and runs a due sweep first.
    fn load(&self, commands: &[Command], now: DateTime<Utc>) -> EventRegistrations {
        let users = || commands.iter().filter_map(|command| command.kind.user());
        let demand: Option<i32> = commands.iter().map(|command| command.kind.waitlist_demand()).sum();
        let mut waitlist_head = self.with_status(JoinStatus::Waitlisted);
        let is_due = self.event.is_due(now);
        waitlist_head.truncate(if is_due { usize::MAX } else { demand.map_or(usize::MAX, |demand| demand as usize) });
        let is_canceled = is_due && self.event.status == EventStatus::Canceled;
        let active_head = if is_canceled { self.with_status(JoinStatus::Active) } else { Vec::new() };
        let registrations = users().filter_map(|user| self.registrations.get(&user).cloned()).collect();
        let bans = users().filter_map(|user| self.bans.get(&user).cloned()).collect();
        let loaded = LoadedRegistrations { registrations, bans, waitlist_head, active_head, row_counts: None };
        let mut loaded = EventRegistrations::new(self.event.clone(), loaded);
        if is_due {
            loaded.apply(&command(CommandKind::Sweep), now).unwrap();
        }
        loaded
    }

    fn save(&mut self, changes: Changes) {
        self.event = changes.event.unwrap_or_else(|| self.event.clone());
        self.registrations.extend(changes.registrations.into_iter().map(|row| (row.user_id, row)));
        self.bans.extend(changes.bans.into_iter().map(|ban| (ban.user_id, ban)));
        for (_, user) in changes.deleted_bans {
            self.bans.remove(&user);
        }
        self.history.extend(changes.history);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn commands_in_any_batches_agree_with_the_model(batches in prop::collection::vec(batch(), 1..12)) {
        let mut model = Model { is_open: true, capacity: 2, ..Model::default() };
        let mut database = Database::new();
        let (mut now, mut version) = (start(), 1);
        for (batch, minutes) in &batches {
            let commands: Vec<Command> = batch.iter().map(|step| command(match step {
                Step::Join(who) => CommandKind::Join { user: user(*who) },
                Step::Cancel(who) => CommandKind::Cancel { user: user(*who) },
                Step::Kick(who) => CommandKind::Kick { user: user(*who), reason: None },
                Step::Ban(who, minutes) => {
                    let expires_at = minutes.map(|minutes| now + TimeDelta::minutes(minutes));
                    CommandKind::Ban { user: user(*who), reason: None, expires_at }
                }
                Step::Unban(who) => CommandKind::Unban { user: user(*who) },
                Step::Update(status, capacity) => {
                    version += 1;
                    CommandKind::UpdateEvent { update: update(version, *status, *capacity) }
                }
                Step::CancelEvent => CommandKind::UpdateEvent { update: update(LAST, EventStatus::Canceled, 3) },
            })).collect();
            let mut loaded = database.load(&commands, now);
            model.sweep(now);
            for (step, command) in batch.iter().zip(&commands) {
                let is_accepted = loaded.apply(command, now).is_ok();
                prop_assert_eq!(is_accepted, model.apply(step, now), "{:?}", step);
            }
            database.save(loaded.into_changes());
            now += TimeDelta::minutes(*minutes);
            let current = [JoinStatus::Active, JoinStatus::Waitlisted].map(|status| database.with_status(status)).concat();
            let stored: Vec<_> =
                current.iter().map(|row| (row.user_id.as_u128(), row.seq, row.status == JoinStatus::Active)).collect();
            prop_assert_eq!(&stored, &model.registrations);
            let Count { active, waitlisted, version } = database.event.counts;
            let expected = (model.active(), model.registrations.len() - model.active());
            prop_assert_eq!((active as usize, waitlisted as usize), expected);
            prop_assert_eq!(version as usize, database.history.len());
            prop_assert_eq!(database.event.next_seq, model.last_seq + 1);
        }
        let versions: Vec<i64> = database.history.iter().map(|entry| entry.counts.version).collect();
        prop_assert_eq!(versions, (1..=database.history.len() as i64).collect::<Vec<_>>());
    }
}

#[test]
fn a_partly_loaded_waitlist_is_promoted_late_but_in_order() {
    let mut database = Database::new();
    let commands: Vec<Command> = (0..6).map(|who| command(CommandKind::Join { user: user(who) })).collect();
    let mut loaded = database.load(&commands, start());
    commands.iter().for_each(|command| drop(loaded.apply(command, start()).unwrap()));
    database.save(loaded.into_changes());
    // Three more seats, but only the first waitlisted registration is loaded.
    let more_seats = command(CommandKind::UpdateEvent { update: update(2, EventStatus::Published, 5) });
    let mut waitlist_head = database.with_status(JoinStatus::Waitlisted);
    waitlist_head.truncate(1);
    let loaded = LoadedRegistrations { waitlist_head, ..LoadedRegistrations::default() };
    let mut loaded = EventRegistrations::new(database.event.clone(), loaded);
    loaded.apply(&more_seats, start()).unwrap();
    let late = command(CommandKind::Join { user: user(7) });
    let joined = loaded.apply(&late, start()).unwrap();
    assert!(
        matches!(joined, Outcome::Joined(Registration { status: JoinStatus::Waitlisted, .. }, Some(4))),
        "{joined:?}"
    );
    database.save(loaded.into_changes());
    assert_eq!(database.event.sweep_at, Some(start()), "the rest is due");
    database.save(database.load(&[], start()).into_changes());
    let seqs: Vec<i64> = database.with_status(JoinStatus::Active).iter().map(|row| row.seq).collect();
    assert_eq!(seqs, [1, 2, 3, 4, 5]);
    assert_eq!(database.event.sweep_at, Some(event().end_time));
}

#[test]
fn a_sweep_corrects_counts_that_contradict_the_rows() {
    let mut wrong = Event { status: EventStatus::Canceled, capacity: CLOSED, sweep_at: Some(start()), ..event() };
    wrong.counts = Count { active: 3, waitlisted: 1, version: 4 };
    let loaded = LoadedRegistrations {
        row_counts: Some(RowCounts { active: 0, waitlisted: 0 }),
        ..LoadedRegistrations::default()
    };
    let mut registrations = EventRegistrations::new(wrong, loaded);
    registrations.apply(&command(CommandKind::Sweep), start()).unwrap();
    let changes = registrations.into_changes();
    let event = changes.event.unwrap();
    assert_eq!((event.counts, event.sweep_at), (Count { active: 0, waitlisted: 0, version: 5 }, None));
    let history: Vec<_> =
        changes.history.iter().map(|entry| (entry.action, entry.user_id, entry.counts.version)).collect();
    assert_eq!(history, [(HistoryAction::Recounted, None, 5)]);
}

#[test]
fn a_recount_publishes_counts_above_the_reported_version() {
    let recounted = |reported: (i32, i64), (active, waitlisted): (i32, i32)| {
        let counts = Count { active: 2, waitlisted: 0, version: 8 };
        let loaded = LoadedRegistrations {
            row_counts: Some(RowCounts { active, waitlisted }),
            ..LoadedRegistrations::default()
        };
        let mut registrations = EventRegistrations::new(Event { counts, ..event() }, loaded);
        let reported = ReportedCount { active: reported.0, version: reported.1 };
        registrations.apply(&command(CommandKind::Recount { reported }), start()).unwrap();
        let history = registrations.into_changes().history;
        history.first().map(|entry| (entry.counts.active, entry.counts.version))
    };
    assert_eq!(recounted((2, 8), (2, 0)), None);
    assert_eq!(recounted((2, 5), (2, 0)), None, "an older version with the right number");
    assert_eq!(recounted((7, 8), (2, 0)), Some((2, 9)));
    assert_eq!(recounted((7, 5), (2, 0)), Some((2, 9)));
    assert_eq!(recounted((2, 50), (2, 0)), Some((2, 51)), "restored from a backup");
    assert_eq!(recounted((2, 8), (3, 0)), Some((3, 9)), "the stored counts are wrong");
}

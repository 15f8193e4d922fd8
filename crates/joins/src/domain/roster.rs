//! Applying orders.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use chrono::{DateTime, Utc};
use contracts::events::EventStatus;
use contracts::joins::{Count, JoinStatus};
use uuid::Uuid;

use super::{Action, Ban, Command, Entry, Event, Line, News, Order, Outcome, Refused, Told};

/// An event, and those of its joins that the orders are about.
#[derive(Debug)]
pub(crate) struct Roster {
    before: Event,
    event: Event,
    entries: HashMap<Uuid, Entry>,
    bans: HashMap<Uuid, Ban>,
    /// The head of the waitlist: seq and user. One that is no longer so is passed over.
    waiting: VecDeque<(i64, Uuid)>,
    /// Whether that is all of it.
    is_whole: bool,
    /// Some who are active, for an event that is over.
    seated: Vec<Uuid>,
    /// Active and waitlisted by the rows as they were read, if they were counted.
    counted: Option<(i32, i32)>,
    changes: Changes,
}

/// What was read of an event's joins.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    /// Of the people that orders are about.
    pub(crate) entries: Vec<Entry>,
    pub(crate) bans: Vec<Ban>,
    /// Of the waitlist, the first.
    pub(crate) waiting: Vec<Entry>,
    pub(crate) seated: Vec<Entry>,
    pub(crate) counted: Option<(i32, i32)>,
}

/// What is to be kept, and told.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// None: the event is as it was.
    pub(crate) event: Option<Event>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) bans: Vec<Ban>,
    /// Event and user.
    pub(crate) bans_ended: Vec<(Uuid, Uuid)>,
    pub(crate) lines: Vec<Line>,
    touched: BTreeSet<Uuid>,
    /// Whose ban changed, and whether there is one now.
    rebanned: BTreeMap<Uuid, bool>,
}

/// What a line says besides whom it is about.
struct Note<'o> {
    action: Action,
    from: Option<JoinStatus>,
    reason: Option<&'o String>,
    expires_at: Option<DateTime<Utc>>,
}

impl Note<'_> {
    fn of(action: Action, from: Option<JoinStatus>) -> Note<'static> {
        Note { action, from, reason: None, expires_at: None }
    }
}

impl Roster {
    pub(crate) fn new(event: Event, loaded: Loaded) -> Roster {
        let waiting: VecDeque<_> = loaded.waiting.iter().map(|entry| (entry.seq, entry.user_id)).collect();
        let seated = loaded.seated.iter().map(|entry| entry.user_id).collect();
        let all = loaded.entries.into_iter().chain(loaded.waiting).chain(loaded.seated);
        Roster {
            before: event.clone(),
            is_whole: waiting.len() as i64 == i64::from(event.counts.waitlisted),
            event,
            entries: all.map(|entry| (entry.user_id, entry)).collect(),
            bans: loaded.bans.into_iter().map(|ban| (ban.user_id, ban)).collect(),
            waiting,
            seated,
            counted: loaded.counted,
            changes: Changes::default(),
        }
    }

    pub(crate) fn apply(&mut self, order: &Order, now: DateTime<Utc>) -> Result<Outcome, Refused> {
        let outcome = match &order.command {
            Command::Join { user } | Command::Cancel { user } if self.is_hidden_from(*user) => {
                return Err(Refused::NoEvent);
            }
            Command::Join { user } => self.join(order, *user, now)?,
            Command::Cancel { user } => {
                let how = (Action::Canceled, JoinStatus::Canceled);
                // They ask for themselves, and are told so.
                let left = self.leave(order, *user, how, None, now);
                Outcome::Canceled(left.map_err(|_| Refused::NothingToCancel)?)
            }
            Command::Kick { user, reason } => {
                let how = (Action::Kicked, JoinStatus::Rejected);
                Outcome::Kicked(self.leave(order, *user, how, reason.as_ref(), now)?)
            }
            Command::Ban { user, reason, expires_at } => {
                Outcome::Banned(self.ban(order, *user, (reason, *expires_at), now)?)
            }
            Command::Unban { user } => self.unban(order, *user, now)?,
            Command::Learn { news } => Outcome::Learned(self.learn(order, news)),
            Command::Recount { told } => Outcome::Recounted(self.recount(order, Some(*told), now)),
            Command::Sweep => self.sweep(order, now),
        };
        self.promote(order, now);
        self.event.sweep_at = self.event.next_sweep(now);
        if matches!(order.command, Command::Sweep) && self.event.is_due(now) {
            // It has had its turn: others that are due come first.
            self.event.sweep_at = Some(now);
        }
        Ok(outcome)
    }

    pub(crate) fn finish(mut self) -> Changes {
        self.changes.event = (self.event != self.before).then_some(self.event);
        for user in &self.changes.touched {
            self.changes.entries.extend(self.entries.remove(user));
        }
        for (user, is_banned) in &self.changes.rebanned {
            match is_banned {
                true => self.changes.bans.extend(self.bans.remove(user)),
                false => self.changes.bans_ended.push((self.before.id, *user)),
            }
        }
        self.changes
    }

    fn is_hidden_from(&self, user: Uuid) -> bool {
        self.event.is_hidden_from(Some(user)) && !self.entries.contains_key(&user)
    }

    fn join(&mut self, order: &Order, user: Uuid, now: DateTime<Utc>) -> Result<Outcome, Refused> {
        match self.event.status {
            EventStatus::Canceled => return Err(Refused::EventCanceled),
            EventStatus::Draft => return Err(Refused::NotPublished),
            EventStatus::Published if self.event.has_ended(now) => return Err(Refused::Ended(self.event.end_time)),
            EventStatus::Published => {}
        }
        if let Some(ban) = self.bans.get(&user).filter(|ban| ban.holds(now)) {
            return Err(Refused::Banned(ban.expires_at));
        }
        if let Some(entry) = self.entries.get(&user).filter(|entry| entry.is_in()) {
            return Ok(Outcome::In(entry.clone()));
        }
        // Whoever waits comes first, also while some of them are still to move up.
        let has_seat = self.event.has_room() && self.event.counts.waitlisted == 0;
        let seq = self.event.next_seq;
        self.event.next_seq += 1;
        let before = self.entries.get(&user);
        let from = before.map(|entry| entry.status);
        let entry = Entry {
            id: before.map_or(order.new_id, |entry| entry.id),
            event_id: self.event.id,
            user_id: user,
            status: if has_seat { JoinStatus::Active } else { JoinStatus::Waitlisted },
            seq,
            created_at: before.map_or(now, |entry| entry.created_at),
            updated_at: now,
            canceled_at: None,
            activated_at: has_seat.then_some(now),
        };
        self.entries.insert(user, entry.clone());
        self.changes.touched.insert(user);
        let position = match has_seat {
            true => {
                self.event.counts.active += 1;
                None
            }
            false => {
                self.event.counts.waitlisted += 1;
                if self.is_whole {
                    self.waiting.push_back((seq, user));
                }
                Some(self.event.counts.waitlisted)
            }
        };
        self.note(order, Some(user), Note::of(Action::Joined, from), now);
        Ok(Outcome::Joined(entry, position))
    }

    /// By themselves, or made to.
    fn leave(
        &mut self,
        order: &Order,
        user: Uuid,
        (action, to): (Action, JoinStatus),
        reason: Option<&String>,
        now: DateTime<Utc>,
    ) -> Result<Entry, Refused> {
        self.entries.get(&user).filter(|entry| entry.is_in()).ok_or(Refused::NotIn)?;
        let from = self.move_to(user, to, now);
        self.note(order, Some(user), Note { reason, ..Note::of(action, from) }, now);
        self.entries.get(&user).cloned().ok_or(Refused::NotIn)
    }

    fn ban(
        &mut self,
        order: &Order,
        user: Uuid,
        (reason, expires_at): (&Option<String>, Option<DateTime<Utc>>),
        now: DateTime<Utc>,
    ) -> Result<Ban, Refused> {
        if expires_at.is_some_and(|end| end <= now) {
            return Err(Refused::BanInThePast);
        }
        let id = self.bans.get(&user).map_or(order.new_id, |ban| ban.id);
        let ban = Ban {
            id,
            event_id: self.event.id,
            user_id: user,
            reason: reason.clone(),
            banned_by: order.actor.to_string(),
            expires_at,
            created_at: now,
        };
        self.bans.insert(user, ban.clone());
        self.changes.rebanned.insert(user, true);
        let from = self.entries.get(&user).map(|entry| entry.status);
        if self.entries.get(&user).is_some_and(Entry::is_in) {
            self.move_to(user, JoinStatus::Rejected, now);
        }
        let note = Note { action: Action::Banned, from, reason: reason.as_ref(), expires_at };
        self.note(order, Some(user), note, now);
        Ok(ban)
    }

    fn unban(&mut self, order: &Order, user: Uuid, now: DateTime<Utc>) -> Result<Outcome, Refused> {
        self.bans.remove(&user).ok_or(Refused::NotBanned)?;
        self.changes.rebanned.insert(user, false);
        let from = self.entries.get(&user).map(|entry| entry.status);
        self.note(order, Some(user), Note::of(Action::Unbanned, from), now);
        Ok(Outcome::Unbanned)
    }

    fn learn(&mut self, order: &Order, news: &News) -> bool {
        if news.version <= self.event.event_version {
            return false;
        }
        let event = &mut self.event;
        event.event_version = news.version;
        event.news_trace = Some(order.trace);
        (event.owner_id, event.status, event.capacity) = (news.owner_id, news.status, news.seats());
        (event.start_time, event.end_time) = (news.start_time, news.end_time);
        true
    }

    /// The version goes above what was told, so that what is right is believed.
    fn recount(&mut self, order: &Order, told: Option<Told>, now: DateTime<Utc>) -> bool {
        let Count { active, waitlisted, version } = self.event.counts;
        // Only as long as nothing has changed.
        let counted = self.counted.take().unwrap_or((active, waitlisted));
        let is_told_wrong = told.is_some_and(|told| told.version > version || told.active != counted.0);
        if counted == (active, waitlisted) && !is_told_wrong {
            return false;
        }
        let version = told.map_or(version, |told| told.version.max(version));
        self.event.counts = Count { active: counted.0, waitlisted: counted.1, version };
        self.is_whole = self.waiting.len() as i64 == i64::from(counted.1);
        self.note(order, None, Note::of(Action::Recounted, None), now);
        true
    }

    /// Tells those who were read that it is over for them, if it is.
    fn sweep(&mut self, order: &Order, now: DateTime<Utc>) -> Outcome {
        // Counts that the rows contradict are put right first: they would be wrong by more, or below zero.
        self.recount(order, None, now);
        let is_canceled = self.event.status == EventStatus::Canceled;
        if is_canceled || self.event.has_ended(now) {
            let waiting = std::mem::take(&mut self.waiting).into_iter().map(|(_, user)| user);
            let seated = std::mem::take(&mut self.seated).into_iter().filter(|_| is_canceled);
            for user in waiting.chain(seated).collect::<Vec<_>>() {
                let from = self.move_to(user, JoinStatus::Expired, now);
                self.note(order, Some(user), Note::of(Action::Expired, from), now);
            }
        }
        Outcome::Swept
    }

    /// Gives free seats to those who wait, the first first.
    fn promote(&mut self, order: &Order, now: DateTime<Utc>) {
        while self.event.status == EventStatus::Published && !self.event.has_ended(now) && self.event.has_room() {
            let Some((seq, user)) = self.waiting.pop_front() else { return };
            let is_still_so = |entry: &&Entry| entry.seq == seq && entry.status == JoinStatus::Waitlisted;
            if self.entries.get(&user).filter(is_still_so).is_some() {
                let from = self.move_to(user, JoinStatus::Active, now);
                self.note(order, Some(user), Note::of(Action::Promoted, from), now);
            }
        }
    }

    /// Changes a status and the counts with it; returns what it was.
    fn move_to(&mut self, user: Uuid, to: JoinStatus, now: DateTime<Utc>) -> Option<JoinStatus> {
        let entry = self.entries.get_mut(&user)?;
        let from = std::mem::replace(&mut entry.status, to);
        entry.updated_at = now;
        match to {
            JoinStatus::Active => entry.activated_at = Some(now),
            JoinStatus::Canceled | JoinStatus::Expired | JoinStatus::Rejected => entry.canceled_at = Some(now),
            JoinStatus::Waitlisted => {}
        }
        let counts = &mut self.event.counts;
        for (status, by) in [(from, -1), (to, 1)] {
            match status {
                JoinStatus::Active => counts.active += by,
                JoinStatus::Waitlisted => counts.waitlisted += by,
                JoinStatus::Canceled | JoinStatus::Expired | JoinStatus::Rejected => {}
            }
        }
        self.changes.touched.insert(user);
        Some(from)
    }

    fn note(&mut self, order: &Order, user: Option<Uuid>, note: Note<'_>, now: DateTime<Utc>) {
        self.event.counts.version += 1;
        let entry = user.and_then(|user| self.entries.get(&user));
        self.changes.lines.push(Line {
            event_id: self.event.id,
            user_id: user,
            action: note.action,
            join_id: entry.map(|entry| entry.id),
            seq: entry.map(|entry| entry.seq),
            from: note.from,
            to: entry.map(|entry| entry.status),
            by: order.actor,
            reason: note.reason.cloned(),
            expires_at: note.expires_at,
            counts: self.event.counts,
            at: now,
            trace: order.trace,
        });
    }
}

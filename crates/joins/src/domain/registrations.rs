//! Applies commands to the registrations of one event.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use chrono::{DateTime, Utc};
use contracts::events::EventStatus;
use contracts::joins::{Count, JoinStatus};
use uuid::Uuid;

use super::{
    Ban, Command, CommandKind, Event, EventUpdate, HistoryAction, HistoryEntry, Outcome, Refused, Registration,
    ReportedCount, RowCounts,
};

/// An event and those of its registrations and bans that the commands need.
#[derive(Debug)]
pub(crate) struct EventRegistrations {
    event_before: Event,
    event: Event,
    registrations: HashMap<Uuid, Registration>,
    bans: HashMap<Uuid, Ban>,
    /// Sequence number and user of the first waitlisted registrations. An item whose registration has changed since is
    /// skipped.
    waitlist_head: VecDeque<(i64, Uuid)>,
    /// Whether `waitlist_head` contains the whole waitlist.
    has_whole_waitlist: bool,
    /// Users of some active registrations, loaded to expire those of a canceled event.
    active_head: Vec<Uuid>,
    /// None if the rows were not counted.
    row_counts: Option<RowCounts>,
    changes: Changes,
}

/// The rows of one event that were loaded.
#[derive(Debug, Default)]
pub(crate) struct LoadedRegistrations {
    /// The registrations of the users that the commands name.
    pub(crate) registrations: Vec<Registration>,
    /// The bans of the users that the commands name.
    pub(crate) bans: Vec<Ban>,
    /// The first registrations of the waitlist.
    pub(crate) waitlist_head: Vec<Registration>,
    /// The first active registrations.
    pub(crate) active_head: Vec<Registration>,
    /// None if the rows were not counted.
    pub(crate) row_counts: Option<RowCounts>,
}

/// The rows to write and the history entries to append.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// None if the event has not changed.
    pub(crate) event: Option<Event>,
    pub(crate) registrations: Vec<Registration>,
    pub(crate) bans: Vec<Ban>,
    /// Event and user of the bans to delete.
    pub(crate) deleted_bans: Vec<(Uuid, Uuid)>,
    pub(crate) history: Vec<HistoryEntry>,
    /// Users whose registration changed.
    changed_users: BTreeSet<Uuid>,
    /// Users whose ban changed, and whether they are banned now.
    changed_bans: BTreeMap<Uuid, bool>,
}

/// The fields of a history entry that the command does not determine.
struct EntryDetails<'a> {
    action: HistoryAction,
    from: Option<JoinStatus>,
    reason: Option<&'a String>,
    expires_at: Option<DateTime<Utc>>,
}

impl EntryDetails<'_> {
    fn new(action: HistoryAction, from: Option<JoinStatus>) -> EntryDetails<'static> {
        EntryDetails { action, from, reason: None, expires_at: None }
    }
}

impl EventRegistrations {
    pub(crate) fn new(event: Event, loaded: LoadedRegistrations) -> EventRegistrations {
        let waitlist_head: VecDeque<_> = loaded.waitlist_head.iter().map(|row| (row.seq, row.user_id)).collect();
        let active_head = loaded.active_head.iter().map(|row| row.user_id).collect();
        let all = loaded.registrations.into_iter().chain(loaded.waitlist_head).chain(loaded.active_head);
        EventRegistrations {
            event_before: event.clone(),
            has_whole_waitlist: waitlist_head.len() as i64 == i64::from(event.counts.waitlisted),
            event,
            registrations: all.map(|registration| (registration.user_id, registration)).collect(),
            bans: loaded.bans.into_iter().map(|ban| (ban.user_id, ban)).collect(),
            waitlist_head,
            active_head,
            row_counts: loaded.row_counts,
            changes: Changes::default(),
        }
    }

    /// Applies one command, promotes the waitlist into free seats and schedules the next sweep. A refused command
    /// changes nothing.
    pub(crate) fn apply(&mut self, command: &Command, now: DateTime<Utc>) -> Result<Outcome, Refused> {
        let outcome = match &command.kind {
            CommandKind::Join { user } | CommandKind::Cancel { user } if self.is_hidden_from(*user) => {
                return Err(Refused::EventNotFound);
            }
            CommandKind::Join { user } => self.join(command, *user, now)?,
            CommandKind::Cancel { user } => {
                let (action, to) = (HistoryAction::Canceled, JoinStatus::Canceled);
                let canceled = self.end_registration(command, *user, action, to, None, now);
                // The caller is the user: the refusal addresses them directly.
                Outcome::Canceled(canceled.map_err(|_| Refused::NothingToCancel)?)
            }
            CommandKind::Kick { user, reason } => {
                let (action, to) = (HistoryAction::Kicked, JoinStatus::Rejected);
                Outcome::Kicked(self.end_registration(command, *user, action, to, reason.as_ref(), now)?)
            }
            CommandKind::Ban { user, reason, expires_at } => {
                Outcome::Banned(self.ban(command, *user, reason, *expires_at, now)?)
            }
            CommandKind::Unban { user } => self.unban(command, *user, now)?,
            CommandKind::UpdateEvent { update } => Outcome::EventUpdated(self.update_event(command, update)),
            CommandKind::Recount { reported } => Outcome::Recounted(self.recount(command, Some(*reported), now)),
            CommandKind::Sweep => self.sweep(command, now),
        };
        self.promote(command, now);
        self.event.sweep_at = self.event.next_sweep(now);
        if matches!(command.kind, CommandKind::Sweep) && self.event.is_due(now) {
            // One step is done; other due events come first.
            self.event.sweep_at = Some(now);
        }
        Ok(outcome)
    }

    /// Returns everything that the commands changed.
    pub(crate) fn into_changes(mut self) -> Changes {
        self.changes.event = (self.event != self.event_before).then_some(self.event);
        for user in &self.changes.changed_users {
            self.changes.registrations.extend(self.registrations.remove(user));
        }
        for (user, is_banned) in &self.changes.changed_bans {
            if *is_banned {
                self.changes.bans.extend(self.bans.remove(user));
            } else {
                self.changes.deleted_bans.push((self.event_before.id, *user));
            }
        }
        self.changes
    }

    fn is_hidden_from(&self, user: Uuid) -> bool {
        self.event.is_hidden_from(Some(user)) && !self.registrations.contains_key(&user)
    }

    fn join(&mut self, command: &Command, user: Uuid, now: DateTime<Utc>) -> Result<Outcome, Refused> {
        match self.event.status {
            EventStatus::Canceled => return Err(Refused::EventCanceled),
            EventStatus::Draft => return Err(Refused::NotPublished),
            EventStatus::Published if self.event.has_ended(now) => return Err(Refused::Ended(self.event.end_time)),
            EventStatus::Published => {}
        }
        if let Some(ban) = self.bans.get(&user).filter(|ban| ban.is_in_force(now)) {
            return Err(Refused::Banned { until: ban.expires_at, reason: ban.reason.clone() });
        }
        if let Some(registration) = self.registrations.get(&user).filter(|known| known.is_current()) {
            return Ok(Outcome::AlreadyJoined(registration.clone()));
        }
        // The waitlist has priority for a free seat, also while a sweep still has to promote a part of it.
        let has_seat = self.event.has_free_seat() && self.event.counts.waitlisted == 0;
        let seq = self.event.next_seq;
        self.event.next_seq += 1;
        let before = self.registrations.get(&user);
        let from = before.map(|registration| registration.status);
        let registration = Registration {
            id: before.map_or(command.new_id, |registration| registration.id),
            event_id: self.event.id,
            user_id: user,
            status: if has_seat { JoinStatus::Active } else { JoinStatus::Waitlisted },
            seq,
            created_at: before.map_or(now, |registration| registration.created_at),
            updated_at: now,
            canceled_at: None,
            activated_at: has_seat.then_some(now),
        };
        self.registrations.insert(user, registration.clone());
        self.changes.changed_users.insert(user);
        let position = if has_seat {
            self.event.counts.active += 1;
            None
        } else {
            {
                self.event.counts.waitlisted += 1;
                if self.has_whole_waitlist {
                    self.waitlist_head.push_back((seq, user));
                }
                Some(self.event.counts.waitlisted)
            }
        };
        self.record(command, Some(user), EntryDetails::new(HistoryAction::Joined, from), now);
        Ok(Outcome::Joined(registration, position))
    }

    /// Ends a current registration, by a cancellation or a kick. Fails if the user has none.
    fn end_registration(
        &mut self,
        command: &Command,
        user: Uuid,
        action: HistoryAction,
        to: JoinStatus,
        reason: Option<&String>,
        now: DateTime<Utc>,
    ) -> Result<Registration, Refused> {
        self.registrations.get(&user).filter(|known| known.is_current()).ok_or(Refused::NotRegistered)?;
        let from = self.set_status(user, to, now);
        self.record(command, Some(user), EntryDetails { reason, ..EntryDetails::new(action, from) }, now);
        self.registrations.get(&user).cloned().ok_or(Refused::NotRegistered)
    }

    fn ban(
        &mut self,
        command: &Command,
        user: Uuid,
        reason: &Option<String>,
        expires_at: Option<DateTime<Utc>>,
        now: DateTime<Utc>,
    ) -> Result<Ban, Refused> {
        if expires_at.is_some_and(|end| end <= now) {
            return Err(Refused::BanInThePast);
        }
        let id = self.bans.get(&user).map_or(command.new_id, |ban| ban.id);
        let ban = Ban {
            id,
            event_id: self.event.id,
            user_id: user,
            reason: reason.clone(),
            banned_by: command.actor.to_string(),
            expires_at,
            created_at: now,
        };
        self.bans.insert(user, ban.clone());
        self.changes.changed_bans.insert(user, true);
        let from = self.registrations.get(&user).map(|registration| registration.status);
        if self.registrations.get(&user).is_some_and(Registration::is_current) {
            self.set_status(user, JoinStatus::Rejected, now);
        }
        let details = EntryDetails { action: HistoryAction::Banned, from, reason: reason.as_ref(), expires_at };
        self.record(command, Some(user), details, now);
        Ok(ban)
    }

    fn unban(&mut self, command: &Command, user: Uuid, now: DateTime<Utc>) -> Result<Outcome, Refused> {
        self.bans.remove(&user).ok_or(Refused::NotBanned)?;
        self.changes.changed_bans.insert(user, false);
        let from = self.registrations.get(&user).map(|registration| registration.status);
        self.record(command, Some(user), EntryDetails::new(HistoryAction::Unbanned, from), now);
        Ok(Outcome::Unbanned)
    }

    /// Applies an update of the event. Returns false, and changes nothing, if the update is not newer than the stored
    /// event.
    fn update_event(&mut self, command: &Command, update: &EventUpdate) -> bool {
        if update.version <= self.event.event_version {
            return false;
        }
        let event = &mut self.event;
        event.event_version = update.version;
        event.update_trace = Some(command.trace);
        (event.owner_id, event.status, event.capacity) = (update.owner_id, update.status, update.stored_capacity());
        (event.start_time, event.end_time) = (update.start_time, update.end_time);
        true
    }

    /// Corrects the stored counts from the rows. Publishes them under a version above the reported one, so that the
    /// events service accepts them. Returns false if stored and reported counts were correct.
    fn recount(&mut self, command: &Command, reported: Option<ReportedCount>, now: DateTime<Utc>) -> bool {
        let Count { active, waitlisted, version } = self.event.counts;
        // Used once: the row counts are stale after the first change.
        let stored = RowCounts { active, waitlisted };
        let counted = self.row_counts.take().unwrap_or(stored);
        let is_reported_wrong =
            reported.is_some_and(|reported| reported.version > version || reported.active != counted.active);
        if counted == stored && !is_reported_wrong {
            return false;
        }
        let version = reported.map_or(version, |reported| reported.version.max(version));
        self.event.counts = Count { active: counted.active, waitlisted: counted.waitlisted, version };
        self.has_whole_waitlist = self.waitlist_head.len() as i64 == i64::from(counted.waitlisted);
        self.record(command, None, EntryDetails::new(HistoryAction::Recounted, None), now);
        true
    }

    /// Expires the loaded registrations if the event is canceled or has ended.
    fn sweep(&mut self, command: &Command, now: DateTime<Utc>) -> Outcome {
        // Correct the counts first: expiring rows on top of wrong counts could make them negative.
        self.recount(command, None, now);
        let is_canceled = self.event.status == EventStatus::Canceled;
        if is_canceled || self.event.has_ended(now) {
            let waitlisted = std::mem::take(&mut self.waitlist_head).into_iter().map(|(_, user)| user);
            let active = std::mem::take(&mut self.active_head).into_iter().filter(|_| is_canceled);
            for user in waitlisted.chain(active).collect::<Vec<_>>() {
                let from = self.set_status(user, JoinStatus::Expired, now);
                self.record(command, Some(user), EntryDetails::new(HistoryAction::Expired, from), now);
            }
        }
        Outcome::Swept
    }

    /// Gives free seats to the loaded head of the waitlist, in order.
    fn promote(&mut self, command: &Command, now: DateTime<Utc>) {
        while self.event.status == EventStatus::Published && !self.event.has_ended(now) && self.event.has_free_seat() {
            let Some((seq, user)) = self.waitlist_head.pop_front() else { return };
            let is_unchanged = |known: &&Registration| known.seq == seq && known.status == JoinStatus::Waitlisted;
            if self.registrations.get(&user).filter(is_unchanged).is_some() {
                let from = self.set_status(user, JoinStatus::Active, now);
                self.record(command, Some(user), EntryDetails::new(HistoryAction::Promoted, from), now);
            }
        }
    }

    /// Changes the status of a registration, and the counts with it. Returns the previous status.
    fn set_status(&mut self, user: Uuid, to: JoinStatus, now: DateTime<Utc>) -> Option<JoinStatus> {
        let registration = self.registrations.get_mut(&user)?;
        let from = std::mem::replace(&mut registration.status, to);
        registration.updated_at = now;
        match to {
            JoinStatus::Active => registration.activated_at = Some(now),
            JoinStatus::Canceled | JoinStatus::Expired | JoinStatus::Rejected => registration.canceled_at = Some(now),
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
        self.changes.changed_users.insert(user);
        Some(from)
    }

    /// Adds a history entry under the next version of the counts.
    fn record(&mut self, command: &Command, user: Option<Uuid>, details: EntryDetails<'_>, now: DateTime<Utc>) {
        self.event.counts.version += 1;
        let registration = user.and_then(|user| self.registrations.get(&user));
        self.changes.history.push(HistoryEntry {
            event_id: self.event.id,
            user_id: user,
            action: details.action,
            join_id: registration.map(|registration| registration.id),
            seq: registration.map(|registration| registration.seq),
            from: details.from,
            to: registration.map(|registration| registration.status),
            by: command.actor,
            reason: details.reason.cloned(),
            expires_at: details.expires_at,
            counts: self.event.counts,
            at: now,
            trace: command.trace,
        });
    }
}

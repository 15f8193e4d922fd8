//! A batch of commands on some events within one transaction: load the events under their locks, run a due sweep, apply
//! the commands, save the changes with their history entries and messages. Every change of a registration goes through
//! here.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use chrono::{DateTime, Utc};
use contracts::events::EventStatus;
use contracts::joins as topics;
use contracts::joins::{EventRecounted, JoinChanged, JoinStatus};
use pillarbox::log::{Post, Source, post_all};
use runtime::clock::Clock;
use runtime::trace::TraceContext;
use serde_json::value::to_raw_value;
use sqlx::{PgConnection, Postgres, Transaction};
use uuid::Uuid;

use crate::domain::{
    Actor, Changes, Command, CommandKind, Event, EventRegistrations, HistoryAction, HistoryEntry, LoadedRegistrations,
    Outcome, Refused, Registration,
};
use crate::error::Error;
use crate::store::command_batch as store;

pub(crate) const SOURCE: Source = Source::new(topics::SOURCE);

/// Maximum number of registrations that one transaction promotes or expires without a command. Further sweeps do the
/// rest.
pub(crate) const STEP: i32 = 500;

pub(crate) struct CommandBatch {
    events: HashMap<Uuid, EventRegistrations>,
    /// The sweep of one event that is due. Its rows are loaded.
    due_sweep: Option<Command>,
    now: DateTime<Utc>,
}

/// A command with a new id, in the current trace. It is not part of the domain, which has no clock and no context.
pub(crate) fn new_command(event_id: Uuid, actor: Actor, kind: CommandKind) -> Command {
    let trace = TraceContext::current().unwrap_or_else(TraceContext::start);
    Command { event_id, kind, actor, new_id: Uuid::now_v7(), trace }
}

impl CommandBatch {
    /// Locks the events of the commands and loads the rows that the commands and one due sweep need. An event without a
    /// row is missing from the batch, unless a command creates it. Fails if the database fails or a row cannot be
    /// decoded.
    pub(crate) async fn load<'c>(
        tx: &mut Transaction<'_, Postgres>,
        clock: &Clock,
        commands: impl IntoIterator<Item = &'c Command> + Clone,
    ) -> Result<CommandBatch, sqlx::Error> {
        let updates: Vec<_> = commands.clone().into_iter().filter_map(|command| command.kind.event_update()).collect();
        if !updates.is_empty() {
            store::insert_stubs(tx, &updates).await?;
        }
        let event_ids = commands.clone().into_iter().map(|command| command.event_id).collect();
        CommandBatch::lock_and_load(tx, clock, event_ids, commands).await
    }

    /// Locks one event and loads the rows that its due sweep needs. Fails like [`CommandBatch::load`].
    pub(crate) async fn load_event(
        tx: &mut Transaction<'_, Postgres>,
        clock: &Clock,
        event_id: Uuid,
    ) -> Result<CommandBatch, sqlx::Error> {
        CommandBatch::lock_and_load(tx, clock, BTreeSet::from([event_id]), []).await
    }

    async fn lock_and_load<'c>(
        tx: &mut Transaction<'_, Postgres>,
        clock: &Clock,
        event_ids: BTreeSet<Uuid>,
        commands: impl IntoIterator<Item = &'c Command>,
    ) -> Result<CommandBatch, sqlx::Error> {
        let events = store::lock_events(tx, &Vec::from_iter(event_ids)).await?;
        // Read the time under the locks, so that a higher version of the counts never has an earlier time.
        let now = clock.now();
        let due = events.iter().filter(|event| event.is_due(now)).min_by_key(|event| event.sweep_at);
        let due_sweep = due.map(|event| Command {
            trace: event.update_trace.unwrap_or_else(TraceContext::start),
            ..new_command(event.id, event.sweep_actor(now), CommandKind::Sweep)
        });
        let mut loaded = RowsToLoad::new(commands, &events, due).load(tx).await?;
        let with_rows = |event: Event| {
            let loaded = loaded.remove(&event.id).unwrap_or_default();
            (event.id, EventRegistrations::new(event, loaded))
        };
        Ok(CommandBatch { events: events.into_iter().map(with_rows).collect(), due_sweep, now })
    }

    /// Sweeps one step of one due event. Every batch does this before its commands: the periodic sweep skips locked
    /// events, so an event that is always busy would otherwise never be swept.
    pub(crate) fn run_due_sweep(&mut self) {
        if let Some(sweep) = self.due_sweep.take() {
            // A sweep is never refused.
            self.apply(&sweep).ok();
        }
    }

    /// Applies one command in memory. Fails if the event is unknown or its rules refuse the command.
    pub(crate) fn apply(&mut self, command: &Command) -> Result<Outcome, Refused> {
        self.events.get_mut(&command.event_id).ok_or(Refused::EventNotFound)?.apply(command, self.now)
    }

    /// Writes the changed rows, the history entries and the messages. Fails if the database fails or refuses a value,
    /// or a message cannot be posted; the caller then rolls back.
    pub(crate) async fn save(self, tx: &mut Transaction<'_, Postgres>) -> Result<(), Error> {
        let mut events = Vec::new();
        let mut all = Changes::default();
        for changes in self.events.into_values().map(EventRegistrations::into_changes) {
            events.extend(changes.event);
            all.registrations.extend(changes.registrations);
            all.bans.extend(changes.bans);
            all.deleted_bans.extend(changes.deleted_bans);
            all.history.extend(changes.history);
        }
        store::save_events(tx, &events).await?;
        store::save_registrations(tx, &all.registrations).await?;
        store::save_bans(tx, &all.bans).await?;
        store::delete_bans(tx, &all.deleted_bans).await?;
        if all.history.is_empty() {
            return Ok(());
        }
        store::append_history(tx, &all.history).await?;
        let posts = all.history.into_iter().map(message).collect::<Result<Vec<Post>, _>>()?;
        post_all(tx, &SOURCE, &posts).await?;
        Ok(())
    }
}

/// Runs the commands one after the other in the caller's transaction. Fails if one of them is refused.
pub(crate) async fn execute(
    tx: &mut Transaction<'_, Postgres>,
    clock: &Clock,
    commands: &[Command],
) -> Result<(), Error> {
    let mut batch = CommandBatch::load(tx, clock, commands).await?;
    batch.run_due_sweep();
    for command in commands {
        batch.apply(command)?;
    }
    batch.save(tx).await
}

/// The rows that the commands and the sweep need.
struct RowsToLoad<'e> {
    /// Event and user of registrations and bans.
    users: Vec<(Uuid, Uuid)>,
    /// For each event, the length of the waitlist's head.
    waitlist_heads: Vec<(Uuid, i32)>,
    /// Events whose counts are computed from the rows.
    recounted: BTreeSet<Uuid>,
    swept: Option<&'e Event>,
}

impl<'e> RowsToLoad<'e> {
    fn new<'c>(
        commands: impl IntoIterator<Item = &'c Command>,
        events: &[Event],
        swept: Option<&'e Event>,
    ) -> RowsToLoad<'e> {
        let events: HashMap<Uuid, &Event> = events.iter().map(|event| (event.id, event)).collect();
        let (mut users, mut recounted) = (BTreeSet::new(), BTreeSet::new());
        let mut heads: BTreeMap<Uuid, i32> = swept.iter().map(|event| (event.id, STEP)).collect();
        for command in commands {
            let Some(event) = events.get(&command.event_id) else { continue };
            users.extend(command.kind.user().map(|user| (event.id, user)));
            let head = heads.entry(event.id).or_default();
            // An empty waitlist needs no head.
            let needed = |demand: i32| demand.min(event.counts.waitlisted);
            *head = command.kind.waitlist_demand().map_or(STEP.max(*head), |demand| *head + needed(demand));
            if matches!(command.kind, CommandKind::Recount { .. }) {
                recounted.insert(event.id);
            }
        }
        heads.retain(|_, count| *count > 0);
        RowsToLoad { users: Vec::from_iter(users), waitlist_heads: Vec::from_iter(heads), recounted, swept }
    }

    async fn load(mut self, tx: &mut PgConnection) -> sqlx::Result<HashMap<Uuid, LoadedRegistrations>> {
        let mut loaded: HashMap<Uuid, LoadedRegistrations> = HashMap::new();
        if !self.users.is_empty() {
            for registration in store::registrations(tx, &self.users).await? {
                loaded.entry(registration.event_id).or_default().registrations.push(registration);
            }
            for ban in store::bans(tx, &self.users).await? {
                loaded.entry(ban.event_id).or_default().bans.push(ban);
            }
        }
        if !self.waitlist_heads.is_empty() {
            for registration in store::waitlist_heads(tx, &self.waitlist_heads).await? {
                loaded.entry(registration.event_id).or_default().waitlist_head.push(registration);
            }
        }
        if let Some(event) = self.swept {
            self.load_swept(tx, event, loaded.entry(event.id).or_default()).await?;
        }
        if !self.recounted.is_empty() {
            for counted in store::count_rows(tx, &Vec::from_iter(self.recounted)).await? {
                loaded.entry(counted.event_id).or_default().row_counts = Some(counted.counts);
            }
        }
        Ok(loaded)
    }

    /// Loads the active registrations that the sweep expires. Has the event recounted if its counts contradict the
    /// rows.
    async fn load_swept(
        &mut self,
        tx: &mut PgConnection,
        event: &Event,
        loaded: &mut LoadedRegistrations,
    ) -> sqlx::Result<()> {
        let waitlist_max = self.waitlist_heads.iter().find(|(id, _)| *id == event.id).map_or(0, |(_, count)| *count);
        let active_max = match event.status {
            EventStatus::Canceled => (STEP - loaded.waitlist_head.len() as i32).max(0),
            EventStatus::Draft | EventStatus::Published => 0,
        };
        loaded.active_head = store::active_heads(tx, &[(event.id, active_max)]).await?;
        // The counts are correct only if there are as many rows as counted, up to the number requested.
        let is_correct = |found: &[Registration], count: i32, max: i32| found.len() as i32 == count.min(max);
        if !is_correct(&loaded.waitlist_head, event.counts.waitlisted, waitlist_max)
            || !is_correct(&loaded.active_head, event.counts.active, active_max)
        {
            self.recounted.insert(event.id);
        }
        Ok(())
    }
}

fn message(entry: HistoryEntry) -> Result<Post, Error> {
    let topic = match (entry.action, entry.to) {
        (HistoryAction::Joined, Some(JoinStatus::Waitlisted)) => topics::WAITLISTED,
        (HistoryAction::Joined, _) => topics::CONFIRMED,
        (HistoryAction::Canceled, _) => topics::CANCELED,
        (HistoryAction::Promoted, _) => topics::PROMOTED,
        (HistoryAction::Expired, _) => topics::EXPIRED,
        (HistoryAction::Kicked, _) => topics::KICKED,
        (HistoryAction::Banned, _) => topics::BANNED,
        (HistoryAction::Unbanned, _) => topics::UNBANNED,
        (HistoryAction::Recounted, _) => topics::RECOUNTED,
    };
    let is_moderation = matches!(entry.action, HistoryAction::Kicked | HistoryAction::Banned | HistoryAction::Unbanned);
    let (counts, occurred_at, trace_id) = (entry.counts, entry.at, entry.trace.trace_id());
    let payload = match entry.user_id {
        None => to_raw_value(&EventRecounted { event_id: entry.event_id, counts, occurred_at, trace_id })?,
        Some(user_id) => to_raw_value(&JoinChanged {
            event_id: entry.event_id,
            user_id,
            join_id: entry.join_id,
            status: entry.to,
            previous_status: entry.from,
            seq: entry.seq,
            reason: entry.reason,
            by: is_moderation.then(|| entry.by.to_string()),
            expires_at: entry.expires_at,
            counts,
            occurred_at,
            trace_id,
        })?,
    };
    let mut post = Post::new(topic, payload).with_key(entry.event_id.to_string());
    post.trace = Some(entry.trace);
    Ok(post)
}

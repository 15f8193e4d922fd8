//! One transaction's view of some events' joins: opened under their locks, changed by orders, and closed by writing what
//! changed, with the history and the messages. Everything that changes a join goes this way.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use chrono::{DateTime, Utc};
use contracts::events::EventStatus;
use contracts::joins::{self as said, EventRecounted, JoinChanged, JoinStatus};
use kit::clock::Clock;
use kit::trace::TraceContext;
use mailbox::post::{Post, Source, post_all};
use serde_json::value::to_raw_value;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::domain::{Action, Actor, Changes, Command, Entry, Event, Line, Loaded, Order, Outcome, Refused, Roster};
use crate::error::Error;
use crate::store::roster as store;

pub(crate) const SOURCE: Source = Source::new(said::SOURCE);

/// So many at most move up, or are told that it is over, in one transaction; a sweep does the rest.
pub(crate) const STEP: i32 = 500;

pub(crate) struct Ledger {
    rosters: HashMap<Uuid, Roster>,
    now: DateTime<Utc>,
}

impl Order {
    pub(crate) fn new(event_id: Uuid, actor: Actor, command: Command) -> Order {
        let trace = TraceContext::current().unwrap_or_else(TraceContext::start);
        Order { event_id, command, actor, new_id: Uuid::now_v7(), trace }
    }
}

impl Ledger {
    /// Locks the events that the orders are about, reads what the orders need, and does a step of what is due for one of
    /// them: a sweep passes over events that are locked, so who keeps an event busy sweeps it.
    pub(crate) async fn open<'o>(
        tx: &mut Transaction<'_, Postgres>,
        clock: &Clock,
        orders: impl IntoIterator<Item = &'o Order> + Clone,
    ) -> Result<Ledger, sqlx::Error> {
        let news: Vec<_> = orders.clone().into_iter().filter_map(|order| order.command.news()).collect();
        if !news.is_empty() {
            store::plant(tx, &news).await?;
        }
        let ids: BTreeSet<Uuid> = orders.clone().into_iter().map(|order| order.event_id).collect();
        let events = store::lock(tx, &Vec::from_iter(ids)).await?;
        // Under the locks: what has a higher version is not earlier.
        let now = clock.now();
        let due = events.iter().filter(|event| event.is_due(now)).min_by_key(|event| event.sweep_at);
        let sweep = due.map(|event| Order {
            trace: event.news_trace.unwrap_or_else(TraceContext::start),
            ..Order::new(event.id, event.swept_by(now), Command::Sweep)
        });
        let mut loaded = load(tx, orders, &events, due).await?;
        let roster = |event: Event| {
            let loaded = loaded.remove(&event.id).unwrap_or_default();
            (event.id, Roster::new(event, loaded))
        };
        let mut ledger = Ledger { rosters: events.into_iter().map(roster).collect(), now };
        if let Some(sweep) = &sweep {
            // It is never refused.
            ledger.apply(sweep).ok();
        }
        Ok(ledger)
    }

    /// When it was opened.
    pub(crate) fn now(&self) -> DateTime<Utc> {
        self.now
    }

    pub(crate) fn apply(&mut self, order: &Order) -> Result<Outcome, Refused> {
        self.rosters.get_mut(&order.event_id).ok_or(Refused::NoEvent)?.apply(order, self.now)
    }

    /// Writes what changed; false: nothing was posted.
    pub(crate) async fn close(self, tx: &mut Transaction<'_, Postgres>) -> Result<bool, Error> {
        let mut events = Vec::new();
        let mut all = Changes::default();
        for changes in self.rosters.into_values().map(Roster::finish) {
            events.extend(changes.event);
            all.entries.extend(changes.entries);
            all.bans.extend(changes.bans);
            all.bans_ended.extend(changes.bans_ended);
            all.lines.extend(changes.lines);
        }
        store::save_events(tx, &events).await?;
        store::save_entries(tx, &all.entries).await?;
        store::save_bans(tx, &all.bans).await?;
        store::end_bans(tx, &all.bans_ended).await?;
        if all.lines.is_empty() {
            return Ok(false);
        }
        store::append_history(tx, &all.lines).await?;
        let posts = all.lines.into_iter().map(message).collect::<Result<Vec<Post>, _>>()?;
        post_all(tx, &SOURCE, &posts).await?;
        Ok(true)
    }
}

/// What the orders need of each event's joins.
async fn load<'o>(
    tx: &mut Transaction<'_, Postgres>,
    orders: impl IntoIterator<Item = &'o Order>,
    events: &[Event],
    swept: Option<&Event>,
) -> Result<HashMap<Uuid, Loaded>, sqlx::Error> {
    let events: HashMap<Uuid, &Event> = events.iter().map(|event| (event.id, event)).collect();
    let (mut people, mut recounted) = (BTreeSet::new(), BTreeSet::new());
    let mut heads: BTreeMap<Uuid, i32> = swept.iter().map(|event| (event.id, STEP)).collect();
    for order in orders {
        let Some(event) = events.get(&order.event_id) else { continue };
        people.extend(order.command.user().map(|user| (event.id, user)));
        let head = heads.entry(event.id).or_default();
        // Who frees a seat needs no head where nobody waits.
        let waits = |frees: i32| frees.min(event.counts.waitlisted);
        *head = order.command.frees().map_or(STEP.max(*head), |frees| *head + waits(frees));
        if matches!(order.command, Command::Recount { .. }) {
            recounted.insert(event.id);
        }
    }
    heads.retain(|_, count| *count > 0);
    let (people, heads) = (Vec::from_iter(people), Vec::from_iter(heads));
    let mut loaded: HashMap<Uuid, Loaded> = HashMap::new();
    if !people.is_empty() {
        for entry in store::entries(tx, &people).await? {
            loaded.entry(entry.event_id).or_default().entries.push(entry);
        }
        for ban in store::bans(tx, &people).await? {
            loaded.entry(ban.event_id).or_default().bans.push(ban);
        }
    }
    if !heads.is_empty() {
        for entry in store::waiting(tx, &heads).await? {
            loaded.entry(entry.event_id).or_default().waiting.push(entry);
        }
    }
    if let Some(event) = swept {
        let of_event = loaded.entry(event.id).or_default();
        let waiting_max = heads.iter().find(|(id, _)| *id == event.id).map_or(0, |(_, count)| *count);
        let seats_max = match event.status {
            EventStatus::Canceled => (STEP - of_event.waiting.len() as i32).max(0),
            EventStatus::Draft | EventStatus::Published => 0,
        };
        of_event.seated = store::seated(tx, &[(event.id, seats_max)]).await?;
        // As many as there are said to be, or as were asked for; else the counts are wrong.
        let is = |found: &[Entry], count: i32, most: i32| found.len() as i32 == count.min(most);
        if !is(&of_event.waiting, event.counts.waitlisted, waiting_max)
            || !is(&of_event.seated, event.counts.active, seats_max)
        {
            recounted.insert(event.id);
        }
    }
    if !recounted.is_empty() {
        for (event, active, waitlisted) in store::counted(tx, &Vec::from_iter(recounted)).await? {
            loaded.entry(event).or_default().counted = Some((active, waitlisted));
        }
    }
    Ok(loaded)
}

fn message(line: Line) -> Result<Post, Error> {
    let topic = match (line.action, line.to) {
        (Action::Joined, Some(JoinStatus::Waitlisted)) => said::WAITLISTED,
        (Action::Joined, _) => said::CONFIRMED,
        (Action::Canceled, _) => said::CANCELED,
        (Action::Promoted, _) => said::PROMOTED,
        (Action::Expired, _) => said::EXPIRED,
        (Action::Kicked, _) => said::KICKED,
        (Action::Banned, _) => said::BANNED,
        (Action::Unbanned, _) => said::UNBANNED,
        (Action::Recounted, _) => said::RECOUNTED,
    };
    let is_moderation = matches!(line.action, Action::Kicked | Action::Banned | Action::Unbanned);
    let (counts, occurred_at, trace_id) = (line.counts, line.at, line.trace.trace_id());
    let payload = match line.user_id {
        None => to_raw_value(&EventRecounted { event_id: line.event_id, counts, occurred_at, trace_id })?,
        Some(user_id) => to_raw_value(&JoinChanged {
            event_id: line.event_id,
            user_id,
            join_id: line.join_id,
            status: line.to,
            seq: line.seq,
            reason: line.reason,
            by: is_moderation.then(|| line.by.to_string()),
            expires_at: line.expires_at,
            counts,
            occurred_at,
            trace_id,
        })?,
    };
    let mut post = Post::new(topic, payload).with_key(line.event_id.to_string());
    post.trace = Some(line.trace);
    Ok(post)
}

//! `parity`: compares the two routes of dual publish, event by event.

use std::collections::{BTreeMap, HashSet};

use chrono::{DateTime, TimeDelta, Utc};
use clap::Args;
use cli::table::{self, print_line};
use cli::time;
use contracts::EventId;
use pillarbox::database::time as database_time;
use pillarbox::operations::parity::{self, Comparison, MessageState};
use pillarbox::operations::status::{self, ConsumerStatus};
use serde::Serialize;
use sqlx::PgConnection;
use uuid::Uuid;

use super::Failure;
use super::installation::connect;
use crate::settings::Settings;

/// The two routes of dual publish, which send the same messages: to the new exchange, and to the legacy exchange.
const NEW: &str = "relay.email";
const LEGACY: &str = "relay.legacy";
/// The new consumer of e-mails. It records every event that it has processed; those records outlive deleted accounts.
const NEW_CONSUMER: &str = "notify.mail";

const NO_RECORDS: &str = "notify.mail has never run on this database, so nothing shows that the new side would have sent the \
                          e-mails. Start the service notify, or add --exchanges-only if it runs on another database.";

/// The range without `--from`.
const RANGE: TimeDelta = TimeDelta::days(7);
/// How many events the text names.
const NAMED_MAX: usize = 20;

#[derive(Args)]
pub(super) struct Parity {
    /// Exit with 1 if an event is missing on one side, or if notify.mail has no record of it
    #[arg(long)]
    check: bool,
    /// Compare the exchanges only: notify.mail runs on another database
    #[arg(long)]
    exchanges_only: bool,
    /// Events that were posted at this time or later: RFC 3339, or a duration before now (30m, 2h, 7d). Default: 7d
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    from: Option<DateTime<Utc>>,
    /// Events that were posted before this time. Default: now
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    to: Option<DateTime<Utc>>,
    /// Print the events that are missing on one side, as lines of JSON
    #[arg(long)]
    json: bool,
}

/// What has happened to an event on both sides.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Pair {
    /// Absent: the event is not for this route.
    #[serde(skip_serializing_if = "Option::is_none")]
    new: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    legacy: Option<String>,
    /// Whether the new consumer has a record of it. Absent: the event is not for it, or it does not run on this database.
    #[serde(skip_serializing_if = "Option::is_none")]
    recorded: Option<bool>,
}

/// An event that is missing on one side.
#[derive(Debug, Serialize)]
struct Missing {
    event_id: EventId,
    at: DateTime<Utc>,
    #[serde(flatten)]
    pair: Pair,
}

/// What the comparison means, in words.
struct Verdict {
    /// Whether both sides have received the same.
    is_good: bool,
    text: String,
}

impl Verdict {
    fn bad(text: &str) -> Verdict {
        Verdict { is_good: false, text: text.to_owned() }
    }
}

/// The result of a comparison.
#[derive(Debug, Default)]
struct Found {
    counts: BTreeMap<Pair, u64>,
    missing: Vec<Missing>,
}

/// Prints what the two exchanges have received and the new consumer has recorded. Fails with `--check` if an event is missing
/// on one side, or if there is nothing to compare, and if the database cannot be reached.
pub(super) async fn run(settings: &Settings, args: Parity) -> Result<(), Failure> {
    let pool = connect(settings)?;
    let consumers = status::consumers(&pool).await?;
    let of = |name: &str| consumers.iter().find(|consumer| consumer.consumer == name);
    let verdict = match (of(NEW), of(LEGACY)) {
        (Some(new), Some(legacy)) => {
            let has_records = of(NEW_CONSUMER).is_some() && !args.exchanges_only;
            let found = compare(&mut *pool.acquire().await?, &args, has_records).await?;
            if args.json {
                found.missing.iter().try_for_each(table::print_json)?;
            } else {
                print_parity(new, legacy, &found)?;
            }
            found.verdict(has_records, has_records || args.exchanges_only)
        }
        (_, None) => Verdict::bad(
            "relay.legacy is not registered: dual publish was never enabled here, or the consumer was dropped.\n\
                 To enable it, set relay.enable_dual_publish = true for the processes with the role relay.",
        ),
        (None, Some(_)) => Verdict::bad(
            "relay.email is not registered: the route `email` never ran here, so there is nothing to compare.\n\
                 With bus = \"postgres\", relay.enable_routes = [\"email\"] turns it on.",
        ),
    };
    if args.check && !verdict.is_good {
        return Err(Failure::Other(verdict.text));
    }
    if args.json {
        return Ok(());
    }
    print_line(&verdict.text)?;
    if of(LEGACY).is_some_and(|legacy| legacy.workers.is_empty()) && of(NEW).is_some() {
        print_line(
            "No process runs relay.legacy. When dual publish is enabled again, it continues where it stopped; to remove it for \
             good, run `pillarbox cursors drop relay.legacy`.",
        )?;
    }
    Ok(())
}

async fn compare(db: &mut PgConnection, args: &Parity, has_records: bool) -> sqlx::Result<Found> {
    let now = database_time::now(db).await?;
    let to = args.to.unwrap_or(now);
    let range = (args.from.unwrap_or(to - RANGE), to);
    // The states of the new consumer tell which messages are for it.
    let mut comparison = Comparison::new(db, &[NEW, LEGACY, NEW_CONSUMER], range).await?;
    let mut result = Found::default();
    while let Some(states) = comparison.next(db).await? {
        let ids: Vec<Uuid> = states.iter().map(|state| state.message_id).collect();
        let recorded = if has_records { parity::processed(db, NEW_CONSUMER, &ids).await? } else { HashSet::new() };
        let is_for_new = |state: &&MessageState| has_records && state.consumer == NEW_CONSUMER;
        let expected: HashSet<Uuid> = states.iter().filter(is_for_new).map(|state| state.message_id).collect();
        let mut events: BTreeMap<i64, Missing> = BTreeMap::new();
        for MessageState { log_id, message_id, at, consumer, state } in states {
            if consumer == NEW_CONSUMER {
                continue;
            }
            let is_recorded = recorded.contains(&message_id);
            let recorded = (is_recorded || expected.contains(&message_id)).then_some(is_recorded);
            let pair = Pair { new: None, legacy: None, recorded };
            let event = events.entry(log_id).or_insert(Missing { event_id: EventId(message_id), at, pair });
            match consumer.as_str() {
                NEW => event.pair.new = Some(state),
                _ => event.pair.legacy = Some(state),
            }
        }
        events.into_values().for_each(|event| result.add(event));
    }
    Ok(result)
}

impl Found {
    fn add(&mut self, event: Missing) {
        *self.counts.entry(event.pair.clone()).or_default() += 1;
        if event.pair.is_missing() {
            self.missing.push(event);
        }
    }

    /// Describes what is missing. `is_complete`: records were compared, or need not be.
    fn verdict(&self, has_records: bool, is_complete: bool) -> Verdict {
        if self.missing.is_empty() {
            let recorded = if has_records { " notify.mail has a record of all of it." } else { "" };
            let unknown = if is_complete { String::new() } else { format!("\n{NO_RECORDS}") };
            let text = "The legacy exchange has received everything that the new one has, and vice versa.";
            return Verdict { is_good: is_complete, text: format!("{text}{recorded}{unknown}") };
        }
        let side = |state: &Option<String>| state.as_deref().unwrap_or("not for it").to_owned();
        let line = |event: &Missing| {
            let unrecorded = if event.pair.recorded == Some(false) { "  recorded: no" } else { "" };
            let (new, legacy) = (side(&event.pair.new), side(&event.pair.legacy));
            format!("\n  {}  new: {new}  legacy: {legacy}{unrecorded}", event.event_id)
        };
        let named: String = self.missing.iter().take(NAMED_MAX).map(line).collect();
        let rest = match self.missing.len().saturating_sub(NAMED_MAX) {
            0 => String::new(),
            rest => format!("\n  and {rest} more: --json lists all of them"),
        };
        let events = table::count(self.missing.len(), "event is", "events are");
        Verdict::bad(&format!("{events} missing on one side:{named}{rest}"))
    }
}

impl Pair {
    /// Whether one side has received the event and the other has not, or the new consumer has no record of it. A route that has
    /// skipped an event did not exist when it was posted, or was reset by an operator: that does not count.
    fn is_missing(&self) -> bool {
        let is = |side: &Option<String>, states: &[&str]| side.as_deref().is_some_and(|state| states.contains(&state));
        let (received, lacking) = (["sent"], ["pending", "parked", "dead", "discarded", "unrouted"]);
        let is_unrecorded = self.recorded == Some(false) && (is(&self.new, &received) || is(&self.legacy, &received));
        is_unrecorded
            || (is(&self.new, &received) && is(&self.legacy, &lacking))
            || (is(&self.legacy, &received) && is(&self.new, &lacking))
    }
}

fn print_parity(new: &ConsumerStatus, legacy: &ConsumerStatus, found: &Found) -> std::io::Result<()> {
    let row = |consumer: &ConsumerStatus| {
        let lag = [consumer.read_to, consumer.lag_messages, consumer.parked, consumer.dead].map(|n| n.to_string());
        let [read_to, lag_messages, parked, dead] = lag;
        let name = consumer.consumer.clone();
        [name, read_to, format!("{:.1}", consumer.lag_seconds), lag_messages, parked, dead]
    };
    table::print(["CONSUMER", "READ_TO", "LAG_S", "LAG", "PARKED", "DEAD"], &[row(new), row(legacy)])?;
    print_line("")?;
    let text = |side: &Option<String>| side.clone().unwrap_or_else(|| "-".to_owned());
    let recorded = |recorded: Option<bool>| recorded.map_or("-", |is| if is { "yes" } else { "no" }).to_owned();
    let count = |(pair, count): (&Pair, &u64)| {
        [count.to_string(), text(&pair.new), text(&pair.legacy), recorded(pair.recorded)]
    };
    let rows: Vec<[String; 4]> = found.counts.iter().map(count).collect();
    table::print(["EVENTS", "NEW", "LEGACY", "RECORDED"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_missing_if_only_one_side_has_received_it() {
        let pair = |new: &str, legacy: &str| {
            let side = |state: &str| (state != "-").then(|| state.to_owned());
            Pair { new: side(new), legacy: side(legacy), recorded: None }
        };
        for (new, legacy, expected) in [
            ("sent", "sent", false),
            ("pending", "pending", false),
            ("sent", "skipped", false),
            ("sent", "-", false),
            ("sent", "pending", true),
            ("pending", "sent", true),
            ("sent", "parked", true),
            ("parked", "sent", true),
            ("sent", "unrouted", true),
            ("sent", "discarded", true),
            ("dead", "pending", false),
        ] {
            assert_eq!(pair(new, legacy).is_missing(), expected, "{new} {legacy}");
            let recorded = Pair { recorded: Some(true), ..pair(new, legacy) };
            assert_eq!(recorded.is_missing(), expected, "{new} {legacy} recorded");
        }
        for (new, legacy, expected) in
            [("sent", "sent", true), ("sent", "skipped", true), ("pending", "pending", false)]
        {
            let unrecorded = Pair { recorded: Some(false), ..pair(new, legacy) };
            assert_eq!(unrecorded.is_missing(), expected, "{new} {legacy} not recorded");
        }
    }
}

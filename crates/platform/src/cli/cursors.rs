//! `cursors` and `parity`: how far the consumers of the log are.

use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use mailbox::moment::Moment;
use mailbox::status::{self, ConsumerStatus};

use super::operate::{connect, say};
use super::status::{Reader, readers};
use super::{Failure, ready, table, when};
use crate::operator::{self, flow};
use crate::settings::Settings;

/// The two consumers of dual publish: mails' events to their new exchange, and to their old one.
const NEW: &str = "relay.email";
const LEGACY: &str = "relay.legacy";

#[derive(Args)]
pub(super) struct Cursors {
    #[command(subcommand)]
    command: Option<Command>,
    /// A line of JSON each, for machines
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// List the consumers: how far they are, who works for them, what went wrong
    List {
        /// A line of JSON each, for machines
        #[arg(long)]
        json: bool,
    },
    /// Let a consumer go on from now, or from a time; one that has lapsed is well again
    Reset {
        /// The consumer, as `pillarbox cursors` names it
        name: String,
        /// Read again what was posted since and has not taken effect: RFC 3339, or back from now (30m, 2h, 7d)
        #[arg(long, value_name = "TIME", value_parser = when::time)]
        from: Option<DateTime<Utc>>,
        /// Yes, pass over what it has not read
        #[arg(long)]
        yes: bool,
    },
    /// Forget a consumer that nobody works for; what it had parked becomes dead letters
    Drop {
        /// The consumer, as `pillarbox cursors` names it
        name: String,
    },
}

pub(super) async fn run(settings: &Settings, cursors: Cursors) -> Result<(), Failure> {
    match cursors.command {
        None => list(settings, cursors.json).await,
        Some(Command::List { json }) => list(settings, json || cursors.json).await,
        Some(Command::Reset { name, from, yes }) => reset(settings, &name, from, yes).await,
        Some(Command::Drop { name }) => forget(settings, &name).await,
    }
}

async fn list(settings: &Settings, json: bool) -> Result<(), Failure> {
    let consumers = readers(&connect(settings)?, &ready::ask_local(settings).await?).await?;
    match json {
        true => consumers.iter().try_for_each(table::json)?,
        false => print(&consumers)?,
    }
    Ok(())
}

pub(super) fn print(consumers: &[Reader]) -> std::io::Result<()> {
    let row = |Reader { state, status: consumer }: &Reader| {
        let workers = consumer.workers.iter().map(|worker| format!("{} ({})", worker.name, worker.shards));
        [
            consumer.consumer.clone(),
            consumer.kind.clone(),
            format!("{:.1}", consumer.lag_seconds),
            consumer.lag_messages.to_string(),
            consumer.parked.to_string(),
            consumer.dead.to_string(),
            consumer.replays.to_string(),
            state.as_str().to_owned(),
            match consumer.workers.is_empty() {
                true => "nobody".to_owned(),
                false => workers.collect::<Vec<_>>().join(", "),
            },
        ]
    };
    let rows: Vec<_> = consumers.iter().map(row).collect();
    let heads = ["CONSUMER", "KIND", "LAG_S", "LAG", "PARKED", "DEAD", "REPLAYS", "STATE", "WORKERS (SHARDS)"];
    table::print(heads, &rows)
}

async fn reset(settings: &Settings, name: &str, from: Option<DateTime<Utc>>, yes: bool) -> Result<(), Failure> {
    let pool = connect(settings)?;
    let consumers = status::consumers(&pool).await?;
    let unread = consumers.iter().find(|one| one.consumer == name).map_or(0, |one| one.lag_messages);
    if unread > 0 && from.is_none() && !yes {
        return Err(Failure::Other(format!(
            "{name} has not read the last {unread} messages of the log, and would pass over them; to do it, add --yes, or \
             --from TIME to read again from there"
        )));
    }
    let moment = Moment::now(&mut *pool.acquire().await?).await?;
    let mut tx = pool.begin().await?;
    flow::reset(&mut tx, name, from, (&moment, Utc::now())).await.map_err(|error| match error {
        operator::Error::FromInTheFuture => Failure::Other(format!("--from {error}")),
        _ => error.into(),
    })?;
    tx.commit().await?;
    say(&match from {
        None => {
            format!("{name} goes on with what is posted from now on; {unread} messages of the log are passed over.")
        }
        Some(from) => format!("{name} goes on from now, and reads again what was posted since {}.", table::time(from)),
    })?;
    Ok(())
}

async fn forget(settings: &Settings, name: &str) -> Result<(), Failure> {
    let mut tx = connect(settings)?.begin().await?;
    flow::forget(&mut tx, name).await?;
    tx.commit().await?;
    say(&format!("{name} is forgotten; what it had parked is among the dead letters."))?;
    Ok(())
}

/// Whether the old way of mails' events keeps up with the new one; with `is_check` it fails when it does not.
pub(super) async fn parity(settings: &Settings, is_check: bool) -> Result<(), Failure> {
    let consumers = status::consumers(&connect(settings)?).await?;
    let of = |name: &str| consumers.iter().find(|consumer| consumer.consumer == name);
    let found = match (of(NEW), of(LEGACY)) {
        (Some(new), Some(legacy)) => {
            print_parity(new, legacy)?;
            level(new, legacy)
        }
        (_, None) => {
            Err("relay.legacy is not registered: dual publish was never on here, or its cursor was dropped.\n\
                          Switch it on with relay.enable_dual_publish = true, on the processes with the role relay."
                .to_owned())
        }
        (None, Some(_)) => Err("relay.email is not registered: the shipped route `email` never ran here, so there is \
                                nothing to compare."
            .to_owned()),
    };
    match (found, is_check) {
        (Err(told), true) => return Err(Failure::Other(told)),
        (Ok(told) | Err(told), _) => say(&told)?,
    }
    if of(LEGACY).is_some_and(|legacy| legacy.workers.is_empty()) && of(NEW).is_some() {
        say(
            "Nobody works for relay.legacy: with dual publish on again it goes on where it stopped; to end it for good, \
             `pillarbox cursors drop relay.legacy`.",
        )?;
    }
    Ok(())
}

/// What to tell: that the old exchange has all that the new one has, or what it lacks.
fn level(new: &ConsumerStatus, legacy: &ConsumerStatus) -> Result<String, String> {
    match (new.read_to - legacy.read_to, legacy.parked + legacy.dead) {
        (..=0, 0) => Ok("The legacy exchange has all that the new one has.".to_owned()),
        (..=0, stuck) => Err(format!("The legacy exchange is level, but {stuck} of its messages are parked or dead.")),
        (behind, stuck) => {
            Err(format!("The legacy exchange is behind by {behind} messages of the log; {stuck} are parked or dead."))
        }
    }
}

fn print_parity(new: &ConsumerStatus, legacy: &ConsumerStatus) -> std::io::Result<()> {
    let row = |consumer: &ConsumerStatus| {
        let lag = [consumer.read_to, consumer.lag_messages, consumer.parked, consumer.dead].map(|n| n.to_string());
        let [read_to, lag_messages, parked, dead] = lag;
        let name = consumer.consumer.clone();
        [name, read_to, format!("{:.1}", consumer.lag_seconds), lag_messages, parked, dead]
    };
    table::print(["CONSUMER", "READ_TO", "LAG_S", "LAG", "PARKED", "DEAD"], &[row(new), row(legacy)])
}

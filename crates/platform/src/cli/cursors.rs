//! `cursors` and `parity`: the consumers of the log and their lag.

use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use mailbox::log::Snapshot;
use mailbox::operations::status::{self, ConsumerStatus};

use super::admin::connect;
use super::status::{Consumer, load_consumers};
use super::table::{self, print_line};
use super::{Failure, readyz, time};
use crate::operator::{self, flow};
use crate::settings::Settings;

/// The two routes of dual publish, which send the same messages: to the new exchange, and to the legacy exchange.
const NEW: &str = "relay.email";
const LEGACY: &str = "relay.legacy";

#[derive(Args)]
pub(super) struct Cursors {
    #[command(subcommand)]
    command: Option<Command>,
    /// Print lines of JSON
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// List the consumers with their lag, shard workers and failures
    List {
        /// Print lines of JSON
        #[arg(long)]
        json: bool,
    },
    /// Reset a consumer to now, or to a time; a lapsed consumer resumes
    Reset {
        /// The name of the consumer, as shown by `pillarbox cursors`
        name: String,
        /// Read again what was posted since and has not taken effect: RFC 3339, or a duration before now (30m, 2h, 7d)
        #[arg(long, value_name = "TIME", value_parser = time::parse)]
        from: Option<DateTime<Utc>>,
        /// Confirm that unread messages are skipped
        #[arg(long)]
        yes: bool,
    },
    /// Drop a consumer that no process runs; its parked messages become dead letters
    Drop {
        /// The name of the consumer, as shown by `pillarbox cursors`
        name: String,
    },
}

pub(super) async fn run(settings: &Settings, cursors: Cursors) -> Result<(), Failure> {
    match cursors.command {
        None => list(settings, cursors.json).await,
        Some(Command::List { json }) => list(settings, json || cursors.json).await,
        Some(Command::Reset { name, from, yes }) => reset(settings, &name, from, yes).await,
        Some(Command::Drop { name }) => drop_consumer(settings, &name).await,
    }
}

async fn list(settings: &Settings, json: bool) -> Result<(), Failure> {
    let consumers = load_consumers(&connect(settings)?, &readyz::load_local(settings).await?).await?;
    match json {
        true => consumers.iter().try_for_each(table::print_json)?,
        false => print(&consumers)?,
    }
    Ok(())
}

pub(super) fn print(consumers: &[Consumer]) -> std::io::Result<()> {
    let row = |Consumer { state, status: consumer }: &Consumer| {
        let workers = consumer.workers.iter().map(|worker| format!("{} ({})", worker.name, worker.shards));
        [
            consumer.consumer.clone(),
            consumer.kind.clone(),
            format!("{:.1}", consumer.lag_seconds),
            consumer.lag_messages.to_string(),
            consumer.parked.to_string(),
            consumer.dead.to_string(),
            consumer.replays.to_string(),
            state.to_string(),
            match consumer.workers.is_empty() {
                true => "none".to_owned(),
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
    let unread =
        consumers.iter().find(|consumer| consumer.consumer == name).map_or(0, |consumer| consumer.lag_messages);
    if unread > 0 && from.is_none() && !yes {
        return Err(Failure::Other(format!(
            "{name} has not read the last {unread} messages of the log and would skip them; add --yes to confirm, or --from TIME \
             to read from a time"
        )));
    }
    let snapshot = Snapshot::now(&mut *pool.acquire().await?).await?;
    let mut tx = pool.begin().await?;
    flow::reset(&mut tx, name, from, (&snapshot, Utc::now())).await.map_err(|error| match error {
        operator::Error::FromInTheFuture => Failure::Other(format!("--from {error}")),
        _ => error.into(),
    })?;
    tx.commit().await?;
    print_line(&match from {
        None => {
            format!(
                "{name} continues with messages that are posted from now on; {unread} messages of the log are skipped."
            )
        }
        Some(from) => {
            format!("{name} continues from now and reads again what was posted since {}.", table::format_time(from))
        }
    })?;
    Ok(())
}

async fn drop_consumer(settings: &Settings, name: &str) -> Result<(), Failure> {
    let mut tx = connect(settings)?.begin().await?;
    flow::drop_consumer(&mut tx, name).await?;
    tx.commit().await?;
    print_line(&format!("{name} is dropped; its parked messages are dead letters now."))?;
    Ok(())
}

/// Prints whether the legacy exchange has received everything that the new one has. With `is_check`, fails if it has not.
pub(super) async fn parity(settings: &Settings, is_check: bool) -> Result<(), Failure> {
    let consumers = status::consumers(&connect(settings)?).await?;
    let of = |name: &str| consumers.iter().find(|consumer| consumer.consumer == name);
    let result = match (of(NEW), of(LEGACY)) {
        (Some(new), Some(legacy)) => {
            print_parity(new, legacy)?;
            compare(new, legacy)
        }
        (_, None) => {
            Err("relay.legacy is not registered: dual publish was never enabled here, or the consumer was dropped.\n\
                          To enable it, set relay.enable_dual_publish = true for the processes with the role relay."
                .to_owned())
        }
        (None, Some(_)) => Err("relay.email is not registered: the default route `email` never ran here, so there is \
                                nothing to compare."
            .to_owned()),
    };
    match (result, is_check) {
        (Err(text), true) => return Err(Failure::Other(text)),
        (Ok(text) | Err(text), _) => print_line(&text)?,
    }
    if of(LEGACY).is_some_and(|legacy| legacy.workers.is_empty()) && of(NEW).is_some() {
        print_line(
            "No process runs relay.legacy. When dual publish is enabled again, it continues where it stopped; to remove it for \
             good, run `pillarbox cursors drop relay.legacy`.",
        )?;
    }
    Ok(())
}

/// Fails with a description of what the legacy exchange lacks.
fn compare(new: &ConsumerStatus, legacy: &ConsumerStatus) -> Result<String, String> {
    match (new.read_to - legacy.read_to, legacy.parked + legacy.dead) {
        (..=0, 0) => Ok("The legacy exchange has received everything that the new one has.".to_owned()),
        (..=0, stuck) => {
            Err(format!("The legacy exchange is not behind, but {stuck} of its messages are parked or dead."))
        }
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

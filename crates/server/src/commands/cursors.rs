//! `cursors`: the consumers of the log and their lag.

use admin::operator::{self, flow};
use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use cli::table::{self, print_line};
use cli::time;
use pillarbox::database::time as database_time;
use pillarbox::log::Snapshot;
use pillarbox::operations::cursors::{self, MoveResult};
use pillarbox::operations::status;

use super::installation::{connect, require_same_time};
use super::{Failure, consumers, readyz};
use crate::settings::Settings;

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
        /// Continue exactly where this consumer has stopped; no process may run either of them
        #[arg(long, value_name = "CONSUMER", conflicts_with = "from")]
        like: Option<String>,
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

/// Lists, resets or drops consumers. Fails if the given one does not exist, is in use, or would skip messages without `--yes`.
pub(super) async fn run(settings: &Settings, cursors: Cursors) -> Result<(), Failure> {
    match cursors.command {
        None => list(settings, cursors.json).await,
        Some(Command::List { json }) => list(settings, json || cursors.json).await,
        Some(Command::Reset { name, like: Some(other), .. }) => continue_like(settings, &name, &other).await,
        Some(Command::Reset { name, from, yes, like: None }) => reset(settings, &name, from, yes).await,
        Some(Command::Drop { name }) => drop_consumer(settings, &name).await,
    }
}

async fn list(settings: &Settings, json: bool) -> Result<(), Failure> {
    let list = consumers::load_consumers(&connect(settings)?, &readyz::load_local(settings).await?).await?;
    match json {
        true => list.iter().try_for_each(table::print_json)?,
        false => consumers::print(&list)?,
    }
    Ok(())
}

async fn reset(settings: &Settings, name: &str, from: Option<DateTime<Utc>>, yes: bool) -> Result<(), Failure> {
    let pool = connect(settings)?;
    let consumers = status::consumers(&pool).await?;
    let mut unread =
        consumers.iter().find(|consumer| consumer.consumer == name).map_or(0, |consumer| consumer.lag_messages);
    if name == hub::FAN_OUT {
        unread += hub::count_deferred(&mut *pool.acquire().await?).await?;
    }
    if unread > 0 && from.is_none() && !yes {
        return Err(Failure::Other(format!(
            "{name} has not processed the last {} of the log and would skip {}; add --yes to confirm, or --from TIME to read from \
             a time",
            table::count(unread, "message", "messages"),
            if unread == 1 { "it" } else { "them" }
        )));
    }
    if from.is_some() {
        require_same_time(&pool).await?;
    }
    let snapshot = Snapshot::now(&mut *pool.acquire().await?).await?;
    let mut tx = pool.begin().await?;
    let now = database_time::now(&mut tx).await?;
    flow::reset(&mut tx, name, from, (&snapshot, now)).await.map_err(|error| match error {
        operator::Error::FromInTheFuture => Failure::Other(format!("--from {error}")),
        _ => error.into(),
    })?;
    tx.commit().await?;
    print_line(&match from {
        None => {
            format!(
                "{name} continues with messages that are posted from now on; {} skipped.",
                table::count(unread, "message of the log is", "messages of the log are")
            )
        }
        Some(from) => {
            format!("{name} continues from now and reads again what was posted since {}.", table::format_time(from))
        }
    })?;
    Ok(())
}

async fn continue_like(settings: &Settings, name: &str, other: &str) -> Result<(), Failure> {
    let mut tx = connect(settings)?.begin().await?;
    let refusal = match cursors::continue_like_in(&mut tx, name, other).await? {
        MoveResult::Moved => {
            tx.commit().await?;
            return Ok(print_line(&format!("{name} continues exactly where {other} has stopped."))?);
        }
        MoveResult::NotFound(name) => format!("there is no consumer {name}; `pillarbox cursors` lists the consumers"),
        MoveResult::InUse(name) => format!(
            "consumer {name} is in use: stop its processes, or start them without it, so that neither position changes \
             meanwhile"
        ),
        MoveResult::OtherHasParked(count) => format!(
            "{} parked, which {other} has passed without having processed them, so nobody would; retry or discard them first",
            table::count(count, &format!("message of {other} is"), &format!("messages of {other} are"))
        ),
        MoveResult::OtherIsIncomplete => format!(
            "{other} has lapsed, or has yet to finish a replay, so its position does not tell what it has processed; start it \
             until `pillarbox cursors` shows that it keeps up"
        ),
        MoveResult::WouldSkip(count) => format!(
            "{} for {name} and not for {other}, and {name} has not read what it would skip; start {name} until it has read it",
            table::count(count, "message is", "messages are")
        ),
        MoveResult::IsAhead(count) => format!(
            "{name} has read {} that {other} has not, so nobody or both would process them; start {other} until it has read \
             them",
            table::count(count, "message", "messages")
        ),
    };
    Err(Failure::Other(refusal))
}

async fn drop_consumer(settings: &Settings, name: &str) -> Result<(), Failure> {
    let mut tx = connect(settings)?.begin().await?;
    let dead_letters = flow::drop_consumer(&mut tx, name).await?;
    tx.commit().await?;
    Ok(print_line(&match dead_letters {
        0 => format!("{name} is dropped."),
        count => format!(
            "{name} is dropped; {} now.",
            table::count(count, "parked message is a dead letter", "parked messages are dead letters")
        ),
    })?)
}

//! `cursors`: the consumers of the log and their lag.

use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use http::Method;
use serde_json::{Value, json};

use crate::Failure;
use crate::api::{Api, ApiError, ServerArgs};
use crate::pages::{self, encoded};
use crate::table::{self, print_line};
use crate::{consumers, time};

#[derive(Args)]
pub struct Cursors {
    #[command(subcommand)]
    command: Option<Command>,
    /// Print lines of JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub server: ServerArgs,
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
    Reset(Reset),
    /// Drop a consumer that no process runs; its parked messages become dead letters
    Drop {
        /// The name of the consumer, as shown by `pillarbox cursors`
        name: String,
    },
}

#[derive(Args)]
struct Reset {
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
}

/// Lists, resets or drops consumers over HTTP. Fails if the given one does not exist, is in use, or would skip messages without
/// `--yes`.
pub async fn run(api: &Api, cursors: Cursors) -> Result<(), Failure> {
    match cursors.command {
        None => list(api, cursors.json).await,
        Some(Command::List { json }) => list(api, json || cursors.json).await,
        Some(Command::Reset(args)) => reset(api, &args).await,
        Some(Command::Drop { name }) => drop_consumer(api, &name).await,
    }
}

async fn list(api: &Api, json: bool) -> Result<(), Failure> {
    let list = consumers::load(api).await?;
    if json {
        return Ok(list.iter().try_for_each(table::print_json)?);
    }
    Ok(print(&list)?)
}

/// Prints consumers, as the API shows them, as a table.
pub fn print(consumers: &[Value]) -> std::io::Result<()> {
    let rows: Vec<_> = consumers.iter().map(row).collect();
    let heads =
        ["CONSUMER", "KIND", "LAG_S", "LAG", "PARKED", "DEAD", "UNROUTED", "REPLAYS", "STATE", "WORKERS (SHARDS)"];
    table::print(heads, &rows)
}

fn row(consumer: &Value) -> [String; 10] {
    let text = |field| pages::text(consumer, field);
    let worker = |worker: &Value| format!("{} ({})", pages::text(worker, "name"), worker["shards"]);
    let workers: Vec<String> = consumer["workers"].as_array().into_iter().flatten().map(worker).collect();
    [
        text("consumer"),
        text("kind"),
        format!("{:.1}", consumer["lag_seconds"].as_f64().unwrap_or_default()),
        text("lag_messages"),
        text("parked"),
        text("dead"),
        text("unrouted"),
        text("replays"),
        text("state"),
        if workers.is_empty() { "none".to_owned() } else { workers.join(", ") },
    ]
}

async fn reset(api: &Api, Reset { name, from, like, yes }: &Reset) -> Result<(), Failure> {
    if from.is_some() {
        consumers::load_in_time(api).await?;
    }
    let body = json!({"from": from, "like": like, "skip_unread": yes});
    let done = api.post(&format!("{}/reset", path_of(name)), &body).await.map_err(|error| advise(error, from, like))?;
    Ok(print_line(&match (like, from) {
        (Some(other), _) => format!("{name} continues exactly where {other} has stopped."),
        (None, Some(from)) => {
            format!("{name} continues from now and reads again what was posted since {}.", table::format_time(*from))
        }
        (None, None) => format!(
            "{name} continues with messages that are posted from now on; {} skipped.",
            table::count(&done["unread"], "message of the log is", "messages of the log are")
        ),
    })?)
}

/// Adds the options that help.
fn advise(error: ApiError, from: &Option<DateTime<Utc>>, like: &Option<String>) -> Failure {
    match error {
        ApiError::Refused(status, reason)
            if status == http::StatusCode::CONFLICT && from.is_none() && like.is_none() =>
        {
            Failure::Other(format!("{reason}; add --yes to confirm, or --from TIME to read from a time"))
        }
        other => other.into(),
    }
}

async fn drop_consumer(api: &Api, name: &str) -> Result<(), Failure> {
    let dropped = api.send(Method::DELETE, &path_of(name), None).await?;
    Ok(print_line(&match dropped["dead_letters"].as_u64().unwrap_or_default() {
        0 => format!("{name} is dropped."),
        count => format!(
            "{name} is dropped; {} now.",
            table::count(count, "parked message is a dead letter", "parked messages are dead letters")
        ),
    })?)
}

fn path_of(name: &str) -> String {
    format!("{}/{}", consumers::PATH, encoded(name))
}

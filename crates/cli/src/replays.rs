//! `replay`: a consumer reads the log again. The replays of webhooks are in [`crate::webhook_replays`].

use std::time::Duration;

use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::Failure;
use crate::api::{Api, ApiError, ServerArgs};
use crate::consumers::{self, ConsumerFilter};
use crate::pages::{self, Columns};
use crate::table::{self, print_line};
use crate::time;
use crate::webhook_replays::WebhookReplays;

const PATH: &str = "/admin/v1/replays";
/// Time between two progress checks of `--wait`.
const PAUSE: Duration = Duration::from_millis(300);

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Replay {
    #[command(subcommand)]
    pub command: Option<Command>,
    /// The consumer that reads again; `pillarbox cursors` lists the consumers
    #[arg(long, value_name = "NAME", required = true)]
    consumer: Option<String>,
    /// Messages posted at this time or later: RFC 3339, or a duration before now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = time::parse, required = true)]
    from: Option<DateTime<Utc>>,
    /// Messages posted before this time [default: now]
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    to: Option<DateTime<Utc>>,
    /// Process messages again that have already taken effect
    #[arg(long)]
    again: bool,
    /// Show the progress until all messages are read. The replay continues if this command is interrupted. Webhooks may still
    /// be in flight at the end
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    pub server: ServerArgs,
}

#[derive(Subcommand)]
pub enum Command {
    /// Send events to webhooks again, and show the progress; list, watch, pause, resume or cancel such replays. An interrupted
    /// command leaves the replay running
    Webhooks(Box<WebhookReplays>),
    /// List replays of consumers with their progress, newest first
    List {
        #[command(flatten)]
        filter: ConsumerFilter,
        /// Print lines of JSON
        #[arg(long)]
        json: bool,
    },
    /// Cancel the replay of a consumer; messages that it has already processed stay processed
    Cancel {
        /// The number in the column ID of `pillarbox replay list`
        id: i64,
    },
}

/// A replay of a consumer, as the options describe it.
struct Request {
    consumer: String,
    from: DateTime<Utc>,
    to: DateTime<Utc>,
    again: bool,
}

impl Replay {
    /// Fails if the options of a request contradict each other. Needs no server, so that it can be checked first.
    pub fn check(&self) -> Result<(), Failure> {
        if self.command.is_none() { self.request().map(drop) } else { Ok(()) }
    }

    /// Fails with the names of the options, not of the fields of the request.
    fn request(&self) -> Result<Request, Failure> {
        let (Some(consumer), Some(from)) = (self.consumer.clone(), self.from) else {
            return Err(Failure::Other(
                "a replay requires --consumer and --from; `pillarbox replay webhooks` sends webhooks again".to_owned(),
            ));
        };
        let to = self.to.unwrap_or_else(Utc::now);
        if from >= to {
            return Err(Failure::Other("--to must be a time after --from".to_owned()));
        }
        Ok(Request { consumer, from, to, again: self.again })
    }
}

/// Requests, lists or cancels replays of consumers over HTTP. Fails if the consumer or the replay does not exist, or the time range
/// is empty.
pub async fn run(api: &Api, replay: Replay) -> Result<(), Failure> {
    let request = replay.request();
    match replay.command {
        Some(Command::List { filter, json }) => {
            let heads = ["ID", "CONSUMER", "FROM", "TO", "AGAIN", "REQUESTED", "STATE"];
            let query = [("consumer", filter.consumer)];
            pages::print_all(api, PATH, &query, json, Columns { heads, row }, "There are no replays.").await
        }
        Some(Command::Cancel { id }) => cancel(api, id).await,
        Some(Command::Webhooks(_)) | None => start(api, &request?, replay.wait).await,
    }
}

async fn start(api: &Api, Request { consumer, from, to, again }: &Request, waits: bool) -> Result<(), Failure> {
    let consumers = consumers::load_in_time(api).await?;
    let body = json!({"consumer": consumer, "from": from, "to": to, "again": again});
    let id = api.post(PATH, &body).await?["id"].as_i64().unwrap_or_default();
    let (from, to) = (table::format_time(*from), table::format_time(*to));
    print_line(&format!("Replay {id}: {consumer} reads {from} to {to} again."))?;
    if !waits {
        return Ok(());
    }
    let is_idle = |one: &Value| one["consumer"] == **consumer && one["workers"].as_array().is_some_and(Vec::is_empty);
    if consumers.iter().any(is_idle) {
        print_line(&format!("No process runs {consumer}; the replay begins when one does."))?;
    }
    wait(api, id).await
}

async fn cancel(api: &Api, id: i64) -> Result<(), Failure> {
    let had_ended = has_ended(&api.get(&format!("{PATH}/{id}")).await?);
    api.send(Method::DELETE, &format!("{PATH}/{id}"), None).await?;
    Ok(print_line(&if had_ended {
        format!("Replay {id} had ended already; nothing is changed.")
    } else {
        format!("Replay {id} is canceled; messages that it has already processed stay processed.")
    })?)
}

fn row(replay: &Value) -> [String; 7] {
    let state = if !replay["canceled_at"].is_null() {
        format!("canceled, {}", progress(replay))
    } else if is_done(replay) {
        "done".to_owned()
    } else {
        progress(replay)
    };
    [
        pages::text(replay, "id"),
        pages::text(replay, "consumer"),
        pages::time(replay, "from"),
        pages::time(replay, "to"),
        if replay["again"] == true { "yes" } else { "no" }.to_owned(),
        pages::time(replay, "requested_at"),
        state,
    ]
}

fn progress(replay: &Value) -> String {
    format!("{} of {} shards done", replay["shards_done"], replay["shards"])
}

fn is_done(replay: &Value) -> bool {
    replay["shards_done"].as_i64() >= replay["shards"].as_i64()
}

fn has_ended(replay: &Value) -> bool {
    is_done(replay) || !replay["canceled_at"].is_null()
}

async fn wait(api: &Api, id: i64) -> Result<(), Failure> {
    let mut printed = String::new();
    loop {
        let replay = api.get(&format!("{PATH}/{id}")).await.map_err(|error| match error {
            ApiError::Refused(StatusCode::NOT_FOUND, _) => Failure::Other(format!(
                "replay {id} no longer exists: its consumer was dropped, or the log was recovered"
            )),
            other => other.into(),
        })?;
        let line = progress(&replay);
        if line != printed {
            print_line(&line)?;
            printed = line;
        }
        if is_done(&replay) {
            return Ok(());
        }
        if has_ended(&replay) {
            return Err(Failure::Other(format!("replay {id} was canceled")));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

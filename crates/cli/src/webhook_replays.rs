//! `replay webhooks`: sending events to subscribers again, and following the progress.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use chrono::{DateTime, SecondsFormat, Utc};
use clap::{Args, Subcommand};
use http::Method;
use pillarbox::log::Tenant;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::Failure;
use crate::api::Api;
use crate::table::{self, print_line, print_note, printable};
use crate::time;

const PATH: &str = "/hub/v1/replays";
/// Time between two checks of the progress.
const PAUSE: Duration = Duration::from_millis(300);
/// Characters of the progress bar.
const BAR_WIDTH: usize = 30;
/// Replays that `list` shows.
const LIST_MAX: u32 = 100;

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct WebhookReplays {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    request: ReplayArgs,
    /// The tenant
    #[arg(long, global = true, value_name = "NAME", default_value = "main")]
    pub tenant: Tenant,
}

#[derive(Subcommand)]
pub enum Command {
    /// List replays, newest first
    List {
        /// Print lines of JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the progress of a replay until its messages have their outcome
    Watch { id: Uuid },
    /// Pause a replay
    Pause { id: Uuid },
    /// Resume a paused replay
    Resume { id: Uuid },
    /// Cancel a replay; messages that it has created are still sent
    Cancel { id: Uuid },
}

#[derive(Args)]
pub struct ReplayArgs {
    /// The subscriber to send to [default: all subscribers of the tenant]
    #[arg(long, value_name = "UUID")]
    subscriber: Option<Uuid>,
    /// An event to send again; can be repeated
    #[arg(long = "event", value_name = "ID", conflicts_with_all = ["from", "to"])]
    events: Vec<String>,
    /// Events posted at this time or later: RFC 3339, or a duration before now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = time::parse, required_unless_present = "events")]
    from: Option<DateTime<Utc>>,
    /// Events posted before this time [default: now]
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    to: Option<DateTime<Utc>>,
    /// Only events of this type (order.paid, order.*); can be repeated
    #[arg(long = "type", value_name = "TYPE")]
    event_types: Vec<String>,
    /// Only events of which the subscriber has no message
    #[arg(long)]
    missed: bool,
    /// Messages per second [default: as fast as the subscribers accept them]
    #[arg(long, value_name = "COUNT")]
    rate: Option<u32>,
    /// Print the number of messages and send nothing
    #[arg(long)]
    dry_run: bool,
    /// Return at once instead of showing the progress
    #[arg(long)]
    no_wait: bool,
}

impl ReplayArgs {
    /// The body of the same request over HTTP.
    fn body(&self) -> Value {
        let time = |at: DateTime<Utc>| json!(at.to_rfc3339_opts(SecondsFormat::Micros, true));
        let fields = [
            ("subscriber_id", self.subscriber.map(|id| json!(id))),
            ("event_ids", (!self.events.is_empty()).then(|| json!(self.events))),
            ("from", self.from.map(time)),
            ("to", self.to.map(time)),
            ("event_types", (!self.event_types.is_empty()).then(|| json!(self.event_types))),
            ("mode", self.missed.then(|| json!("missed"))),
            ("rate_per_second", self.rate.map(|rate| json!(rate))),
            ("dry_run", self.dry_run.then_some(Value::Bool(true))),
        ];
        let given = fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        Value::Object(given.collect::<Map<_, _>>())
    }
}

/// Runs the command over HTTP. Fails if the replay or its subscriber does not exist, or if the request is invalid.
pub async fn run(api: &Api, replays: WebhookReplays) -> Result<(), Failure> {
    let tenant = replays.tenant;
    match replays.command {
        None => replay(api, &tenant, &replays.request).await,
        Some(Command::List { json }) => list(api, json).await,
        Some(Command::Watch { id }) => watch(api, &tenant, id).await,
        Some(Command::Pause { id }) => change(api, id, "pause", "paused").await,
        Some(Command::Resume { id }) => change(api, id, "resume", "resumed").await,
        Some(Command::Cancel { id }) => change(api, id, "cancel", "canceled").await,
    }
}

async fn replay(api: &Api, tenant: &Tenant, args: &ReplayArgs) -> Result<(), Failure> {
    let created = api.post(PATH, &args.body()).await?;
    if args.dry_run {
        let (count, is_exact) = (&created["matched"], created["is_exact"] == true);
        let count = table::count(count, "message", "messages");
        let text = if is_exact { count } else { format!("at least {count}") };
        print_line(&format!("{text} would be sent; nothing is."))?;
        return Ok(());
    }
    let id: Uuid = created["id"].as_str().and_then(|id| id.parse().ok()).unwrap_or_default();
    print_line(&format!("Replay {id} is created."))?;
    if args.no_wait { Ok(()) } else { watch(api, tenant, id).await }
}

async fn change(api: &Api, id: Uuid, action: &str, effect: &str) -> Result<(), Failure> {
    api.send(Method::POST, &format!("{PATH}/{id}/{action}"), None).await?;
    print_line(&format!("Replay {id} is {effect}."))?;
    Ok(())
}

async fn list(api: &Api, json: bool) -> Result<(), Failure> {
    let page = api.get(&format!("{PATH}?limit={LIST_MAX}")).await?;
    let replays = page["items"].as_array().map_or(&[][..], Vec::as_slice);
    if json {
        for replay in replays {
            print_line(&replay.to_string())?;
        }
        return Ok(());
    }
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let row = |replay: &Value| {
        let subscriber = replay.get("subscriber_id").map_or("all".to_owned(), text);
        let counts = ["created", "delivered", "dead"].map(|name| text(&replay[name]));
        let [created, delivered, dead] = counts;
        [text(&replay["id"]), text(&replay["kind"]), subscriber, text(&replay["state"]), created, delivered, dead]
    };
    let rows: Vec<[String; 7]> = replays.iter().map(row).collect();
    table::print(["ID", "KIND", "SUBSCRIBER", "STATE", "CREATED", "DELIVERED", "DEAD"], &rows)?;
    Ok(())
}

/// Shows the progress until the replay has ended and its messages have their outcome. The replay continues if this command is
/// interrupted. Fails if the replay fails, or is canceled before its end.
async fn watch(api: &Api, tenant: &Tenant, id: Uuid) -> Result<(), Failure> {
    // A bar for a person, lines for a log.
    let (is_terminal, mut printed) = (std::io::stderr().is_terminal(), String::new());
    loop {
        let replay = api.get(&format!("{PATH}/{id}")).await?;
        let (line, state) = (progress_line(&replay), replay["state"].as_str().unwrap_or_default().to_owned());
        let is_done = state == "finished" && replay["waiting"] == 0;
        let has_ended = is_done || matches!(state.as_str(), "canceled" | "failed");
        if is_terminal {
            let mut out = std::io::stderr().lock();
            // The rest of a longer line before is erased.
            write!(out, "\r{}\u{1b}[K{}", printable(&line), if has_ended { "\n" } else { "" })?;
            out.flush()?;
        } else if line != printed {
            print_line(&line)?;
        }
        printed = line;
        match state.as_str() {
            _ if is_done => return Ok(()),
            "failed" => {
                let error = replay["error"].as_str().unwrap_or("no reason is known");
                return Err(Failure::Other(format!("replay {id} has failed: {error}")));
            }
            "canceled" => return Err(Failure::Other(format!("replay {id} was canceled"))),
            _ => {}
        }
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            _ = tokio::signal::ctrl_c() => {
                if is_terminal {
                    print_note("");
                }
                let tenant = tenant.as_str();
                print_line(&format!(
                    "Replay {id} continues. `pillarbox replay webhooks watch {id} --tenant {tenant}` shows its progress, and \
                     `pillarbox replay webhooks cancel {id} --tenant {tenant}` ends it."
                ))?;
                return Ok(());
            }
        }
    }
}

/// One line: the state, a bar, the counts, the rate and the remaining time.
fn progress_line(replay: &Value) -> String {
    let number = |name: &str| replay[name].as_i64().unwrap_or_default();
    let done = replay["done"].as_f64().unwrap_or_default().clamp(0.0, 1.0);
    let filled = (done * BAR_WIDTH as f64) as usize;
    let bar = format!("[{}{}]", "=".repeat(filled), " ".repeat(BAR_WIDTH - filled));
    let state = replay["state"].as_str().unwrap_or_default();
    let mut line = format!(
        "{state} {bar} {:.0} %  {} created, {} delivered, {} dead",
        done * 100.0,
        number("created"),
        number("delivered"),
        number("dead")
    );
    if number("dropped") > 0 {
        line += &format!(", {} dropped (their subscriber was deleted)", number("dropped"));
    }
    if let Some(rate) = replay["rate"].as_f64() {
        line += &format!(", {rate:.0}/s");
    }
    if let Some(seconds) = replay["eta_seconds"].as_u64() {
        line += &format!(", {seconds} s left");
    }
    if let Some(subscriber) = replay["waits_for"].as_str() {
        line += &format!(", waits for subscriber {subscriber}");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_progress_shows_the_bar_the_counts_the_rate_and_the_time() {
        let replay = json!({"state": "running", "created": 50, "delivered": 40, "dead": 1, "done": 0.5, "rate": 25.2,
                            "eta_seconds": 2});
        let bar = format!("[{}{}]", "=".repeat(15), " ".repeat(15));
        let expected = format!("running {bar} 50 %  50 created, 40 delivered, 1 dead, 25/s, 2 s left");
        assert_eq!(progress_line(&replay), expected);
    }
}

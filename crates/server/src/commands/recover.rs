//! `replay` and `recover`: reading the log again. The replays of webhooks are in `webhook_replays`.

use std::time::Duration;

use admin::operator::flow;
use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use cli::api::ServerArgs;
use cli::table::{self, print_line};
use cli::time;
use cli::webhook_replays::{self, WebhookReplays};
use pillarbox::operations::recovery::Recovery;
use pillarbox::operations::replays::{self, Request};
use pillarbox::operations::status;
use sqlx::PgPool;

use super::access::HubSession;
use super::installation::{connect, require_same_time};
use super::parked::ConsumerFilter;
use super::{Failure, rows};
use crate::settings::Settings;

/// Time between two progress checks of `--wait`.
const PAUSE: Duration = Duration::from_millis(300);

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct Replay {
    #[command(subcommand)]
    command: Option<Command>,
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
}

impl Replay {
    /// The server of a command that uses HTTP.
    pub(super) fn server_args(&mut self) -> Option<&mut ServerArgs> {
        match &mut self.command {
            Some(Command::Webhooks(replays)) => Some(&mut replays.server),
            Some(Command::List { .. } | Command::Cancel { .. }) | None => None,
        }
    }
}

#[derive(Subcommand)]
enum Command {
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

#[derive(Args)]
#[group(required = true, multiple = false)]
pub(super) struct RecoverArgs {
    /// All consumers read again what was posted since: RFC 3339, or a duration before now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    from: Option<DateTime<Utc>>,
    /// Send nothing that was restored; parked messages and pending webhooks become dead letters
    #[arg(long)]
    skip: bool,
}

/// Requests, lists or cancels replays. Fails if the consumer or the replay does not exist, or the time range is empty.
pub(super) async fn replay(settings: &Settings, replay: Replay) -> Result<(), Failure> {
    match replay {
        Replay { command: Some(Command::Webhooks(replays)), .. } => {
            let session = HubSession::open(settings, &replays.server, &replays.tenant).await?;
            session.close_after(webhook_replays::run(&session.api, *replays)).await
        }
        Replay { command: Some(Command::List { filter, json }), .. } => list(&connect(settings)?, filter, json).await,
        Replay { command: Some(Command::Cancel { id }), .. } => cancel(&connect(settings)?, id).await,
        Replay { command: None, consumer: Some(consumer), from: Some(from), to, again, wait } => {
            let to = to.unwrap_or_else(Utc::now);
            request_replay(settings, &Request { consumer, from, to, again }, wait).await
        }
        Replay { command: None, .. } => Err(Failure::Other(
            "a replay requires --consumer and --from; `pillarbox replay webhooks` sends webhooks again".to_owned(),
        )),
    }
}

async fn request_replay(settings: &Settings, request: &Request, waits: bool) -> Result<(), Failure> {
    // Checked before the database is needed, to name the options instead of the fields.
    flow::check_range(request).map_err(|_| Failure::Other("--to must be a time after --from".to_owned()))?;
    let db = &connect(settings)?;
    require_same_time(db).await?;
    let mut tx = db.begin().await?;
    let id = flow::request_replay(&mut tx, request).await?;
    tx.commit().await?;
    let (from, to) = (table::format_time(request.from), table::format_time(request.to));
    print_line(&format!("Replay {id}: {} reads {from} to {to} again.", request.consumer))?;
    match waits {
        true => wait(db, id).await,
        false => Ok(()),
    }
}

async fn cancel(db: &PgPool, id: i64) -> Result<(), Failure> {
    let mut tx = db.begin().await?;
    let is_canceled = flow::cancel_replay(&mut tx, id).await?;
    tx.commit().await?;
    print_line(&match is_canceled {
        true => format!("Replay {id} is canceled; messages that it has already processed stay processed."),
        false => format!("Replay {id} had ended already; nothing is changed."),
    })?;
    Ok(())
}

async fn list(db: &PgPool, filter: ConsumerFilter, json: bool) -> Result<(), Failure> {
    let heads = ["ID", "CONSUMER", "FROM", "TO", "AGAIN", "REQUESTED", "STATE"];
    let load = async |before, limit| replays::list(db, filter.consumer.as_deref(), before, limit).await;
    rows::print_list(json, heads, Some("There are no replays."), id_and_row, load).await
}

fn id_and_row(replay: &replays::Replay) -> (i64, [String; 7]) {
    let progress = format!("{} of {} shards done", replay.shards_done, replay.shards);
    let row = [
        replay.id.to_string(),
        replay.consumer.clone(),
        table::format_time(replay.from),
        table::format_time(replay.to),
        if replay.again { "yes" } else { "no" }.to_owned(),
        table::format_time(replay.requested_at),
        match replay.canceled_at {
            Some(_) => format!("canceled, {progress}"),
            None if replay.is_done() => "done".to_owned(),
            None => progress,
        },
    ];
    (replay.id, row)
}

async fn wait(db: &PgPool, id: i64) -> Result<(), Failure> {
    let mut printed = None;
    loop {
        let Some(replay) = replays::find(db, id).await? else {
            return Err(Failure::Other(format!(
                "replay {id} no longer exists: its consumer was dropped, or the log was recovered"
            )));
        };
        if printed.is_none() {
            let consumers = status::consumers(db).await?;
            if consumers.iter().any(|consumer| consumer.consumer == replay.consumer && consumer.workers.is_empty()) {
                print_line(&format!("No process runs {}; the replay begins when one does.", replay.consumer))?;
            }
        }
        if printed != Some(replay.shards_done) {
            print_line(&format!("{} of {} shards done", replay.shards_done, replay.shards))?;
            printed = Some(replay.shards_done);
        }
        if replay.is_done() {
            return Ok(());
        }
        if replay.canceled_at.is_some() {
            return Err(Failure::Other(format!("replay {id} was canceled")));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Resumes the consumers of a restored database, and prints what they do. Fails if the database cannot be reached.
pub(super) async fn recover(settings: &Settings, args: RecoverArgs) -> Result<(), Failure> {
    let db = connect(settings)?;
    let (recovery, effect) = match args.from {
        Some(from) => {
            let effect = format!("every consumer reads again what was posted since {}", table::format_time(from));
            (Recovery::From(from), effect)
        }
        None => {
            (Recovery::Skip, "nothing that was restored is sent, and parked messages are dead letters now".to_owned())
        }
    };
    require_same_time(&db).await?;
    let Some(skipped) = flow::recover(&db, recovery).await? else {
        print_line("This database was not restored or copied; nothing is changed.")?;
        return Ok(());
    };
    print_line(&format!("Recovered: {effect}."))?;
    if skipped > 0 {
        print_line(&format!(
            "{} of the hub now.",
            table::count(skipped, "pending webhook is a dead letter", "pending webhooks are dead letters")
        ))?;
    }
    let consumers = status::consumers(&db).await?;
    let names: Vec<&str> = consumers.iter().map(|consumer| consumer.consumer.as_str()).collect();
    print_line(&match names.as_slice() {
        [] => "There are no consumers yet.".to_owned(),
        names => format!("These consumers resume within seconds: {}.", names.join(", ")),
    })?;
    Ok(())
}

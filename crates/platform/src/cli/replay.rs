//! `replay` and `recover`: reading the log again.

use std::time::Duration;

use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use mailbox::home::Recover;
use mailbox::replay::{self, Request};
use mailbox::status;
use sqlx::PgPool;

use super::operate::{connect, say};
use super::{Failure, table, when};
use crate::operator::flow;
use crate::settings::Settings;

const PAGE: i64 = 100;
const PAUSE: Duration = Duration::from_millis(300);

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct Replay {
    #[command(subcommand)]
    command: Option<Command>,
    /// Who reads it again; `pillarbox cursors` lists them
    #[arg(long, value_name = "NAME", required = true)]
    consumer: Option<String>,
    /// What was posted then or later: RFC 3339, or back from now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = when::time, required = true)]
    from: Option<DateTime<Utc>>,
    /// What was posted before then [default: now]
    #[arg(long, value_name = "TIME", value_parser = when::time)]
    to: Option<DateTime<Utc>>,
    /// Repeat what has taken effect already, too
    #[arg(long)]
    again: bool,
    /// Show how far it is until all is read; interrupted, the replay goes on. Webhooks may still be on their way then
    #[arg(long)]
    wait: bool,
}

#[derive(Subcommand)]
enum Command {
    /// List replays, newest first, with how far they have come
    List {
        /// Only this consumer's
        #[arg(long, value_name = "NAME")]
        consumer: Option<String>,
        /// A line of JSON each, for machines
        #[arg(long)]
        json: bool,
    },
    /// Call one off; what it has repeated stays repeated
    Cancel {
        /// The number in ID of `pillarbox replay list`
        id: i64,
    },
}

#[derive(Args)]
#[group(required = true, multiple = false)]
pub(super) struct Way {
    /// Everyone reads again what was posted since: RFC 3339, or back from now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = when::time)]
    from: Option<DateTime<Utc>>,
    /// Nothing that was restored is sent; what was parked, and webhooks that waited, become dead letters
    #[arg(long)]
    skip: bool,
}

pub(super) async fn replay(settings: &Settings, replay: Replay) -> Result<(), Failure> {
    let db = connect(settings)?;
    match replay {
        Replay { command: Some(Command::List { consumer, json }), .. } => list(&db, consumer.as_deref(), json).await,
        Replay { command: Some(Command::Cancel { id }), .. } => cancel(&db, id).await,
        Replay { command: None, consumer: Some(consumer), from: Some(from), to, again, wait } => {
            let to = to.unwrap_or_else(Utc::now);
            ask(&db, &Request { consumer, from, to, again }, wait).await
        }
        Replay { command: None, .. } => Err(Failure::Other("a replay takes --consumer and --from".to_owned())),
    }
}

async fn ask(db: &PgPool, request: &Request, is_waited_for: bool) -> Result<(), Failure> {
    if request.to <= request.from {
        return Err(Failure::Other("--to must be a time after --from".to_owned()));
    }
    let mut tx = db.begin().await?;
    let id = flow::replay(&mut tx, request).await?;
    tx.commit().await?;
    let (from, to) = (table::time(request.from), table::time(request.to));
    say(&format!("Replay {id}: {} reads {from} to {to} again.", request.consumer))?;
    match is_waited_for {
        true => wait(db, id).await,
        false => Ok(()),
    }
}

async fn cancel(db: &PgPool, id: i64) -> Result<(), Failure> {
    let mut tx = db.begin().await?;
    let is_canceled = flow::cancel_replay(&mut tx, id).await?;
    tx.commit().await?;
    say(&match is_canceled {
        true => format!("Replay {id} is canceled; what it has repeated stays repeated."),
        false => format!("Replay {id} had ended already; nothing is changed."),
    })?;
    Ok(())
}

async fn list(db: &PgPool, consumer: Option<&str>, json: bool) -> Result<(), Failure> {
    let mut rows = Vec::new();
    let mut before = None;
    loop {
        let page = replay::list(db, consumer, before, PAGE).await?;
        let is_last = page.len() < PAGE as usize;
        before = page.last().map(|last| last.id);
        for replay in page {
            match json {
                true => table::json(&replay)?,
                false => rows.push(row(&replay)),
            }
        }
        if is_last {
            break;
        }
    }
    if !json {
        table::print(["ID", "CONSUMER", "FROM", "TO", "AGAIN", "REQUESTED", "STATE"], &rows)?;
    }
    Ok(())
}

fn row(replay: &replay::Replay) -> [String; 7] {
    let so_far = format!("{} of {} shards done", replay.shards_done, replay.shards);
    [
        replay.id.to_string(),
        replay.consumer.clone(),
        table::time(replay.from),
        table::time(replay.to),
        if replay.again { "yes" } else { "no" }.to_owned(),
        table::time(replay.requested_at),
        match replay.canceled_at {
            Some(_) => format!("canceled, {so_far}"),
            None if replay.is_done() => "done".to_owned(),
            None => so_far,
        },
    ]
}

async fn wait(db: &PgPool, id: i64) -> Result<(), Failure> {
    let mut told = None;
    loop {
        let Some(replay) = replay::find(db, id).await? else {
            return Err(Failure::Other(format!("replay {id} is gone: its consumer was dropped, or the log recovered")));
        };
        if told.is_none() {
            let consumers = status::consumers(db).await?;
            if consumers.iter().any(|one| one.consumer == replay.consumer && one.workers.is_empty()) {
                say(&format!("Nobody works for {}: it begins when somebody does.", replay.consumer))?;
            }
        }
        if told != Some(replay.shards_done) {
            say(&format!("{} of {} shards done", replay.shards_done, replay.shards))?;
            told = Some(replay.shards_done);
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

pub(super) async fn recover(settings: &Settings, way: Way) -> Result<(), Failure> {
    let db = connect(settings)?;
    let (way, told) = match way.from {
        Some(from) => {
            let told = format!("every consumer reads again what was posted since {}", table::time(from));
            (Recover::From(from), told)
        }
        None => (Recover::Skip, "nothing that was restored is sent, and what was parked is a dead letter".to_owned()),
    };
    let Some(set_aside) = flow::recover(&db, way, Utc::now()).await? else {
        say("This database was not restored or copied; nothing is changed.")?;
        return Ok(());
    };
    say(&format!("Recovered: {told}."))?;
    if set_aside > 0 {
        say(&format!("{set_aside} webhooks that waited are among the hub's dead letters."))?;
    }
    let consumers = status::consumers(&db).await?;
    let names: Vec<&str> = consumers.iter().map(|consumer| consumer.consumer.as_str()).collect();
    say(&match names.as_slice() {
        [] => "There are no consumers yet.".to_owned(),
        names => format!("They go on within seconds: {}.", names.join(", ")),
    })?;
    Ok(())
}

//! `replay` and `recover`: reading the log again.

use std::time::Duration;

use chrono::{DateTime, Utc};
use clap::Args;
use mailbox::home::{self, Recover};
use mailbox::replay::{self, Request};
use mailbox::status;
use sqlx::PgPool;

use super::operate::{connect, say};
use super::{Failure, table, when};
use crate::operator::flow;
use crate::settings::Settings;

const PAUSE: Duration = Duration::from_millis(300);

#[derive(Args)]
pub(super) struct Replay {
    /// Who reads it again; `pillarbox cursors` lists them
    #[arg(long, value_name = "NAME")]
    consumer: String,
    /// What was posted then or later: RFC 3339, or back from now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = when::time)]
    from: DateTime<Utc>,
    /// What was posted before then [default: now]
    #[arg(long, value_name = "TIME", value_parser = when::time)]
    to: Option<DateTime<Utc>>,
    /// Repeat what has taken effect already, too
    #[arg(long)]
    again: bool,
    /// Show how far it is until it is done; interrupted, the replay goes on
    #[arg(long)]
    wait: bool,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
pub(super) struct Way {
    /// Everyone reads again what was posted since: RFC 3339, or back from now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = when::time)]
    from: Option<DateTime<Utc>>,
    /// Nothing that was restored is sent; what was parked becomes dead letters
    #[arg(long)]
    skip: bool,
}

pub(super) async fn replay(settings: &Settings, asked: Replay) -> Result<(), Failure> {
    let db = connect(settings)?;
    let to = asked.to.unwrap_or_else(Utc::now);
    let request = Request { consumer: asked.consumer, from: asked.from, to, again: asked.again };
    let mut tx = db.begin().await?;
    let id = flow::replay(&mut tx, &request).await?;
    tx.commit().await?;
    let (from, to) = (table::time(request.from), table::time(request.to));
    say(&format!("Replay {id}: {} reads {from} to {to} again.", request.consumer))?;
    match asked.wait {
        true => wait(&db, id).await,
        false => Ok(()),
    }
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
    if !home::recover(&db, way).await? {
        say("This database was not restored or copied; nothing is changed.")?;
        return Ok(());
    }
    say(&format!("Recovered: {told}."))?;
    let consumers = status::consumers(&db).await?;
    let names: Vec<&str> = consumers.iter().map(|consumer| consumer.consumer.as_str()).collect();
    say(&match names.as_slice() {
        [] => "There are no consumers yet.".to_owned(),
        names => format!("They go on within seconds: {}.", names.join(", ")),
    })?;
    Ok(())
}

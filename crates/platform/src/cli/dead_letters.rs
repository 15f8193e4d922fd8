//! `dead-letters`: messages that were given up.

use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use kit::auth::Tenant;
use mailbox::dead_letter::{self, Bulk, DeadLetter, Which};
use sqlx::PgPool;

use super::operate::{connect, say};
use super::{Failure, table, when};
use crate::operator::{DeadLetterView, flow};
use crate::settings::Settings;

const PAGE: i64 = 100;

const FILTERS: [&str; 5] = ["consumer", "topic", "tenant", "from", "to"];
const FILTERS_OR_ALL: [&str; 6] = ["consumer", "topic", "tenant", "from", "to", "all"];

#[derive(Subcommand)]
pub(super) enum Command {
    /// List them, oldest first
    List {
        #[command(flatten)]
        filters: Filters,
        /// A line of JSON each, for machines
        #[arg(long)]
        json: bool,
    },
    /// Show one as JSON, with its content
    Show {
        /// The number in ID of `pillarbox dead-letters list`
        id: i64,
    },
    /// Give them to their consumers again, with all their retries
    Retry {
        #[command(flatten)]
        chosen: Chosen,
    },
    /// Throw them away
    Discard {
        #[command(flatten)]
        chosen: Chosen,
        /// With --all: yes, all of them
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Args)]
pub(super) struct Filters {
    /// Only this consumer's
    #[arg(long, value_name = "NAME")]
    consumer: Option<String>,
    /// Only this topic and what is below it
    #[arg(long, value_name = "NAME")]
    topic: Option<String>,
    /// Only this tenant's
    #[arg(long, value_name = "NAME")]
    tenant: Option<Tenant>,
    /// Given up then or later: RFC 3339, or back from now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = when::time)]
    from: Option<DateTime<Utc>>,
    /// Given up before then
    #[arg(long, value_name = "TIME", value_parser = when::time)]
    to: Option<DateTime<Utc>>,
}

/// One, those that filters mean, or all.
#[derive(Args)]
pub(super) struct Chosen {
    /// The number in ID of `pillarbox dead-letters list`
    #[arg(conflicts_with_all = FILTERS_OR_ALL)]
    id: Option<i64>,
    #[command(flatten)]
    filters: Filters,
    /// All of them
    #[arg(long, conflicts_with_all = FILTERS)]
    all: bool,
}

impl Chosen {
    fn check(&self) -> Result<(), Failure> {
        let Filters { consumer, topic, tenant, from, to } = &self.filters;
        let has_filter = consumer.is_some() || topic.is_some() || tenant.is_some() || from.is_some() || to.is_some();
        match self.id.is_some() || has_filter || self.all {
            true => Ok(()),
            false => Err(Failure::Other("say which: an ID, a filter such as --consumer NAME, or --all".to_owned())),
        }
    }
}

impl Filters {
    fn which(self) -> Which {
        Which {
            consumer: self.consumer,
            topic: self.topic,
            tenant: self.tenant.map(String::from),
            from: self.from,
            to: self.to,
            ..Which::default()
        }
    }
}

pub(super) async fn run(settings: &Settings, command: Command) -> Result<(), Failure> {
    match command {
        Command::List { filters, json } => list(&connect(settings)?, &filters.which(), json).await,
        Command::Show { id } => {
            let dead = flow::dead_letter(&mut *connect(settings)?.acquire().await?, id).await?;
            let shown = serde_json::to_string_pretty(&DeadLetterView::whole(dead)).map_err(std::io::Error::from)?;
            Ok(say(&shown)?)
        }
        Command::Retry { chosen } => {
            chosen.check()?;
            retry(&connect(settings)?, chosen).await
        }
        Command::Discard { chosen, yes } => {
            chosen.check()?;
            if chosen.all && !yes {
                let detail = "this throws every dead letter of every consumer away; to do it, add --yes";
                return Err(Failure::Other(detail.to_owned()));
            }
            discard(&connect(settings)?, chosen).await
        }
    }
}

async fn list(db: &PgPool, which: &Which, json: bool) -> Result<(), Failure> {
    let mut rows = Vec::new();
    let mut after = None;
    loop {
        let page = dead_letter::list(db, which, after, PAGE).await?;
        let is_last = page.len() < PAGE as usize;
        after = page.last().map(|last| last.id);
        for dead in page {
            match json {
                true => table::json(&DeadLetterView::brief(dead))?,
                false => rows.push(row(&dead)),
            }
        }
        if is_last {
            break;
        }
    }
    if !json && rows.is_empty() {
        say("No dead letters of the log's consumers. Those of webhooks: GET /hub/v1/dead-letters.")?;
    } else if !json {
        table::print(["ID", "CONSUMER", "DIED", "ATTEMPTS", "TOPIC", "EVENT", "ERROR"], &rows)?;
    }
    Ok(())
}

fn row(dead: &DeadLetter) -> [String; 7] {
    [
        dead.id.to_string(),
        dead.consumer.clone(),
        table::time(dead.died_at),
        dead.attempts.to_string(),
        dead.message.topic.clone(),
        contracts::EventId(dead.message.message_id).to_string(),
        table::shown(&dead.last_error),
    ]
}

async fn retry(db: &PgPool, chosen: Chosen) -> Result<(), Failure> {
    if let Some(id) = chosen.id {
        let mut tx = db.begin().await?;
        flow::retry_dead_letter(&mut tx, id).await?;
        tx.commit().await?;
        say(&format!("Dead letter {id} is parked, and due now."))?;
        return Ok(());
    }
    let which = chosen.filters.which();
    let done = dead_letter::retry_many(db, &which).await?;
    tell("are parked, and due now", done)?;
    let left = dead_letter::without_consumer(db, &which).await?;
    for (consumer, count) in left {
        say(&format!(
            "{count} of {consumer} cannot be retried: it is no consumer of the log, or is not there any more."
        ))?;
    }
    Ok(())
}

async fn discard(db: &PgPool, chosen: Chosen) -> Result<(), Failure> {
    if let Some(id) = chosen.id {
        let mut tx = db.begin().await?;
        flow::discard_dead_letter(&mut tx, id).await?;
        tx.commit().await?;
        say(&format!("Dead letter {id} is gone."))?;
        return Ok(());
    }
    let done = dead_letter::discard_many(db, &chosen.filters.which()).await?;
    tell("are gone", done)
}

fn tell(what: &str, Bulk { count, more }: Bulk) -> Result<(), Failure> {
    let more = if more { "; there are more: run it again" } else { "" };
    say(&format!("{count} dead letters {what}{more}."))?;
    Ok(())
}

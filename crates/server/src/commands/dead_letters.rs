//! `dead-letters`: messages that consumers gave up after their retries.

use admin::operator::{DeadLetterView, flow};
use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use cli::table::{self, print_line};
use cli::time;
use pillarbox::database::Database;
use pillarbox::log::Tenant;
use pillarbox::operations::dead_letters::{self, Bulk, Selection};
use sqlx::PgPool;

use super::installation::connect;
use super::{Failure, rows};
use crate::settings::Settings;

#[derive(Subcommand)]
pub(super) enum Command {
    /// List dead letters, oldest first
    List {
        #[command(flatten)]
        filters: Filters,
        /// Print lines of JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a dead letter as JSON, with its headers and payload
    Show {
        /// The number in the column ID of `pillarbox dead-letters list`
        id: i64,
    },
    /// Retry one or many dead letters, with the full number of retries
    Retry {
        #[command(flatten)]
        target: Target,
    },
    /// Discard one or many dead letters
    Discard {
        #[command(flatten)]
        target: Target,
        /// Confirm --all
        #[arg(long)]
        yes: bool,
    },
}

/// One dead letter, or a selection.
#[derive(Args)]
pub(super) struct Target {
    /// The number in the column ID of `pillarbox dead-letters list`
    #[arg(conflicts_with_all = ["consumer", "topic", "tenant", "from", "to", "all"])]
    id: Option<i64>,
    #[command(flatten)]
    filters: Filters,
    /// All dead letters, without a filter
    #[arg(long, conflicts_with_all = ["consumer", "topic", "tenant", "from", "to"])]
    all: bool,
}

/// Selects dead letters; without filters, all of them.
#[derive(Args)]
pub(super) struct Filters {
    /// Only dead letters of this consumer
    #[arg(long, value_name = "NAME")]
    consumer: Option<String>,
    /// Only this topic and the topics below it
    #[arg(long, value_name = "NAME")]
    topic: Option<String>,
    /// Only this tenant
    #[arg(long, value_name = "NAME")]
    tenant: Option<Tenant>,
    /// Given up at this time or later: RFC 3339, or a duration before now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    from: Option<DateTime<Utc>>,
    /// Given up before this time
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    to: Option<DateTime<Utc>>,
}

impl Filters {
    fn is_empty(&self) -> bool {
        let Filters { consumer, topic, tenant, from, to } = self;
        consumer.is_none() && topic.is_none() && tenant.is_none() && from.is_none() && to.is_none()
    }

    fn into_query(self) -> Selection {
        let Filters { consumer, topic, tenant, from, to } = self;
        Selection { consumer, topic, tenant: tenant.map(String::from), from, to, ..Selection::default() }
    }
}

impl Target {
    /// Fails unless it has either filters or `--all`: a command without them must not affect every dead letter.
    fn into_query(self) -> Result<Selection, Failure> {
        if !self.all && self.filters.is_empty() {
            let advice = "select dead letters: give an ID, a filter such as --consumer NAME, or --all";
            return Err(Failure::Other(advice.to_owned()));
        }
        Ok(self.filters.into_query())
    }
}

/// Lists, shows, retries or discards dead letters. Fails if the given one does not exist, its consumer no longer exists, or
/// nothing is selected.
pub(super) async fn run(settings: &Settings, command: Command) -> Result<(), Failure> {
    match command {
        Command::List { filters, json } => list(&connect(settings)?, filters, json).await,
        Command::Show { id } => {
            let dead = flow::dead_letter(&mut *connect(settings)?.acquire().await?, id).await?;
            let text = serde_json::to_string_pretty(&DeadLetterView::full(dead)).map_err(std::io::Error::from)?;
            Ok(print_line(&text)?)
        }
        Command::Retry { target } => retry(settings, target).await,
        Command::Discard { target, yes } => {
            if target.all && !yes {
                let detail = "this discards every dead letter of every consumer; add --yes to confirm";
                return Err(Failure::Other(detail.to_owned()));
            }
            discard(settings, target).await
        }
    }
}

async fn list(db: &PgPool, filters: Filters, json: bool) -> Result<(), Failure> {
    let heads = ["ID", "CONSUMER", "DIED", "ATTEMPTS", "TOPIC", "EVENT", "ERROR"];
    let if_empty =
        "The log's consumers have no dead letters. For the dead letters of webhooks: GET /hub/v1/dead-letters.";
    let query = filters.into_query();
    let load = async |after, limit| {
        let page = dead_letters::list(db, &query, after, limit).await?;
        Ok(page.into_iter().map(DeadLetterView::brief).collect())
    };
    rows::print_list(json, heads, Some(if_empty), id_and_row, load).await
}

fn id_and_row(dead: &DeadLetterView) -> (i64, [String; 7]) {
    let row = [
        dead.id.to_string(),
        dead.consumer.clone(),
        table::format_time(dead.died_at),
        dead.attempts.to_string(),
        dead.message.topic().to_owned(),
        dead.message.event_id().to_string(),
        table::shorten(&dead.last_error),
    ];
    (dead.id, row)
}

async fn retry(settings: &Settings, target: Target) -> Result<(), Failure> {
    if let Some(id) = target.id {
        let mut tx = connect(settings)?.begin().await?;
        flow::retry_dead_letter(&mut tx, id).await?;
        tx.commit().await?;
        return Ok(print_line(&format!("Dead letter {id} is parked again, and due now."))?);
    }
    let query = target.into_query()?;
    let db = connect(settings)?;
    print_result("parked again, and due now", flow::retry_dead_letters(&Database::new(db.clone()), &query).await?)?;
    for (consumer, count) in dead_letters::without_consumer(&db, &query).await? {
        print_line(&format!(
            "{count} of {consumer} cannot be retried: it is not a consumer of the log, or it no longer exists."
        ))?;
    }
    Ok(())
}

async fn discard(settings: &Settings, target: Target) -> Result<(), Failure> {
    if let Some(id) = target.id {
        let mut tx = connect(settings)?.begin().await?;
        flow::discard_dead_letter(&mut tx, id).await?;
        tx.commit().await?;
        return Ok(print_line(&format!("Dead letter {id} is discarded."))?);
    }
    let query = target.into_query()?;
    print_result("discarded", flow::discard_dead_letters(&Database::new(connect(settings)?), &query).await?)
}

fn print_result(result: &str, Bulk { count, more }: Bulk) -> Result<(), Failure> {
    let more = if more { "; there are more: run the command again" } else { "" };
    Ok(print_line(&format!("{} {result}{more}.", table::count(count, "dead letter is", "dead letters are")))?)
}

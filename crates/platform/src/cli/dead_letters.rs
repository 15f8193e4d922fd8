//! `dead-letters`: messages that consumers gave up after their retries.

use clap::{Args, Subcommand};
use mailbox::operations::dead_letters::{self, Bulk};
use sqlx::PgPool;

use super::Failure;
use super::installation::connect;
use super::table::{self, print_line};
use crate::operator::filters::{DEAD_LETTER_SELECTION, DeadLetterFilters, DeadLetterSelection};
use crate::operator::{self, DeadLetterView, flow};
use crate::settings::Settings;

#[derive(Subcommand)]
pub(super) enum Command {
    /// List dead letters, oldest first
    List {
        #[command(flatten)]
        filters: DeadLetterFilters,
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
    #[arg(conflicts_with_all = DEAD_LETTER_SELECTION)]
    id: Option<i64>,
    #[command(flatten)]
    selection: DeadLetterSelection,
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
            if target.selection.is_all() && !yes {
                let detail = "this discards every dead letter of every consumer; add --yes to confirm";
                return Err(Failure::Other(detail.to_owned()));
            }
            discard(settings, target).await
        }
    }
}

async fn list(db: &PgPool, filters: DeadLetterFilters, json: bool) -> Result<(), Failure> {
    let heads = ["ID", "CONSUMER", "DIED", "ATTEMPTS", "TOPIC", "EVENT", "ERROR"];
    let if_empty =
        "The log's consumers have no dead letters. For the dead letters of webhooks: GET /hub/v1/dead-letters.";
    let query = filters.into_query();
    let load = async |after, limit| {
        let page = dead_letters::list(db, &query, after, limit).await?;
        Ok(page.into_iter().map(DeadLetterView::brief).collect())
    };
    table::print_list(json, heads, Some(if_empty), id_and_row, load).await
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
    let query = target.selection.into_query().map_err(explain)?;
    let db = connect(settings)?;
    print_result("parked again, and due now", flow::retry_dead_letters(&db, &query).await?)?;
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
    let query = target.selection.into_query().map_err(explain)?;
    print_result("discarded", flow::discard_dead_letters(&connect(settings)?, &query).await?)
}

/// Names the options of the command line instead of the fields of the HTTP API.
fn explain(error: operator::Error) -> Failure {
    match error {
        operator::Error::NoFilter => {
            Failure::Other("select dead letters: give an ID, a filter such as --consumer NAME, or --all".to_owned())
        }
        error => error.into(),
    }
}

fn print_result(result: &str, Bulk { count, more }: Bulk) -> Result<(), Failure> {
    let more = if more { "; there are more: run the command again" } else { "" };
    Ok(print_line(&format!("{} {result}{more}.", table::count(count, "dead letter is", "dead letters are")))?)
}

//! `parked`: messages that failed and wait for their retry.

use admin::operator::{ParkedView, flow};
use clap::{Args, Subcommand};
use cli::table::{self, print_line};
use pillarbox::operations::parked;

use super::installation::connect;
use super::{Failure, rows};
use crate::settings::Settings;

/// Selects parked messages or replays.
#[derive(Args)]
pub(super) struct ConsumerFilter {
    /// Only those of this consumer
    #[arg(long, value_name = "NAME")]
    pub(super) consumer: Option<String>,
}

#[derive(Subcommand)]
pub(super) enum Command {
    /// List parked messages in the order in which they were parked
    List {
        #[command(flatten)]
        filter: ConsumerFilter,
        /// Print lines of JSON
        #[arg(long)]
        json: bool,
    },
    /// Retry a parked message now
    Retry {
        /// The number in the column PLACE of `pillarbox parked list`
        place: i64,
    },
    /// Discard a parked message; later messages of its key continue
    Discard {
        /// The number in the column PLACE of `pillarbox parked list`
        place: i64,
    },
}

/// Lists, retries or discards parked messages. Fails if the given one is not parked any more, or waits behind another.
pub(super) async fn run(settings: &Settings, command: Command) -> Result<(), Failure> {
    let db = connect(settings)?;
    match command {
        Command::List { filter, json } => {
            let heads = ["PLACE", "CONSUMER", "KEY", "TOPIC", "EVENT", "ATTEMPTS", "NEXT", "ERROR"];
            let load = async |after, limit| {
                let page = parked::list(&db, filter.consumer.as_deref(), after, limit).await?;
                Ok(page.into_iter().map(ParkedView::from).collect())
            };
            let if_empty = "Nothing is parked.";
            rows::print_list(json, heads, Some(if_empty), id_and_row, load).await
        }
        Command::Retry { place } => {
            let mut tx = db.begin().await?;
            flow::retry_parked(&mut tx, place).await?;
            tx.commit().await?;
            Ok(print_line(&format!("Parked message {place} is due; the shard worker retries it within seconds."))?)
        }
        Command::Discard { place } => {
            let mut tx = db.begin().await?;
            flow::discard_parked(&mut tx, place).await?;
            tx.commit().await?;
            Ok(print_line(&format!(
                "Parked message {place} is discarded; the shard worker removes it when its turn comes."
            ))?)
        }
    }
}

fn id_and_row(parked: &ParkedView) -> (i64, [String; 8]) {
    let next = match (parked.discarded, parked.next_at) {
        (true, _) => "discarded".to_owned(),
        (false, Some(at)) => table::format_time(at),
        (false, None) => "blocked by its key".to_owned(),
    };
    let row = [
        parked.place.to_string(),
        parked.consumer.clone(),
        table::shorten(parked.message.key().unwrap_or("-")),
        parked.message.topic().to_owned(),
        parked.message.event_id().to_string(),
        parked.attempts.to_string(),
        next,
        table::shorten(parked.last_error.as_deref().unwrap_or("-")),
    ];
    (parked.place, row)
}

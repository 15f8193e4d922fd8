//! `parked`: messages that failed and wait for their retry.

use clap::{Args, Subcommand};
use http::Method;
use serde_json::Value;

use crate::Failure;
use crate::api::{Api, ServerArgs};
use crate::consumers::ConsumerFilter;
use crate::pages::{self, Columns};
use crate::table::print_line;

const PATH: &str = "/admin/v1/parked";

#[derive(Args)]
pub struct Parked {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub server: ServerArgs,
}

#[derive(Subcommand)]
pub enum Command {
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

/// Lists, retries or discards parked messages over HTTP. Fails if the given one is not parked any more, or waits behind another.
pub async fn run(api: &Api, command: Command) -> Result<(), Failure> {
    match command {
        Command::List { filter, json } => {
            let heads = ["PLACE", "CONSUMER", "KEY", "TOPIC", "EVENT", "ATTEMPTS", "NEXT", "ERROR"];
            let columns = Columns { heads, row };
            pages::print_all(api, PATH, &[("consumer", filter.consumer)], json, columns, "Nothing is parked.").await
        }
        Command::Retry { place } => {
            api.send(Method::POST, &format!("{PATH}/{place}/retry"), None).await?;
            Ok(print_line(&format!("Parked message {place} is due; the shard worker retries it within seconds."))?)
        }
        Command::Discard { place } => {
            api.send(Method::POST, &format!("{PATH}/{place}/discard"), None).await?;
            Ok(print_line(&format!(
                "Parked message {place} is discarded; the shard worker removes it when its turn comes."
            ))?)
        }
    }
}

fn row(parked: &Value) -> [String; 8] {
    let message = &parked["message"];
    let next = if parked["discarded"] == true {
        "discarded".to_owned()
    } else if parked["next_at"].is_null() {
        "blocked by its key".to_owned()
    } else {
        pages::time(parked, "next_at")
    };
    [
        pages::text(parked, "place"),
        pages::text(parked, "consumer"),
        pages::text(message, "key"),
        pages::text(message, "topic"),
        pages::text(message, "event_id"),
        pages::text(parked, "attempts"),
        next,
        pages::text(parked, "last_error"),
    ]
}

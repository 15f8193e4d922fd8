//! `deliveries`: events on their way to one subscriber each, and the attempts to deliver them.

use clap::{Args, Subcommand};
use pillarbox::log::Tenant;
use serde_json::Value;
use uuid::Uuid;

use crate::api::{Api, ServerArgs};
use crate::arguments::uuid;
use crate::pages::{self, Columns, ListArgs};
use crate::{Failure, table};

const PATH: &str = "/hub/v1/messages";

#[derive(Args)]
pub struct Deliveries {
    #[command(subcommand)]
    pub command: Command,
    /// The tenant
    #[arg(long, global = true, value_name = "NAME", default_value = "main")]
    pub tenant: Tenant,
    #[command(flatten)]
    pub server: ServerArgs,
}

#[derive(Subcommand)]
pub enum Command {
    /// List deliveries, newest first: each event once per subscriber, with the outcome of the last time that it was sent
    List {
        /// Only to this subscriber
        #[arg(long, value_name = "ID", value_parser = uuid)]
        subscriber: Option<Uuid>,
        /// Only with this outcome
        #[arg(long, value_parser = ["delivered", "pending", "failed", "dead"])]
        outcome: Option<String>,
        #[command(flatten)]
        list: ListArgs,
    },
    /// Show a delivery with its attempts as JSON
    Show {
        /// The id of the delivery, as shown by `pillarbox deliveries list`: those of its event and its subscriber
        id: String,
    },
}

/// Lists or shows deliveries over HTTP. Fails if there is no server or no such delivery.
pub async fn run(api: &Api, command: Command) -> Result<(), Failure> {
    match command {
        Command::List { subscriber, outcome, list } => {
            let query = [("subscriber_id", subscriber.map(|id| id.to_string())), ("outcome", outcome)];
            let heads = ["QUEUED", "EVENT TYPE", "SUBSCRIBER", "KIND", "OUTCOME", "ATTEMPTS", "STATUS", "ID"];
            pages::print(api, PATH, &query, &list, Columns { heads, row }).await
        }
        Command::Show { id } => {
            let mut shown = api.get(&format!("{PATH}/{id}")).await?;
            shown["attempt_list"] = api.get(&format!("{PATH}/{id}/attempts")).await?["items"].take();
            Ok(table::print_json(&shown)?)
        }
    }
}

fn row(item: &Value) -> [String; 8] {
    [
        pages::time(item, "created_at"),
        pages::text(item, "event_type"),
        pages::text(item, "subscriber_name"),
        pages::text(item, "kind"),
        pages::text(item, "outcome"),
        pages::text(item, "attempts"),
        pages::text(item, "last_status"),
        pages::text(item, "id"),
    ]
}

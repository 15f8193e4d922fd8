//! `notifications`: notifications that were given up.

use clap::{Args, Subcommand};
use serde_json::json;
use uuid::Uuid;

use crate::Failure;
use crate::api::{Api, ServerArgs};
use crate::table::{self, print_line};

#[derive(Args)]
pub struct Notifications {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub server: ServerArgs,
}

#[derive(Subcommand)]
pub enum Command {
    /// Deliver dead notifications again, with the full number of retries
    Retry {
        #[command(flatten)]
        selection: Selection,
    },
}

/// Filters, or all.
#[derive(Args)]
#[group(required = true, multiple = true)]
pub struct Selection {
    /// Only notifications over this channel
    #[arg(long, value_name = "NAME", value_parser = ["email", "webhook"])]
    channel: Option<String>,
    /// Only notifications about events of this type, such as order.paid
    #[arg(long, value_name = "NAME")]
    event_type: Option<String>,
    /// Only notifications to this user
    #[arg(long, value_name = "UUID")]
    user: Option<Uuid>,
    /// All dead notifications, without a filter
    #[arg(long, conflicts_with_all = ["channel", "event_type", "user"])]
    all: bool,
}

/// Makes dead notifications due again, over HTTP. Fails if the server refuses it.
pub async fn run(api: &Api, command: Command) -> Result<(), Failure> {
    let Command::Retry { selection: Selection { channel, event_type, user, all } } = command;
    let body = json!({"channel": channel, "event_type": event_type, "user_id": user, "all": all});
    let retried = api.post_bulk("/admin/v1/notifications/retry", &body).await?;
    let count = table::count(&retried["count"], "notification is", "notifications are");
    Ok(print_line(&format!("{count} due now{}.", table::and_more(&retried)))?)
}

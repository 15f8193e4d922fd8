//! `notifications`: notifications that were given up.

use clap::{Args, Subcommand};
use notify::{BulkRetry, DeadNotifications};
use uuid::Uuid;

use super::Failure;
use super::installation::connect;
use super::table::{self, print_line};
use crate::settings::Settings;

#[derive(Subcommand)]
pub(super) enum Command {
    /// Deliver dead notifications again, with the full number of retries
    Retry {
        #[command(flatten)]
        selection: Selection,
    },
}

/// Filters, or all.
#[derive(Args)]
#[group(required = true, multiple = true)]
pub(super) struct Selection {
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

/// Makes dead notifications due again. Fails if the database cannot be reached.
pub(super) async fn run(settings: &Settings, command: Command) -> Result<(), Failure> {
    let Command::Retry { selection: Selection { channel, event_type, user, all: _ } } = command;
    let channel = channel.and_then(|name| name.parse().ok());
    let selection = DeadNotifications { channel, event_type, user_id: user };
    let BulkRetry { count, more } = notify::retry_dead_notifications(&connect(settings)?, &selection).await?;
    let more = if more { "; there are more: run the command again" } else { "" };
    Ok(print_line(&format!("{} due now{more}.", table::count(count, "notification is", "notifications are")))?)
}

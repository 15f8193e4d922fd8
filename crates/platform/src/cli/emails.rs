//! `mail`: e-mails that were given up.

use chrono::TimeDelta;
use clap::{Args, Subcommand};
use notify::{BulkRetry, DeadMails};

use super::Failure;
use super::installation::connect;
use super::table::print_line;
use crate::settings::Settings;

#[derive(Subcommand)]
pub(super) enum Command {
    /// Send dead e-mails again, with the full time for retries; the text of expired ones was erased
    Retry {
        #[command(flatten)]
        selection: Selection,
    },
}

/// Filters, or all.
#[derive(Args)]
#[group(required = true, multiple = true)]
pub(super) struct Selection {
    /// Only e-mails to this address
    #[arg(long, value_name = "ADDRESS")]
    to: Option<String>,
    /// Only e-mails of this template, such as verification
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
    /// All dead e-mails, without a filter
    #[arg(long, conflicts_with_all = ["to", "template"])]
    all: bool,
}

/// Queues dead e-mails again. Fails if the database cannot be reached.
pub(super) async fn run(settings: &Settings, command: Command) -> Result<(), Failure> {
    let Command::Retry { selection: Selection { to, template, all: _ } } = command;
    let retry_time = TimeDelta::hours(i64::from(settings.mail.retry_hours));
    let selection = DeadMails::new(to, template);
    let BulkRetry { count, more } = notify::retry_dead_mails(&connect(settings)?, &selection, retry_time).await?;
    let more = if more { "; there are more: run the command again" } else { "" };
    Ok(print_line(&format!("{count} e-mails are queued again, and due now{more}."))?)
}

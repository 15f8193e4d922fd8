//! `mail`: the e-mails of the installation, and those that were given up.

use chrono::TimeDelta;
use clap::{Args, Subcommand};
use notify::{BulkRetry, DeadMails};
use serde_json::Value;

use super::Failure;
use super::api::{ServerArgs, operator_api};
use super::installation::connect;
use super::pages::{self, Columns, ListArgs};
use super::table::{self, print_line};
use crate::settings::Settings;

const PATH: &str = "/admin/v1/mail";

#[derive(Args)]
pub(super) struct Emails {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    pub(super) server: ServerArgs,
}

#[derive(Subcommand)]
enum Command {
    /// List e-mails, newest first
    List {
        /// Only e-mails to this address
        #[arg(long, value_name = "ADDRESS")]
        to: Option<String>,
        /// Only e-mails with this status
        #[arg(long, value_parser = ["queued", "sent", "dead", "captured", "expired", "shadowed"])]
        status: Option<String>,
        /// Only e-mails of this template, such as verification
        #[arg(long, value_name = "NAME")]
        template: Option<String>,
        #[command(flatten)]
        list: ListArgs,
    },
    /// Show an e-mail as JSON; its text only if it was captured
    Show {
        /// The id of the e-mail, as shown by `pillarbox mail list`
        id: i64,
    },
    /// Send dead e-mails again, with the full time for retries; the text of expired ones was erased
    Retry {
        #[command(flatten)]
        selection: Selection,
    },
}

/// Filters, or all.
#[derive(Args)]
#[group(required = true, multiple = true)]
struct Selection {
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

/// Lists or shows e-mails over HTTP, or queues dead ones again. Fails if the server or the database cannot be reached.
pub(super) async fn run(settings: &Settings, emails: Emails) -> Result<(), Failure> {
    match emails.command {
        Command::List { to, status, template, list } => {
            let query = [("to", to), ("status", status), ("template", template)];
            let heads = ["ID", "CREATED", "STATUS", "TEMPLATE", "ATTEMPTS", "TO", "LAST ERROR"];
            pages::print(&operator_api(settings, &emails.server)?, PATH, &query, &list, Columns { heads, row }).await
        }
        Command::Show { id } => {
            let api = operator_api(settings, &emails.server)?;
            Ok(table::print_json(&api.get(&format!("{PATH}/{id}")).await?)?)
        }
        Command::Retry { selection } => retry(settings, selection).await,
    }
}

async fn retry(settings: &Settings, Selection { to, template, all: _ }: Selection) -> Result<(), Failure> {
    let retry_time = TimeDelta::hours(i64::from(settings.mail.retry_hours));
    let selection = DeadMails::new(to, template);
    let BulkRetry { count, more } = notify::retry_dead_mails(&connect(settings)?, &selection, retry_time).await?;
    let more = if more { "; there are more: run the command again" } else { "" };
    Ok(print_line(&format!("{} queued again, and due now{more}.", table::count(count, "e-mail is", "e-mails are")))?)
}

fn row(item: &Value) -> [String; 7] {
    [
        pages::text(item, "id"),
        pages::time(item, "created_at"),
        pages::text(item, "status"),
        pages::text(item, "template"),
        pages::text(item, "attempts"),
        pages::text(item, "to"),
        pages::text(item, "last_error"),
    ]
}

//! `mail`: the e-mails of the installation, and those that were given up.

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::Failure;
use crate::api::{Api, ServerArgs};
use crate::pages::{self, Columns, ListArgs};
use crate::table::{self, print_line};

const PATH: &str = "/admin/v1/mail";

#[derive(Args)]
pub struct Emails {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub server: ServerArgs,
}

#[derive(Subcommand)]
pub enum Command {
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
pub struct Selection {
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

/// Lists or shows e-mails, or queues dead ones again, over HTTP. Fails if the server refuses it.
pub async fn run(api: &Api, command: Command) -> Result<(), Failure> {
    match command {
        Command::List { to, status, template, list } => {
            let query = [("to", to), ("status", status), ("template", template)];
            let heads = ["ID", "CREATED", "STATUS", "TEMPLATE", "ATTEMPTS", "TO", "LAST ERROR"];
            pages::print(api, PATH, &query, &list, Columns { heads, row }).await
        }
        Command::Show { id } => Ok(table::print_json(&api.get(&format!("{PATH}/{id}")).await?)?),
        Command::Retry { selection: Selection { to, template, all } } => {
            let body = json!({"to": to, "template": template, "all": all});
            let retried = api.post_bulk(&format!("{PATH}/retry"), &body).await?;
            let count = table::count(&retried["count"], "e-mail is", "e-mails are");
            Ok(print_line(&format!("{count} queued again, and due now{}.", table::and_more(&retried)))?)
        }
    }
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

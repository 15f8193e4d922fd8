//! `webhook-dead-letters`: webhooks that were given up after their retries.

use chrono::{DateTime, SecondsFormat, Utc};
use clap::{Args, Subcommand};
use http::Method;
use pillarbox::log::Tenant;
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::Failure;
use crate::api::{Api, ServerArgs};
use crate::arguments::uuid;
use crate::pages::{self, Columns, ListArgs};
use crate::table::{self, print_line, print_note};
use crate::time;

const PATH: &str = "/hub/v1/dead-letters";
/// Dead letters that one request retries or discards, so that the progress can be shown.
const STEP: u32 = 5_000;

#[derive(Args)]
pub struct WebhookDeadLetters {
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
    /// List dead letters, newest first
    List {
        #[command(flatten)]
        filter: Filter,
        #[command(flatten)]
        list: ListArgs,
    },
    /// Show a dead letter with its event and its subscriber as JSON
    Show {
        /// The id of the dead letter
        #[arg(value_parser = uuid)]
        id: Uuid,
    },
    /// Send dead letters again: one, those that match the filters, or all
    Retry(Selection),
    /// Delete dead letters for good; lanes that they block continue
    Discard(Selection),
}

#[derive(Args)]
pub struct Filter {
    /// Only of this subscriber
    #[arg(long, value_name = "ID", value_parser = uuid)]
    subscriber: Option<Uuid>,
    /// Only events of this type and the types below it
    #[arg(long, value_name = "NAME")]
    event_type: Option<String>,
    /// Only those that were given up for this reason
    #[arg(long, value_parser = ["exhausted", "refused", "gone", "manual", "expired"])]
    reason: Option<String>,
    /// Only those given up at this time or later: RFC 3339, or a duration before now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    from: Option<DateTime<Utc>>,
    /// Only those given up before this time
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    to: Option<DateTime<Utc>>,
}

#[derive(Args)]
#[command(group(clap::ArgGroup::new("selected").required(true).multiple(true)
    .args(["id", "all", "subscriber", "event_type", "reason", "from", "to"])))]
pub struct Selection {
    /// The id of one dead letter
    #[arg(value_parser = uuid, conflicts_with_all = ["all", "subscriber", "event_type", "reason", "from", "to"])]
    id: Option<Uuid>,
    /// All dead letters of the tenant
    #[arg(long, conflicts_with_all = ["subscriber", "event_type", "reason", "from", "to"])]
    all: bool,
    #[command(flatten)]
    filter: Filter,
}

/// Lists, shows, retries or discards dead letters over HTTP. Fails if there is no server or no such dead letter.
pub async fn run(api: &Api, command: Command) -> Result<(), Failure> {
    match command {
        Command::List { filter, list } => {
            let heads = ["GIVEN UP", "EVENT TYPE", "REASON", "ATTEMPTS", "RETRIED", "ID", "DETAIL"];
            pages::print(api, PATH, &filter.fields(), &list, Columns { heads, row }).await
        }
        Command::Show { id } => Ok(table::print_json(&api.get(&format!("{PATH}/{id}")).await?)?),
        Command::Retry(selection) => {
            let count = change(api, "retry", "retried", selection).await?;
            Ok(print_line(&format!("{} sent again.", table::count(count, "webhook is", "webhooks are")))?)
        }
        Command::Discard(selection) => {
            let count = change(api, "discard", "discarded", selection).await?;
            Ok(print_line(&format!("{} discarded.", table::count(count, "dead letter is", "dead letters are")))?)
        }
    }
}

/// Applies `verb` to the selected dead letters. Returns how many there were.
async fn change(api: &Api, verb: &str, counter: &str, selection: Selection) -> Result<u64, Failure> {
    if let Some(id) = selection.id {
        api.send(Method::POST, &format!("{PATH}/{id}/{verb}"), None).await?;
        return Ok(1);
    }
    // Not those that are given up from now on: a message whose retry fails at once would be retried without end.
    let filter = Filter { to: selection.filter.to.or(Some(Utc::now())), ..selection.filter };
    let mut body: Map<String, Value> =
        filter.fields().into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.into()))).collect();
    body.insert("limit".to_owned(), STEP.into());
    let (body, mut count) = (Value::Object(body), 0);
    loop {
        let answer = api.post_bulk(&format!("{PATH}/{verb}"), &body).await?;
        count += answer[counter].as_u64().unwrap_or_default();
        if answer["more"] != true {
            return Ok(count);
        }
        print_note(&format!("{counter} so far: {count}"));
    }
}

impl Filter {
    fn fields(&self) -> [(&'static str, Option<String>); 5] {
        let time = |at: Option<DateTime<Utc>>| at.map(|at| at.to_rfc3339_opts(SecondsFormat::Micros, true));
        [
            ("subscriber_id", self.subscriber.map(|id| id.to_string())),
            ("event_type", self.event_type.clone()),
            ("reason", self.reason.clone()),
            ("from", time(self.from)),
            ("to", time(self.to)),
        ]
    }
}

fn row(item: &Value) -> [String; 7] {
    [
        pages::time(item, "moved_to_dlq_at"),
        pages::text(item, "event_type"),
        pages::text(item, "reason"),
        pages::text(item, "attempts"),
        if item["manual_retry_at"].is_null() { "no" } else { "yes" }.to_owned(),
        pages::text(item, "id"),
        pages::text(item, "detail"),
    ]
}

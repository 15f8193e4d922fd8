//! `dead-letters`: messages that consumers gave up after their retries.

use chrono::{DateTime, SecondsFormat, Utc};
use clap::{Args, Subcommand};
use http::Method;
use pillarbox::log::Tenant;
use serde_json::{Map, Value};

use crate::Failure;
use crate::api::{Api, ServerArgs};
use crate::pages::{self, Columns};
use crate::table::{self, print_line};
use crate::time;

const PATH: &str = "/admin/v1/dead-letters";

#[derive(Args)]
pub struct DeadLetters {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub server: ServerArgs,
}

#[derive(Subcommand)]
pub enum Command {
    /// List dead letters, oldest first
    List {
        #[command(flatten)]
        filters: Filters,
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
pub struct Target {
    /// The number in the column ID of `pillarbox dead-letters list`
    #[arg(conflicts_with_all = ["consumer", "topic", "tenant", "from", "to", "all"])]
    id: Option<i64>,
    #[command(flatten)]
    filters: Filters,
    /// All dead letters, without a filter
    #[arg(long, conflicts_with_all = ["consumer", "topic", "tenant", "from", "to"])]
    all: bool,
}

/// Selects dead letters; without filters, all of them.
#[derive(Args)]
pub struct Filters {
    /// Only dead letters of this consumer
    #[arg(long, value_name = "NAME")]
    consumer: Option<String>,
    /// Only this topic and the topics below it
    #[arg(long, value_name = "NAME")]
    topic: Option<String>,
    /// Only this tenant
    #[arg(long, value_name = "NAME")]
    tenant: Option<Tenant>,
    /// Given up at this time or later: RFC 3339, or a duration before now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    from: Option<DateTime<Utc>>,
    /// Given up before this time
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    to: Option<DateTime<Utc>>,
}

impl Filters {
    fn fields(&self) -> [(&'static str, Option<String>); 5] {
        let time = |at: Option<DateTime<Utc>>| at.map(|at| at.to_rfc3339_opts(SecondsFormat::Micros, true));
        [
            ("consumer", self.consumer.clone()),
            ("topic", self.topic.clone()),
            ("tenant", self.tenant.clone().map(String::from)),
            ("from", time(self.from)),
            ("to", time(self.to)),
        ]
    }
}

impl Target {
    /// The body of the same request over HTTP.
    fn body(&self) -> Map<String, Value> {
        let fields = self.filters.fields().into_iter();
        let all = self.all.then_some(("all".to_owned(), Value::Bool(true)));
        fields.filter_map(|(name, value)| Some((name.to_owned(), value?.into()))).chain(all).collect()
    }
}

impl DeadLetters {
    /// Fails unless the command says which dead letters it affects: without a selection it must not affect all. Needs no server, so
    /// that it can be checked first.
    pub fn check(&self) -> Result<(), Failure> {
        let (Command::Retry { target } | Command::Discard { target, .. }) = &self.command else { return Ok(()) };
        if target.id.is_none() && target.body().is_empty() {
            let advice = "select dead letters: give an ID, a filter such as --consumer NAME, or --all";
            return Err(Failure::Other(advice.to_owned()));
        }
        if target.all && matches!(self.command, Command::Discard { yes: false, .. }) {
            let detail = "this discards every dead letter of every consumer; add --yes to confirm";
            return Err(Failure::Other(detail.to_owned()));
        }
        Ok(())
    }
}

/// Lists, shows, retries or discards dead letters over HTTP. Fails if the given one does not exist, or its consumer no longer
/// exists. [`DeadLetters::check`] comes first.
pub async fn run(api: &Api, command: Command) -> Result<(), Failure> {
    match command {
        Command::List { filters, json } => {
            let heads = ["ID", "CONSUMER", "DIED", "ATTEMPTS", "TOPIC", "EVENT", "ERROR"];
            let if_empty =
                "The log's consumers have no dead letters. For the dead letters of webhooks: GET /hub/v1/dead-letters.";
            pages::print_all(api, PATH, &filters.fields(), json, Columns { heads, row }, if_empty).await
        }
        // Byte for byte: a payload may have numbers that JSON cannot represent exactly.
        Command::Show { id } => Ok(print_line(&api.get_text(&format!("{PATH}/{id}")).await?)?),
        Command::Retry { target } => retry(api, &target).await,
        Command::Discard { target, .. } => discard(api, &target).await,
    }
}

fn row(dead: &Value) -> [String; 7] {
    let message = &dead["message"];
    [
        pages::text(dead, "id"),
        pages::text(dead, "consumer"),
        pages::time(dead, "died_at"),
        pages::text(dead, "attempts"),
        pages::text(message, "topic"),
        pages::text(message, "event_id"),
        pages::text(dead, "last_error"),
    ]
}

async fn retry(api: &Api, target: &Target) -> Result<(), Failure> {
    if let Some(id) = target.id {
        api.send(Method::POST, &format!("{PATH}/{id}/retry"), None).await?;
        return Ok(print_line(&format!("Dead letter {id} is parked again, and due now."))?);
    }
    let done = api.post_bulk(&format!("{PATH}/retry"), &Value::Object(target.body())).await?;
    print_result("parked again, and due now", &done)?;
    for (consumer, count) in done["without_consumer"].as_object().into_iter().flatten() {
        print_line(&format!(
            "{count} of {consumer} cannot be retried: it is not a consumer of the log, or it no longer exists."
        ))?;
    }
    Ok(())
}

async fn discard(api: &Api, target: &Target) -> Result<(), Failure> {
    if let Some(id) = target.id {
        api.send(Method::POST, &format!("{PATH}/{id}/discard"), None).await?;
        return Ok(print_line(&format!("Dead letter {id} is discarded."))?);
    }
    print_result("discarded", &api.post_bulk(&format!("{PATH}/discard"), &Value::Object(target.body())).await?)
}

fn print_result(result: &str, done: &Value) -> Result<(), Failure> {
    let dead_letters = table::count(&done["count"], "dead letter is", "dead letters are");
    Ok(print_line(&format!("{dead_letters} {result}{}.", table::and_more(done)))?)
}

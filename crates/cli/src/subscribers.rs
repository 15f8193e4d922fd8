//! `subscribers`: the endpoints of a tenant that receive webhooks.

use clap::{Args, Subcommand};
use http::Method;
use pillarbox::log::Tenant;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::Failure;
use crate::api::{Api, ServerArgs};
use crate::arguments::{name_and_value, uuid};
use crate::pages::{self, Columns, ListArgs};
use crate::table::{self, print_line};

const PATH: &str = "/hub/v1/subscribers";

#[derive(Args)]
pub struct Subscribers {
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
    /// List the subscribers
    List {
        /// Only subscribers whose name contains this text
        #[arg(long, value_name = "TEXT")]
        search: Option<String>,
        #[command(flatten)]
        list: ListArgs,
    },
    /// Show a subscriber as JSON
    Show(Id),
    /// Create a subscriber and print it, with its secret, as JSON; the secret is not shown again
    Create(Create),
    /// Change fields of a subscriber and print it as JSON; the others stay as they are
    Update(Update),
    /// Pause a subscriber: its messages wait
    Pause(Id),
    /// Resume a paused subscriber: the messages that wait are sent
    Resume(Id),
    /// Switch a subscriber on again that the hub or its owner has switched off
    Enable(Id),
    /// Send a test webhook and print the response as JSON; exit with 1 if it is not delivered
    Test(Id),
    /// Create a new secret and print it as JSON; the former one stays valid for a day
    RotateSecret {
        #[command(flatten)]
        id: Id,
        /// For how many hours the former secret still signs as well, from 0 to 168
        #[arg(long, value_name = "HOURS", default_value_t = 24, value_parser = clap::value_parser!(u8).range(0..=168))]
        overlap_hours: u8,
    },
    /// Delete a subscriber; messages that wait for it are not sent
    Delete(Id),
}

#[derive(Args)]
pub struct Id {
    /// The id of the subscriber, as shown by `pillarbox subscribers list`
    #[arg(value_parser = uuid)]
    id: Uuid,
}

#[derive(Args)]
pub struct Create {
    /// The name of the subscriber
    #[arg(long)]
    name: String,
    /// The address that receives the webhooks
    #[arg(long)]
    url: String,
    /// The types of events, such as order.paid or order.*
    #[arg(long, value_name = "TYPE,...", value_delimiter = ',', default_value = "*")]
    event_types: Vec<String>,
    /// Any other field of the API, such as --field max_in_flight=4; can be repeated. The value is JSON, or else a text
    #[arg(long, value_name = "NAME=VALUE", value_parser = name_and_value)]
    field: Vec<(String, String)>,
}

#[derive(Args)]
#[command(group(clap::ArgGroup::new("changes").required(true).multiple(true).args(["name", "url", "event_types", "field"])))]
pub struct Update {
    #[command(flatten)]
    id: Id,
    /// The new name
    #[arg(long)]
    name: Option<String>,
    /// The new address. At another host, `headers` of the subscriber have to be given again with --field
    #[arg(long)]
    url: Option<String>,
    /// The new types of events, such as order.paid or order.*
    #[arg(long, value_name = "TYPE,...", value_delimiter = ',')]
    event_types: Option<Vec<String>>,
    /// Any other field of the API, such as --field max_in_flight=4; can be repeated. The value is JSON, or else a text; null
    /// resets the field to its default
    #[arg(long, value_name = "NAME=VALUE", value_parser = name_and_value)]
    field: Vec<(String, String)>,
}

/// Lists, shows, creates, changes or deletes subscribers over HTTP. Fails if there is no server or the server refuses it.
pub async fn run(api: &Api, command: Command) -> Result<bool, Failure> {
    let post = async |id: &Id, verb: &str, body: Option<&Value>| {
        api.send(Method::POST, &format!("{PATH}/{}/{verb}", id.id), body).await
    };
    match command {
        Command::List { search, list } => {
            let heads = ["ID", "NAME", "STATE", "EVENT TYPES", "URL"];
            pages::print(api, PATH, &[("q", search)], &list, Columns { heads, row }).await?;
        }
        Command::Show(Id { id }) => table::print_json(&api.get(&format!("{PATH}/{id}")).await?)?,
        Command::Create(create) => table::print_json(&api.post(PATH, &body_of(create)).await?)?,
        Command::Update(update) => {
            let path = format!("{PATH}/{}", update.id.id);
            table::print_json(&api.send(Method::PATCH, &path, Some(&update.body())).await?)?;
        }
        Command::Pause(id) => {
            post(&id, "pause", None).await?;
            print_line(&format!("The subscriber {} is paused.", id.id))?;
        }
        Command::Resume(id) => {
            post(&id, "resume", None).await?;
            print_line(&format!("The subscriber {} is resumed.", id.id))?;
        }
        Command::Enable(Id { id }) => {
            let change = json!({"is_active": true});
            api.send(Method::PATCH, &format!("{PATH}/{id}"), Some(&change)).await?;
            print_line(&format!("The subscriber {id} is switched on."))?;
        }
        Command::Test(id) => {
            let tested = post(&id, "test", None).await?;
            table::print_json(&tested)?;
            return Ok(tested["delivered"] == true);
        }
        Command::RotateSecret { id, overlap_hours } => {
            let overlap = json!({"overlap_hours": overlap_hours});
            table::print_json(&post(&id, "rotate-secret", Some(&overlap)).await?)?;
        }
        Command::Delete(Id { id }) => {
            api.send(Method::DELETE, &format!("{PATH}/{id}"), None).await?;
            print_line(&format!("The subscriber {id} is deleted."))?;
        }
    }
    Ok(true)
}

/// Fields as the user gives them: their values are JSON, or else texts.
fn fields_of(given: Vec<(String, String)>) -> Map<String, Value> {
    let field = |(name, value): (String, String)| (name, serde_json::from_str(&value).unwrap_or(Value::String(value)));
    given.into_iter().map(field).collect()
}

impl Update {
    fn body(self) -> Value {
        let mut body = fields_of(self.field);
        body.extend(self.name.map(|name| ("name".to_owned(), name.into())));
        body.extend(self.url.map(|url| ("url".to_owned(), url.into())));
        body.extend(self.event_types.map(|types| ("event_types".to_owned(), types.into())));
        Value::Object(body)
    }
}

fn body_of(create: Create) -> Value {
    let mut body = fields_of(create.field);
    body.insert("name".to_owned(), create.name.into());
    body.insert("url".to_owned(), create.url.into());
    body.insert("event_types".to_owned(), create.event_types.into());
    Value::Object(body)
}

fn row(item: &Value) -> [String; 5] {
    let state = if item["is_active"] == false {
        "off"
    } else if !item["paused_at"].is_null() {
        "paused"
    } else if !item["unverified_since"].is_null() {
        "unverified"
    } else {
        "active"
    };
    let types = item["event_types"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let types = table::shorten(&types.collect::<Vec<_>>().join(", "));
    [pages::text(item, "id"), pages::text(item, "name"), state.to_owned(), types, pages::text(item, "url")]
}

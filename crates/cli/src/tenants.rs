//! `tenants`: the customers of this installation.

use clap::{Args, Subcommand};
use http::Method;
use pillarbox::log::Tenant;
use serde_json::{Map, Value, json};

use crate::Failure;
use crate::api::{Api, ServerArgs};
use crate::pages;
use crate::table::{self, print_line, print_note};

const PATH: &str = "/admin/v1/tenants";

#[derive(Args)]
pub struct Tenants {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub server: ServerArgs,
}

#[derive(Subcommand)]
pub enum Command {
    /// Create a tenant
    Create(Limits),
    /// List the tenants by name
    List {
        /// Only tenants that are suspended (true), or that are not (false)
        #[arg(long)]
        suspended: Option<bool>,
        /// Only tenants whose name or display name contains this text
        #[arg(long, value_name = "TEXT")]
        search: Option<String>,
        /// Print lines of JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a tenant as JSON
    Show {
        /// The name of the tenant
        tenant: Tenant,
    },
    /// Change the display name or the limits of a tenant; what is not given stays as it is
    Update(Limits),
    /// Suspend a tenant: its requests are refused, and messages to its subscribers wait
    Suspend {
        /// The name of the tenant
        tenant: Tenant,
    },
    /// Resume a suspended tenant: the messages that wait are sent
    Resume {
        /// The name of the tenant
        tenant: Tenant,
    },
    /// Delete a suspended tenant with its keys, subscribers, streams and event types
    Delete {
        /// The name of the tenant
        tenant: Tenant,
    },
}

#[derive(Args)]
pub struct Limits {
    /// The name in requests and messages; it cannot be changed
    tenant: Tenant,
    /// The name that operators see
    #[arg(long, value_name = "TEXT")]
    display_name: Option<String>,
    /// The largest number of subscribers [default: the setting hub.subscribers_max]
    #[arg(long, value_name = "COUNT")]
    subscribers_max: Option<i64>,
    /// The largest number of events per second over HTTP [default: no limit]
    #[arg(long, value_name = "COUNT")]
    events_per_second_max: Option<i64>,
    /// The largest payload [default: 262144]
    #[arg(long, value_name = "BYTES")]
    payload_bytes_max: Option<i64>,
}

/// Creates, lists, shows, changes, suspends, resumes or deletes tenants over HTTP. Fails if the named one does not exist, or a field
/// is invalid.
pub async fn run(api: &Api, command: Command) -> Result<(), Failure> {
    match command {
        Command::Create(create) => {
            let mut body = create.fields();
            body.insert("name".to_owned(), create.tenant.as_str().into());
            let created = api.post(PATH, &Value::Object(body)).await?;
            Ok(print_line(&format!("Created the tenant {}.", pages::text(&created, "name")))?)
        }
        Command::List { suspended, search, json } => list(api, suspended, search.as_deref(), json).await,
        Command::Update(update) => {
            let path = format!("{PATH}/{}", update.tenant.as_str());
            Ok(table::print_json(&api.send(Method::PATCH, &path, Some(&Value::Object(update.fields()))).await?)?)
        }
        Command::Show { tenant } => Ok(table::print_json(&api.get(&format!("{PATH}/{}", tenant.as_str())).await?)?),
        Command::Suspend { tenant } => {
            change(api, &tenant, "suspend").await?;
            Ok(print_line(&format!("The tenant {} is suspended.", tenant.as_str()))?)
        }
        Command::Resume { tenant } => {
            change(api, &tenant, "resume").await?;
            Ok(print_line(&format!("The tenant {} is resumed.", tenant.as_str()))?)
        }
        Command::Delete { tenant } => {
            api.send(Method::DELETE, &format!("{PATH}/{}", tenant.as_str()), None).await?;
            Ok(print_line(&format!("The tenant {} is deleted.", tenant.as_str()))?)
        }
    }
}

impl Limits {
    /// The fields that were given.
    fn fields(&self) -> Map<String, Value> {
        let fields = [
            ("display_name", self.display_name.as_ref().map(|name| json!(name))),
            ("subscribers_max", self.subscribers_max.map(|count| json!(count))),
            ("events_per_second_max", self.events_per_second_max.map(|count| json!(count))),
            ("payload_bytes_max", self.payload_bytes_max.map(|bytes| json!(bytes))),
        ];
        fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
    }
}

async fn change(api: &Api, tenant: &Tenant, verb: &str) -> Result<(), Failure> {
    let changed = api.send(Method::POST, &format!("{PATH}/{}/{verb}", tenant.as_str()), None).await?;
    if changed["effective"] == false {
        print_note("The change is stored, but a process has not confirmed it yet.");
    }
    Ok(())
}

async fn list(api: &Api, suspended: Option<bool>, search: Option<&str>, json: bool) -> Result<(), Failure> {
    let mut query = suspended.map(|suspended| format!("&suspended={suspended}")).unwrap_or_default();
    query.extend(search.map(|text| format!("&q={}", pages::encoded(text))));
    let tenants = pages::all(api, PATH, &query).await?;
    if json {
        return Ok(tenants.iter().try_for_each(table::print_json)?);
    }
    let rows: Vec<_> = tenants.iter().map(row).collect();
    Ok(table::print(["NAME", "STATE", "CREATED", "DISPLAY NAME"], &rows)?)
}

fn row(tenant: &Value) -> [String; 4] {
    let state = if tenant["suspended_at"].is_null() { "active" } else { "suspended" };
    [
        pages::text(tenant, "name"),
        state.to_owned(),
        pages::time(tenant, "created_at"),
        pages::text(tenant, "display_name"),
    ]
}

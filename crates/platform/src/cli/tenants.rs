//! `tenants`: the customers of this installation.

use std::time::Duration;

use clap::{Args, Subcommand};
use kit::auth::Tenant;
use kit::etag::IfMatch;
use kit::field::{Field, Whole};
use mailbox::database::Database;
use sqlx::PgPool;

use super::Failure;
use super::installation::connect;
use super::table::{self, print_line};
use crate::settings::Settings;
use crate::tenants::flow::{self, Propagation};
use crate::tenants::{TenantFields, TenantFilter, TenantRecord};

/// Rows that a list loads at a time.
const PAGE: u32 = 100;

#[derive(Subcommand)]
pub(super) enum Command {
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
pub(super) struct Limits {
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

/// Creates, lists, shows, changes, suspends, resumes or deletes tenants. Fails if the named one does not exist, or a field is invalid.
pub(super) async fn run(settings: &Settings, command: Command) -> Result<(), Failure> {
    let db = connect(settings)?;
    match command {
        Command::Create(create) => {
            let mut tx = db.begin().await?;
            let created = flow::create(&mut tx, create.tenant.clone(), fields(create)).await?;
            tx.commit().await?;
            Ok(print_line(&format!("Created the tenant {}.", created.name.as_str()))?)
        }
        Command::List { suspended, search, json } => {
            list(&db, &TenantFilter { is_suspended: suspended, name: search }, json).await
        }
        Command::Update(update) => {
            let mut tx = db.begin().await?;
            let tenant = update.tenant.clone();
            let changed = flow::update(&mut tx, &tenant, &IfMatch::default(), fields(update)).await?;
            tx.commit().await?;
            Ok(table::print_json(&changed)?)
        }
        Command::Show { tenant } => Ok(table::print_json(&flow::show(&db, &tenant).await?)?),
        Command::Suspend { tenant } => {
            set_suspended(settings, db, &tenant, true).await?;
            Ok(print_line(&format!("The tenant {} is suspended.", tenant.as_str()))?)
        }
        Command::Resume { tenant } => {
            set_suspended(settings, db, &tenant, false).await?;
            Ok(print_line(&format!("The tenant {} is resumed.", tenant.as_str()))?)
        }
        Command::Delete { tenant } => {
            let mut tx = db.begin().await?;
            flow::delete(&mut tx, &tenant, &IfMatch::default()).await?;
            tx.commit().await?;
            Ok(print_line(&format!("The tenant {} is deleted.", tenant.as_str()))?)
        }
    }
}

fn fields(create: Limits) -> TenantFields {
    fn field<T>(value: Option<T>) -> Field<T> {
        value.map_or(Field::Absent, Field::Given)
    }
    TenantFields {
        display_name: field(create.display_name),
        metadata: Field::Absent,
        subscribers_max: field(create.subscribers_max.map(Whole)),
        events_per_second_max: field(create.events_per_second_max.map(Whole)),
        payload_bytes_max: field(create.payload_bytes_max.map(Whole)),
    }
}

async fn set_suspended(settings: &Settings, db: PgPool, tenant: &Tenant, is_suspended: bool) -> Result<(), Failure> {
    let mut tx = db.begin().await?;
    flow::set_suspended(&mut tx, tenant, &IfMatch::default(), is_suspended).await?;
    tx.commit().await?;
    let time_max = Duration::from_millis(settings.hub.change_wait_ms.into());
    let propagation = Propagation { lease_time: settings.lease_time(), time_max, own_processes: 0 };
    if !flow::wait_until_effective(&Database::new(db), propagation).await {
        eprintln!("The change is stored, but a dispatcher has not confirmed it yet.");
    }
    Ok(())
}

async fn list(db: &PgPool, filter: &TenantFilter, json: bool) -> Result<(), Failure> {
    let (mut rows, mut after) = (Vec::new(), None::<String>);
    loop {
        let page = flow::list(db, filter, after.as_deref(), PAGE).await?;
        after = page.last().map(|last| last.name.as_str().to_owned());
        let is_last = page.len() < PAGE as usize;
        for tenant in page {
            match json {
                true => table::print_json(&tenant)?,
                false => rows.push(row(&tenant)),
            }
        }
        if is_last {
            break;
        }
    }
    match json {
        true => Ok(()),
        false => Ok(table::print(["NAME", "STATE", "CREATED", "DISPLAY NAME"], &rows)?),
    }
}

fn row(tenant: &TenantRecord) -> [String; 4] {
    let state = if tenant.suspended_at.is_some() { "suspended" } else { "active" };
    let display_name = table::shorten(tenant.display_name.as_deref().unwrap_or("-"));
    [tenant.name.as_str().to_owned(), state.to_owned(), table::format_time(tenant.created_at), display_name]
}

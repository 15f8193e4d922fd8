//! `event-types`: the catalogue of a tenant.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use hub::ImportOptions;
use kit::auth::Tenant;
use serde_json::Value;
use sqlx::PgPool;

use super::Failure;
use super::installation::connect;
use super::table::{self, print_line};
use crate::settings::Settings;
use crate::tenants::flow as tenants;

/// The name of a file that stands for the standard input.
const STANDARD_INPUT: &str = "-";

#[derive(Args)]
pub(super) struct EventTypes {
    #[command(subcommand)]
    command: Command,
    /// The tenant
    #[arg(long, global = true, value_name = "NAME", default_value = "main")]
    tenant: Tenant,
}

#[derive(Subcommand)]
enum Command {
    /// List the event types by name
    List {
        /// Print lines of JSON
        #[arg(long)]
        json: bool,
    },
    /// Show an event type with its versions as JSON
    Show {
        /// The name of the event type, such as order.paid
        name: String,
    },
    /// Import a catalogue, all of it or nothing; types that are not in the file stay
    Import(Import),
    /// Print the catalogue as one file, which `import` accepts
    Export,
}

#[derive(Args)]
struct Import {
    /// The file, or - for the standard input
    file: PathBuf,
    /// Print what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Accept versions that may refuse payloads that the previous version accepts
    #[arg(long)]
    force: bool,
    /// Remove the event types that are not in the file
    #[arg(long)]
    remove_others: bool,
}

/// Lists, shows, imports or exports event types. Fails if the tenant or the type does not exist, or the file is refused.
pub(super) async fn run(settings: &Settings, EventTypes { command, tenant }: EventTypes) -> Result<(), Failure> {
    let db = connect(settings)?;
    tenants::show(&db, &tenant).await?;
    match command {
        Command::List { json } => list(&db, &tenant, json).await,
        Command::Show { name } => {
            let shown = hub::show_event_type(&db, &tenant, &name).await.map_err(Failure::Other)?;
            Ok(table::print_json(&shown)?)
        }
        Command::Import(args) => import(&db, &tenant, &args).await,
        Command::Export => {
            let file = hub::export_catalogue(&db, &tenant).await.map_err(Failure::Other)?;
            Ok(print_line(&file)?)
        }
    }
}

async fn list(db: &PgPool, tenant: &Tenant, json: bool) -> Result<(), Failure> {
    let types = hub::list_event_types(db, tenant).await?;
    if json {
        for event_type in &types {
            table::print_json(event_type)?;
        }
        return Ok(());
    }
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let row = |event_type: &Value| {
        let state = match (event_type["deprecated"] == true, event_type["enforce"] == true) {
            (true, _) => "deprecated",
            (false, true) => "enforced",
            (false, false) => "not enforced",
        };
        let [name, version] = ["name", "version"].map(|field| text(&event_type[field]));
        [name, version, state.to_owned(), table::shorten(&text(&event_type["description"]))]
    };
    let rows: Vec<[String; 4]> = types.iter().map(row).collect();
    Ok(table::print(["NAME", "VERSION", "STATE", "DESCRIPTION"], &rows)?)
}

async fn import(db: &PgPool, tenant: &Tenant, args: &Import) -> Result<(), Failure> {
    let text = read(&args.file)?;
    let options = ImportOptions { is_dry_run: args.dry_run, is_forced: args.force, removes_others: args.remove_others };
    let result = hub::import_catalogue(db, tenant, &text, options).await.map_err(Failure::Other)?;
    for (list, effect) in [("created", "Created"), ("changed", "Changed"), ("removed", "Removed")] {
        for name in result[list].as_array().into_iter().flatten().filter_map(Value::as_str) {
            print_line(&format!("{effect} {name}."))?;
        }
    }
    for change in result["forced"].as_array().into_iter().flatten() {
        let [pointer, detail] = ["pointer", "detail"].map(|field| change[field].as_str().unwrap_or_default());
        print_line(&format!("Accepted although it may break: {pointer} {detail}"))?;
    }
    let unchanged = &result["unchanged"];
    let end = if args.dry_run { " This was a dry run: nothing has changed." } else { "" };
    Ok(print_line(&format!("{} unchanged.{end}", table::count(unchanged, "event type is", "event types are")))?)
}

fn read(file: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    let read = match file == Path::new(STANDARD_INPUT) {
        true => std::io::stdin().read_to_string(&mut text).map(drop),
        false => std::fs::File::open(file).and_then(|mut file| file.read_to_string(&mut text)).map(drop),
    };
    read.map_err(|error| Failure::Other(format!("cannot read {}: {error}", file.display())))?;
    Ok(text)
}

//! `event-types`: the catalogue of a tenant.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use pillarbox::log::Tenant;
use serde_json::Value;

use crate::Failure;
use crate::api::{Api, ServerArgs};
use crate::pages;
use crate::table::{self, print_line};

const PATH: &str = "/hub/v1/event-types";
const FILE_PATH: &str = "/hub/v1/catalogue/file";
/// The name of a file that stands for the standard input.
const STANDARD_INPUT: &str = "-";

#[derive(Args)]
pub struct EventTypes {
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
pub struct Import {
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

/// Lists, shows, imports or exports event types over HTTP. Fails if the type does not exist, or the file is refused.
pub async fn run(api: &Api, command: Command) -> Result<(), Failure> {
    match command {
        Command::List { json } => list(api, json).await,
        Command::Show { name } => Ok(table::print_json(&api.get(&format!("{PATH}/{}", pages::encoded(&name))).await?)?),
        Command::Import(args) => import(api, &args).await,
        Command::Export => Ok(print_line(&api.get_text(FILE_PATH).await?)?),
    }
}

async fn list(api: &Api, json: bool) -> Result<(), Failure> {
    let types = pages::all(api, PATH, "").await?;
    if json {
        for event_type in &types {
            table::print_json(event_type)?;
        }
        return Ok(());
    }
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let row = |event_type: &Value| {
        let state = if event_type["deprecated"] == true {
            "deprecated"
        } else if event_type["enforce"] == true {
            "enforced"
        } else {
            "not enforced"
        };
        let [name, version] = ["name", "version"].map(|field| text(&event_type[field]));
        [name, version, state.to_owned(), table::shorten(&text(&event_type["description"]))]
    };
    let rows: Vec<[String; 4]> = types.iter().map(row).collect();
    Ok(table::print(["NAME", "VERSION", "STATE", "DESCRIPTION"], &rows)?)
}

async fn import(api: &Api, args: &Import) -> Result<(), Failure> {
    let Import { file, dry_run, force, remove_others } = args;
    let path = format!("{FILE_PATH}?dry_run={dry_run}&force={force}&remove_others={remove_others}");
    let result = api.put_text(&path, read(file)?).await?;
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
    let read = if file == Path::new(STANDARD_INPUT) {
        std::io::stdin().read_to_string(&mut text).map(drop)
    } else {
        std::fs::File::open(file).and_then(|mut file| file.read_to_string(&mut text)).map(drop)
    };
    read.map_err(|error| Failure::Other(format!("cannot read {}: {error}", file.display())))?;
    Ok(text)
}

//! The commands.

mod cursors;
mod dead_letters;
mod operate;
mod parked;
mod ready;
mod reconcile;
mod replay;
mod serve;
mod status;
mod table;
mod tail;
mod webhooks;
mod when;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use kit::auth::{Role, Tenant};
use kit::config::{BadSetting, ENV_PREFIX, Sources};
use serde::Serialize;
use uuid::Uuid;

use crate::app::{StartError, api_description};
use crate::data_dir::DataDirError;
use crate::embedded::EmbeddedError;
use crate::settings::{Settings, default_file};
use crate::{keys, operator};

/// A reliable event platform on PostgreSQL.
///
/// Without a command it runs `up`: everything in one process, with a private PostgreSQL of its own.
#[derive(Parser)]
#[command(name = "pillarbox", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// A file with settings [default: pillarbox.toml, if there is one]
    #[arg(long, global = true, value_name = "FILE", help_heading = "Settings")]
    config: Option<PathBuf>,
    /// Any setting, such as --set pool_max=10; may be repeated
    #[arg(long, global = true, value_name = "NAME=VALUE", value_parser = name_and_value, help_heading = "Settings")]
    set: Vec<(String, String)>,
    #[command(flatten)]
    flags: Flags,
}

/// The settings that have a flag of their own.
#[derive(Args, Serialize)]
#[command(next_help_heading = "Settings")]
struct Flags {
    /// Where to answer [default: 127.0.0.1:8080]
    #[arg(long, global = true, value_name = "ADDR:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    listen: Option<SocketAddr>,
    /// What an instance keeps: the private PostgreSQL, the secret key [default: /var/lib/pillarbox for root, else
    /// ~/.local/share/pillarbox]
    #[arg(long, global = true, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    data_dir: Option<PathBuf>,
    /// PostgreSQL in place of the private one
    #[arg(long, global = true, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    database_url: Option<String>,
    /// PostgreSQL itself, where --database-url is a pooler
    #[arg(long, global = true, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    database_direct_url: Option<String>,
    /// A copy of the database to read feeds from
    #[arg(long, global = true, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    replica_url: Option<String>,
    /// RabbitMQ
    #[arg(long, global = true, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    amqp_url: Option<String>,
    /// Redis
    #[arg(long, global = true, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    redis_url: Option<String>,
    /// The mail server
    #[arg(long, global = true, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    smtp_url: Option<String>,
    /// Which services to run [default: all]
    #[arg(long, global = true, value_name = "NAME,...", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    services: Option<Vec<String>>,
    /// Which roles to run: api, relay, consume, fanout, dispatch, maintain [default: all]
    #[arg(long, global = true, value_name = "NAME,...", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    roles: Option<Vec<String>>,
}

#[derive(Subcommand)]
enum Command {
    /// Run everything in one process, with a private PostgreSQL unless --database-url names another
    Up,
    /// Run services and roles on the PostgreSQL of --database-url
    Serve,
    /// Bring the database's schema up to this version
    Migrate,
    /// Print a short-lived token for a user, signed with this installation's key
    Token {
        /// Whose it is: any UUID, such as 01890a5d-ac96-774b-bcce-b302099a8057
        #[arg(long, value_name = "UUID", value_parser = uuid)]
        user: Uuid,
        /// Make it an operator's
        #[arg(long, value_name = "admin", value_parser = admin_role)]
        role: Option<Role>,
        /// How long it is good, at most 86400
        #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
        ttl: u32,
    },
    /// API keys
    #[command(subcommand)]
    Key(KeyCommand),
    /// Post an event to the hub, as a producer does
    Send(webhooks::Send),
    /// Listen on this machine for webhooks: verify and print them
    Listen(webhooks::Listen),
    /// Print the messages of the log as lines of JSON, and follow it
    Tail {
        /// Start with the oldest message that is kept, not with the next one
        #[arg(long)]
        from_beginning: bool,
        /// End with the newest message, do not wait for the next one
        #[arg(long)]
        once: bool,
        /// Only topics that are this or begin with it and a dot
        #[arg(long, value_name = "NAME")]
        topic: Option<String>,
    },
    /// The consumers of the log, and how far they are
    Cursors(cursors::Cursors),
    /// Messages that wait for another try
    #[command(subcommand)]
    Parked(parked::Command),
    /// Messages that were given up
    #[command(subcommand)]
    DeadLetters(dead_letters::Command),
    /// Let a consumer read a time range again, list such replays, or call one off
    Replay(replay::Replay),
    /// Say how a database that was restored or copied goes on
    Recover(replay::Way),
    /// Show whether dual publish's old exchange has all that the new one has
    Parity {
        /// Fail (exit 1) when it has not, for scripts
        #[arg(long)]
        check: bool,
    },
    /// Compare the counts of events with the joins themselves, and repair what differs
    Reconcile(reconcile::Reconcile),
    /// Show what runs, what it depends on, and how far the consumers are
    Status {
        /// As JSON, for machines
        #[arg(long)]
        json: bool,
    },
    /// Print the API's description
    Openapi,
}

#[derive(Subcommand)]
enum KeyCommand {
    /// Make a key and print it, once
    Create {
        /// What it may do: ingest, manage or admin; each includes the ones before
        #[arg(long)]
        role: Role,
        /// Whose it is
        #[arg(long, default_value = "main")]
        tenant: Tenant,
        /// What it is for
        #[arg(long, default_value = "command line")]
        name: String,
    },
    /// List the keys, newest first
    List {
        /// Only this tenant's
        #[arg(long)]
        tenant: Option<Tenant>,
        /// A line of JSON each, for machines
        #[arg(long)]
        json: bool,
    },
    /// Make a key worthless
    Revoke {
        /// Its id, as `pillarbox key list` shows it
        #[arg(value_parser = uuid)]
        id: Uuid,
    },
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Setting(#[from] BadSetting),
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    #[error(transparent)]
    Embedded(#[from] EmbeddedError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Telemetry(#[from] kit::telemetry::TelemetryError),
    #[error(transparent)]
    Keys(#[from] keys::Error),
    #[error(transparent)]
    Operator(#[from] operator::Error),
    #[error("migrations: {0}")]
    Migrate(#[from] sqlx::migrate::MigrateError),
    #[error("the database: {0}")]
    Database(#[from] sqlx::Error),
    #[error("cannot print: {0}")]
    Print(#[from] std::io::Error),
    #[error("{0}")]
    Other(String),
}

/// The whole program: parses, runs, tells what went wrong.
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    match runtime.block_on(dispatch(cli)) {
        Ok(code) => code,
        // Whoever read it has enough: `pillarbox status | head -1`.
        Err(Failure::Print(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(failure) => fail(&failure),
    }
}

fn fail(error: &dyn std::fmt::Display) -> ExitCode {
    eprintln!("error: {error}");
    ExitCode::FAILURE
}

async fn dispatch(cli: Cli) -> Result<ExitCode, Failure> {
    if let Some(Command::Openapi) = cli.command {
        let text = api_description().to_pretty_json().map_err(|error| Failure::Other(error.to_string()))?;
        operate::say(&text)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(Command::Listen(listen)) = cli.command {
        webhooks::listen(listen).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let settings = load(&cli)?;
    match cli.command.unwrap_or(Command::Up) {
        Command::Up => serve::up(&settings).await?,
        Command::Serve => serve::serve(&settings).await?,
        Command::Migrate => operate::migrate(&settings).await?,
        Command::Token { user, role, ttl } => operate::token(&settings, user, role, ttl)?,
        Command::Key(KeyCommand::Create { role, tenant, name }) => {
            operate::create_key(&settings, role, tenant, name).await?
        }
        Command::Key(KeyCommand::List { tenant, json }) => operate::list_keys(&settings, tenant, json).await?,
        Command::Key(KeyCommand::Revoke { id }) => operate::revoke_key(&settings, id).await?,
        Command::Tail { from_beginning, once, topic } => tail::tail(&settings, from_beginning, once, topic).await?,
        Command::Cursors(cursors) => cursors::run(&settings, cursors).await?,
        Command::Parked(command) => parked::run(&settings, command).await?,
        Command::DeadLetters(command) => dead_letters::run(&settings, command).await?,
        Command::Replay(asked) => replay::replay(&settings, asked).await?,
        Command::Recover(way) => replay::recover(&settings, way).await?,
        Command::Parity { check } => cursors::parity(&settings, check).await?,
        Command::Reconcile(asked) => return reconcile::run(&settings, asked).await,
        Command::Status { json } => return status::run(&settings, json).await,
        Command::Send(send) => webhooks::send(&settings, send).await?,
        Command::Openapi | Command::Listen(_) => {}
    }
    Ok(ExitCode::SUCCESS)
}

fn load(cli: &Cli) -> Result<Settings, BadSetting> {
    let mut environment: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    // A `--set` is an environment variable that was typed: the same names, the same reading, and it comes later.
    let typed = cli
        .set
        .iter()
        .map(|(name, value)| (format!("{ENV_PREFIX}{}", name.to_uppercase().replace('.', "__")), value.clone()));
    environment.extend(typed);
    let file = cli.config.as_deref().or_else(|| default_file());
    let settings: Settings = Sources { file, environment, flags: &cli.flags }.load()?;
    settings.check()?;
    Ok(settings)
}

fn name_and_value(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("takes NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

fn uuid(text: &str) -> Result<Uuid, &'static str> {
    text.parse().map_err(|_| "takes a UUID such as 01890a5d-ac96-774b-bcce-b302099a8057")
}

fn admin_role(text: &str) -> Result<Role, String> {
    if text == "admin" { Ok(Role::Admin) } else { Err("a user's token can have the role admin, or none".to_owned()) }
}

//! The command line: its commands and their options. [`dispatch`] runs them, and [`load`] loads their settings.
//!
//! The commands here run a server, or need its database or its secret key; the crate `cli` has those that are clients of the HTTP
//! API, for which [`access`] finds the server and the credentials.

// Everything that is printed passes through `table`, which escapes what would act on a terminal.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod access;
mod aliases;
mod credentials;
mod demo;
mod dispatch;
mod installation;
mod load;
mod manual;
mod migrate;
mod one_installation;
mod options;
mod parity;
mod readyz;
mod reconcile;
mod recover;
mod secret_flags;
mod serve;
mod status;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use admin::{keys, operator};
use clap::{Args, Parser, Subcommand};
use cli::api::ServerArgs;
use cli::arguments::{name_and_value, uuid};
use cli::contexts::GivenOptions;
use http_kit::auth::Role;
use identity::UserRole;
use pillarbox::database;
use pillarbox::log::Tenant;
use runtime::config::InvalidSetting;
use runtime::duration::{self, Unit};
use serde::Serialize;
use uuid::Uuid;

use crate::data_dir::DataDirError;
use crate::embedded::EmbeddedError;
use crate::settings;
use crate::start_error::StartError;
pub use dispatch::run;

/// A reliable event platform on PostgreSQL.
///
/// Without a command, it runs `up`: all services and roles in one process, with an embedded PostgreSQL.
#[derive(Parser)]
#[command(name = "pillarbox", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// The settings file [default: pillarbox.toml, if it exists]
    #[arg(long, value_name = "FILE", help_heading = "Settings")]
    config: Option<PathBuf>,
    /// Sets any setting, such as --set pool_max=10; can be repeated. Not for secrets: other users can see the arguments
    /// of a process. Use a variable (PILLARBOX_ADMIN_KEY) or the settings file
    #[arg(long, value_name = "NAME=VALUE", value_parser = name_and_value, help_heading = "Settings")]
    set: Vec<(String, String)>,
    /// The context of this command; `pillarbox context list` lists them [default: PILLARBOX_CONTEXT, or the selected one]
    #[arg(long, value_name = "NAME", help_heading = "Settings")]
    context: Option<String>,
    #[command(flatten)]
    flags: Flags,
}

/// The settings with their own option. [`options`] decides which commands accept them.
#[derive(Args, Serialize)]
#[command(next_help_heading = "Settings")]
struct Flags {
    /// The address of the HTTP server, or a port of this machine alone [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR:PORT", value_parser = settings::listen::parse)]
    #[serde(skip_serializing_if = "Option::is_none")]
    listen: Option<SocketAddr>,
    /// The folder for the embedded PostgreSQL and the secret key [default: /var/lib/pillarbox for root, otherwise
    /// ~/.local/share/pillarbox]
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    data_dir: Option<PathBuf>,
    /// The PostgreSQL to use instead of the embedded one. With a password, better as PILLARBOX_DATABASE_URL or in the
    /// settings file: other users can see the arguments of a process
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    database_url: Option<String>,
    /// The port of this machine on which the embedded PostgreSQL also listens [default: its Unix socket only]
    #[arg(long, value_name = "PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    postgres_port: Option<u16>,
    /// PostgreSQL itself, when --database-url is a pooler (PILLARBOX_DATABASE_DIRECT_URL)
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    database_direct_url: Option<String>,
    /// A streaming replica of the database, from which the feeds of events are read (PILLARBOX_REPLICA_URL)
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    replica_url: Option<String>,
    /// The RabbitMQ server (PILLARBOX_AMQP_URL)
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    amqp_url: Option<String>,
    /// The Redis server (PILLARBOX_REDIS_URL)
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    redis_url: Option<String>,
    /// The mail server, SMTP (PILLARBOX_SMTP_URL)
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    smtp_url: Option<String>,
    /// The services to run [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    services: Option<Vec<String>>,
    /// The roles to run: api, relay, consume, fanout, dispatch, maintain [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    roles: Option<Vec<String>>,
}

#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Installation(InstallationCommand),
    #[command(flatten)]
    Offline(OfflineCommand),
}

/// Commands that act on one installation, which the settings and the context name.
#[derive(Subcommand)]
enum InstallationCommand {
    #[command(flatten)]
    Local(LocalCommand),
    #[command(flatten)]
    Tenant(TenantCommand),
    #[command(flatten)]
    Operator(OperatorCommand),
}

/// Commands that run a server, or that need the database or the secret key of the installation.
#[derive(Subcommand)]
enum LocalCommand {
    /// Run everything in one process, with an embedded PostgreSQL unless database_url is set
    Up,
    /// Run the configured services and roles on the PostgreSQL at database_url
    Serve,
    /// Migrate the database's schema to this version
    Migrate,
    /// Print a short-lived token for a user, signed with the secret key of this installation
    Token {
        /// The id of the user: any UUID, such as 01890a5d-ac96-774b-bcce-b302099a8057
        #[arg(long, value_name = "UUID", value_parser = uuid)]
        user: Uuid,
        /// Make it the token of an operator
        #[arg(long, value_name = "admin", value_parser = admin_role)]
        role: Option<Role>,
        /// How long the token is valid, at most 24h: a duration such as 90s, 30m or 1h, or a number of seconds
        #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = token_lifetime)]
        ttl: Duration,
    },
    /// Change accounts of users
    #[command(subcommand)]
    User(UserCommand),
    /// Make believable traffic on this machine's installation, and see everything move; its messages stay in the log
    Demo(demo::DemoArgs),
    /// Resume the consumers after the database was restored or copied
    Recover(recover::RecoverArgs),
    /// Compare, event by event, what the new and the legacy exchange of dual publish have received
    Parity(parity::Parity),
    /// Compare the counts of events with the registrations themselves, and repair differences
    Reconcile(reconcile::Reconcile),
    /// Show the server, its dependencies and the consumers; exit with 1 if something needs attention
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Clients of the HTTP API that act for one tenant.
#[derive(Subcommand)]
enum TenantCommand {
    /// List, show, create, pause, test and delete the subscribers of a tenant
    Subscribers(cli::subscribers::Subscribers),
    /// List and show deliveries: events on their way to one subscriber each
    Deliveries(cli::deliveries::Deliveries),
    /// List, show, retry or discard webhooks that were given up after their retries
    WebhookDeadLetters(cli::webhook_dead_letters::WebhookDeadLetters),
    /// List, show, import and export the event types of a tenant
    EventTypes(cli::event_types::EventTypes),
    /// List, show, seek and delete the streams of a tenant
    Streams(cli::streams::Streams),
}

/// Clients of the HTTP API that act as an operator or a producer.
#[derive(Subcommand)]
enum OperatorCommand {
    /// Create, list, suspend, resume and delete tenants: the customers of this installation
    Tenants(cli::tenants::Tenants),
    /// Create, list and revoke API keys
    #[command(subcommand)]
    Key(KeyCommand),
    /// Post an event to the hub over HTTP
    Send(cli::send::Send),
    /// Print the messages of the log as lines of JSON, and follow the log
    Tail(cli::tail::Tail),
    /// List, reset or drop the consumers of the log
    Cursors(cli::cursors::Cursors),
    /// List, retry or discard parked messages, which failed and wait for their retry
    Parked(cli::parked::Parked),
    /// List, retry or discard dead letters, which were given up after their retries
    DeadLetters(cli::dead_letters::DeadLetters),
    /// List and show e-mails, and retry those that were given up
    #[command(name = "mail")]
    Emails(cli::emails::Emails),
    /// Deliver notifications again that were given up
    Notifications(cli::notifications::Notifications),
    /// Make a consumer read a time range again, or send webhooks again (`replay webhooks`); list or cancel replays
    Replay(cli::replays::Replay),
}

/// Commands that concern no installation, and work whatever the settings are.
#[derive(Subcommand)]
enum OfflineCommand {
    /// Add, select, list, show and remove contexts: named targets of the commands
    #[command(subcommand)]
    Context(cli::contexts::Command),
    /// Receive webhooks on this machine, verify and print them
    Listen(cli::listen::Listen),
    /// Print the OpenAPI description of the HTTP API
    Openapi,
    /// Print the completions of a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write a manual page for each command into a folder
    Man {
        /// The folder; it is created if it does not exist
        folder: PathBuf,
    },
}

#[derive(Subcommand)]
enum UserCommand {
    /// Set the role of a user; a user who is no longer an admin is signed out
    SetRole {
        /// The e-mail address of the user
        email: String,
        /// The role: admin or user
        #[arg(value_name = "admin|user")]
        role: UserRole,
    },
    /// Announce the contacts of all verified users again, for a notify service that has lost them
    Announce,
}

#[derive(Subcommand)]
enum KeyCommand {
    /// Create a key and print it; it is not shown again
    Create {
        /// The role: ingest, manage or admin; each role includes the ones before it
        #[arg(long)]
        role: Role,
        /// The tenant of the key
        #[arg(long, default_value = "main")]
        tenant: Tenant,
        /// A name that tells what the key is used for
        #[arg(long, default_value = "command line")]
        name: String,
    },
    /// List the keys, newest first
    List {
        /// Only keys of this tenant
        #[arg(long)]
        tenant: Option<Tenant>,
        /// Print lines of JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Revoke a key
    Revoke {
        /// The id of the key, as shown by `pillarbox key list`
        #[arg(value_parser = uuid)]
        id: Uuid,
        #[command(flatten)]
        server: ServerArgs,
    },
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Setting(#[from] InvalidSetting),
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    #[error(transparent)]
    Embedded(#[from] EmbeddedError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Telemetry(#[from] runtime::telemetry::TelemetryError),
    #[error(transparent)]
    Keys(#[from] keys::Error),
    #[error(transparent)]
    Operator(#[from] operator::Error),
    #[error("the database cannot be migrated: {0}")]
    Migrate(#[from] database::MigrationError),
    #[error("the database failed: {0}; `pillarbox status` shows whether it can be reached and is migrated")]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Cli(#[from] cli::Failure),
    #[error("{0}")]
    Other(String),
}

impl From<std::io::Error> for Failure {
    /// An error of standard output.
    fn from(error: std::io::Error) -> Failure {
        Failure::Cli(cli::Failure::Print(error))
    }
}

impl From<cli::api::ApiError> for Failure {
    fn from(error: cli::api::ApiError) -> Failure {
        Failure::Cli(error.into())
    }
}

impl Cli {
    /// What contexts need to know of the options.
    fn given_options(&self) -> GivenOptions {
        let settings = serde_json::to_value(&self.flags).unwrap_or_default();
        let mut names = settings.as_object().into_iter().flatten().map(|(name, _)| name.as_str());
        let other = names.find(|name| *name != "data_dir");
        GivenOptions {
            context: self.context.clone(),
            config: self.config.clone(),
            data_dir: self.flags.data_dir.clone(),
            has_database_url: self.flags.database_url.is_some(),
            set: self.set.iter().map(|(name, _)| name.clone()).collect(),
            other: other.map(|name| format!("--{}", name.replace('_', "-"))),
        }
    }
}

/// A duration in an option.
#[derive(Debug, thiserror::Error)]
enum InvalidDuration {
    #[error("{0}")]
    Malformed(String),
    #[error("must be from 1 s to {hours_max} h")]
    OutOfRange { hours_max: u64 },
}

fn token_lifetime(text: &str) -> Result<Duration, InvalidDuration> {
    seconds(text, 86_400)
}

/// Parses a duration, or a number of seconds. Fails with the accepted values if it is 0 or longer than `max` seconds.
fn seconds(text: &str, max: u64) -> Result<Duration, InvalidDuration> {
    let seconds =
        duration::in_unit(text, Unit::Second).map_err(|error| InvalidDuration::Malformed(error.to_string()))?;
    if (1..=max).contains(&seconds) {
        Ok(Duration::from_secs(seconds))
    } else {
        Err(InvalidDuration::OutOfRange { hours_max: max / 3_600 })
    }
}

fn admin_role(text: &str) -> Result<Role, &'static str> {
    if text == "admin" { Ok(Role::Admin) } else { Err("must be admin; without --role, the token has no role") }
}

#[cfg(test)]
mod tests;

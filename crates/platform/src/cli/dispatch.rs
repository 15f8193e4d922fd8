//! Runs a command: with the settings and the context that it needs, or without any.

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use super::contexts::{self, Target};
use super::secret_flags::{self, SecretFlag};
use super::{
    Cli, Command, Failure, KeyCommand, UserCommand, admin, cursors, dead_letters, deliveries, demo, emails,
    event_types, listen, load, manual, notifications, parity, parked, reconcile, replay, serve, status, streams,
    subscribers, table, tail, tenants, webhook_dead_letters, webhooks,
};
use crate::api::api_description;
use crate::services::SERVICES;
use crate::settings::Settings;

/// Runs the program: parses the command line, runs the command, and prints an error.
pub fn run() -> ExitCode {
    let matches = Cli::command().get_matches();
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    let secrets = secret_flags::secrets_in(&matches);
    let path = contexts::command_path(&matches);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    match runtime.block_on(dispatch(cli, &path, &secrets)) {
        Ok(code) => code,
        // The reader has closed the pipe, as in `pillarbox status | head -1`.
        Err(Failure::Print(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(failure) => fail(&failure),
    }
}

fn fail(error: &dyn std::fmt::Display) -> ExitCode {
    eprintln!("error: {error}");
    ExitCode::FAILURE
}

/// Loads the settings and runs the command. `path` is its name, such as `key list`.
async fn dispatch(mut cli: Cli, path: &str, secrets: &[SecretFlag]) -> Result<ExitCode, Failure> {
    // A server writes its warnings to its log, which may have another format.
    if !matches!(cli.command, None | Some(Command::Up | Command::Serve)) {
        secrets.iter().for_each(|secret| eprintln!("warning: {secret}"));
    }
    if is_without_settings(cli.command.as_ref()) {
        run_without_settings(cli).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let target = Target::of_command(&cli, path)?;
    let settings = load::load(&cli, target.as_ref()).map_err(|error| match &target {
        Some(target) => target.explain(&error),
        None => Failure::Setting(error),
    })?;
    if let Some(target) = target {
        apply_server(&target, cli.command.as_mut())?;
    }
    run_command(cli.command.unwrap_or(Command::Up), &settings, secrets).await
}

/// Whether the command concerns no installation, and works whatever the settings are.
fn is_without_settings(command: Option<&Command>) -> bool {
    use Command::{Completions, Context, Listen, Man, Openapi};
    matches!(command, Some(Openapi | Completions { .. } | Man { .. } | Listen(_) | Context(_)))
}

/// Gives the server and the API key of the context to a command that uses HTTP. Fails if the key cannot be read.
fn apply_server(target: &Target, command: Option<&mut Command>) -> Result<(), Failure> {
    let args = match command {
        Some(Command::Send(send)) => &mut send.server,
        Some(Command::Subscribers(args)) => &mut args.server,
        Some(Command::Deliveries(args)) => &mut args.server,
        Some(Command::WebhookDeadLetters(args)) => &mut args.server,
        Some(Command::Emails(args)) => &mut args.server,
        _ => return Ok(()),
    };
    target.fill(&mut args.server, &mut args.api_key)
}

async fn run_command(command: Command, settings: &Settings, secrets: &[SecretFlag]) -> Result<ExitCode, Failure> {
    match command {
        Command::Up => serve::up(settings, secrets).await?,
        Command::Serve => serve::serve(settings, secrets).await?,
        Command::Migrate => admin::migrate(settings).await?,
        Command::Token { user, role, ttl } => admin::token(settings, user, role, ttl)?,
        Command::Key(KeyCommand::Create { role, tenant, name }) => {
            admin::create_key(settings, role, tenant, name).await?
        }
        Command::Key(KeyCommand::List { tenant, json }) => admin::list_keys(settings, tenant, json).await?,
        Command::Key(KeyCommand::Revoke { id }) => admin::revoke_key(settings, id).await?,
        Command::Tenants(command) => tenants::run(settings, command).await?,
        Command::User(UserCommand::SetRole { email, role }) => admin::set_role(settings, &email, role).await?,
        Command::User(UserCommand::Announce) => admin::announce_users(settings).await?,
        Command::Tail { from_beginning, once, topic } => tail::tail(settings, from_beginning, once, topic).await?,
        Command::Cursors(cursors) => cursors::run(settings, cursors).await?,
        Command::Parked(command) => parked::run(settings, command).await?,
        Command::DeadLetters(command) => dead_letters::run(settings, command).await?,
        Command::Emails(command) => emails::run(settings, command).await?,
        Command::Notifications(command) => notifications::run(settings, command).await?,
        Command::Replay(args) => replay::replay(settings, args).await?,
        Command::Recover(args) => replay::recover(settings, args).await?,
        Command::Parity(args) => parity::run(settings, args).await?,
        Command::Reconcile(args) => return reconcile::run(settings, args).await,
        Command::Status { json } => return status::run(settings, json).await,
        Command::Send(send) => webhooks::send(settings, send).await?,
        Command::EventTypes(event_types) => event_types::run(settings, event_types).await?,
        Command::Streams(streams) => streams::run(settings, streams).await?,
        Command::Demo(args) => demo::run(settings, args).await?,
        Command::Subscribers(args) => {
            let is_done = subscribers::run(settings, args).await?;
            return Ok(if is_done { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Command::Deliveries(args) => deliveries::run(settings, args).await?,
        Command::WebhookDeadLetters(args) => webhook_dead_letters::run(settings, args).await?,
        // Done above, without settings.
        Command::Openapi
        | Command::Listen(_)
        | Command::Completions { .. }
        | Command::Man { .. }
        | Command::Context(_) => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs a command that concerns no installation, and that works whatever the settings are.
async fn run_without_settings(cli: Cli) -> Result<(), Failure> {
    if let Some(Command::Context(command)) = &cli.command {
        return contexts::run(&cli, command);
    }
    match cli.command {
        Some(Command::Openapi) => {
            let text = api_description(SERVICES).to_pretty_json().map_err(|error| Failure::Other(error.to_string()))?;
            Ok(table::print_line(&text)?)
        }
        Some(Command::Completions { shell }) => manual::print_completions(shell),
        Some(Command::Man { folder }) => manual::write_pages(&folder),
        Some(Command::Listen(listen)) => listen::listen(listen).await,
        _ => Ok(()),
    }
}

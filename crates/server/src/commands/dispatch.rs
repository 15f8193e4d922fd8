//! Runs a command: with the settings and the context that it needs, or without any.

use std::process::ExitCode;

use cli::contexts::{self, Target};
use cli::replays::{Command as Replays, Replay};
use cli::table::{self, print_note};
use cli::webhook_replays;

use super::access::{HubSession, operator_api, producer_api};
use super::secret_flags::{self, SecretFlag};
use super::{
    Cli, Command, Failure, KeyCommand, UserCommand, credentials, demo, load, manual, migrate, options, parity,
    reconcile, recover, serve, status,
};
use crate::api::api_description;
use crate::services::SERVICES;
use crate::settings::Settings;

/// Runs the program: parses the command line, runs the command, and prints an error.
pub fn run() -> ExitCode {
    let (cli, matches) = match options::parse(std::env::args_os()) {
        Ok(parsed) => parsed,
        // Help and the version, which clap prints to standard output.
        Err(error) if !error.use_stderr() => error.exit(),
        Err(error) => {
            print_note(error.to_string().trim_end());
            return u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from);
        }
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
        Err(Failure::Cli(cli::Failure::Print(error))) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(failure) => fail(&failure),
    }
}

fn fail(error: &dyn std::fmt::Display) -> ExitCode {
    print_note(&format!("error: {error}"));
    ExitCode::FAILURE
}

/// Loads the settings and runs the command. `path` is its name, such as `key list`.
async fn dispatch(mut cli: Cli, path: &str, secrets: &[SecretFlag]) -> Result<ExitCode, Failure> {
    // A server writes its warnings to its log, which may have another format.
    if !matches!(cli.command, None | Some(Command::Up | Command::Serve)) {
        secrets.iter().for_each(|secret| print_note(&format!("warning: {secret}")));
    }
    if is_without_settings(cli.command.as_ref()) {
        run_without_settings(cli).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let target = Target::of_command(&cli.given_options(), path)?;
    let settings = load::load(&cli, target.as_ref()).map_err(|error| match &target {
        Some(target) => target.explain(&error).into(),
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
    let server = match command {
        Some(Command::Send(args)) => &mut args.server,
        Some(Command::Subscribers(args)) => &mut args.server,
        Some(Command::Deliveries(args)) => &mut args.server,
        Some(Command::WebhookDeadLetters(args)) => &mut args.server,
        Some(Command::EventTypes(args)) => &mut args.server,
        Some(Command::Streams(args)) => &mut args.server,
        Some(Command::Emails(args)) => &mut args.server,
        Some(Command::Notifications(args)) => &mut args.server,
        Some(Command::Tenants(args)) => &mut args.server,
        Some(Command::Key(KeyCommand::List { server, .. } | KeyCommand::Revoke { server, .. })) => server,
        Some(Command::Tail(args)) => &mut args.server,
        Some(Command::Cursors(args)) => &mut args.server,
        Some(Command::Parked(args)) => &mut args.server,
        Some(Command::DeadLetters(args)) => &mut args.server,
        Some(Command::Replay(args)) => &mut args.server,
        _ => return Ok(()),
    };
    Ok(target.fill(&mut server.server, &mut server.api_key)?)
}

async fn run_command(command: Command, settings: &Settings, secrets: &[SecretFlag]) -> Result<ExitCode, Failure> {
    match command {
        Command::Up => serve::up(settings, secrets).await?,
        Command::Serve => serve::serve(settings, secrets).await?,
        Command::Migrate => migrate::migrate(settings).await?,
        Command::Token { user, role, ttl } => credentials::token(settings, user, role, ttl)?,
        Command::Key(KeyCommand::Create { role, tenant, name }) => {
            credentials::create_key(settings, role, tenant, name).await?
        }
        Command::User(UserCommand::SetRole { email, role }) => credentials::set_role(settings, &email, role).await?,
        Command::User(UserCommand::Announce) => credentials::announce_users(settings).await?,
        Command::Recover(args) => recover::run(settings, args).await?,
        Command::Parity(args) => parity::run(settings, args).await?,
        Command::Reconcile(args) => return reconcile::run(settings, args).await,
        Command::Status { json } => return status::run(settings, json).await,
        Command::Demo(args) => demo::run(settings, args).await?,
        command => return run_client(command, settings).await,
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs a command that is a client of the HTTP API, as an operator or a producer.
async fn run_client(command: Command, settings: &Settings) -> Result<ExitCode, Failure> {
    match command {
        Command::Key(KeyCommand::List { tenant, json, server }) => {
            cli::keys::list(&operator_api(settings, &server).await?, tenant.as_ref(), json).await?;
        }
        Command::Key(KeyCommand::Revoke { id, server }) => {
            cli::keys::revoke(&operator_api(settings, &server).await?, id).await?;
        }
        Command::Tenants(args) => {
            cli::tenants::run(&operator_api(settings, &args.server).await?, args.command).await?;
        }
        Command::Emails(args) => {
            cli::emails::run(&operator_api(settings, &args.server).await?, args.command).await?;
        }
        Command::Notifications(args) => {
            cli::notifications::run(&operator_api(settings, &args.server).await?, args.command).await?;
        }
        Command::Tail(args) => cli::tail::run(&operator_api(settings, &args.server).await?, args).await?,
        Command::Cursors(args) => cli::cursors::run(&operator_api(settings, &args.server).await?, args).await?,
        Command::Parked(args) => cli::parked::run(&operator_api(settings, &args.server).await?, args.command).await?,
        Command::DeadLetters(args) => {
            args.check()?;
            cli::dead_letters::run(&operator_api(settings, &args.server).await?, args.command).await?;
        }
        Command::Send(send) => {
            let api = producer_api(settings, &send.server, &send.tenant).await?;
            cli::send::run(&api, send).await?;
        }
        command => return run_of_tenant(command, settings).await,
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs a command that acts for a tenant over the HTTP API.
async fn run_of_tenant(command: Command, settings: &Settings) -> Result<ExitCode, Failure> {
    match command {
        Command::EventTypes(args) => {
            let session = HubSession::open(settings, &args.server, &args.tenant).await?;
            session.close_after(cli::event_types::run(&session.api, args.command)).await?;
        }
        Command::Streams(args) => {
            let session = HubSession::open(settings, &args.server, &args.tenant).await?;
            session.close_after(cli::streams::run(&session.api, args.command)).await?;
        }
        Command::Subscribers(args) => {
            let session = HubSession::open(settings, &args.server, &args.tenant).await?;
            let is_done = session.close_after(cli::subscribers::run(&session.api, args.command)).await?;
            return Ok(if is_done { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Command::Deliveries(args) => {
            let session = HubSession::open(settings, &args.server, &args.tenant).await?;
            session.close_after(cli::deliveries::run(&session.api, args.command)).await?;
        }
        Command::WebhookDeadLetters(args) => {
            let session = HubSession::open(settings, &args.server, &args.tenant).await?;
            session.close_after(cli::webhook_dead_letters::run(&session.api, args.command)).await?;
        }
        Command::Replay(Replay { command: Some(Replays::Webhooks(replays)), server, .. }) => {
            let session = HubSession::open(settings, &server, &replays.tenant).await?;
            session.close_after(webhook_replays::run(&session.api, *replays)).await?;
        }
        Command::Replay(args) => {
            args.check()?;
            cli::replays::run(&operator_api(settings, &args.server).await?, args).await?;
        }
        // Run before.
        Command::Up
        | Command::Serve
        | Command::Migrate
        | Command::Token { .. }
        | Command::Key(_)
        | Command::Tenants(_)
        | Command::Emails(_)
        | Command::Notifications(_)
        | Command::Send(_)
        | Command::User(_)
        | Command::Demo(_)
        | Command::Tail(_)
        | Command::Cursors(_)
        | Command::Parked(_)
        | Command::DeadLetters(_)
        | Command::Recover(_)
        | Command::Parity(_)
        | Command::Reconcile(_)
        | Command::Status { .. }
        | Command::Context(_)
        | Command::Openapi
        | Command::Listen(_)
        | Command::Completions { .. }
        | Command::Man { .. } => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs a command that concerns no installation, and that works whatever the settings are.
async fn run_without_settings(cli: Cli) -> Result<(), Failure> {
    if let Some(Command::Context(command)) = &cli.command {
        return Ok(contexts::run(&cli.given_options(), command)?);
    }
    match cli.command {
        Some(Command::Openapi) => {
            let text = api_description(SERVICES).to_pretty_json().map_err(|error| Failure::Other(error.to_string()))?;
            Ok(table::print_line(&text)?)
        }
        Some(Command::Completions { shell }) => manual::print_completions(shell),
        Some(Command::Man { folder }) => manual::write_pages(&folder),
        Some(Command::Listen(listen)) => Ok(cli::listen::listen(listen).await?),
        _ => Ok(()),
    }
}

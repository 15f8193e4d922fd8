//! Runs a command: with the settings and the context that it needs, or without any.

use std::process::ExitCode;

use cli::api::ServerArgs;
use cli::contexts::{self, GivenOptions, Target};
use cli::replays::{Command as Replays, Replay};
use cli::table::{self, print_note};
use cli::webhook_replays;

use super::access::{HubSession, operator_api, producer_api};
use super::secret_flags::{self, SecretFlag};
use super::{
    Cli, Command, Failure, InstallationCommand, KeyCommand, LocalCommand, OfflineCommand, OperatorCommand,
    TenantCommand, UserCommand, credentials, demo, load, manual, migrate, options, parity, reconcile, recover, serve,
    status,
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

/// Runs the command. `path` is its name, such as `key list`.
async fn dispatch(mut cli: Cli, path: &str, secrets: &[SecretFlag]) -> Result<ExitCode, Failure> {
    let up = Command::Installation(InstallationCommand::Local(LocalCommand::Up));
    let command = cli.command.take().unwrap_or(up);
    // A server writes its warnings to its log, which may have another format.
    let is_server =
        matches!(command, Command::Installation(InstallationCommand::Local(LocalCommand::Up | LocalCommand::Serve)));
    if !is_server {
        secrets.iter().for_each(|secret| print_note(&format!("warning: {secret}")));
    }
    match command {
        Command::Installation(command) => run_on_installation(&cli, command, path, secrets).await,
        Command::Offline(command) => {
            run_offline(command, &cli.given_options()).await?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Loads the settings, applies the context, and runs the command.
async fn run_on_installation(
    cli: &Cli,
    mut command: InstallationCommand,
    path: &str,
    secrets: &[SecretFlag],
) -> Result<ExitCode, Failure> {
    let target = Target::of_command(&cli.given_options(), path)?;
    let settings = load::load(cli, target.as_ref()).map_err(|error| match &target {
        Some(target) => target.explain(&error).into(),
        None => Failure::Setting(error),
    })?;
    if let Some(target) = target {
        apply_server(&target, &mut command)?;
    }
    match command {
        InstallationCommand::Local(command) => run_locally(command, &settings, secrets).await,
        InstallationCommand::Tenant(command) => run_for_tenant(command, &settings).await,
        InstallationCommand::Operator(command) => {
            run_as_operator(command, &settings).await?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Gives the server and the API key of the context to a command that uses HTTP. Fails if the key cannot be read.
fn apply_server(target: &Target, command: &mut InstallationCommand) -> Result<(), Failure> {
    let server = match command {
        InstallationCommand::Local(_) => None,
        InstallationCommand::Tenant(command) => Some(command.server_mut()),
        InstallationCommand::Operator(command) => command.server_mut(),
    };
    let Some(server) = server else { return Ok(()) };
    Ok(target.fill(&mut server.server, &mut server.api_key)?)
}

impl TenantCommand {
    fn server_mut(&mut self) -> &mut ServerArgs {
        match self {
            TenantCommand::Subscribers(args) => &mut args.server,
            TenantCommand::Deliveries(args) => &mut args.server,
            TenantCommand::WebhookDeadLetters(args) => &mut args.server,
            TenantCommand::EventTypes(args) => &mut args.server,
            TenantCommand::Streams(args) => &mut args.server,
        }
    }
}

impl OperatorCommand {
    /// None for a command that uses the database.
    fn server_mut(&mut self) -> Option<&mut ServerArgs> {
        Some(match self {
            OperatorCommand::Key(KeyCommand::Create { .. }) => return None,
            OperatorCommand::Key(KeyCommand::List { server, .. } | KeyCommand::Revoke { server, .. }) => server,
            OperatorCommand::Tenants(args) => &mut args.server,
            OperatorCommand::Send(args) => &mut args.server,
            OperatorCommand::Tail(args) => &mut args.server,
            OperatorCommand::Cursors(args) => &mut args.server,
            OperatorCommand::Parked(args) => &mut args.server,
            OperatorCommand::DeadLetters(args) => &mut args.server,
            OperatorCommand::Emails(args) => &mut args.server,
            OperatorCommand::Notifications(args) => &mut args.server,
            OperatorCommand::Replay(args) => &mut args.server,
        })
    }
}

async fn run_locally(command: LocalCommand, settings: &Settings, secrets: &[SecretFlag]) -> Result<ExitCode, Failure> {
    match command {
        LocalCommand::Up => serve::up(settings, secrets).await?,
        LocalCommand::Serve => serve::serve(settings, secrets).await?,
        LocalCommand::Migrate => migrate::migrate(settings).await?,
        LocalCommand::Token { user, role, ttl } => credentials::token(settings, user, role, ttl)?,
        LocalCommand::User(UserCommand::SetRole { email, role }) => {
            credentials::set_role(settings, &email, role).await?;
        }
        LocalCommand::User(UserCommand::Announce) => credentials::announce_users(settings).await?,
        LocalCommand::Recover(args) => recover::run(settings, args).await?,
        LocalCommand::Parity(args) => parity::run(settings, args).await?,
        LocalCommand::Reconcile(args) => return reconcile::run(settings, args).await,
        LocalCommand::Status { json } => return status::run(settings, json).await,
        LocalCommand::Demo(args) => demo::run(settings, args).await?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn run_as_operator(command: OperatorCommand, settings: &Settings) -> Result<(), Failure> {
    match command {
        OperatorCommand::Key(KeyCommand::Create { role, tenant, name }) => {
            credentials::create_key(settings, role, tenant, name).await?;
        }
        OperatorCommand::Key(KeyCommand::List { tenant, json, server }) => {
            cli::keys::list(&operator_api(settings, &server).await?, tenant.as_ref(), json).await?;
        }
        OperatorCommand::Key(KeyCommand::Revoke { id, server }) => {
            cli::keys::revoke(&operator_api(settings, &server).await?, id).await?;
        }
        OperatorCommand::Tenants(args) => {
            cli::tenants::run(&operator_api(settings, &args.server).await?, args.command).await?;
        }
        OperatorCommand::Emails(args) => {
            cli::emails::run(&operator_api(settings, &args.server).await?, args.command).await?;
        }
        OperatorCommand::Notifications(args) => {
            cli::notifications::run(&operator_api(settings, &args.server).await?, args.command).await?;
        }
        OperatorCommand::Tail(args) => cli::tail::run(&operator_api(settings, &args.server).await?, args).await?,
        OperatorCommand::Cursors(args) => cli::cursors::run(&operator_api(settings, &args.server).await?, args).await?,
        OperatorCommand::Parked(args) => {
            cli::parked::run(&operator_api(settings, &args.server).await?, args.command).await?;
        }
        OperatorCommand::DeadLetters(args) => {
            args.check()?;
            cli::dead_letters::run(&operator_api(settings, &args.server).await?, args.command).await?;
        }
        OperatorCommand::Send(send) => {
            let api = producer_api(settings, &send.server, &send.tenant).await?;
            cli::send::run(&api, send).await?;
        }
        OperatorCommand::Replay(Replay { command: Some(Replays::Webhooks(replays)), server, .. }) => {
            let session = HubSession::open(settings, &server, &replays.tenant).await?;
            session.close_after(webhook_replays::run(&session.api, *replays)).await?;
        }
        OperatorCommand::Replay(args) => {
            args.check()?;
            cli::replays::run(&operator_api(settings, &args.server).await?, args).await?;
        }
    }
    Ok(())
}

async fn run_for_tenant(command: TenantCommand, settings: &Settings) -> Result<ExitCode, Failure> {
    match command {
        TenantCommand::EventTypes(args) => {
            let session = HubSession::open(settings, &args.server, &args.tenant).await?;
            session.close_after(cli::event_types::run(&session.api, args.command)).await?;
        }
        TenantCommand::Streams(args) => {
            let session = HubSession::open(settings, &args.server, &args.tenant).await?;
            session.close_after(cli::streams::run(&session.api, args.command)).await?;
        }
        TenantCommand::Subscribers(args) => {
            let session = HubSession::open(settings, &args.server, &args.tenant).await?;
            let is_done = session.close_after(cli::subscribers::run(&session.api, args.command)).await?;
            return Ok(if is_done { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        TenantCommand::Deliveries(args) => {
            let session = HubSession::open(settings, &args.server, &args.tenant).await?;
            session.close_after(cli::deliveries::run(&session.api, args.command)).await?;
        }
        TenantCommand::WebhookDeadLetters(args) => {
            let session = HubSession::open(settings, &args.server, &args.tenant).await?;
            session.close_after(cli::webhook_dead_letters::run(&session.api, args.command)).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn run_offline(command: OfflineCommand, given: &GivenOptions) -> Result<(), Failure> {
    match command {
        OfflineCommand::Context(command) => Ok(contexts::run(given, &command)?),
        OfflineCommand::Openapi => {
            let text = api_description(SERVICES).to_pretty_json().map_err(|error| Failure::Other(error.to_string()))?;
            Ok(table::print_line(&text)?)
        }
        OfflineCommand::Completions { shell } => manual::print_completions(shell),
        OfflineCommand::Man { folder } => manual::write_pages(&folder),
        OfflineCommand::Listen(listen) => Ok(cli::listen::listen(listen).await?),
    }
}

//! `up` and `serve`: start the process, wait for the stop signal, drain.

use std::io::Write;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use pillarbox::operations::status;
use pillarbox::{consumers, database};
use runtime::config::InvalidSetting;
use runtime::telemetry;
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};

use super::Failure;
use super::installation::{check_installation, database_options, master_keys_or_new};
use super::secret_flags::SecretFlag;
use crate::app::{self, Running};
use crate::data_dir::DataDir;
use crate::embedded::{self, Embedded, TcpAccess};
use crate::migrations;
use crate::pools::check_reachable;
use crate::services::SERVICES;
use crate::settings::{Role, Settings};
use crate::start_error::StartError;
use cli::table::printable;

/// Runs with the embedded PostgreSQL unless `database_url` is set. Migrates the database first. Fails if another process uses
/// the data folder, the address is in use, or the process cannot start.
pub(super) async fn up(settings: &Settings, secrets: &[SecretFlag]) -> Result<(), Failure> {
    let traces = telemetry::start_logs(&settings.log, settings.log_format, settings.otlp_endpoint.as_deref())?;
    secrets.iter().for_each(|secret| tracing::warn!("{secret}"));
    let settings = &limit_connections(settings);
    let mut stop = StopSignal::listen()?;
    let listener = bind(settings).await?;
    let data_dir = DataDir::at(&settings.data_dir)?;
    check_installation(settings, &data_dir)?;
    let mut lock = data_dir.lock()?;
    let address = listener.local_addr().map_err(StartError::Listener)?;
    let written = lock.write_description(&format!("process {} at http://{address}", std::process::id()));
    written.map_err(|error| {
        Failure::Other(format!("cannot write to the data folder {}: {error}", data_dir.path().display()))
    })?;
    let master_keys = master_keys_or_new(settings, &data_dir).await?;

    let embedded = match settings.database_url {
        Some(_) => None,
        None => {
            let port = Some(settings.postgres_port).filter(|port| *port != 0);
            let tcp = port.zip(master_keys.first()).map(|(port, key)| TcpAccess::new(port, key));
            Some(Embedded::start(&data_dir, tcp).await?)
        }
    };
    let options = match &embedded {
        Some(embedded) => embedded.connect_options(),
        None => database_options(settings, &data_dir)?,
    };
    let starting = async {
        if let Some(embedded) = &embedded {
            embedded.wait_until_ready().await?;
        }
        check_reachable(settings, &options).await?;
        database::migrate_all(&options, &migrations()).await?;
        if let Some(embedded) = &embedded {
            embedded.apply_tcp_access(&data_dir).await?;
            // The data folder is locked and its PostgreSQL has just started, so every process that held a lease is dead.
            let mut database = PgConnection::connect_with(&options).await?;
            consumers::end_all_leases(&mut database).await?;
            database.close().await?;
        }
        Ok(app::start(settings, SERVICES, listener, options.clone(), &master_keys).await?)
    };
    let result = run(starting, &mut stop, |running| greet(running, settings, &data_dir)).await;
    if let Some(embedded) = embedded {
        embedded.stop().await;
    }
    drop(lock);
    traces.flush().await;
    result
}

/// Runs on an existing, migrated database. Fails if `database_url` is not set, the address is in use, or the process cannot
/// start.
pub(super) async fn serve(settings: &Settings, secrets: &[SecretFlag]) -> Result<(), Failure> {
    let traces = telemetry::start_logs(&settings.log, settings.log_format, settings.otlp_endpoint.as_deref())?;
    secrets.iter().for_each(|secret| tracing::warn!("{secret}"));
    if settings.database_url.is_none() {
        let detail = "is required by `serve`: set PILLARBOX_DATABASE_URL=postgres://user:password@host/name, or database_url in the \
                      settings file; `pillarbox up` starts an embedded PostgreSQL instead";
        return Err(InvalidSetting::new("database_url", detail).into());
    }
    let settings = &limit_connections(settings);
    let mut stop = StopSignal::listen()?;
    let listener = bind(settings).await?;
    let data_dir = DataDir::at(&settings.data_dir)?;
    check_installation(settings, &data_dir)?;
    let options = database_options(settings, &data_dir)?;
    let starting = async {
        check_reachable(settings, &options).await?;
        let master_keys = master_keys_or_new(settings, &data_dir).await?;
        let running = app::start(settings, SERVICES, listener, options.clone(), &master_keys).await?;
        if let Err(error) = warn_of_idle_roles(settings, &options).await {
            tracing::debug!(%error, "could not check which roles no process runs");
        }
        Ok(running)
    };
    let result = run(starting, &mut stop, |running| greet(running, settings, &data_dir)).await;
    traces.flush().await;
    result
}

/// Logs a warning if the enabled services need roles that no process runs. An API without them accepts messages that nothing
/// delivers.
async fn warn_of_idle_roles(settings: &Settings, options: &PgConnectOptions) -> sqlx::Result<()> {
    let mut database = PgConnection::connect_with(options).await?;
    let running = status::active_names(&mut database).await?;
    database.close().await?;
    let roles = settings.roles();
    let services = SERVICES.iter().filter(|service| settings.has_service(service.name()));
    let work = services.flat_map(|service| service.work());
    let is_idle = |(role, name): &&(Role, &str)| !roles.contains(*role) && !running.contains(*name);
    let mut idle: Vec<Role> = work.filter(is_idle).map(|(role, _)| *role).collect();
    idle.sort();
    idle.dedup();
    let has_relay = roles.contains(Role::Relay) || running.iter().any(|name| name.starts_with("relay."));
    if settings.amqp_url.is_some() && !has_relay {
        idle.push(Role::Relay);
    }
    if !idle.is_empty() {
        let idle = idle.iter().map(Role::to_string).collect::<Vec<_>>().join(", ");
        tracing::warn!("no process runs the roles {idle} yet: their messages wait until one does");
    }
    Ok(())
}

/// Starts, prints the greeting, waits for the stop signal and drains. A stop signal during the start ends it at once.
async fn run(
    starting: impl Future<Output = Result<Running, Failure>>,
    stop: &mut StopSignal,
    greet: impl FnOnce(&Running),
) -> Result<(), Failure> {
    let running = tokio::select! {
        started = starting => started?,
        () = stop.wait() => {
            tracing::info!("stopped before the process was ready");
            return Ok(());
        }
    };
    greet(&running);
    stop.wait().await;
    tracing::info!("stopping: finishing requests and batches in flight");
    tokio::select! {
        () = running.stop() => {}
        () = stop.wait() => tracing::warn!("second stop signal: not waiting any longer"),
    }
    Ok(())
}

async fn bind(settings: &Settings) -> Result<TcpListener, Failure> {
    const BACKLOG: u32 = 1024;
    let listen = settings.listen;
    let bound = async {
        let socket = if listen.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        socket.bind(listen)?;
        socket.listen(BACKLOG)
    };
    bound.await.map_err(|error: std::io::Error| {
        let advice = match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                "another program uses this address: stop it, or choose another --listen ADDR:PORT"
            }
            _ => "choose another --listen ADDR:PORT",
        };
        Failure::Other(format!("cannot listen on {listen}: {error}; {advice}"))
    })
}

/// Lowers `connections_max` to what the limit on open files allows. Each connection needs a file descriptor, and clients must
/// not use up those of the database connections.
fn limit_connections(settings: &Settings) -> Settings {
    /// Reserved for files, the broker, Redis and webhooks.
    const RESERVED: u64 = 64;
    let mut settings = settings.clone();
    let Ok((_, limit)) = getrlimit(Resource::RLIMIT_NOFILE) else { return settings };
    let _ = setrlimit(Resource::RLIMIT_NOFILE, limit, limit); // on failure, the lower limit stays
    let free = limit.saturating_sub(u64::from(settings.pool_max + settings.worker_pool_max) + RESERVED).max(1);
    if u64::from(settings.connections_max) > free {
        tracing::warn!(connections_max = free, "lowered connections_max: this process may open only {limit} files");
        settings.connections_max = free as u32;
    }
    settings
}

/// Prints the addresses and the first admin key on standard output. The log goes to standard error and must not contain the key.
fn greet(running: &Running, settings: &Settings, data_dir: &DataDir) {
    let address = running.address;
    let mut text = format!("Pillarbox is listening on http://{address}\n");
    let has_api = settings.roles().contains(Role::Api);
    if has_api && settings.console.enabled {
        text += &format!("  console   http://{address}/console/\n");
    }
    text += &format!("  docs      http://{address}/docs\n");
    text += &format!("  data      {}\n", data_dir.path().display());
    if settings.database_url.is_none() {
        text += &format!("  database  {}\n", embedded::address(data_dir));
        if let Some(file) = embedded::address_file(data_dir) {
            text += &format!("  over TCP  the address is in {}\n", file.display());
        }
        text +=
            &format!("  demo      {}   (in another terminal: example traffic to look at)\n", demo_command(data_dir));
    }
    if let Some(key) = &running.first_admin_key {
        text += &format!("  admin key {}\n            (shown only once; only its hash is stored)\n", key.reveal());
    }
    let mut out = std::io::stdout().lock();
    let printed = out.write_all(printable(&text).as_bytes()).and_then(|()| out.flush());
    if let (Err(error), Some(_)) = (printed, &running.first_admin_key) {
        tracing::error!(%error, "could not print the first admin key; create another with `pillarbox key create --role admin`");
    }
    tracing::info!(%address, "ready");
}

/// The command that starts the demo on this installation.
fn demo_command(data_dir: &DataDir) -> String {
    let program = std::env::args().next().unwrap_or_else(|| "pillarbox".to_owned());
    if data_dir.path() == Settings::default().data_dir {
        format!("{program} demo")
    } else {
        format!("{program} demo --data-dir {}", data_dir.path().display())
    }
}

/// Receives SIGTERM, Ctrl-C and a closed terminal, from its creation on.
pub(super) struct StopSignal {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hang_up: tokio::signal::unix::Signal,
}

impl StopSignal {
    pub(super) fn listen() -> Result<StopSignal, Failure> {
        let listen =
            |kind| signal(kind).map_err(|error| Failure::Other(format!("cannot receive stop signals: {error}")));
        Ok(StopSignal {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hang_up: listen(SignalKind::hangup())?,
        })
    }

    pub(super) async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hang_up.recv() => {}
        }
    }
}

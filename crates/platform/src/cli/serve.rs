//! `up` and `serve`: start, wait for the signal, drain.

use std::io::Write;

use kit::config::BadSetting;
use kit::telemetry;
use mailbox::{database, replica, status};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};

use super::Failure;
use super::operate::{database_options, master_keys};
use crate::app::{self, Running};
use crate::data_dir::DataDir;
use crate::embedded::{self, Embedded};
use crate::settings::{Role, Settings};

pub(super) async fn up(settings: &Settings) -> Result<(), Failure> {
    let traces = telemetry::start_logs(&settings.log, settings.log_format, settings.otlp_endpoint.as_deref())?;
    let settings = &fit_file_handles(settings);
    let mut stop = StopSignal::listen()?;
    let listener = bind(settings).await?;
    let data_dir = DataDir::at(&settings.data_dir)?;
    let mut lock = data_dir.lock()?;
    let address = listener.local_addr().map_err(sqlx::Error::Io)?;
    let described = lock.describe(&format!("process {} at http://{address}", std::process::id()));
    described.map_err(|error| Failure::Other(format!("{}: {error}", data_dir.path().display())))?;
    let master_keys = master_keys(settings, &data_dir)?;

    let embedded = match settings.database_url {
        Some(_) => None,
        None => Some(Embedded::start(&data_dir).await?),
    };
    let options = match &embedded {
        Some(embedded) => embedded.connect_options(),
        None => database_options(settings, &data_dir)?,
    };
    let starting = async {
        if let Some(embedded) = &embedded {
            embedded.wait_until_ready().await?;
        }
        app::reach(settings, &options).await?;
        database::migrate(&options).await?;
        if embedded.is_some() {
            // The folder is locked, and its PostgreSQL has just been started: who held a lease there is dead.
            let mut database = PgConnection::connect_with(&options).await?;
            replica::end_all(&mut database).await?;
            database.close().await?;
        }
        Ok(app::start(settings, listener, options.clone(), &master_keys).await?)
    };
    let outcome = run(starting, &mut stop, |running| greet(running, &data_dir, embedded.is_some())).await;
    if let Some(embedded) = embedded {
        embedded.stop().await;
    }
    drop(lock);
    traces.flush().await;
    outcome
}

pub(super) async fn serve(settings: &Settings) -> Result<(), Failure> {
    let traces = telemetry::start_logs(&settings.log, settings.log_format, settings.otlp_endpoint.as_deref())?;
    if settings.database_url.is_none() {
        let takes = "is needed by `serve` (--database-url postgres://user:password@host/name); `pillarbox up` brings a database of its own";
        return Err(BadSetting::new("database_url", takes).into());
    }
    let settings = &fit_file_handles(settings);
    let mut stop = StopSignal::listen()?;
    let listener = bind(settings).await?;
    let data_dir = DataDir::at(&settings.data_dir)?;
    let master_keys = master_keys(settings, &data_dir)?;
    let options = database_options(settings, &data_dir)?;
    let starting = async {
        app::reach(settings, &options).await?;
        let running = app::start(settings, listener, options.clone(), &master_keys).await?;
        if let Err(error) = tell_of_idle_roles(settings, &options).await {
            tracing::debug!(%error, "could not look which roles nobody has");
        }
        Ok(running)
    };
    let outcome = run(starting, &mut stop, |running| greet(running, &data_dir, false)).await;
    traces.flush().await;
    outcome
}

/// Says which roles nobody has so far, neither this process nor another: an API alone takes what nobody delivers.
async fn tell_of_idle_roles(settings: &Settings, options: &PgConnectOptions) -> sqlx::Result<()> {
    let mut database = PgConnection::connect_with(options).await?;
    let at_work = status::at_work(&mut database).await?;
    database.close().await?;
    let mut idle: Vec<&str> = [
        ("consume", Role::Consume, "events", "events.counts"),
        ("consume", Role::Consume, "joins", "joins.events"),
        ("fanout", Role::Fanout, "hub", "hub.fanout"),
        ("dispatch", Role::Dispatch, "hub", "hub.dispatch"),
    ]
    .into_iter()
    .filter(|(_, role, service, work)| {
        !settings.has_role(*role) && settings.has_service(service) && !at_work.contains(*work)
    })
    .map(|(name, ..)| name)
    .collect();
    idle.dedup();
    if settings.amqp_url.is_some()
        && !settings.has_role(Role::Relay)
        && !at_work.iter().any(|one| one.starts_with("relay."))
    {
        idle.push("relay");
    }
    if !idle.is_empty() {
        tracing::warn!("nobody runs the roles {} so far: until a process does, their messages wait", idle.join(", "));
    }
    Ok(())
}

/// Starts, greets, waits for the signal, drains. Stopped while it starts, it just ends.
async fn run(
    starting: impl Future<Output = Result<Running, Failure>>,
    stop: &mut StopSignal,
    greet: impl FnOnce(&Running),
) -> Result<(), Failure> {
    let running = tokio::select! {
        started = starting => started?,
        () = stop.wait() => {
            tracing::info!("stopped before it was ready");
            return Ok(());
        }
    };
    greet(&running);
    stop.wait().await;
    tracing::info!("stopping: finishing what is in flight");
    tokio::select! {
        () = running.stop() => {}
        () = stop.wait() => tracing::warn!("asked again: not waiting any longer"),
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
                "another program listens there: stop it, or choose another --listen ADDR:PORT"
            }
            _ => "choose another --listen ADDR:PORT",
        };
        Failure::Other(format!("cannot listen on {listen}: {error}; {advice}"))
    })
}

/// Each connection is a file handle, and the database needs some, too: strangers must not take them all.
fn fit_file_handles(settings: &Settings) -> Settings {
    const OTHERS: u64 = 64;
    let mut settings = settings.clone();
    let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) else { return settings };
    let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most); // then the lower limit holds
    let free = most.saturating_sub(u64::from(settings.pool_max + settings.worker_pool_max) + OTHERS).max(1);
    if u64::from(settings.connections_max) > free {
        tracing::warn!(connections_max = free, "fewer connections than set: this process may open {most} files");
        settings.connections_max = free as u32;
    }
    settings
}

/// Tells a person where it is. On standard output: the log goes to standard error, and the key must not be in it.
fn greet(running: &Running, data_dir: &DataDir, has_embedded: bool) {
    let address = running.address;
    let mut text = format!("Pillarbox is listening on http://{address}\n  docs      http://{address}/docs\n");
    text += &format!("  data      {}\n", data_dir.path().display());
    if has_embedded {
        text += &format!("  database  {}\n", embedded::address(data_dir));
    }
    if let Some(key) = &running.first_admin_key {
        text += &format!("  admin key {}\n            (shown this once; only its hash is kept)\n", key.reveal());
    }
    let mut out = std::io::stdout().lock();
    let shown = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    if let (Err(error), Some(_)) = (shown, &running.first_admin_key) {
        tracing::error!(%error, "the first admin key could not be shown; make one with `pillarbox key create --role admin`");
    }
    tracing::info!(%address, "ready");
}

/// SIGTERM, Ctrl-C or a closed terminal, from the moment it is made.
struct StopSignal {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hang_up: tokio::signal::unix::Signal,
}

impl StopSignal {
    fn listen() -> Result<StopSignal, Failure> {
        let listen = |kind| signal(kind).map_err(|error| Failure::Other(format!("signals: {error}")));
        Ok(StopSignal {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hang_up: listen(SignalKind::hangup())?,
        })
    }

    async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hang_up.recv() => {}
        }
    }
}

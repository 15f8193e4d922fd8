//! An embedded PostgreSQL in the data folder, run from the binaries that are installed on the machine.
//!
//! It listens on a Unix socket, which needs no port and no password: only the user that it runs as (and root) can enter the folder
//! of the socket. With `postgres_port` it also listens on TCP, on this machine (see `tcp`). It stops when this process ends, even after a
//! crash. A server that is left over from a killed process is stopped before the next start.

mod install;
mod memory;
mod server;
mod tcp;

use std::ffi::OsStr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use nix::sys::signal::Signal;
use nix::unistd::{Gid, Uid, User};
use sha2::{Digest, Sha256};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};

use self::install::Install;
use self::server::Server;
pub(crate) use self::tcp::{TcpAccess, address_file};
use crate::data_dir::DataDir;

const USER: &str = "pillarbox";
const DATABASE: &str = "pillarbox";
const PORT_DEFAULT: u16 = 5432;
/// How long to wait until PostgreSQL accepts connections; crash recovery after heavy writes can take minutes.
const READY_TIME_MAX: Duration = Duration::from_secs(300);
/// Longest path of the socket folder: the limit of `sun_path`, minus `/.s.PGSQL.5432` and the final NUL.
const SOCKET_DIR_BYTES_MAX: usize = 107 - 14 - 1;

#[derive(Debug, thiserror::Error)]
pub(crate) enum EmbeddedError {
    #[error(
        "no PostgreSQL found (searched PATH, /usr/lib/postgresql and /usr/pgsql-*): \
         install it (Debian, Ubuntu: `apt-get install postgresql`), or set PILLARBOX_DATABASE_URL"
    )]
    NotInstalled,
    #[error(
        "{folder} contains data of PostgreSQL {wanted}, but this machine has {found}: install postgresql-{wanted}, \
         or upgrade the data with pg_upgrade, or choose another --data-dir"
    )]
    OtherVersion { folder: PathBuf, wanted: String, found: String },
    #[error(
        "the user {user}, which runs PostgreSQL because it refuses to run as root, cannot reach {folder}: choose a --data-dir \
         outside of it, such as /var/lib/pillarbox"
    )]
    Unreachable { user: String, folder: PathBuf },
    #[error(
        "PostgreSQL refuses to run as root, and there is no user `postgres` to run it: the distribution's package creates one"
    )]
    NoUser,
    #[error("{0} names process {1}, which is running and may be a PostgreSQL on this data: stop it first")]
    Occupied(PathBuf, i32),
    #[error("postgres_port: 127.0.0.1:{0} cannot be used ({1}): stop what listens there, or choose another port")]
    Port(u16, #[source] io::Error),
    #[error("{what} failed: {why}")]
    Tool { what: &'static str, why: String },
    #[error("PostgreSQL did not start; the end of {log}:\n{tail}")]
    DidNotStart { log: PathBuf, tail: String },
    #[error("the embedded PostgreSQL: {0}")]
    Database(#[from] sqlx::Error),
    #[error("{0}: {1}")]
    Io(PathBuf, #[source] io::Error),
}

/// The paths of one embedded PostgreSQL.
#[derive(Debug, Clone)]
struct Folders {
    data: PathBuf,
    socket: PathBuf,
    log: PathBuf,
}

/// The user that runs PostgreSQL when this process runs as root.
#[derive(Debug, Clone)]
struct Account {
    name: String,
    uid: Uid,
    gid: Gid,
}

/// A running embedded PostgreSQL.
pub(crate) struct Embedded {
    server: Server,
    folders: Folders,
    tcp: Option<TcpAccess>,
}

/// The connection options of the embedded PostgreSQL of a data folder, which another process may have started.
pub(crate) fn connect_options(data_dir: &DataDir) -> PgConnectOptions {
    let folders = folders(data_dir);
    options(&folders, port(&folders.data)).database(DATABASE)
}

/// The same as a connection URL.
pub(crate) fn address(data_dir: &DataDir) -> String {
    let folders = folders(data_dir);
    let port = match port(&folders.data) {
        PORT_DEFAULT => String::new(),
        port => format!("&port={port}"),
    };
    format!("postgresql:///{DATABASE}?host={}{port}&user={USER}", folders.socket.display())
}

/// The port of the running server, which is a part of the name of its socket.
fn port(cluster: &Path) -> u16 {
    let text = fs::read_to_string(cluster.join("postmaster.pid")).unwrap_or_default();
    text.lines().nth(3).and_then(|line| line.trim().parse().ok()).unwrap_or(PORT_DEFAULT)
}

/// Whether the data folder contains an embedded PostgreSQL, running or not.
pub(crate) fn has_cluster(data_dir: &DataDir) -> bool {
    folders(data_dir).data.exists()
}

impl Embedded {
    /// Creates the cluster if necessary and starts it. The caller must hold the lock of the data folder.
    pub(crate) async fn start(data_dir: &DataDir, tcp: Option<TcpAccess>) -> Result<Embedded, EmbeddedError> {
        let folders = folders(data_dir);
        let account = account()?;
        if let Some(account) = &account {
            check_reachable(data_dir.path(), account)?;
        }
        let install = install::find(&folders.data)?;
        let arguments = (install.clone(), folders.clone(), account.clone());
        let created =
            tokio::task::spawn_blocking(move || create_cluster(&arguments.0, &arguments.1, arguments.2.as_ref())).await;
        created.map_err(|error| EmbeddedError::Tool { what: "initdb", why: error.to_string() })??;
        server::stop_leftover(&folders.data).await?;
        tcp.as_ref().map_or(Ok(()), TcpAccess::check_port)?;
        let port = tcp.as_ref().map(TcpAccess::port);
        let server = Server::start(install, folders.clone(), account, port)?;
        Ok(Embedded { server, folders, tcp })
    }

    pub(crate) fn connect_options(&self) -> PgConnectOptions {
        self.options().database(DATABASE)
    }

    fn options(&self) -> PgConnectOptions {
        options(&self.folders, self.tcp.as_ref().map_or(PORT_DEFAULT, TcpAccess::port))
    }

    /// Lets programs connect over TCP, or no longer. The database must be migrated.
    pub(crate) async fn apply_tcp_access(&self, data_dir: &DataDir) -> Result<(), EmbeddedError> {
        match &self.tcp {
            Some(tcp) => tcp.grant(self.connect_options(), data_dir).await,
            None => tcp::revoke(self.connect_options(), data_dir).await,
        }
    }

    /// Stops it cleanly, so that the next start needs no recovery.
    pub(crate) async fn stop(self) {
        self.server.stop().await;
    }

    /// Waits until it accepts connections, and creates the database. Fails if it does not start in time.
    pub(crate) async fn wait_until_ready(&self) -> Result<(), EmbeddedError> {
        let started = std::time::Instant::now();
        let mut logged = started;
        loop {
            match PgConnection::connect_with(&self.options().database("postgres")).await {
                Ok(connection) => return create_database(connection).await,
                Err(error) if started.elapsed() > READY_TIME_MAX => return Err(error.into()),
                Err(_) if self.server.is_failing() => return Err(server::did_not_start(&self.folders.log)),
                Err(error) => {
                    if logged.elapsed() > Duration::from_secs(5) {
                        logged = std::time::Instant::now();
                        tracing::info!(waiting = ?started.elapsed(), state = %error, "PostgreSQL is not ready yet");
                    }
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

async fn create_database(mut connection: PgConnection) -> Result<(), EmbeddedError> {
    let exists: bool = sqlx::query_scalar("select exists (select from pg_database where datname = $1)")
        .bind(DATABASE)
        .fetch_one(&mut connection)
        .await?;
    if !exists {
        sqlx::raw_sql("create database pillarbox").execute(&mut connection).await?;
    }
    // The role has the name of our schema, which PostgreSQL would search first: an operator's tables would end up in it.
    sqlx::raw_sql("alter role pillarbox set search_path = public").execute(&mut connection).await?;
    connection.close().await?;
    Ok(())
}

fn options(folders: &Folders, port: u16) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass().socket(&folders.socket).port(port).username(USER)
}

fn folders(data_dir: &DataDir) -> Folders {
    let inside = data_dir.path().join("run");
    let fits = inside.as_os_str().len() <= SOCKET_DIR_BYTES_MAX;
    Folders {
        data: data_dir.path().join("postgres"),
        socket: if fits { inside } else { short_socket_dir(data_dir.path()) },
        log: data_dir.path().join("postgres.log"),
    }
}

/// A socket folder for a data folder whose path is too long for a socket. The name is derived from that path.
fn short_socket_dir(data_dir: &Path) -> PathBuf {
    let digest = Sha256::digest(data_dir.as_os_str().as_encoded_bytes());
    let name: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    PathBuf::from(format!("/tmp/pillarbox-{name}"))
}

fn account() -> Result<Option<Account>, EmbeddedError> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(None);
    }
    // Not an unprivileged user that other daemons share: they could read the data.
    let user = User::from_name("postgres").ok().flatten().ok_or(EmbeddedError::NoUser)?;
    Ok(Some(Account { name: user.name, uid: user.uid, gid: user.gid }))
}

/// Fails when a parent folder does not let the user through.
fn check_reachable(data_dir: &Path, account: &Account) -> Result<(), EmbeddedError> {
    for folder in data_dir.ancestors() {
        let metadata = fs::metadata(folder).map_err(|error| EmbeddedError::Io(folder.to_owned(), error))?;
        let passable = if metadata.uid() == account.uid.as_raw() {
            0o100
        } else if metadata.gid() == account.gid.as_raw() {
            0o010
        } else {
            0o001
        };
        if metadata.mode() & passable == 0 {
            return Err(EmbeddedError::Unreachable { user: account.name.clone(), folder: folder.to_owned() });
        }
    }
    Ok(())
}

/// Creates a folder that only the user of PostgreSQL may enter. An existing one must be private already.
fn create_private_dir(path: &Path, account: Option<&Account>) -> Result<(), EmbeddedError> {
    let failed = |error| EmbeddedError::Io(path.to_owned(), error);
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => change_owner(path, account),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            // Outside the data folder, another user may have created it first to intercept connections.
            let owner = fs::symlink_metadata(path).map_err(failed)?;
            let expected = account.map_or_else(nix::unistd::geteuid, |account| account.uid);
            let private =
                owner.is_dir() && (owner.uid() == expected.as_raw()) && owner.permissions().mode() & 0o077 == 0;
            if private {
                Ok(())
            } else {
                Err(failed(io::Error::other("exists, but is not private to the user of PostgreSQL")))
            }
        }
        Err(error) => Err(failed(error)),
    }
}

fn change_owner(path: &Path, account: Option<&Account>) -> Result<(), EmbeddedError> {
    let Some(account) = account else { return Ok(()) };
    nix::unistd::chown(path, Some(account.uid), Some(account.gid))
        .map_err(|error| EmbeddedError::Io(path.to_owned(), error.into()))
}

/// Removes incomplete clusters of a killed `initdb`. Its child processes may still write for a moment, so this retries.
fn remove_incomplete_clusters(cluster: &Path) -> io::Result<()> {
    const ATTEMPTS: u32 = 50;
    let Some(parent) = cluster.parent() else { return Ok(()) };
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().starts_with(b"postgres.new-") {
            continue;
        }
        for _ in 0..ATTEMPTS {
            match fs::remove_dir_all(entry.path()) {
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => break,
            }
        }
    }
    Ok(())
}

/// Creates the cluster with `initdb` in a temporary folder and renames it, so that a killed `initdb` leaves no partial cluster.
fn create_cluster(install: &Install, folders: &Folders, account: Option<&Account>) -> Result<(), EmbeddedError> {
    if folders.data.join("PG_VERSION").exists() {
        return Ok(());
    }
    let temporary = folders.data.with_extension(format!("new-{}", uuid::Uuid::new_v4().simple()));
    let failed = |error| EmbeddedError::Io(temporary.clone(), error);
    remove_incomplete_clusters(&folders.data).map_err(failed)?;
    create_private_dir(&temporary, account)?;
    tracing::info!(folder = %folders.data.display(), version = install.major, "creating an embedded PostgreSQL");
    let mut initdb = install.command("initdb", account);
    initdb.args(["--encoding=UTF8", "--locale=C.UTF-8", "--auth=trust", "--data-checksums", "--no-instructions"]);
    initdb.args([OsStr::new("--username"), OsStr::new(USER), OsStr::new("--pgdata"), temporary.as_os_str()]);
    server::stop_with_parent(&mut initdb, Signal::SIGKILL);
    let output = initdb.output().map_err(failed)?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(EmbeddedError::Tool { what: "initdb", why });
    }
    fs::rename(&temporary, &folders.data).map_err(failed)
}

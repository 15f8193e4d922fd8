//! A private PostgreSQL under the data folder, from the binaries on the machine.
//!
//! It listens on a Unix socket alone, so it needs no port and no password: who may enter the socket's folder may
//! connect, and that is the user it runs as (and root). It ends with us, however we end; one that outlived a killed
//! instance is stopped before the next starts.

mod install;
mod server;

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::{Gid, Uid, User};
use sha2::{Digest, Sha256};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};

use self::install::Install;
use self::server::Server;
use crate::data_dir::DataDir;

const USER: &str = "pillarbox";
const DATABASE: &str = "pillarbox";
/// Crash recovery after heavy writes takes a while; say so meanwhile.
const READY_TIME_MAX: Duration = Duration::from_secs(300);
/// What a socket's path may have (`sun_path`), less PostgreSQL's `/.s.PGSQL.5432` and a closing NUL.
const SOCKET_DIR_BYTES_MAX: usize = 107 - 14 - 1;

#[derive(Debug, thiserror::Error)]
pub(crate) enum EmbeddedError {
    #[error(
        "no PostgreSQL found (looked on PATH, in /usr/lib/postgresql and /usr/pgsql-*): \
         install it (Debian, Ubuntu: `apt-get install postgresql`), or give --database-url"
    )]
    NotInstalled,
    #[error(
        "{folder} holds data of PostgreSQL {wanted}, but this machine has {found}: install postgresql-{wanted}, \
         or move the data over with pg_upgrade, or choose another --data-dir"
    )]
    OtherVersion { folder: PathBuf, wanted: String, found: String },
    #[error(
        "the user {user}, who must run PostgreSQL (it refuses root), cannot reach {folder}: choose a --data-dir outside, \
         such as /var/lib/pillarbox"
    )]
    Unreachable { user: String, folder: PathBuf },
    #[error(
        "PostgreSQL refuses to run as root, and there is no user `postgres` to run it: the distribution's package makes one"
    )]
    NoUser,
    #[error("{0} names process {1}, which runs and may be a PostgreSQL on this data: end it first")]
    Occupied(PathBuf, i32),
    #[error("{what} failed: {why}")]
    Tool { what: &'static str, why: String },
    #[error("PostgreSQL did not start; the end of {log}:\n{tail}")]
    DidNotStart { log: PathBuf, tail: String },
    #[error("the private PostgreSQL: {0}")]
    Database(#[from] sqlx::Error),
    #[error("{0}: {1}")]
    Io(PathBuf, #[source] io::Error),
}

/// The folders of one private PostgreSQL.
#[derive(Debug, Clone)]
struct Folders {
    data: PathBuf,
    socket: PathBuf,
    log: PathBuf,
}

/// The account that runs PostgreSQL when we are root.
#[derive(Debug, Clone)]
struct Account {
    name: String,
    uid: Uid,
    gid: Gid,
}

/// A PostgreSQL that runs.
pub(crate) struct Embedded {
    server: Server,
    folders: Folders,
}

/// How to reach the private PostgreSQL of a data folder, whoever started it.
pub(crate) fn connect_options(data_dir: &DataDir) -> PgConnectOptions {
    options(&folders(data_dir)).database(DATABASE)
}

/// The same as an address, for people and for programs in any language.
pub(crate) fn address(data_dir: &DataDir) -> String {
    format!("postgresql:///{DATABASE}?host={}&user={USER}", folders(data_dir).socket.display())
}

impl Embedded {
    /// Makes the cluster if need be and starts it. The caller holds the folder's lock.
    pub(crate) async fn start(data_dir: &DataDir) -> Result<Embedded, EmbeddedError> {
        let folders = folders(data_dir);
        let account = account()?;
        if let Some(account) = &account {
            check_reachable(data_dir.path(), account)?;
        }
        let install = install::find(&folders.data)?;
        let making = (install.clone(), folders.clone(), account.clone());
        let made = tokio::task::spawn_blocking(move || make_cluster(&making.0, &making.1, making.2.as_ref())).await;
        made.map_err(|error| EmbeddedError::Tool { what: "initdb", why: error.to_string() })??;
        server::stop_leftover(&folders.data).await?;
        let server = Server::start(install, folders.clone(), account)?;
        Ok(Embedded { server, folders })
    }

    pub(crate) fn connect_options(&self) -> PgConnectOptions {
        options(&self.folders).database(DATABASE)
    }

    /// A clean stop: what is committed is on disk, the next start needs no recovery.
    pub(crate) async fn stop(self) {
        self.server.stop().await;
    }

    /// Waits until it answers, which takes a while after a crash.
    pub(crate) async fn wait_until_ready(&self) -> Result<(), EmbeddedError> {
        let started = std::time::Instant::now();
        let mut told = started;
        loop {
            match PgConnection::connect_with(&options(&self.folders).database("postgres")).await {
                Ok(connection) => return make_database(connection).await,
                Err(error) if started.elapsed() > READY_TIME_MAX => return Err(error.into()),
                Err(_) if self.server.gave_up() => return Err(server::did_not_start(&self.folders.log)),
                Err(error) => {
                    if told.elapsed() > Duration::from_secs(5) {
                        told = std::time::Instant::now();
                        tracing::info!(waiting = ?started.elapsed(), state = %error, "PostgreSQL is not ready yet");
                    }
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

async fn make_database(mut connection: PgConnection) -> Result<(), EmbeddedError> {
    let exists: bool = sqlx::query_scalar("select exists (select from pg_database where datname = $1)")
        .bind(DATABASE)
        .fetch_one(&mut connection)
        .await?;
    if !exists {
        sqlx::raw_sql("create database pillarbox").execute(&mut connection).await?;
    }
    // The role and our schema have one name, and PostgreSQL looks there first: an operator's tables would end up in it.
    sqlx::raw_sql("alter role pillarbox set search_path = public").execute(&mut connection).await?;
    connection.close().await?;
    Ok(())
}

fn options(folders: &Folders) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass().socket(&folders.socket).username(USER)
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

/// A socket's path is short by law; a deep data folder gets one elsewhere, by a name that only it has.
fn short_socket_dir(data_dir: &Path) -> PathBuf {
    let digest = Sha256::digest(data_dir.as_os_str().as_encoded_bytes());
    let name: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    PathBuf::from(format!("/tmp/pillarbox-{name}"))
}

fn account() -> Result<Option<Account>, EmbeddedError> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(None);
    }
    // Not `nobody`: that is every daemon's user, and could read what we keep.
    let user = User::from_name("postgres").ok().flatten().ok_or(EmbeddedError::NoUser)?;
    Ok(Some(Account { name: user.name, uid: user.uid, gid: user.gid }))
}

/// Every folder above must let the account through.
fn check_reachable(data_dir: &Path, account: &Account) -> Result<(), EmbeddedError> {
    for folder in data_dir.ancestors() {
        let metadata = fs::metadata(folder).map_err(|error| EmbeddedError::Io(folder.to_owned(), error))?;
        let passable = match () {
            () if metadata.uid() == account.uid.as_raw() => 0o100,
            () if metadata.gid() == account.gid.as_raw() => 0o010,
            () => 0o001,
        };
        if metadata.mode() & passable == 0 {
            return Err(EmbeddedError::Unreachable { user: account.name.clone(), folder: folder.to_owned() });
        }
    }
    Ok(())
}

/// A folder that only the one who runs PostgreSQL may enter.
fn make_private_dir(path: &Path, account: Option<&Account>) -> Result<(), EmbeddedError> {
    let failed = |error| EmbeddedError::Io(path.to_owned(), error);
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => give(path, account),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            // Outside the data folder somebody else may have made it first, to listen in.
            let owner = fs::symlink_metadata(path).map_err(failed)?;
            let expected = account.map_or_else(nix::unistd::geteuid, |account| account.uid);
            let private =
                owner.is_dir() && (owner.uid() == expected.as_raw()) && owner.permissions().mode() & 0o077 == 0;
            if private {
                Ok(())
            } else {
                Err(failed(io::Error::other("exists, but is not private to PostgreSQL's user")))
            }
        }
        Err(error) => Err(failed(error)),
    }
}

fn give(path: &Path, account: Option<&Account>) -> Result<(), EmbeddedError> {
    let Some(account) = account else { return Ok(()) };
    nix::unistd::chown(path, Some(account.uid), Some(account.gid))
        .map_err(|error| EmbeddedError::Io(path.to_owned(), error.into()))
}

/// Removes what a killed `initdb` left. Its children may still be ending, and write meanwhile: then for a bounded while.
fn sweep_halves(cluster: &Path) -> io::Result<()> {
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

/// `initdb`, aside and then renamed: a killed one leaves nothing that looks like a cluster.
fn make_cluster(install: &Install, folders: &Folders, account: Option<&Account>) -> Result<(), EmbeddedError> {
    if folders.data.join("PG_VERSION").exists() {
        return Ok(());
    }
    let aside = folders.data.with_extension(format!("new-{}", uuid::Uuid::new_v4().simple()));
    let failed = |error| EmbeddedError::Io(aside.clone(), error);
    sweep_halves(&folders.data).map_err(failed)?;
    make_private_dir(&aside, account)?;
    tracing::info!(folder = %folders.data.display(), version = install.major, "making a private PostgreSQL");
    let mut initdb = install.command("initdb", account);
    initdb.args(["--encoding=UTF8", "--locale=C.UTF-8", "--auth=trust", "--data-checksums", "--no-instructions"]);
    initdb.args([OsStr::new("--username"), OsStr::new(USER), OsStr::new("--pgdata"), aside.as_os_str()]);
    server::end_with_us(&mut initdb, Signal::SIGKILL);
    let output = initdb.output().map_err(failed)?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(EmbeddedError::Tool { what: "initdb", why });
    }
    fs::rename(&aside, &folders.data).map_err(failed)
}

//! Access to the embedded PostgreSQL over TCP on this machine, for the programs of other users and for clients that cannot use a
//! Unix socket. Such a program logs in with a separate role, which may post messages and create tables, and with a password.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use runtime::secret::{MasterKey, Secret};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection};

use super::{Account, DATABASE, EmbeddedError, change_owner};
use crate::data_dir::DataDir;

const APP_USER: &str = "pillarbox_app";
/// The file with the address and its password, in the data folder.
const URL_FILE: &str = "postgres.url";
const REVOKE: &str = "do $$ begin
                          if exists (select from pg_roles where rolname = 'pillarbox_app' and rolcanlogin) then
                              alter role pillarbox_app nologin password null;
                          end if;
                      end $$";
/// The rules of authentication: the folder of the socket is private; over TCP, only the role for programs may log in, with its password.
const OVER_SOCKET: &str = "local all all trust\n";
const OVER_TCP: &str = "host pillarbox pillarbox_app 127.0.0.1/32 scram-sha-256\n";

/// A port of this machine, and the password of the role for programs.
#[derive(Debug, Clone)]
pub(crate) struct TcpAccess {
    port: u16,
    password: Secret<String>,
}

impl TcpAccess {
    /// The password is derived from the secret key, so it stays the same.
    pub(crate) fn new(port: u16, key: &MasterKey) -> TcpAccess {
        let password = key.derive("embedded postgresql").iter().map(|byte| format!("{byte:02x}")).collect();
        TcpAccess { port, password: Secret::new(password) }
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Fails if another program listens on the port: PostgreSQL itself would end without saying so at once.
    pub(super) fn check_port(&self) -> Result<(), EmbeddedError> {
        match TcpListener::bind((Ipv4Addr::LOCALHOST, self.port)) {
            Ok(_) => Ok(()),
            Err(error) => Err(EmbeddedError::Port(self.port, error)),
        }
    }

    /// Lets the role for programs log in, and writes the address. The database must be migrated.
    pub(super) async fn grant(&self, options: PgConnectOptions, data_dir: &DataDir) -> Result<(), EmbeddedError> {
        execute(options, &login(self.password.reveal())).await?;
        let (port, password) = (self.port, self.password.reveal());
        let url = format!("postgresql://{APP_USER}:{password}@127.0.0.1:{port}/{DATABASE}\n");
        let path = url_file(data_dir);
        write_private(&path, &url, None).map_err(|error| EmbeddedError::Io(path, error))
    }
}

/// Ends what an earlier start has granted.
pub(super) async fn revoke(options: PgConnectOptions, data_dir: &DataDir) -> Result<(), EmbeddedError> {
    execute(options, REVOKE).await?;
    let path = url_file(data_dir);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(EmbeddedError::Io(path, error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// The file with the address, if programs may connect over TCP.
pub(crate) fn address_file(data_dir: &DataDir) -> Option<PathBuf> {
    Some(url_file(data_dir)).filter(|path| path.exists())
}

/// Writes the rules of authentication, which replace those of `initdb`: these trust every user of the machine over TCP. Returns
/// the file, which only PostgreSQL may read.
pub(super) fn write_rules(cluster: &Path, account: Option<&Account>, port: Option<u16>) -> io::Result<PathBuf> {
    let path = cluster.join("pillarbox_hba.conf");
    let over_tcp = if port.is_some() { OVER_TCP } else { "" };
    write_private(&path, &format!("{OVER_SOCKET}{over_tcp}"), account)?;
    Ok(path)
}

fn url_file(data_dir: &DataDir) -> PathBuf {
    data_dir.path().join(URL_FILE)
}

/// The password consists of letters and digits.
fn login(password: &str) -> String {
    format!(
        "do $$ begin
             if not exists (select from pg_roles where rolname = '{APP_USER}') then
                 create role {APP_USER};
             end if;
         end $$;
         create schema if not exists app authorization {APP_USER};
         alter role {APP_USER} login connection limit 15 password '{password}';
         alter role {APP_USER} set search_path = app;
         grant pillarbox_producer to {APP_USER}"
    )
}

async fn execute(options: PgConnectOptions, statements: &str) -> Result<(), EmbeddedError> {
    // The log must not contain the password. Without `public`, which others may create objects in.
    let options = options.options([("search_path", "pg_catalog")]).disable_statement_logging();
    let mut connection = options.connect().await?;
    sqlx::raw_sql(sqlx::AssertSqlSafe(statements)).execute(&mut connection).await?;
    connection.close().await?;
    Ok(())
}

/// Replaces a file that only its owner may read: this user, or the account of PostgreSQL.
fn write_private(path: &Path, content: &str, account: Option<&Account>) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let _ = fs::remove_file(&temporary); // of a start that was killed
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(content.as_bytes())?;
    change_owner(&temporary, account).map_err(io::Error::other)?;
    fs::rename(temporary, path)
}

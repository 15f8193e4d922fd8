//! How a command finds the database and the secret key of its installation.

use admin::keys::flow::fingerprint;
use pillarbox::database::time::Measurement;
use pillarbox::database::{self, PoolLimits};
use runtime::config::InvalidSetting;
use runtime::secret::MasterKey;
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection, PgPool};

use super::Failure;
use crate::data_dir::{DataDir, DataDirError};
use crate::embedded;
use crate::pools::check_reachable;
use crate::settings::Settings;
use cli::table::print_note;

/// The current secret key first, then the former ones. Fails if there is no current one, or if the data folder belongs to
/// another installation.
pub(super) fn master_keys(settings: &Settings, data_dir: &DataDir) -> Result<Vec<MasterKey>, Failure> {
    let current = match settings.master_key_given()? {
        Some(key) => key,
        None => {
            check_installation(settings, data_dir)?;
            data_dir.secret_key()?
        }
    };
    Ok([vec![current], settings.previous_master_keys()?].concat())
}

/// As [`master_keys`], for a server: a new installation gets a secret key, in the data folder. Fails if an installation that
/// has a key would get another one, which could not read what the installation has encrypted.
pub(super) async fn master_keys_or_new(settings: &Settings, data_dir: &DataDir) -> Result<Vec<MasterKey>, Failure> {
    match master_keys(settings, data_dir) {
        Err(Failure::DataDir(DataDirError::NoSecretKey(_))) => {}
        found => return found,
    }
    let previous = settings.previous_master_keys()?;
    match settings.database()? {
        None if embedded::has_cluster(data_dir) => {
            return Err(DataDirError::LostSecretKey(data_dir.secret_key_path()).into());
        }
        Some(database) => {
            check_reachable(settings, &database).await?;
            let known = fingerprint(&mut PgConnection::connect_with(&database).await?).await?;
            // A replaced key is among the former ones.
            if known.is_some_and(|known| !previous.iter().any(|key| key.fingerprint() == known)) {
                return Err(DataDirError::SecretKeyElsewhere(data_dir.secret_key_path()).into());
            }
        }
        None => {}
    }
    Ok([vec![data_dir.new_secret_key()?], previous].concat())
}

/// Fails if the data folder has an embedded PostgreSQL and the settings name another database: the folder and its secret key
/// belong to another installation. Two installations with one key would accept each other's tokens and signatures. Only
/// checks whether files exist.
pub(super) fn check_installation(settings: &Settings, data_dir: &DataDir) -> Result<(), Failure> {
    if settings.database_url.is_none() || settings.secret_key.is_some() || !embedded::has_cluster(data_dir) {
        return Ok(());
    }
    let folder = data_dir.path().display();
    Err(Failure::Other(format!(
        "the data folder {folder} belongs to the installation whose PostgreSQL is in it, and not to database_url: choose another \
         folder with --data-dir DIR, or set PILLARBOX_SECRET_KEY to the key of your installation \
         (a new key: openssl rand -base64 32)"
    )))
}

/// PostgreSQL itself: the configured one, or the embedded one of the data folder.
pub(super) fn database_options(settings: &Settings, data_dir: &DataDir) -> Result<PgConnectOptions, InvalidSetting> {
    Ok(settings.database()?.unwrap_or_else(|| embedded::connect_options(data_dir)))
}

/// Fails when the command needs the embedded PostgreSQL and no server runs it.
pub(super) fn require_database(settings: &Settings, data_dir: &DataDir) -> Result<(), Failure> {
    if settings.database_url.is_some() || data_dir.holder().is_some() {
        return Ok(());
    }
    let folder = data_dir.path().display();
    Err(Failure::Other(format!(
        "no server runs in the data folder {folder}. Is it running? Start it with `pillarbox up`, name its folder with \
         --data-dir DIR, or set PILLARBOX_DATABASE_URL"
    )))
}

/// A pool for one command. Fails when there is no database to connect to.
pub(super) fn connect(settings: &Settings) -> Result<PgPool, Failure> {
    let data_dir = DataDir::at(&settings.data_dir)?;
    require_database(settings, &data_dir)?;
    let options = database_options(settings, &data_dir)?;
    print_database(settings, &options);
    Ok(pool(options))
}

/// As [`print_target`], for a command that acts on this database.
pub(super) fn print_database(settings: &Settings, options: &PgConnectOptions) {
    let name = options.get_database().unwrap_or_else(|| options.get_username());
    print_target(settings, &format!("database {name} on {}:{}", options.get_host(), options.get_port()));
}

/// Prints on standard error what the command acts on, if the settings name a database: commands that use HTTP then act on the
/// server at `listen`, which may belong to another installation.
pub(super) fn print_target(settings: &Settings, target: &str) {
    if settings.database_url.is_some() {
        print_note(&format!("target: {target}"));
    }
}

/// Fails when the clock of this machine differs from the database's: a time that the operator gave relative to now would be
/// another one for the database.
pub(super) async fn require_same_time(db: &PgPool) -> Result<(), Failure> {
    let measured = Measurement::read(&mut *db.acquire().await?).await?;
    measured.check().map_err(|differs| Failure::Other(differs.to_string()))
}

/// A small pool, which connects when it is first used.
pub(super) fn pool(options: PgConnectOptions) -> PgPool {
    database::pool(options, PoolLimits { connections_min: 0, connections_max: 2, ..PoolLimits::default() })
}

//! How a command finds the database and the secret key of its installation.

use kit::config::InvalidSetting;
use kit::secret::MasterKey;
use mailbox::database::time::Measurement;
use mailbox::database::{self, PoolLimits};
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;

use super::Failure;
use crate::data_dir::DataDir;
use crate::embedded;
use crate::settings::Settings;

/// The current secret key first, then the former ones. Creates the key in the data folder if there is none. Fails if the
/// data folder belongs to another installation.
pub(super) fn master_keys(settings: &Settings, data_dir: &DataDir) -> Result<Vec<MasterKey>, Failure> {
    let current = match settings.master_key_given()? {
        Some(key) => key,
        None => {
            check_installation(settings, data_dir)?;
            data_dir.secret_key_or_new()?
        }
    };
    let mut keys = vec![current];
    keys.extend(settings.previous_master_keys()?);
    Ok(keys)
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
    Ok(pool(database_options(settings, &data_dir)?))
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

//! Why a process does not start.

use admin::keys;
use pillarbox::database::MigrationId;
use pillarbox::database::pooler::PoolerError;
use runtime::config::InvalidSetting;
use runtime::telemetry;

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Setting(#[from] InvalidSetting),
    #[error("setting `issuers`: {0}")]
    Issuer(#[from] http_kit::auth::InvalidIssuer),
    #[error(transparent)]
    Telemetry(#[from] telemetry::TelemetryError),
    #[error("the database lacks the migrations {}: run `pillarbox migrate` with the same settings", crate::list(.0))]
    NotMigrated(Vec<MigrationId>),
    #[error(
        "the database at {address} cannot be reached: {cause}; check that it is running and that {setting} is correct"
    )]
    Unreachable {
        setting: &'static str,
        address: String,
        #[source]
        cause: sqlx::Error,
    },
    #[error(
        "{0} is the address of a pooler, which assigns another session to each transaction: set it to PostgreSQL itself. Only \
         requests can go through a pooler: set database_url to the pooler and database_direct_url to PostgreSQL itself"
    )]
    Pooled(&'static str),
    #[error(transparent)]
    Pooler(#[from] PoolerError),
    #[error("the address of the HTTP server cannot be determined: {0}; restart the process")]
    Listener(#[source] std::io::Error),
    #[error(
        "the database failed during the start: {0}; `pillarbox status` shows whether it can be reached and is migrated"
    )]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Keys(#[from] keys::Error),
}

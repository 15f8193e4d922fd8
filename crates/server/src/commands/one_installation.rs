//! Whether the server and the database of a command belong to one installation.

use std::time::Duration;

use admin::keys::flow::installation_id;
use cli::api::Api;
use cli::table::print_note;
use runtime::secret::Secret;
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};
use uuid::Uuid;

use super::Failure;
use crate::settings::Settings;

/// How long a server or a database may take to tell its installation.
const TIME_MAX: Duration = Duration::from_secs(5);

/// Fails if the settings name a database that belongs to another installation than the server. Without an answer of both there is
/// nothing to compare: the command itself fails if it needs the one that is missing.
pub(super) async fn require_one_installation(settings: &Settings, server: &str) -> Result<(), Failure> {
    let Some(database) = settings.database()? else { return Ok(()) };
    let (of_server, of_database) = tokio::join!(
        tokio::time::timeout(TIME_MAX, of_server(server)),
        tokio::time::timeout(TIME_MAX, of_database(&database))
    );
    let of_database = match of_database {
        Ok(Ok(id)) => id,
        Ok(Err(error)) => {
            print_note(&format!("the database of database_url is not compared with the server: {error}"));
            None
        }
        Err(_) => {
            print_note("the database of database_url is not compared with the server: it does not respond");
            None
        }
    };
    match (of_server.ok().flatten(), of_database) {
        (Some(of_server), Some(of_database)) if of_server != of_database => Err(Failure::Other(format!(
            "the server {server} belongs to the installation {of_server}, and the database of database_url to the installation \
             {of_database}: a command acts on one of them. Name the server of the database with --server URL, or the database of \
             the server with --database-url URL, or unset PILLARBOX_DATABASE_URL"
        ))),
        _ => Ok(()),
    }
}

async fn of_server(server: &str) -> Option<Uuid> {
    let health = Api::new(server, Secret::new(String::new())).ok()?.get("/healthz").await.ok()?;
    health["installation"].as_str()?.parse().ok()
}

async fn of_database(database: &PgConnectOptions) -> sqlx::Result<Option<Uuid>> {
    installation_id(&mut PgConnection::connect_with(database).await?).await
}

//! The migrations of all schemas.

use sqlx::migrate::{MigrateError, Migrator};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};

use super::pool::SEARCH_PATH;

/// Returns the migrations of all schemas, in one sequence. Their table is in the schema `pillarbox`, so that an
/// application in the same database can have its own.
pub fn migrations() -> Migrator {
    let mut migrations = sqlx::migrate!("../../migrations");
    migrations.create_schema("pillarbox");
    migrations.dangerous_set_table_name("pillarbox.migration");
    // The previous binary must run on the new schema, so that replicas can be replaced one by one.
    migrations.set_ignore_missing(true);
    migrations
}

/// Applies the missing migrations and returns their versions. Several processes may call it at once: a lock serialises
/// them.
pub async fn migrate(options: &PgConnectOptions) -> Result<Vec<i64>, MigrateError> {
    let mut connection = PgConnection::connect_with(options).await?;
    // The role may have timeouts that are meant for requests. Notices are silenced because every start would log one
    // for the schema that exists already.
    let session = format!(
        "set search_path = {SEARCH_PATH}; set statement_timeout = 0; set idle_in_transaction_session_timeout = 0;
         set client_min_messages = warning"
    );
    sqlx::raw_sql(AssertSqlSafe(session)).execute(&mut connection).await?;
    let missing = missing_in(&mut connection).await?;
    migrations().run(&mut connection).await?;
    connection.close().await?;
    Ok(missing)
}

/// Returns the versions that this binary needs and the database does not have.
pub async fn missing_migrations(pool: &PgPool) -> Result<Vec<i64>, sqlx::Error> {
    missing_in(&mut *pool.acquire().await?).await
}

async fn missing_in(db: &mut PgConnection) -> Result<Vec<i64>, sqlx::Error> {
    let is_migrated: bool =
        sqlx::query_scalar("select to_regclass('pillarbox.migration') is not null").fetch_one(&mut *db).await?;
    let applied: Vec<i64> = if is_migrated {
        sqlx::query_scalar("select version from pillarbox.migration where success").fetch_all(db).await?
    } else {
        Vec::new()
    };
    let needed = migrations();
    Ok(needed.iter().map(|migration| migration.version).filter(|version| !applied.contains(version)).collect())
}

//! Migrations: the library's schema, the schemas of services beside it, and the lock that serialises them.
//!
//! Each schema has its own versions. A process applies those that its program has and the database lacks; it ignores those
//! that only the database has. So the previous program runs on the schema of the next one, and replicas can be replaced one by
//! one.

use std::fmt;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};

use super::pool::SEARCH_PATH;
use super::statements::statements;

/// The migrations of the library's own schema.
const LIBRARY: SchemaMigrations =
    SchemaMigrations { schema: "pillarbox", texts: &[include_str!("../../migrations/0001_pillarbox.sql")] };
/// The first line of a migration that is executed one statement at a time, without a transaction.
const NO_TRANSACTION: &str = "-- no-transaction";
/// The table of the applied migrations. It is in the schema of the library, so that an application in the same database can have
/// its own.
const TABLE: &str = "
    create schema if not exists pillarbox;
    create table if not exists pillarbox.migration (
        schema     text        not null,
        version    integer     not null,
        -- SHA-256 of the text.
        checksum   bytea       not null,
        applied_at timestamptz not null default now(),
        primary key (schema, version)
    )";
/// The key of the advisory lock that a migration holds.
pub const MIGRATION_LOCK: i64 = i64::from_be_bytes(*b"pillarbx");
/// Our name in `pg_stat_activity` during a migration.
const APPLICATION: &str = "pillarbox migrate";
/// The pause between two attempts to get the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// The migrations of one schema.
#[derive(Debug, Clone, Copy)]
pub struct SchemaMigrations {
    /// The name of the schema, as the first line of each text declares it.
    pub schema: &'static str,
    /// In the order of their versions. The first one has the version 1.
    pub texts: &'static [&'static str],
}

/// The migrations of several schemas, in the order in which they are applied. The default: those of the library alone.
#[derive(Debug, Clone)]
pub struct Migrations(Vec<SchemaMigrations>);

impl Default for Migrations {
    fn default() -> Migrations {
        Migrations(vec![LIBRARY])
    }
}

impl Migrations {
    /// Adds schemas, which may use that of the library.
    pub fn with(mut self, schemas: impl IntoIterator<Item = SchemaMigrations>) -> Migrations {
        self.0.extend(schemas);
        self
    }

    /// All migrations with their texts.
    pub fn iter(&self) -> impl Iterator<Item = (MigrationId, &'static str)> {
        self.0.iter().flat_map(|&SchemaMigrations { schema, texts }| {
            (1..).zip(texts).map(move |(version, text)| (MigrationId { schema, version }, *text))
        })
    }
}

/// Identifies a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationId {
    /// The schema that it changes.
    pub schema: &'static str,
    /// Its number among the migrations of the schema, from 1.
    pub version: i32,
}

impl fmt::Display for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.schema, self.version)
    }
}

/// The database was not migrated.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the texts of the errors say what they mean")]
pub enum MigrationError {
    #[error("the migration {migration} failed: {cause}")]
    Failed { migration: MigrationId, cause: sqlx::Error },
    #[error(
        "the database has applied another text of the migration {0}: use the program that created this database, or a new \
         database"
    )]
    Changed(MigrationId),
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    #[error(
        "another session has held the lock of migrations for {} s: {holder}. If it is a migration, start again when it \
         has finished; otherwise end the session, in SQL: select pg_terminate_backend({})", waited.as_secs(), holder.pid
    )]
    Locked { holder: Box<LockHolder>, waited: Duration },
    #[error("the lock of migrations was not granted for {} s: start again", .0.as_secs())]
    Contended(Duration),
}

/// The session that holds the lock of migrations. PostgreSQL shows address and time only to roles that may see them.
#[derive(Debug, Clone)]
pub struct LockHolder {
    /// Its process id in PostgreSQL.
    pub pid: i32,
    /// Its role.
    pub role: Option<String>,
    /// Its `application_name`.
    pub application: Option<String>,
    /// Its address.
    pub client: Option<String>,
    /// When it connected.
    pub connected_since: Option<DateTime<Utc>>,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |value: &Option<String>| match value.as_deref() {
            None | Some("") => "unknown".to_owned(),
            Some(value) => format!("{value:?}"),
        };
        write!(f, "pid {}, application {}, ", self.pid, text(&self.application))?;
        write!(f, "role {}, client {}, ", text(&self.role), text(&self.client))?;
        match self.connected_since {
            Some(since) => write!(f, "connected since {}", since.format("%Y-%m-%dT%H:%M:%SZ")),
            None => f.write_str("connected since an unknown time"),
        }
    }
}

/// How long a migration waits for the lock.
#[derive(Debug, Clone, Copy)]
pub struct LockWait {
    /// The time after which the holder is reported, and again.
    pub report_after: Duration,
    /// The number of reports after which the migration fails.
    pub reports_max: u32,
}

impl Default for LockWait {
    /// A minute in all: a replica that starts during a migration waits for it, and a supervisor starts it again if the
    /// migration takes longer.
    fn default() -> LockWait {
        LockWait { report_after: Duration::from_secs(3), reports_max: 20 }
    }
}

/// Applies the missing migrations of the library and returns them. Several processes may call it at once: a lock serialises
/// them. Logs the holder of the lock while it waits.
pub async fn migrate(options: &PgConnectOptions) -> Result<Vec<MigrationId>, MigrationError> {
    migrate_all(options, &Migrations::default()).await
}

/// The same, with the migrations of other schemas.
pub async fn migrate_all(
    options: &PgConnectOptions,
    migrations: &Migrations,
) -> Result<Vec<MigrationId>, MigrationError> {
    let report = |holder: &LockHolder| {
        tracing::warn!(%holder, "waiting for the lock of migrations, which another session holds");
    };
    migrate_reporting(options, migrations, LockWait::default(), report).await
}

/// The same. Passes the holder of the lock to `report` while it waits. Fails with [`MigrationError::Locked`] if it has
/// waited too long.
pub async fn migrate_reporting(
    options: &PgConnectOptions,
    migrations: &Migrations,
    wait: LockWait,
    report: impl Fn(&LockHolder),
) -> Result<Vec<MigrationId>, MigrationError> {
    let mut connection = PgConnection::connect_with(&options.clone().application_name(APPLICATION)).await?;
    // The role may have timeouts that are meant for requests. Notices are silenced because every start would log one
    // for the schema that exists already.
    let session = format!(
        "set search_path = {SEARCH_PATH}; set statement_timeout = 0; set idle_in_transaction_session_timeout = 0;
         set client_min_messages = warning"
    );
    sqlx::raw_sql(AssertSqlSafe(session)).execute(&mut connection).await?;
    lock(&mut connection, wait, report).await?;
    // The end of the connection releases the lock, also after a failure.
    let applied = apply_migrations(&mut connection, migrations).await?;
    connection.close().await?;
    Ok(applied)
}

/// Applies the missing migrations without the lock, and returns them. Fails with [`MigrationError::Changed`] if the database has
/// applied a migration with another text.
pub async fn apply_migrations(
    db: &mut PgConnection,
    migrations: &Migrations,
) -> Result<Vec<MigrationId>, MigrationError> {
    sqlx::raw_sql(TABLE).execute(&mut *db).await?;
    let applied = applied(db).await?;
    let mut missing = Vec::new();
    for (migration, text) in migrations.iter() {
        if !is_in(&applied, migration) {
            apply(db, migration, text).await.map_err(|cause| MigrationError::Failed { migration, cause })?;
            missing.push(migration);
        } else if !is_unchanged(db, migration, text).await? {
            return Err(MigrationError::Changed(migration));
        }
    }
    Ok(missing)
}

/// Applies a migration in a transaction. PostgreSQL executes a text of several statements in one anyway, so a migration that
/// begins with `-- no-transaction` is executed one statement at a time: it must be possible to execute it again after a failure.
async fn apply(db: &mut PgConnection, migration: MigrationId, text: &'static str) -> sqlx::Result<()> {
    if text.starts_with(NO_TRANSACTION) {
        for statement in statements(text) {
            sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut *db).await?;
        }
        return record(db, migration, text).await;
    }
    let mut tx = db.begin().await?;
    sqlx::raw_sql(text).execute(&mut *tx).await?;
    record(&mut tx, migration, text).await?;
    tx.commit().await
}

async fn record(db: &mut PgConnection, migration: MigrationId, text: &str) -> sqlx::Result<()> {
    let query = "insert into pillarbox.migration (schema, version, checksum)
                 values ($1, $2, sha256(convert_to($3, 'UTF8')))";
    sqlx::query(query).bind(migration.schema).bind(migration.version).bind(text).execute(db).await.map(drop)
}

async fn is_unchanged(db: &mut PgConnection, migration: MigrationId, text: &str) -> sqlx::Result<bool> {
    let query = "select checksum = sha256(convert_to($3, 'UTF8')) from pillarbox.migration
                 where schema = $1 and version = $2";
    sqlx::query_scalar(query).bind(migration.schema).bind(migration.version).bind(text).fetch_one(db).await
}

/// Returns the migrations that the database lacks.
pub async fn missing_migrations(pool: &PgPool, migrations: &Migrations) -> sqlx::Result<Vec<MigrationId>> {
    let mut db = pool.acquire().await?;
    let query = "select to_regclass('pillarbox.migration') is not null";
    let has_table: bool = sqlx::query_scalar(query).fetch_one(&mut *db).await?;
    let applied = if has_table { applied(&mut db).await? } else { Vec::new() };
    Ok(migrations.iter().map(|(migration, _)| migration).filter(|one| !is_in(&applied, *one)).collect())
}

async fn applied(db: &mut PgConnection) -> sqlx::Result<Vec<(String, i32)>> {
    sqlx::query_as("select schema, version from pillarbox.migration").fetch_all(db).await
}

fn is_in(applied: &[(String, i32)], migration: MigrationId) -> bool {
    applied.iter().any(|(schema, version)| schema == migration.schema && *version == migration.version)
}

/// Acquires the lock of migrations for the session. Any login of the database can hold it, so the wait is limited. It waits
/// between statements and not in one: a session that waits in a statement has a snapshot, and an index that the holder of the lock
/// builds while its table can be written waits for the end of all older snapshots.
async fn lock(db: &mut PgConnection, wait: LockWait, report: impl Fn(&LockHolder)) -> Result<(), MigrationError> {
    let mut last_holder = None;
    for _ in 0..wait.reports_max {
        let began = Instant::now();
        while began.elapsed() < wait.report_after {
            let query = "select pg_try_advisory_lock($1)";
            if sqlx::query_scalar(query).bind(MIGRATION_LOCK).fetch_one(&mut *db).await? {
                return Ok(());
            }
            tokio::time::sleep(LOCK_PAUSE.min(wait.report_after)).await;
        }
        // None: the holder has released the lock in the meantime.
        last_holder = lock_holder(db).await?;
        last_holder.iter().for_each(&report);
    }
    let waited = wait.report_after * wait.reports_max;
    Err(match last_holder {
        Some(holder) => MigrationError::Locked { holder: Box::new(holder), waited },
        None => MigrationError::Contended(waited),
    })
}

async fn lock_holder(db: &mut PgConnection) -> sqlx::Result<Option<LockHolder>> {
    // PostgreSQL shows a key of 64 bits as two numbers of 32 bits.
    type Row = (i32, Option<String>, Option<String>, Option<String>, Option<DateTime<Utc>>);
    let found: Option<Row> = sqlx::query_as(
        "select l.pid, a.usename::text, a.application_name, host(a.client_addr), a.backend_start
         from pg_locks l left join pg_stat_activity a on a.pid = l.pid
         where l.locktype = 'advisory' and l.granted and l.objsubid = 1
           and l.database = (select oid from pg_database where datname = current_database())
           and (l.classid::bigint << 32) | l.objid::bigint = $1",
    )
    .bind(MIGRATION_LOCK)
    .fetch_optional(db)
    .await?;
    Ok(found.map(|(pid, role, application, client, connected_since)| LockHolder {
        pid,
        role,
        application,
        client,
        connected_since,
    }))
}

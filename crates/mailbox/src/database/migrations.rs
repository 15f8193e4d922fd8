//! The migrations of all schemas, and the lock that serialises them.

use std::borrow::Cow;
use std::fmt;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use sqlx::migrate::{Migrate, MigrateError, Migration, MigrationType, Migrator};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool, SqlStr};

use super::pool::SEARCH_PATH;
use super::statements::statements;

/// Version, description and text of each migration, in the order of their versions; written by `build.rs`.
const MIGRATIONS: &[(i64, &str, &str)] = &include!(concat!(env!("OUT_DIR"), "/migrations.rs"));
/// Our name in `pg_stat_activity` during a migration.
const APPLICATION: &str = "pillarbox migrate";
/// The pause between two attempts to get the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(50);
/// PostgreSQL's code for a statement that was ended because of a deadlock.
const DEADLOCK: &str = "40P01";
/// How often a migration without a transaction is tried if it ends in a deadlock.
const TRIES_MAX: u32 = 10;

/// The database was not migrated.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    #[error(transparent)]
    Migration(#[from] MigrateError),
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
    pub pid: i32,
    pub role: Option<String>,
    pub application: Option<String>,
    pub client: Option<String>,
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

/// Returns the migrations of all schemas, in one sequence. Their table is in the schema `pillarbox`, so that an
/// application in the same database can have its own.
pub fn migrations() -> Migrator {
    let to_migration = |(version, description, text): &(i64, &'static str, &'static str)| {
        let needs_no_transaction = text.starts_with("-- no-transaction");
        let (description, text) = (Cow::Borrowed(*description), SqlStr::from_static(text));
        Migration::new(*version, description, MigrationType::Simple, text, needs_no_transaction)
    };
    let mut migrations = Migrator::with_migrations(MIGRATIONS.iter().map(to_migration).collect());
    migrations.create_schema("pillarbox");
    migrations.dangerous_set_table_name("pillarbox.migration");
    // The previous binary must run on the new schema, so that replicas can be replaced one by one.
    migrations.set_ignore_missing(true);
    migrations
}

/// Applies the missing migrations and returns their versions. Several processes may call it at once: a lock serialises
/// them. Logs the holder of the lock while it waits.
pub async fn migrate(options: &PgConnectOptions) -> Result<Vec<i64>, MigrationError> {
    let report = |holder: &LockHolder| {
        tracing::warn!(%holder, "waiting for the lock of migrations, which another session holds");
    };
    migrate_reporting(options, LockWait::default(), report).await
}

/// The same. Passes the holder of the lock to `report` while it waits. Fails with [`MigrationError::Locked`] if it has
/// waited too long.
pub async fn migrate_reporting(
    options: &PgConnectOptions,
    wait: LockWait,
    report: impl Fn(&LockHolder),
) -> Result<Vec<i64>, MigrationError> {
    let mut connection = PgConnection::connect_with(&options.clone().application_name(APPLICATION)).await?;
    // The role may have timeouts that are meant for requests. Notices are silenced because every start would log one
    // for the schema that exists already.
    let session = format!(
        "set search_path = {SEARCH_PATH}; set statement_timeout = 0; set idle_in_transaction_session_timeout = 0;
         set client_min_messages = warning"
    );
    sqlx::raw_sql(AssertSqlSafe(session)).execute(&mut connection).await?;
    lock(&mut connection, wait, report).await?;
    let missing = missing_in(&mut connection).await?;
    let mut migrations = migrations();
    // The connection holds the lock already; its end releases the lock, also after a failure.
    migrations.set_locking(false);
    apply_migrations(&migrations, &mut connection).await?;
    connection.close().await?;
    Ok(missing)
}

/// Applies those of these migrations that are missing. sqlx sends a whole file as one command, which PostgreSQL executes in a
/// transaction; so a migration that begins with `-- no-transaction` is executed here, one statement at a time. It must not
/// matter if some of its statements are executed again.
pub async fn apply_migrations(migrations: &Migrator, db: &mut PgConnection) -> Result<(), MigrationError> {
    for migration in migrations.iter().filter(|migration| migration.no_tx) {
        // Not `run_to`: its future is not `Send` for a borrowed connection.
        migrations.run_direct(Some(migration.version - 1), db, false).await?;
        let applied = db.list_applied_migrations(&migrations.table_name).await?;
        if applied.iter().any(|applied| applied.version == migration.version) {
            continue;
        }
        execute_statements(migration, db).await?;
        // Only records it.
        db.skip(&migrations.table_name, migration).await?;
    }
    Ok(migrations.run_direct(None, db, false).await?)
}

/// Executes the statements of a migration. An index that is built while its table can be written waits for all other
/// transactions, also for that of a process of an earlier version which waits for the lock of migrations: PostgreSQL then
/// ends one of the two.
async fn execute_statements(migration: &Migration, db: &mut PgConnection) -> Result<(), MigrateError> {
    let mut tries = 0;
    'again: loop {
        tries += 1;
        for statement in statements(migration.sql.as_str()) {
            match sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut *db).await {
                Ok(_) => {}
                Err(error) if tries < TRIES_MAX && is_deadlock(&error) => continue 'again,
                Err(error) => return Err(MigrateError::ExecuteMigration(error, migration.version)),
            }
        }
        return Ok(());
    }
}

fn is_deadlock(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == DEADLOCK)
}

/// Acquires the lock of migrations for the session. Any login of the database can hold it, so the wait is limited. It waits
/// between statements and not in one: whoever waits in a statement has a snapshot, and an index that the holder of the lock
/// builds while its table can be written waits for the end of all older snapshots.
async fn lock(db: &mut PgConnection, wait: LockWait, report: impl Fn(&LockHolder)) -> Result<(), MigrationError> {
    let name: String = sqlx::query_scalar("select current_database()").fetch_one(&mut *db).await?;
    let mut last_holder = None;
    for _ in 0..wait.reports_max {
        let began = Instant::now();
        while began.elapsed() < wait.report_after {
            let query = "select pg_try_advisory_lock($1)";
            if sqlx::query_scalar(query).bind(lock_key(&name)).fetch_one(&mut *db).await? {
                return Ok(());
            }
            tokio::time::sleep(LOCK_PAUSE.min(wait.report_after)).await;
        }
        // None: the holder has released the lock in the meantime.
        last_holder = lock_holder(db, &name).await?;
        last_holder.iter().for_each(&report);
    }
    let waited = wait.report_after * wait.reports_max;
    Err(match last_holder {
        Some(holder) => MigrationError::Locked { holder: Box::new(holder), waited },
        None => MigrationError::Contended(waited),
    })
}

async fn lock_holder(db: &mut PgConnection, database: &str) -> sqlx::Result<Option<LockHolder>> {
    // PostgreSQL shows a key of 64 bits as two numbers of 32 bits.
    type Row = (i32, Option<String>, Option<String>, Option<String>, Option<DateTime<Utc>>);
    let found: Option<Row> = sqlx::query_as(
        "select l.pid, a.usename::text, a.application_name, host(a.client_addr), a.backend_start
         from pg_locks l left join pg_stat_activity a on a.pid = l.pid
         where l.locktype = 'advisory' and l.granted and l.objsubid = 1
           and l.database = (select oid from pg_database where datname = current_database())
           and (l.classid::bigint << 32) | l.objid::bigint = $1",
    )
    .bind(lock_key(database))
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

/// The key of the lock, as sqlx derives it from the name of the database. Earlier versions let sqlx lock, and must
/// exclude this one.
fn lock_key(database: &str) -> i64 {
    let crc = database.bytes().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg()))
    });
    0x3D32_AD9E * i64::from(!crc)
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

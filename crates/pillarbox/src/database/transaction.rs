//! The database of a service: a pool whose commits wake the readers of the log.
//!
//! A message that was just committed would otherwise wait for the watcher's next poll. No caller has to remember the
//! wake-up: [`DatabaseTransaction::commit`] is the only way to commit.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use runtime::worker::Wake;
use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, PgPool, Postgres, Transaction};

use super::admission::{Admission, AdmissionPermit};
use super::dedicated_connection::DedicatedConnection;
use super::invalidations::Invalidations;
use super::step::{STEP_TIME_ALLOWANCE, STEP_TIME_MAX, step};

/// A connection pool, the readers of the log that a commit wakes, and the caches that an invalidation drops. It is cheap
/// to clone.
#[derive(Debug, Clone)]
pub struct Database {
    pool: PgPool,
    readers: Wake,
    invalidations: Invalidations,
    step_time_max: Duration,
    /// None: every task may use a connection as soon as there is one.
    admission: Option<Arc<dyn Admission>>,
}

impl Database {
    /// A database without running readers: `consumers::Runtime::start` runs them.
    pub fn new(pool: PgPool) -> Database {
        let (readers, invalidations) = (Wake::default(), Invalidations::default());
        Database { pool, readers, invalidations, step_time_max: STEP_TIME_MAX, admission: None }
    }

    /// Returns the same database over another pool. Commits over both pools wake the same readers, and an invalidation
    /// concerns both. The same rules admit to it.
    pub fn with_pool(&self, pool: PgPool) -> Database {
        let admission = self.admission.as_ref().map(|admission| admission.for_pool(pool.options()));
        Database { admission, pool, ..self.clone() }
    }

    /// Sets the rules that admit to the connections.
    pub fn with_admission(self, admission: Arc<dyn Admission>) -> Database {
        Database { admission: Some(admission), ..self }
    }

    /// Sets the time limit of the steps of background work according to that of PostgreSQL for one statement: PostgreSQL
    /// responds within its own limit, so that a slow statement is not taken for a dead connection.
    pub fn with_statement_timeout(self, statement_timeout: Duration) -> Database {
        Database { step_time_max: statement_timeout.saturating_add(STEP_TIME_ALLOWANCE), ..self }
    }

    /// Returns the time limit of one step of background work, for [`step`](super::step()).
    pub fn step_time_max(&self) -> Duration {
        self.step_time_max
    }

    /// Calls `drop_cache` whenever the database may have lost transactions. Everything in memory that was derived from
    /// the database must be dropped then: versions and ids are assigned again for other content.
    pub fn on_invalidation(&self, drop_cache: impl Fn() + Send + Sync + 'static) {
        self.invalidations.subscribe(Box::new(drop_cache));
    }

    /// Returns a connection for statements that post nothing.
    pub async fn acquire(&self) -> sqlx::Result<DatabaseConnection> {
        let permit = self.admit().await?;
        Ok(DatabaseConnection { connection: self.pool.acquire().await?, _permit: permit })
    }

    /// Begins a transaction.
    pub async fn begin(&self) -> sqlx::Result<DatabaseTransaction<'static>> {
        let permit = self.admit().await?;
        let transaction = DatabaseTransaction::new(self.pool.begin().await?, &self.readers);
        Ok(DatabaseTransaction { _permit: permit, ..transaction })
    }

    /// Waits until this task may use connections: for work that is shared with other tasks, which must not wait for the
    /// admission of this one. The connections that it acquires then need no further permit.
    pub async fn admit(&self) -> sqlx::Result<Option<AdmissionPermit>> {
        match &self.admission {
            Some(admission) => admission.enter().await,
            None => Ok(None),
        }
    }

    /// Runs a step on connections of this database, like [`step`](super::step()).
    pub fn step<T, E: From<sqlx::Error>>(
        &self,
        name: &str,
        time_max: Duration,
        work: impl Future<Output = Result<T, E>>,
    ) -> impl Future<Output = Result<T, E>> {
        step(&self.pool, name, time_max, work)
    }

    /// Returns a connection that only one loop uses. Its commits also wake the readers.
    pub fn dedicated_connection(&self) -> DedicatedConnection {
        DedicatedConnection::with_readers(self.pool.clone(), self.readers.clone())
    }

    /// Returns the pool, for background work that posts nothing. A request uses [`Database::acquire`] and [`Database::begin`],
    /// which wait for its admission.
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }

    pub(crate) fn invalidations(&self) -> &Invalidations {
        &self.invalidations
    }

    /// Returns the handle that each commit triggers.
    pub(crate) fn readers(&self) -> &Wake {
        &self.readers
    }
}

/// A connection of the pool. It returns to the pool when it is dropped, which also drops its permit.
#[derive(Debug)]
pub struct DatabaseConnection {
    connection: PoolConnection<Postgres>,
    _permit: Option<AdmissionPermit>,
}

impl Deref for DatabaseConnection {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.connection
    }
}

impl DerefMut for DatabaseConnection {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.connection
    }
}

/// A transaction whose commit wakes the readers of the log. It is rolled back when it is dropped.
#[derive(Debug)]
pub struct DatabaseTransaction<'c> {
    transaction: Transaction<'c, Postgres>,
    readers: Wake,
    _permit: Option<AdmissionPermit>,
}

impl<'c> DatabaseTransaction<'c> {
    pub(super) fn new(transaction: Transaction<'c, Postgres>, readers: &Wake) -> DatabaseTransaction<'c> {
        DatabaseTransaction { transaction, readers: readers.clone(), _permit: None }
    }

    /// Commits, then wakes the readers of the log. If nothing was posted, the wake-up costs one small poll.
    pub async fn commit(self) -> sqlx::Result<()> {
        self.transaction.commit().await?;
        self.readers.wake();
        Ok(())
    }

    /// Rolls back.
    pub async fn rollback(self) -> sqlx::Result<()> {
        self.transaction.rollback().await
    }
}

impl<'c> Deref for DatabaseTransaction<'c> {
    type Target = Transaction<'c, Postgres>;

    fn deref(&self) -> &Transaction<'c, Postgres> {
        &self.transaction
    }
}

impl<'c> DerefMut for DatabaseTransaction<'c> {
    fn deref_mut(&mut self) -> &mut Transaction<'c, Postgres> {
        &mut self.transaction
    }
}

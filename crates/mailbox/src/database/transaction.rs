//! The database of a service: a pool whose commits wake the readers of the log.
//!
//! A message that was just committed would otherwise wait for the watcher's next poll. No caller has to remember the
//! wake-up: [`DatabaseTransaction::commit`] is the only way to commit.

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use kit::caller_share::{CallerShares, SharePermit};
use kit::worker::Wake;
use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, PgPool, Postgres, Transaction};

use super::dedicated_connection::DedicatedConnection;
use super::invalidations::Invalidations;
use super::step::{STEP_TIME_ALLOWANCE, STEP_TIME_MAX};

/// A connection pool, the readers of the log that a commit wakes, and the caches that an invalidation drops. It is cheap
/// to clone.
#[derive(Debug, Clone)]
pub struct Database {
    pool: PgPool,
    readers: Wake,
    invalidations: Invalidations,
    step_time_max: Duration,
    /// Of the connections, for requests: one caller gets half of them.
    shares: Arc<CallerShares>,
}

impl Database {
    /// A database whose readers nobody runs yet: `consumers::Runtime::start` runs them.
    pub fn new(pool: PgPool) -> Database {
        let (readers, invalidations) = (Wake::default(), Invalidations::default());
        let shares = shares_of(&pool);
        Database { pool, readers, invalidations, step_time_max: STEP_TIME_MAX, shares }
    }

    /// Returns the same database over another pool. Commits over both pools wake the same readers, and an invalidation
    /// concerns both.
    pub fn with_pool(&self, pool: PgPool) -> Database {
        Database { shares: shares_of(&pool), pool, ..self.clone() }
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
        let permit = self.share_permit().await?;
        Ok(DatabaseConnection { connection: self.pool.acquire().await?, _permit: permit })
    }

    pub async fn begin(&self) -> sqlx::Result<DatabaseTransaction<'static>> {
        let permit = self.share_permit().await?;
        let transaction = DatabaseTransaction::new(self.pool.begin().await?, &self.readers);
        Ok(DatabaseTransaction { _permit: permit, ..transaction })
    }

    /// Waits for a permit of the caller whose request this is. Without a request there is no share.
    async fn share_permit(&self) -> sqlx::Result<Option<SharePermit>> {
        self.shares.enter().await.map_err(|exhausted| sqlx::Error::Io(io::Error::other(exhausted)))
    }

    /// Returns a connection of its own for one loop. Its commits wake the readers, too.
    pub fn dedicated_connection(&self) -> DedicatedConnection {
        DedicatedConnection::with_readers(self.pool.clone(), self.readers.clone())
    }

    /// Returns the pool, for work that posts nothing.
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

/// The shares of the callers in a pool: half of its connections, for which a request waits as long as for one of the pool.
fn shares_of(pool: &PgPool) -> Arc<CallerShares> {
    let options = pool.options();
    let permits = (options.get_max_connections() as usize).div_ceil(2);
    Arc::new(CallerShares::new(permits, options.get_acquire_timeout()))
}

/// A connection of the pool. It returns to the pool when it is dropped, and its permit to the caller.
#[derive(Debug)]
pub struct DatabaseConnection {
    connection: PoolConnection<Postgres>,
    _permit: Option<SharePermit>,
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
    _permit: Option<SharePermit>,
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

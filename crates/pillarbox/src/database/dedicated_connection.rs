//! A connection that one loop reserves for itself.
//!
//! A pool returns its connections in turn and tests each before and after its use. For a loop that queries or commits
//! hundreds of times a second these are two more round trips each time, and each time another PostgreSQL process with
//! cold plans and caches.

use std::time::{Duration, Instant};

use runtime::worker::Wake;
use sqlx::{Connection, PgConnection, PgPool};
use tokio::sync::{Mutex, MutexGuard};

use super::step::ping_connection;
use super::transaction::DatabaseTransaction;

/// A connection that was used this recently is not tested before its next use.
const FRESH: Duration = Duration::from_secs(1);

/// A connection that only one loop uses. It is opened at its first use, and again after it was lost.
#[derive(Debug)]
pub struct DedicatedConnection {
    pool: PgPool,
    slot: Mutex<Slot>,
    /// The readers of the log, woken by each commit.
    readers: Wake,
}

/// The idle connection and the time of its last use.
type Slot = Option<(PgConnection, Instant)>;

/// The connection while it is in use. If it is dropped without [`ConnectionGuard::release`], the connection is closed.
#[derive(Debug)]
pub struct ConnectionGuard<'o> {
    connection: PgConnection,
    slot: MutexGuard<'o, Slot>,
    readers: &'o Wake,
}

impl DedicatedConnection {
    pub(super) fn with_readers(pool: PgPool, readers: Wake) -> DedicatedConnection {
        DedicatedConnection { pool, slot: Mutex::default(), readers }
    }

    /// Returns the connection, and opens one if there is none. Fails if none can be opened.
    pub async fn acquire(&self) -> sqlx::Result<ConnectionGuard<'_>> {
        let mut slot = self.slot.lock().await;
        let idle = match slot.take() {
            Some((connection, used_at)) if used_at.elapsed() < FRESH => Some(connection),
            Some((mut connection, _)) => ping_connection(&mut connection).await.ok().map(|()| connection),
            None => None,
        };
        let connection = match idle {
            Some(connection) => connection,
            None => self.pool.acquire().await?.detach(),
        };
        Ok(ConnectionGuard { connection, slot, readers: &self.readers })
    }
}

impl ConnectionGuard<'_> {
    /// Returns the connection.
    pub fn connection(&mut self) -> &mut PgConnection {
        &mut self.connection
    }

    /// Begins a transaction.
    pub async fn begin(&mut self) -> sqlx::Result<DatabaseTransaction<'_>> {
        Ok(DatabaseTransaction::new(self.connection.begin().await?, self.readers))
    }

    /// Wakes the readers of the log after a statement that was its own transaction.
    pub(crate) fn wake_readers(&self) {
        self.readers.wake();
    }

    /// Returns the connection for the next use. After an error it is tested first, which also rolls back an open
    /// transaction; a lost connection is closed.
    pub async fn release<T, E>(mut self, result: &Result<T, E>) {
        if result.is_ok() || ping_connection(&mut self.connection).await.is_ok() {
            *self.slot = Some((self.connection, Instant::now()));
        }
    }
}

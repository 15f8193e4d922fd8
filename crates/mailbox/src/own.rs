//! A connection that one loop has for itself.
//!
//! A pool hands its connections out in turn, and tries each before and after its use. For a loop that asks or commits hundreds
//! of times a second that is two more round trips each time, and each time another process of PostgreSQL, which has its plans
//! and its caches cold.

use std::time::{Duration, Instant};

use sqlx::{Connection, PgConnection, PgPool, Postgres, Transaction};
use tokio::sync::{Mutex, MutexGuard};

/// What was used so short a time ago is not tried first.
const FRESH: Duration = Duration::from_secs(1);

/// It is made when it is first used, as those of the pool are, and again when it was lost.
#[derive(Debug)]
pub struct OwnConnection {
    pool: PgPool,
    /// And when it was last used.
    kept: Mutex<Option<(PgConnection, Instant)>>,
}

/// The connection in use.
#[derive(Debug)]
pub struct Held<'o> {
    connection: PgConnection,
    place: MutexGuard<'o, Option<(PgConnection, Instant)>>,
}

impl OwnConnection {
    pub fn new(pool: PgPool) -> OwnConnection {
        OwnConnection { pool, kept: Mutex::default() }
    }

    pub async fn hold(&self) -> sqlx::Result<Held<'_>> {
        let mut place = self.kept.lock().await;
        let kept = match place.take() {
            Some((connection, used_at)) if used_at.elapsed() < FRESH => Some(connection),
            Some((mut connection, _)) => connection.ping().await.ok().map(|()| connection),
            None => None,
        };
        let connection = match kept {
            Some(connection) => connection,
            None => self.pool.acquire().await?.detach(),
        };
        Ok(Held { connection, place })
    }
}

impl Held<'_> {
    pub fn connection(&mut self) -> &mut PgConnection {
        &mut self.connection
    }

    pub async fn begin(&mut self) -> sqlx::Result<Transaction<'_, Postgres>> {
        self.connection.begin().await
    }

    /// For the next time. After an error it is tried first: what is not committed is undone then, and a connection that was
    /// lost is closed, as is one that is never put back.
    pub async fn put_back<T, E>(mut self, done: &Result<T, E>) {
        if done.is_ok() || self.connection.ping().await.is_ok() {
            *self.place = Some((self.connection, Instant::now()));
        }
    }
}

//! The counts of unfinished projects: in Redis if one is configured, and in PostgreSQL otherwise. Both behave the same.
//!
//! Counts belong to a token of their project. Counts with another token, or on a server other than the one on which they were
//! initialised, are lost: whatever they say may be too low.

pub(crate) mod postgres;
pub(crate) mod redis;

use std::sync::Arc;

use chrono::{DateTime, Utc};
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::counts::{Changed, Counts, Reading};
use crate::domain::Items;
use crate::error::StateError;

pub(crate) use self::postgres::PostgresState;
pub(crate) use self::redis::RedisState;

/// Where the counts are.
pub(crate) enum State {
    Redis(Arc<RedisState>),
    Postgres(Arc<PostgresState>),
}

/// The counts of one of many projects; None if they are lost. Fails if they cannot be read, although those of others can.
pub(crate) type ReadResult = Result<Option<Reading>, StateError>;

impl State {
    /// Fails if the counts cannot be reached at present.
    pub(crate) async fn check(&self) -> Result<(), StateError> {
        match self {
            State::Redis(redis) => redis.check().await,
            State::Postgres(_) => Ok(()),
        }
    }

    /// Initialises the counts, unless they are initialised with this token already. Returns the server that has them. `tx` holds the
    /// lock of the project, so that nothing is counted before this server is recorded.
    pub(crate) async fn initialise(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        project_id: &str,
        token: Uuid,
        expires_at: DateTime<Utc>,
    ) -> Result<String, StateError> {
        match self {
            State::Redis(redis) => redis.initialise(project_id, token, expires_at).await,
            State::Postgres(_) => postgres::initialise(tx, project_id, token, expires_at).await,
        }
    }

    /// Counts the items that were not counted before. Returns None if the counts are lost.
    pub(crate) async fn mark(&self, counts: &Counts, items: &Items) -> Result<Option<Changed>, StateError> {
        match self {
            State::Redis(redis) => redis.mark(counts, items).await,
            State::Postgres(postgres) => postgres.mark(counts, items).await,
        }
    }

    /// Reads many counts at once, in order. `completes`: whether those at the finish line become DONE, for counts that another
    /// program has changed.
    pub(crate) async fn read(&self, many: &[Counts], completes: bool) -> Result<Vec<ReadResult>, StateError> {
        match self {
            State::Redis(redis) => redis.read(many, completes).await,
            State::Postgres(postgres) => postgres.read(many, completes).await,
        }
    }

    /// Deletes all counts of these projects. Those in PostgreSQL are deleted later, because they can be millions of rows.
    pub(crate) async fn delete(&self, project_ids: &[String]) -> Result<(), StateError> {
        match self {
            State::Redis(redis) => redis.delete(project_ids).await,
            State::Postgres(_) => Ok(()),
        }
    }

    /// Reads the counts of one project.
    pub(crate) async fn read_one(&self, counts: &Counts) -> ReadResult {
        let found = self.read(std::slice::from_ref(counts), false).await?.pop();
        found.unwrap_or(Ok(None))
    }
}

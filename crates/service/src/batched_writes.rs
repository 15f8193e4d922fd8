//! Batched writes: the requests of many callers in one transaction, each with its effect once per `Idempotency-Key`.
//!
//! [`runtime::batch`] is the mechanism that combines concurrent requests; this module is its handler for writes. A service
//! implements [`BatchedWrite`]: it loads state, decides about each request, and saves. [`BatchedWriteHandler`] does the
//! rest: the dedicated connection, the transaction, the responses to repeated requests, and the further attempts when
//! another transaction uses one of the keys.

use std::future::Future;

use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::problem::Problem;
use runtime::batch::{BatchError, BatchHandler};
use sqlx::{Postgres, Transaction};

use crate::idempotency::{Responses, StoreError, StoreResponse, still_running};
use http_kit::database::problem;
use pillarbox::database::{ConnectionGuard, Database, DedicatedConnection};

/// Attempts for a batch whose keys are in use by other transactions.
const ATTEMPTS: u32 = 3;

/// The response to one request, or the problem that rejects it.
pub type WriteResult = Result<StoredResponse, Problem>;

/// The part of a batched write that belongs to a service. No response may contain a secret.
pub trait BatchedWrite: Send + Sync + 'static {
    type Request: Send + Sync + 'static;
    /// What the decisions need and what they change, for one batch.
    type State: Send;

    /// Returns the identity by which a repeat is recognised; None for a request without a key.
    fn identity(request: &Self::Request) -> Option<&RequestIdentity>;

    /// See [`BatchHandler::weight`].
    fn weight(_: &Self::Request) -> usize {
        1
    }

    /// Locks and loads the rows that the requests need. A repeat that waits here for the lock of its first request finds
    /// the response afterwards.
    fn load(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        requests: &[Self::Request],
    ) -> impl Future<Output = Result<Self::State, WriteError>> + Send;

    /// Decides about one request that is not a repeat. Changes the state only.
    fn decide(&self, state: &mut Self::State, request: &Self::Request) -> Decision;

    /// Writes the changes. `new` are the requests that were decided about.
    fn save(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        state: Self::State,
        new: &[&Self::Request],
    ) -> impl Future<Output = Result<(), WriteError>> + Send;

    /// Executes requests without keys with one statement, which is its own transaction. None if that is not possible;
    /// then the batch gets a transaction like any other.
    fn write_unkeyed(
        &self,
        _: &mut ConnectionGuard<'_>,
        _: &[Self::Request],
    ) -> impl Future<Output = Option<Result<Vec<WriteResult>, WriteError>>> + Send {
        async { None }
    }

    /// Called after each commit, for metrics. `new` as in [`BatchedWrite::save`].
    fn committed(&self, _requests: &[Self::Request], _new: &[&Self::Request]) {}
}

/// The decision about one request.
#[derive(Debug)]
pub enum Decision {
    /// The response is stored if it is a success or a final rejection; a repeat gets it again.
    Stored(WriteResult),
    /// The response is not stored, so that a repeat tries again.
    NotStored(WriteResult),
}

/// The reason why a transaction was rolled back.
#[derive(Debug)]
pub enum WriteError {
    /// One of the requests caused the failure.
    Request(Problem),
    /// The failure has another cause.
    Batch(Problem),
    /// Another transaction has stored a response under one of the keys.
    KeyInUse,
}

impl From<sqlx::Error> for WriteError {
    fn from(error: sqlx::Error) -> WriteError {
        WriteError::Batch(problem(&error))
    }
}

impl From<StoreError> for WriteError {
    fn from(error: StoreError) -> WriteError {
        match error {
            StoreError::KeyInUse => WriteError::KeyInUse,
            StoreError::Database(error) => error.into(),
        }
    }
}

/// Runs the batches of a [`BatchedWrite`] over a dedicated connection.
pub struct BatchedWriteHandler<W> {
    db: DedicatedConnection,
    write: W,
}

impl<W: BatchedWrite> BatchedWriteHandler<W> {
    pub fn new(db: &Database, write: W) -> BatchedWriteHandler<W> {
        BatchedWriteHandler { db: db.dedicated_connection(), write }
    }

    async fn write(
        &self,
        db: &mut ConnectionGuard<'_>,
        requests: &[W::Request],
    ) -> Result<Vec<WriteResult>, WriteError> {
        let is_unkeyed = requests.iter().all(|request| W::identity(request).is_none());
        if is_unkeyed && let Some(written) = self.write.write_unkeyed(db, requests).await {
            let responses = written?;
            self.write.committed(requests, &Vec::from_iter(requests));
            return Ok(responses);
        }
        self.write_in_transaction(db, requests).await
    }

    async fn write_in_transaction(
        &self,
        db: &mut ConnectionGuard<'_>,
        requests: &[W::Request],
    ) -> Result<Vec<WriteResult>, WriteError> {
        let mut tx = db.begin().await?;
        let mut state = self.write.load(&mut tx, requests).await?;
        let mut stored = Responses::load(&mut tx, requests.iter().filter_map(W::identity)).await?;
        let (mut responses, mut new) = (Vec::with_capacity(requests.len()), Vec::with_capacity(requests.len()));
        for request in requests {
            let identity = W::identity(request);
            if let Some(repeated) = identity.and_then(|identity| stored.find(identity)) {
                responses.push(repeated);
                continue;
            }
            new.push(request);
            responses.push(match self.write.decide(&mut state, request) {
                Decision::NotStored(response) => response,
                Decision::Stored(response) => {
                    if let Some(identity) = identity {
                        insert(&mut stored, identity, &response);
                    }
                    response
                }
            });
        }
        self.write.save(&mut tx, state, &new).await?;
        stored.save(&mut tx).await?;
        tx.commit().await?;
        self.write.committed(requests, &new);
        Ok(responses)
    }
}

fn insert(stored: &mut Responses, identity: &RequestIdentity, response: &WriteResult) {
    match response {
        Ok(response) => stored.insert(identity, response, StoreResponse::WithBody),
        Err(problem) => stored.insert(identity, &StoredResponse::problem(problem), StoreResponse::WithBody),
    }
}

impl<W: BatchedWrite> BatchHandler for BatchedWriteHandler<W> {
    type Item = W::Request;
    type Output = WriteResult;
    type Error = Problem;

    async fn run(&self, requests: &[W::Request]) -> Result<Vec<WriteResult>, BatchError<Problem>> {
        for _ in 0..ATTEMPTS {
            let mut db = self.db.acquire().await.map_err(|error| BatchError::Whole(problem(&error)))?;
            let written = self.write(&mut db, requests).await;
            db.release(&written).await;
            match written {
                Ok(responses) => return Ok(responses),
                Err(WriteError::Request(problem)) => return Err(BatchError::Item(problem)),
                Err(WriteError::Batch(problem)) => return Err(BatchError::Whole(problem)),
                // The other transaction has committed by now, so the next attempt finds its response.
                Err(WriteError::KeyInUse) => {}
            }
        }
        Err(BatchError::Item(still_running()))
    }

    fn weight(request: &W::Request) -> usize {
        W::weight(request)
    }
}

//! Idempotency keys: a repeated request gets the stored response, and has no second effect.
//!
//! For handlers whose effects are all in the database: key, effect and response are committed in one transaction, so a
//! crash leaves all of them or none. A repeat of a request that is still running waits for it for a short time, and
//! then fails with `still-running`.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use http::StatusCode;
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::problem::Problem;
use sqlx::{Acquire, PgConnection, Postgres, Row, Transaction};

use http_kit::database::problem;
use pillarbox::database::{Database, DatabaseTransaction};

/// How long a repeat waits for the first request.
const WAIT_MAX: Duration = Duration::from_secs(2);
const WAIT_PAUSE: Duration = Duration::from_millis(25);

/// Stores responses for 24 hours, if their ids are unused or expired. `now()` is the database's time at the start of the
/// transaction, so this statement and [`Responses::load`] agree about what has expired.
const INSERT: &str = "insert into pillarbox.idempotency as old (id, fingerprint, status, body, expires_at)
    select *, now() + interval '24 hours' from unnest($1::bytea[], $2::bytea[], $3::smallint[], $4::bytea[])
    on conflict (id) do update set fingerprint = excluded.fingerprint, status = excluded.status,
        body = excluded.body, expires_at = excluded.expires_at
    where old.expires_at <= now()";

/// Whether a successful response is stored with its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreResponse {
    WithBody,
    /// The body contains a secret. In its place, the problem is stored that tells a repeat how to continue
    /// ([`StoredResponse::shown_once`]).
    WithoutBody,
}

pub type Effect<'t> = Pin<Box<dyn Future<Output = Result<StoredResponse, Problem>> + Send + 't>>;

/// Runs `effect` in a transaction, once per identity; without an identity, runs it every time. A final rejection (4xx)
/// is stored like a response, and its effect is rolled back. 401, 429 and 5xx are not stored, so that a repeat tries
/// again.
pub async fn run_once<F>(
    db: &Database,
    identity: Option<&RequestIdentity>,
    store: StoreResponse,
    effect: F,
) -> Result<StoredResponse, Problem>
where
    F: for<'t> FnOnce(&'t mut Transaction<'_, Postgres>) -> Effect<'t> + Send,
{
    let failed = |error: sqlx::Error| problem(&error);
    let Some(identity) = identity else {
        let mut tx = db.begin().await.map_err(failed)?;
        let response = effect(&mut tx).await?;
        tx.commit().await.map_err(failed)?;
        return Ok(response);
    };
    let mut tx = lock_identity(db, identity).await?;
    let mut responses = Responses::load(&mut tx, [identity]).await.map_err(failed)?;
    if let Some(repeated) = responses.find(identity) {
        return repeated;
    }
    let mut step = tx.begin().await.map_err(failed)?;
    let response = match effect(&mut step).await {
        Ok(response) => {
            step.commit().await.map_err(failed)?;
            response
        }
        Err(rejection) if is_final(rejection.status()) => {
            step.rollback().await.map_err(failed)?;
            StoredResponse::problem(&rejection)
        }
        Err(rejection) => return Err(rejection),
    };
    responses.insert(identity, &response, store);
    match responses.save(&mut tx).await {
        Ok(()) => tx.commit().await.map_err(failed)?,
        // A request that is processed in a batch does not lock its identity. It has committed by now.
        Err(StoreError::KeyInUse) => {
            tx.rollback().await.map_err(failed)?;
            let mut connection = db.acquire().await.map_err(failed)?;
            let responses = Responses::load(&mut connection, [identity]).await.map_err(failed)?;
            return responses.find(identity).unwrap_or_else(|| Err(still_running()));
        }
        Err(StoreError::Database(error)) => return Err(problem(&error)),
    }
    Ok(response)
}

/// The stored response to a repeat; None if the request is not a repeat. For work that is done before [`run_once`], and that a
/// repeat must not do again.
pub async fn find_response(
    db: &Database,
    identity: Option<&RequestIdentity>,
) -> Result<Option<StoredResponse>, Problem> {
    let Some(identity) = identity else { return Ok(None) };
    let load = async { Responses::load(&mut *db.acquire().await?, [identity]).await };
    load.await.map_err(|error| problem(&error))?.find(identity).transpose()
}

/// Like [`run_once`], for an effect of many rows that one transaction would lock for too long: runs `step` in transactions of their
/// own, until its response is not [`unfinished`]. The last one stores the response. If a step fails, those before it stay, so a
/// repeat continues.
pub async fn run_in_steps<F>(
    db: &Database,
    identity: Option<&RequestIdentity>,
    store: StoreResponse,
    step: F,
) -> Result<StoredResponse, Problem>
where
    F: for<'t> Fn(&'t mut Transaction<'_, Postgres>) -> Effect<'t> + Send + Sync,
{
    loop {
        let response = run_once(db, identity, store, &step).await?;
        if response.status() != UNFINISHED {
            return Ok(response);
        }
    }
}

/// Neither a success nor a rejection, so it is not stored.
const UNFINISHED: StatusCode = StatusCode::PROCESSING;

/// Returns what a step of [`run_in_steps`] responds if there are more.
pub fn unfinished() -> StoredResponse {
    StoredResponse::empty(UNFINISHED)
}

/// A response as it is stored.
#[derive(Debug)]
struct Stored {
    fingerprint: Vec<u8>,
    status: i16,
    body: Vec<u8>,
}

impl Stored {
    /// Returns the response to a repeat. Fails if the first request was a different one.
    fn repeat(&self, identity: &RequestIdentity) -> Result<StoredResponse, Problem> {
        if self.fingerprint != identity.fingerprint {
            let detail = "this Idempotency-Key was used for another request: use a new key for each new request";
            return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "idempotency-key-reused", detail));
        }
        let status = StatusCode::from_u16(self.status as u16).map_err(|error| Problem::internal(&error))?;
        Ok(StoredResponse::replay(status, self.body.clone()))
    }
}

/// The responses to the requests of one transaction: load them, find those of repeats, insert those of first requests,
/// save. Everything that stores or repeats a response uses it.
///
/// Two transactions may process the same key at once, and both find no response. Then [`Responses::save`] of the second
/// waits for the first and fails; it must be rolled back, and finds the response when it is tried again.
#[derive(Debug, Default)]
pub struct Responses {
    stored: HashMap<[u8; 16], Stored>,
    new: BTreeMap<[u8; 16], Stored>,
}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("another request used the same Idempotency-Key at the same time")]
    KeyInUse,
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

impl Responses {
    /// Loads the stored responses of these identities.
    pub async fn load<'i>(
        db: &mut PgConnection,
        identities: impl IntoIterator<Item = &'i RequestIdentity>,
    ) -> sqlx::Result<Responses> {
        let ids: Vec<&[u8]> = identities.into_iter().map(|identity| identity.id.as_slice()).collect();
        let query = "select id, fingerprint, status, body from pillarbox.idempotency
                     where id = any($1) and expires_at > now()";
        let rows = sqlx::query(query).bind(ids).fetch_all(db).await?;
        let mut stored = HashMap::with_capacity(rows.len());
        for row in rows {
            let id: Vec<u8> = row.try_get("id")?;
            let response = Stored {
                fingerprint: row.try_get("fingerprint")?,
                status: row.try_get("status")?,
                body: row.try_get("body")?,
            };
            stored.extend(id.try_into().ok().map(|id| (id, response)));
        }
        Ok(Responses { stored, new: BTreeMap::new() })
    }

    /// Returns the response to a repeat; None if the request is not a repeat. The request that it repeats may be an
    /// earlier one of the same transaction.
    pub fn find(&self, identity: &RequestIdentity) -> Option<Result<StoredResponse, Problem>> {
        let stored = self.stored.get(&identity.id).or_else(|| self.new.get(&identity.id))?;
        Some(stored.repeat(identity))
    }

    /// Adds the response to a first request. A rejection that is not final is ignored, so that a repeat tries again.
    pub fn insert(&mut self, identity: &RequestIdentity, response: &StoredResponse, store: StoreResponse) {
        let is_success = response.status().is_success();
        if !is_success && !is_final(response.status()) {
            return;
        }
        let has_secret = store == StoreResponse::WithoutBody && is_success;
        let for_repeats = has_secret.then(|| StoredResponse::problem(&response.already_answered()));
        let response = for_repeats.as_ref().unwrap_or(response);
        let stored = Stored {
            fingerprint: identity.fingerprint.to_vec(),
            status: response.status().as_u16() as i16,
            body: response.body().to_vec(),
        };
        self.new.insert(identity.id, stored);
    }

    /// Saves the new responses. Fails with [`StoreError::KeyInUse`] if another transaction stored one under the same
    /// key.
    pub async fn save(self, tx: &mut Transaction<'_, Postgres>) -> Result<(), StoreError> {
        if self.new.is_empty() {
            return Ok(());
        }
        // Sorted by id, so that two transactions cannot deadlock.
        let rows = || self.new.values();
        let done = sqlx::query(INSERT)
            .bind(self.new.keys().map(<[u8; 16]>::as_slice).collect::<Vec<_>>())
            .bind(rows().map(|response| response.fingerprint.as_slice()).collect::<Vec<_>>())
            .bind(rows().map(|response| response.status).collect::<Vec<_>>())
            .bind(rows().map(|response| response.body.as_slice()).collect::<Vec<_>>())
            .execute(&mut **tx)
            .await?;
        if done.rows_affected() == self.new.len() as u64 { Ok(()) } else { Err(StoreError::KeyInUse) }
    }
}

/// Whether a repeat of the request would be rejected in the same way.
fn is_final(status: StatusCode) -> bool {
    status.is_client_error() && status != StatusCode::UNAUTHORIZED && status != StatusCode::TOO_MANY_REQUESTS
}

/// Begins a transaction that holds the lock of the identity. The previous holder has ended by then, so its row is
/// visible.
async fn lock_identity(db: &Database, identity: &RequestIdentity) -> Result<DatabaseTransaction<'static>, Problem> {
    let [a, b, c, d, e, f, g, h, ..] = identity.id;
    let lock = i64::from_be_bytes([a, b, c, d, e, f, g, h]);
    let started = tokio::time::Instant::now();
    loop {
        let mut tx = db.begin().await.map_err(|error| problem(&error))?;
        let locked = sqlx::query_scalar("select pg_try_advisory_xact_lock($1)").bind(lock).fetch_one(&mut **tx).await;
        if locked.map_err(|error| problem(&error))? {
            return Ok(tx);
        }
        // The connection is returned while waiting: many repeats must not starve the first request.
        tx.rollback().await.map_err(|error| problem(&error))?;
        if started.elapsed() > WAIT_MAX {
            return Err(still_running());
        }
        tokio::time::sleep(WAIT_PAUSE).await;
    }
}

/// The rejection of a repeat whose first request has no response yet.
pub(crate) fn still_running() -> Problem {
    let detail = "the first request with this Idempotency-Key is still running";
    Problem::conflict("still-running", detail).retry_after(Duration::from_secs(1))
}

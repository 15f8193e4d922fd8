//! Idempotency keys: a repeated request gets the stored response, and has no second effect.
//!
//! For handlers whose effects are all in the database: key, effect and response are committed in one transaction, so a
//! crash leaves all of them or none. A repeat of a request that is still running waits for it for a short time, and
//! then fails with `still-running`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use chrono::{DateTime, Utc};
use http::StatusCode;
use kit::idempotency::{RequestIdentity, StoredResponse};
use kit::problem::Problem;
use sqlx::{Acquire, PgConnection, Postgres, Row, Transaction};

use crate::database::{Database, DatabaseTransaction, problem};

/// How long responses are stored.
const STORED_FOR: chrono::Duration = chrono::Duration::hours(24);
/// How long a repeat waits for the first request.
const WAIT_MAX: Duration = Duration::from_secs(2);
const WAIT_PAUSE: Duration = Duration::from_millis(25);

/// Stores responses whose ids are unused or expired. Parameters: ids, fingerprints, statuses, bodies, expiry, now.
const INSERT: &str = "insert into pillarbox.idempotency as old (id, fingerprint, status, body, expires_at)
    select *, $5 from unnest($1::bytea[], $2::bytea[], $3::smallint[], $4::bytea[])
    on conflict (id) do update set fingerprint = excluded.fingerprint, status = excluded.status,
        body = excluded.body, expires_at = excluded.expires_at
    where old.expires_at <= $6";

/// Whether a successful response is stored with its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreResponse {
    WithBody,
    /// The body contains a secret. Only the status is stored, and a repeat is rejected.
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
    now: DateTime<Utc>,
    effect: F,
) -> Result<StoredResponse, Problem>
where
    F: for<'t> FnOnce(&'t mut Transaction<'_, Postgres>) -> Effect<'t> + Send,
{
    let failed = |error: sqlx::Error| problem(&error);
    let mut tx = match identity {
        None => db.begin().await.map_err(failed)?,
        Some(identity) => lock_identity(db, identity).await?,
    };
    if let Some(identity) = identity
        && let Some(response) = load(&mut tx, identity, now).await?
    {
        return Ok(response);
    }
    let mut step = tx.begin().await.map_err(failed)?;
    let response = match effect(&mut step).await {
        Ok(response) => {
            step.commit().await.map_err(failed)?;
            response
        }
        Err(rejection) => {
            step.rollback().await.map_err(failed)?;
            if identity.is_none() || !is_final(rejection.status()) {
                return Err(rejection);
            }
            StoredResponse::problem(&rejection)
        }
    };
    if let Some(identity) = identity {
        let body = (store == StoreResponse::WithBody || !response.status().is_success()).then_some(response.body());
        save(&mut tx, identity, response.status(), body, now + STORED_FOR).await.map_err(failed)?;
    }
    tx.commit().await.map_err(failed)?;
    Ok(response)
}

/// Fingerprint, status and body of a stored response.
type Stored = (Vec<u8>, i16, Option<Vec<u8>>);

/// The result of claiming the identity of one request among many.
#[derive(Debug)]
pub enum Claim {
    /// The first request: its response is stored, and its effect must be in the same transaction.
    First,
    /// A repeat, with the response to the first request.
    Repeat(StoredResponse),
    Rejected(Problem),
}

/// Stores the responses of many requests at once, each successful and without a secret. Returns a claim for each
/// request; an identity can also be claimed by an earlier request of the same call. Waits for other transactions that
/// claim the same identity.
pub async fn claim_all(
    tx: &mut Transaction<'_, Postgres>,
    requests: &[(RequestIdentity, StoredResponse)],
    now: DateTime<Utc>,
) -> Result<Vec<Claim>, Problem> {
    let mut first: BTreeMap<[u8; 16], usize> = BTreeMap::new();
    for (at, (identity, _)) in requests.iter().enumerate() {
        first.entry(identity.id).or_insert(at);
    }
    // Sorted by id, so that two transactions cannot deadlock.
    let rows: Vec<&(RequestIdentity, StoredResponse)> = first.values().map(|at| &requests[*at]).collect();
    let stored: Vec<Vec<u8>> = sqlx::query_scalar(sqlx::AssertSqlSafe(format!("{INSERT} returning id")))
        .bind(rows.iter().map(|(identity, _)| identity.id.as_slice()).collect::<Vec<_>>())
        .bind(rows.iter().map(|(identity, _)| identity.fingerprint.as_slice()).collect::<Vec<_>>())
        .bind(rows.iter().map(|(_, response)| response.status().as_u16() as i16).collect::<Vec<_>>())
        .bind(rows.iter().map(|(_, response)| response.body()).collect::<Vec<_>>())
        .bind(now + STORED_FOR)
        .bind(now)
        .fetch_all(&mut **tx)
        .await
        .map_err(|error| problem(&error))?;
    let stored: HashSet<Vec<u8>> = stored.into_iter().collect();
    let mut claims = Vec::with_capacity(requests.len());
    for (at, (identity, _)) in requests.iter().enumerate() {
        if first.get(&identity.id) == Some(&at) && stored.contains(identity.id.as_slice()) {
            claims.push(Claim::First);
            continue;
        }
        claims.push(match load(tx, identity, now).await {
            Ok(Some(response)) => Claim::Repeat(response),
            Ok(None) => Claim::Rejected(Problem::conflict("still-running", "try again")),
            Err(problem) if problem.status().is_server_error() => return Err(problem),
            Err(problem) => Claim::Rejected(problem),
        });
    }
    Ok(claims)
}

/// The responses to many requests in one transaction, if each is known only after its effect is decided: load, decide,
/// save.
///
/// The caller must hold a lock that a repeat of the same request needs, too. If one key is used for two different
/// requests at once, both may find no response; then [`Responses::save`] fails, and the transaction must not be
/// committed.
#[derive(Debug, Default)]
pub struct Responses {
    stored: HashMap<[u8; 16], Stored>,
    new: BTreeMap<[u8; 16], (RequestIdentity, StatusCode, Vec<u8>)>,
}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("another request used the same Idempotency-Key meanwhile")]
    KeyInUse,
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

impl Responses {
    /// Loads the stored responses of these identities.
    pub async fn load<'i>(
        tx: &mut Transaction<'_, Postgres>,
        identities: impl Iterator<Item = &'i RequestIdentity>,
        now: DateTime<Utc>,
    ) -> sqlx::Result<Responses> {
        let ids: Vec<&[u8]> = identities.map(|identity| identity.id.as_slice()).collect();
        let query = "select id, fingerprint, status, body from pillarbox.idempotency
                     where id = any($1) and expires_at > $2";
        let rows = sqlx::query(query).bind(ids).bind(now).fetch_all(&mut **tx).await?;
        let mut stored = HashMap::with_capacity(rows.len());
        for row in rows {
            let id: Vec<u8> = row.try_get("id")?;
            let response = (row.try_get("fingerprint")?, row.try_get("status")?, row.try_get("body")?);
            stored.extend(id.try_into().ok().map(|id| (id, response)));
        }
        Ok(Responses { stored, new: BTreeMap::new() })
    }

    /// Returns the response to a repeat; None if the request is not a repeat.
    pub fn find(&self, identity: &RequestIdentity) -> Option<Result<StoredResponse, Problem>> {
        let new = || {
            let (first, status, body) = self.new.get(&identity.id)?;
            Some((first.fingerprint.to_vec(), status.as_u16() as i16, Some(body.clone())))
        };
        let stored = self.stored.get(&identity.id).cloned().or_else(new)?;
        Some(repeat_response(stored, identity))
    }

    /// Adds the response to a first request. A rejection that is not final is ignored, so that a repeat tries again.
    pub fn insert(&mut self, identity: &RequestIdentity, response: &StoredResponse) {
        if response.status().is_success() || is_final(response.status()) {
            self.new.insert(identity.id, (identity.clone(), response.status(), response.body().to_vec()));
        }
    }

    /// Saves the new responses. Fails with [`StoreError::KeyInUse`] if another transaction stored one under the same
    /// key.
    pub async fn save(self, tx: &mut Transaction<'_, Postgres>, now: DateTime<Utc>) -> Result<(), StoreError> {
        if self.new.is_empty() {
            return Ok(());
        }
        // Sorted by id, so that two transactions cannot deadlock.
        let rows = || self.new.values();
        let done = sqlx::query(INSERT)
            .bind(rows().map(|(identity, _, _)| identity.id.as_slice()).collect::<Vec<_>>())
            .bind(rows().map(|(identity, _, _)| identity.fingerprint.as_slice()).collect::<Vec<_>>())
            .bind(rows().map(|(_, status, _)| status.as_u16() as i16).collect::<Vec<_>>())
            .bind(rows().map(|(_, _, body)| body.as_slice()).collect::<Vec<_>>())
            .bind(now + STORED_FOR)
            .bind(now)
            .execute(&mut **tx)
            .await?;
        match done.rows_affected() == self.new.len() as u64 {
            true => Ok(()),
            false => Err(StoreError::KeyInUse),
        }
    }
}

/// Deletes up to `limit` expired responses. Returns how many.
pub async fn delete_expired(db: &mut PgConnection, now: DateTime<Utc>, limit: i64) -> sqlx::Result<u64> {
    let done = sqlx::query(
        "delete from pillarbox.idempotency where id in
             (select id from pillarbox.idempotency where expires_at <= $1 order by expires_at limit $2)",
    )
    .bind(now)
    .bind(limit)
    .execute(db)
    .await?;
    Ok(done.rows_affected())
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
            let detail = "the first request with this Idempotency-Key is still running";
            return Err(Problem::conflict("still-running", detail).retry_after(Duration::from_secs(1)));
        }
        tokio::time::sleep(WAIT_PAUSE).await;
    }
}

/// Loads the response to the first request; None if there was none. Fails if the key was used for another request.
async fn load(
    db: &mut PgConnection,
    identity: &RequestIdentity,
    now: DateTime<Utc>,
) -> Result<Option<StoredResponse>, Problem> {
    let query = "select fingerprint, status, body from pillarbox.idempotency where id = $1 and expires_at > $2";
    let found = sqlx::query(query).bind(identity.id.as_slice()).bind(now).fetch_optional(db).await;
    let Some(row) = found.map_err(|error| problem(&error))? else { return Ok(None) };
    let read =
        || -> sqlx::Result<Stored> { Ok((row.try_get("fingerprint")?, row.try_get("status")?, row.try_get("body")?)) };
    let stored = read().map_err(|error| problem(&error))?;
    repeat_response(stored, identity).map(Some)
}

/// Returns the response to a repeat. Fails if the first request was a different one or its body was not stored.
fn repeat_response((fingerprint, status, body): Stored, identity: &RequestIdentity) -> Result<StoredResponse, Problem> {
    if fingerprint != identity.fingerprint {
        let detail = "this Idempotency-Key was used for another request: use a new key for each new request";
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "idempotency-key-reused", detail));
    }
    let Some(body) = body else {
        let detail = "the first request succeeded; its response contained a secret and was not stored";
        return Err(Problem::conflict("already-answered", detail));
    };
    let status = StatusCode::from_u16(status as u16).map_err(|error| Problem::internal(&error))?;
    Ok(StoredResponse::replay(status, body))
}

async fn save(
    db: &mut PgConnection,
    identity: &RequestIdentity,
    status: StatusCode,
    body: Option<&[u8]>,
    expires_at: DateTime<Utc>,
) -> sqlx::Result<()> {
    // An expired row may not have been deleted yet.
    sqlx::query(
        "insert into pillarbox.idempotency (id, fingerprint, status, body, expires_at) values ($1, $2, $3, $4, $5)
         on conflict (id) do update set fingerprint = excluded.fingerprint, status = excluded.status,
             body = excluded.body, expires_at = excluded.expires_at",
    )
    .bind(identity.id.as_slice())
    .bind(identity.fingerprint.as_slice())
    .bind(status.as_u16() as i16)
    .bind(body)
    .bind(expires_at)
    .execute(db)
    .await
    .map(drop)
}

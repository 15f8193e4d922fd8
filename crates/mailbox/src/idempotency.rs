//! A repeated request is answered again, and does nothing more.
//!
//! For handlers that touch only the database: key, effect and answer commit in one transaction, so a crash leaves
//! nothing half done. Who repeats a request that is still running waits for it; one that takes longer is told to come
//! back.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use chrono::{DateTime, Utc};
use http::StatusCode;
use kit::idempotency::{Answer, Identity};
use kit::problem::Problem;
use sqlx::{Acquire, PgConnection, PgPool, Postgres, Row, Transaction};

use crate::database::problem;

const KEPT: chrono::Duration = chrono::Duration::hours(24);
const WAIT_MAX: Duration = Duration::from_secs(2);
const WAIT_PAUSE: Duration = Duration::from_millis(25);

/// Keeps answers whose ids are free: ids, fingerprints, statuses, bodies; until when; now.
const ENTER: &str = "insert into pillarbox.idempotency as old (id, fingerprint, status, body, expires_at)
    select *, $5 from unnest($1::bytea[], $2::bytea[], $3::smallint[], $4::bytea[])
    on conflict (id) do update set fingerprint = excluded.fingerprint, status = excluded.status,
        body = excluded.body, expires_at = excluded.expires_at
    where old.expires_at <= $6";

/// Whether an answer may be kept to be given again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    Answer,
    /// It carries a secret: only that it was given is kept, and a repeat is refused.
    NoAnswer,
}

pub type Effect<'t> = Pin<Box<dyn Future<Output = Result<Answer, Problem>> + Send + 't>>;

/// Runs `effect` in a transaction, once per identity; without one, just runs it. A settled refusal (4xx) is kept like an
/// answer, with its effect undone; 401, 429 and 5xx are not, so that a repeat tries again.
pub async fn once<F>(
    db: &PgPool,
    identity: Option<&Identity>,
    keep: Keep,
    now: DateTime<Utc>,
    effect: F,
) -> Result<Answer, Problem>
where
    F: for<'t> FnOnce(&'t mut Transaction<'_, Postgres>) -> Effect<'t> + Send,
{
    let failed = |error: sqlx::Error| problem(&error);
    let mut tx = match identity {
        None => db.begin().await.map_err(failed)?,
        Some(identity) => claim(db, identity).await?,
    };
    if let Some(identity) = identity
        && let Some(answer) = answered(&mut tx, identity, now).await?
    {
        return Ok(answer);
    }
    let mut step = tx.begin().await.map_err(failed)?;
    let answer = match effect(&mut step).await {
        Ok(answer) => {
            step.commit().await.map_err(failed)?;
            answer
        }
        Err(refused) => {
            step.rollback().await.map_err(failed)?;
            if identity.is_none() || !is_settled(refused.status()) {
                return Err(refused);
            }
            Answer::refusal(&refused)
        }
    };
    if let Some(identity) = identity {
        let body = (keep == Keep::Answer || !answer.status().is_success()).then_some(answer.body());
        store(&mut tx, identity, answer.status(), body, now + KEPT).await.map_err(failed)?;
    }
    tx.commit().await.map_err(failed)?;
    Ok(answer)
}

/// Fingerprint, status and body of what was answered.
type Kept = (Vec<u8>, i16, Option<Vec<u8>>);

/// What came of a request among many.
#[derive(Debug)]
pub enum Entered {
    /// It is the first: its answer is kept, and its effect must be in the same transaction.
    First,
    /// It was answered before.
    Again(Answer),
    Refused(Problem),
}

/// Keeps the answers of many requests at once, each successful and without a secret. One whose identity is taken, also by
/// an earlier one among these, is told so. Who is working on the same identity is waited for.
pub async fn enter_all(
    tx: &mut Transaction<'_, Postgres>,
    requests: &[(Identity, Answer)],
    now: DateTime<Utc>,
) -> Result<Vec<Entered>, Problem> {
    let mut first: BTreeMap<[u8; 16], usize> = BTreeMap::new();
    for (at, (identity, _)) in requests.iter().enumerate() {
        first.entry(identity.id).or_insert(at);
    }
    // In one order everywhere, so that two transactions wait for each other in one direction only.
    let rows: Vec<&(Identity, Answer)> = first.values().map(|at| &requests[*at]).collect();
    let kept: Vec<Vec<u8>> = sqlx::query_scalar(sqlx::AssertSqlSafe(format!("{ENTER} returning id")))
        .bind(rows.iter().map(|(identity, _)| identity.id.as_slice()).collect::<Vec<_>>())
        .bind(rows.iter().map(|(identity, _)| identity.fingerprint.as_slice()).collect::<Vec<_>>())
        .bind(rows.iter().map(|(_, answer)| answer.status().as_u16() as i16).collect::<Vec<_>>())
        .bind(rows.iter().map(|(_, answer)| answer.body()).collect::<Vec<_>>())
        .bind(now + KEPT)
        .bind(now)
        .fetch_all(&mut **tx)
        .await
        .map_err(|error| problem(&error))?;
    let kept: HashSet<Vec<u8>> = kept.into_iter().collect();
    let mut entered = Vec::with_capacity(requests.len());
    for (at, (identity, _)) in requests.iter().enumerate() {
        if first.get(&identity.id) == Some(&at) && kept.contains(identity.id.as_slice()) {
            entered.push(Entered::First);
            continue;
        }
        entered.push(match answered(tx, identity, now).await {
            Ok(Some(answer)) => Entered::Again(answer),
            Ok(None) => Entered::Refused(Problem::conflict("still-running", "try again")),
            Err(refused) if refused.status().is_server_error() => return Err(refused),
            Err(refused) => Entered::Refused(refused),
        });
    }
    Ok(entered)
}

/// The answers to many requests in one transaction, each known only when its effect is decided: look, decide, keep.
///
/// Who looks must hold a lock that a repeat of the same request needs, too. A key that is used for two different requests at
/// once may pass the look; then [`Answers::keep`] says so, and the transaction must not be committed.
#[derive(Debug, Default)]
pub struct Answers {
    known: HashMap<[u8; 16], Kept>,
    new: BTreeMap<[u8; 16], (Identity, StatusCode, Vec<u8>)>,
}

#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    #[error("another request was answered under the same Idempotency-Key meanwhile")]
    Taken,
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

impl Answers {
    pub async fn look<'i>(
        tx: &mut Transaction<'_, Postgres>,
        identities: impl Iterator<Item = &'i Identity>,
        now: DateTime<Utc>,
    ) -> sqlx::Result<Answers> {
        let ids: Vec<&[u8]> = identities.map(|identity| identity.id.as_slice()).collect();
        let query = "select id, fingerprint, status, body from pillarbox.idempotency
                     where id = any($1) and expires_at > $2";
        let rows = sqlx::query(query).bind(ids).bind(now).fetch_all(&mut **tx).await?;
        let mut known = HashMap::with_capacity(rows.len());
        for row in rows {
            let id: Vec<u8> = row.try_get("id")?;
            let kept = (row.try_get("fingerprint")?, row.try_get("status")?, row.try_get("body")?);
            known.extend(id.try_into().ok().map(|id| (id, kept)));
        }
        Ok(Answers { known, new: BTreeMap::new() })
    }

    /// What a repeat is told; None: it is none.
    pub fn given(&self, identity: &Identity) -> Option<Result<Answer, Problem>> {
        let new = || {
            let (first, status, body) = self.new.get(&identity.id)?;
            Some((first.fingerprint.to_vec(), status.as_u16() as i16, Some(body.clone())))
        };
        let kept = self.known.get(&identity.id).cloned().or_else(new)?;
        Some(again(kept, identity))
    }

    /// A refusal that is not settled is not kept: a repeat tries again.
    pub fn give(&mut self, identity: &Identity, answer: &Answer) {
        if answer.status().is_success() || is_settled(answer.status()) {
            self.new.insert(identity.id, (identity.clone(), answer.status(), answer.body().to_vec()));
        }
    }

    pub async fn keep(self, tx: &mut Transaction<'_, Postgres>, now: DateTime<Utc>) -> Result<(), KeepError> {
        if self.new.is_empty() {
            return Ok(());
        }
        // In the order of the ids, as everywhere, so that two transactions wait for each other in one direction only.
        let rows = || self.new.values();
        let done = sqlx::query(ENTER)
            .bind(rows().map(|(identity, _, _)| identity.id.as_slice()).collect::<Vec<_>>())
            .bind(rows().map(|(identity, _, _)| identity.fingerprint.as_slice()).collect::<Vec<_>>())
            .bind(rows().map(|(_, status, _)| status.as_u16() as i16).collect::<Vec<_>>())
            .bind(rows().map(|(_, _, body)| body.as_slice()).collect::<Vec<_>>())
            .bind(now + KEPT)
            .bind(now)
            .execute(&mut **tx)
            .await?;
        match done.rows_affected() == self.new.len() as u64 {
            true => Ok(()),
            false => Err(KeepError::Taken),
        }
    }
}

/// Forgets what has expired; returns how many.
pub async fn forget_expired(db: &mut PgConnection, now: DateTime<Utc>, limit: i64) -> sqlx::Result<u64> {
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

fn is_settled(status: StatusCode) -> bool {
    status.is_client_error() && status != StatusCode::UNAUTHORIZED && status != StatusCode::TOO_MANY_REQUESTS
}

/// A transaction that holds the identity's lock. The one that held it before has ended then, so its row is visible.
async fn claim(db: &PgPool, identity: &Identity) -> Result<Transaction<'static, Postgres>, Problem> {
    let [a, b, c, d, e, f, g, h, ..] = identity.id;
    let lock = i64::from_be_bytes([a, b, c, d, e, f, g, h]);
    let started = tokio::time::Instant::now();
    loop {
        let mut tx = db.begin().await.map_err(|error| problem(&error))?;
        let locked = sqlx::query_scalar("select pg_try_advisory_xact_lock($1)").bind(lock).fetch_one(&mut *tx).await;
        if locked.map_err(|error| problem(&error))? {
            return Ok(tx);
        }
        // No connection is held while waiting: many repeats must not starve the one that works.
        tx.rollback().await.map_err(|error| problem(&error))?;
        if started.elapsed() > WAIT_MAX {
            let detail = "the first request with this Idempotency-Key is still running";
            return Err(Problem::conflict("still-running", detail).retry_after(Duration::from_secs(1)));
        }
        tokio::time::sleep(WAIT_PAUSE).await;
    }
}

/// What the first request was answered.
async fn answered(db: &mut PgConnection, identity: &Identity, now: DateTime<Utc>) -> Result<Option<Answer>, Problem> {
    let query = "select fingerprint, status, body from pillarbox.idempotency where id = $1 and expires_at > $2";
    let found = sqlx::query(query).bind(identity.id.as_slice()).bind(now).fetch_optional(db).await;
    let Some(row) = found.map_err(|error| problem(&error))? else { return Ok(None) };
    let read =
        || -> sqlx::Result<Kept> { Ok((row.try_get("fingerprint")?, row.try_get("status")?, row.try_get("body")?)) };
    let kept = read().map_err(|error| problem(&error))?;
    again(kept, identity).map(Some)
}

/// The answer to a repeat of a request that was answered so.
fn again((fingerprint, status, body): Kept, identity: &Identity) -> Result<Answer, Problem> {
    if fingerprint != identity.fingerprint {
        let detail = "this Idempotency-Key was used for another request: send a new one with each new request";
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "idempotency-key-reused", detail));
    }
    let Some(body) = body else {
        let detail = "this was done and answered; the answer carried a secret and is not kept";
        return Err(Problem::conflict("already-answered", detail));
    };
    let status = StatusCode::from_u16(status as u16).map_err(|error| Problem::internal(&error))?;
    Ok(Answer::again(status, body))
}

async fn store(
    db: &mut PgConnection,
    identity: &Identity,
    status: StatusCode,
    body: Option<&[u8]>,
    expires_at: DateTime<Utc>,
) -> sqlx::Result<()> {
    // There is a row already if it has expired and is not yet forgotten.
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

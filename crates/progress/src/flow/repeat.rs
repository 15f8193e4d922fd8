//! Repeated requests that change counts. A rejection is not stored: the reason, such as lost counts, may no longer apply to a repeat.

use http_kit::database::problem;
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::problem::Problem;
use pillarbox::database::Database;
use service::idempotency::{Effect, Responses, StoreError, StoreResponse};
use sqlx::{Postgres, Transaction};

use crate::error::Error;

fn failed(error: sqlx::Error) -> Problem {
    problem(&error)
}

/// Returns the stored response of a repeat; runs `effect` otherwise, and stores its response afterwards. For effects outside of the
/// database: they must be idempotent by themselves, because a repeat after a crash in between has them again.
pub(crate) async fn answer_once(
    db: &Database,
    identity: Option<&RequestIdentity>,
    effect: impl Future<Output = Result<StoredResponse, Error>>,
) -> Result<StoredResponse, Problem> {
    let Some(identity) = identity else { return Ok(effect.await?) };
    if let Some(repeated) = stored(db, identity).await? {
        return repeated;
    }
    let response = effect.await?;
    let mut tx = db.begin().await.map_err(failed)?;
    match save(&mut tx, identity, &response).await {
        Ok(()) => tx.commit().await.map_err(failed)?,
        Err(StoreError::KeyInUse) => {
            tx.rollback().await.map_err(failed)?;
            // A repeat at the same time was faster: both get its response.
            return stored(db, identity).await?.unwrap_or(Ok(response));
        }
        Err(StoreError::Database(error)) => return Err(problem(&error)),
    }
    Ok(response)
}

/// The same for effects in the database: they commit together with the response.
pub(crate) async fn answer_in_transaction<F>(
    db: &Database,
    identity: Option<&RequestIdentity>,
    effect: F,
) -> Result<StoredResponse, Problem>
where
    F: for<'t> FnOnce(&'t mut Transaction<'_, Postgres>) -> Effect<'t> + Send,
{
    if let Some(identity) = identity
        && let Some(repeated) = stored(db, identity).await?
    {
        return repeated;
    }
    let mut tx = db.begin().await.map_err(failed)?;
    let response = effect(&mut tx).await?;
    if let Some(identity) = identity {
        match save(&mut tx, identity, &response).await {
            Ok(()) => {}
            Err(StoreError::KeyInUse) => {
                tx.rollback().await.map_err(failed)?;
                let in_use = || Err(Error::Contended.into());
                return stored(db, identity).await?.unwrap_or_else(in_use);
            }
            Err(StoreError::Database(error)) => return Err(problem(&error)),
        }
    }
    tx.commit().await.map_err(failed)?;
    Ok(response)
}

/// The stored response, if the request is a repeat.
async fn stored(db: &Database, identity: &RequestIdentity) -> Result<Option<Result<StoredResponse, Problem>>, Problem> {
    let mut connection = db.acquire().await.map_err(failed)?;
    let responses = Responses::load(&mut connection, [identity]).await.map_err(failed)?;
    Ok(responses.find(identity))
}

async fn save(
    tx: &mut Transaction<'_, Postgres>,
    identity: &RequestIdentity,
    response: &StoredResponse,
) -> Result<(), StoreError> {
    let mut responses = Responses::default();
    responses.insert(identity, response, StoreResponse::WithBody);
    responses.save(tx).await
}

//! Replays for the operator's command line, which has a connection to the database and no server: the same requests, checks
//! and representations as over HTTP.

use kit::auth::Tenant;
use kit::problem::FieldError;
use mailbox::database::time;
use serde_json::{Value, json};
use sqlx::PgPool;
use uuid::Uuid;

use crate::HubSettings;
use crate::domain::ReplayAction;
use crate::error::Error;
use crate::event_selection::EventSelection;
use crate::flow::replay;
use crate::replay::ReplayOutcomes;
use crate::replay_fields::ReplayFields;
use crate::store;
use crate::view::ReplayView;

/// Creates a replay from the body of a `POST /hub/v1/replays`, or counts for a dry run. Returns the body of the response.
/// Fails with the reason.
pub async fn request_replay(
    db: &PgPool,
    settings: &HubSettings,
    tenant: &Tenant,
    (by, body): (&str, Value),
) -> Result<Value, String> {
    let fields: ReplayFields = serde_json::from_value(body).map_err(|error| error.to_string())?;
    let is_dry_run = fields.dry_run;
    let request = fields.check().map_err(reason)?;
    let mut tx = db.begin().await.map_err(|error| reason(error.into()))?;
    let now = time::now(&mut tx).await.map_err(|error| reason(error.into()))?;
    if is_dry_run {
        let events = EventSelection::new(&settings.export, &settings.sql_events);
        let count = replay::dry_run(&mut tx, &events, tenant, request, now).await.map_err(reason)?;
        return Ok(json!(count));
    }
    let created = replay::insert(&mut tx, tenant, request, by.to_owned(), now).await.map_err(reason)?;
    tx.commit().await.map_err(|error| reason(error.into()))?;
    Ok(json!(ReplayView::new((created, ReplayOutcomes::default()), now)))
}

/// A replay as the API shows it. None if the tenant has no such replay.
pub async fn show_replay(db: &PgPool, tenant: &Tenant, id: Uuid) -> sqlx::Result<Option<Value>> {
    let mut db = db.acquire().await?;
    let now = time::now(&mut db).await?;
    Ok(store::replay::find(&mut db, tenant, id).await?.map(|found| json!(ReplayView::new(found, now))))
}

/// The newest replays of a tenant.
pub async fn list_replays(db: &PgPool, tenant: &Tenant, limit: u32) -> sqlx::Result<Vec<Value>> {
    let mut db = db.acquire().await?;
    let now = time::now(&mut db).await?;
    let found = store::replay::list(&mut db, tenant, (None, None), (None, limit)).await?;
    Ok(found.into_iter().map(|found| json!(ReplayView::new(found, now))).collect())
}

/// Pauses, resumes or cancels a replay. Fails with the reason.
pub async fn change_replay(db: &PgPool, tenant: &Tenant, id: Uuid, action: ReplayAction) -> Result<(), String> {
    let mut tx = db.begin().await.map_err(|error| reason(error.into()))?;
    let now = time::now(&mut tx).await.map_err(|error| reason(error.into()))?;
    replay::change_in(&mut tx, tenant, id, action, now).await.map_err(reason)?;
    tx.commit().await.map_err(|error| reason(error.into()))
}

/// Ends all active replays as failed. For a restored database, in which nobody knows what they have read.
pub async fn fail_replays(tx: &mut sqlx::PgConnection) -> sqlx::Result<u64> {
    let now = time::now(tx).await?;
    store::replay::fail_all(tx, "the database was restored; request another replay", now).await
}

/// The text of an error on the command line.
pub(crate) fn reason(error: Error) -> String {
    match error {
        Error::Invalid(errors) => listed(&errors),
        Error::BreakingChange(ref errors) => format!("{error}: {}", listed(errors)),
        other => other.to_string(),
    }
}

fn listed(errors: &[FieldError]) -> String {
    let texts = errors.iter().map(|error| format!("{} {}", error.pointer.trim_start_matches('/'), error.detail));
    texts.collect::<Vec<_>>().join("; ").trim().to_owned()
}

//! The catalogue of event types for the operator's command line, which has a connection to the database and no server: the same
//! checks and representations as over HTTP.

use kit::auth::Tenant;
use mailbox::database::time;
use serde_json::{Value, json};
use sqlx::PgPool;

use crate::catalogue::cache::VALID_TIME;
use crate::error::Error;
use crate::flow::catalogue_file;
pub use crate::flow::catalogue_file::ImportOptions;
use crate::flow::event_type::{self as flow, TYPES_MAX};
use crate::operator_replays::reason;
use crate::store::catalogue as store;
use crate::view::{CatalogueFile, EventTypeView, EventTypeWithVersions};

/// The event types that apply to a tenant, by name, as the API shows them.
pub async fn list_event_types(db: &PgPool, tenant: &Tenant) -> sqlx::Result<Vec<Value>> {
    let mut db = db.acquire().await?;
    let (tenant, _) = flow::applied(&mut db, tenant).await?;
    let types = store::list(&mut db, &tenant, None, TYPES_MAX).await?;
    Ok(types.into_iter().map(|event_type| json!(EventTypeView::from(event_type))).collect())
}

/// An event type with its versions. Fails with the reason.
pub async fn show_event_type(db: &PgPool, tenant: &Tenant, name: &str) -> Result<Value, String> {
    let found = async {
        let mut db = db.acquire().await?;
        let (tenant, _) = flow::applied(&mut db, tenant).await?;
        let event_type = flow::find(&mut db, &tenant, name).await?;
        Ok((event_type, store::versions(&mut db, &tenant, name).await?))
    };
    let (event_type, versions) = found.await.map_err(reason)?;
    Ok(json!(EventTypeWithVersions::new(event_type, versions)))
}

/// The whole catalogue as the text of a file, with every schema byte for byte. Fails with the reason.
pub async fn export_catalogue(db: &PgPool, tenant: &Tenant) -> Result<String, String> {
    let exported = async { catalogue_file::export_in(&mut *db.acquire().await?, tenant).await };
    serde_json::to_string(&exported.await.map_err(reason)?).map_err(|error| error.to_string())
}

/// Imports a file, all of it or nothing, and returns what has changed. The change holds in every process when it returns. Fails
/// with the reason.
pub async fn import_catalogue(
    db: &PgPool,
    tenant: &Tenant,
    file: &str,
    options: ImportOptions,
) -> Result<Value, String> {
    let file: CatalogueFile = serde_json::from_str(file)
        .map_err(|error| format!("the file is no catalogue: {error}; `pillarbox event-types export` prints one"))?;
    let imported = async {
        let mut tx = db.begin().await?;
        let now = time::now(&mut tx).await?;
        let result = catalogue_file::apply(&mut tx, tenant, file, options, now).await?;
        if !options.is_dry_run {
            tx.commit().await?;
            tokio::time::sleep(VALID_TIME).await;
        }
        Ok::<_, Error>(json!(result))
    };
    imported.await.map_err(reason)
}

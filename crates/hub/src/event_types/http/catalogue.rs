//! The catalogue of event types as a whole: its settings, its file, and the documents made of it.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use http_kit::admission::caller_share::LimitPermit;
use http_kit::extract::{Json, Query};
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::problem::Problem;
use serde::Deserialize;
use service::idempotency::find_response;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Hub;
use crate::access::{CatalogueManager, CatalogueReader};
use crate::event_types::domain::UnknownTypes;
use crate::event_types::flow;
use crate::event_types::flow::document::document;
use crate::event_types::flow::import::ImportOptions;
use crate::event_types::http::change;
use crate::event_types::page::Document;
use crate::event_types::view::{CatalogueFile, CatalogueView, ImportResult};

/// The page contains texts of the tenant, so it may load and run nothing.
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'";

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new()
        .routes(routes!(show, update))
        .routes(routes!(export, import))
        .routes(routes!(schemas))
        .routes(routes!(read))
}

/// Changes of the catalogue's settings.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"unknown_types": "accept"}))]
struct ChangedCatalogue {
    /// Whether events are accepted whose type is not in the catalogue. Absent: unchanged.
    unknown_types: Option<UnknownTypes>,
    /// Whether tenants without a catalogue use it. For the tenant `main` only. Absent: unchanged.
    shared: Option<bool>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ImportQuery {
    /// Changes nothing, and tells what would change.
    #[serde(default)]
    dry_run: bool,
    /// Accepts versions that may refuse payloads that the previous version accepts.
    #[serde(default)]
    force: bool,
    /// Removes the event types that are not in the file.
    #[serde(default)]
    remove_others: bool,
}

/// Show the settings of the catalogue
#[utoipa::path(get, path = "/hub/v1/catalogue", operation_id = "getCatalogue", tag = "hub", security(("bearer" = [])),
    responses((status = 200, body = CatalogueView)))]
async fn show(
    State(hub): State<Arc<Hub>>,
    CatalogueReader(caller): CatalogueReader,
) -> Result<Json<CatalogueView>, Problem> {
    Ok(Json(flow::catalogue(&hub, &caller.tenant).await?))
}

/// Change the settings of the catalogue
#[utoipa::path(patch, path = "/hub/v1/catalogue", operation_id = "updateCatalogue", tag = "hub", request_body = ChangedCatalogue,
    params(("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])), responses((status = 200, body = CatalogueView)))]
async fn update(
    State(hub): State<Arc<Hub>>,
    CatalogueManager(caller): CatalogueManager,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<ChangedCatalogue>>,
) -> Result<StoredResponse, Problem> {
    change(&hub, identity.as_ref(), |tx, _| {
        Box::pin(async move {
            let changed = flow::change_settings(tx, &caller.tenant, body.unknown_types, body.shared).await?;
            Ok(StoredResponse::json(StatusCode::OK, &changed))
        })
    })
    .await
}

/// Export the catalogue as one file
#[utoipa::path(get, path = "/hub/v1/catalogue/file", operation_id = "exportCatalogue", tag = "hub", security(("bearer" = [])),
    responses((status = 200, body = CatalogueFile)))]
async fn export(State(hub): State<Arc<Hub>>, CatalogueReader(caller): CatalogueReader) -> Result<Response, Problem> {
    let file = Body::from_stream(flow::export::export(hub, &caller.tenant).await?);
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], file).into_response())
}

/// Import a file
///
/// All of it, or nothing. Versions that exist must be the same in the file, which may add others.
#[utoipa::path(put, path = "/hub/v1/catalogue/file", operation_id = "importCatalogue", tag = "hub", request_body = CatalogueFile,
    params(ImportQuery,
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 200, body = ImportResult),
        (status = 409, description = "A version breaks what the previous one accepts, or there are too many event types")))]
async fn import(
    State(hub): State<Arc<Hub>>,
    CatalogueManager(caller): CatalogueManager,
    Query(query): Query<ImportQuery>,
    Mutation { body: JsonBody(file), identity }: Mutation<JsonBody<CatalogueFile>>,
) -> Result<StoredResponse, Problem> {
    let ImportQuery { dry_run, force, remove_others } = query;
    let options = ImportOptions { is_dry_run: dry_run, is_forced: force, removes_others: remove_others };
    if let Some(repeated) = find_response(&hub.db, identity.as_ref()).await? {
        return Ok(repeated);
    }
    let now = hub.clock.now();
    let file = flow::import::check(&hub, &caller.tenant, file, now).await?;
    if dry_run {
        let result = flow::import::try_out(&hub, &caller.tenant, file, options, now).await?;
        return Ok(StoredResponse::json(StatusCode::OK, &result));
    }
    change(&hub, identity.as_ref(), |tx, _| {
        Box::pin(async move {
            let result = flow::import::apply(tx, &caller.tenant, file, options, now).await?;
            Ok(StoredResponse::json(StatusCode::OK, &result))
        })
    })
    .await
}

/// Waits until an event type may be shown with all of its versions.
pub(super) async fn document_permit(hub: &Hub) -> Result<LimitPermit, Problem> {
    let place = hub.limits.catalogue_documents.enter().await;
    place.map_err(|exhausted| Problem::overloaded(exhausted, Duration::from_secs(1)))
}

/// All schemas as one JSON Schema
///
/// For code generators: `$defs` has the newest schema of each event type, by its name.
#[utoipa::path(get, path = "/hub/v1/catalogue/schemas", operation_id = "getCatalogueSchemas", tag = "hub", security(("bearer" = [])),
    responses((status = 200, body = Value, content_type = "application/json")))]
async fn schemas(State(hub): State<Arc<Hub>>, CatalogueReader(caller): CatalogueReader) -> Result<Response, Problem> {
    let document = Body::from_stream(document(hub, caller.tenant, Document::Schemas).await?);
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], document).into_response())
}

/// The catalogue as a page to read
#[utoipa::path(get, path = "/hub/v1/catalogue/page", operation_id = "getCataloguePage", tag = "hub", security(("bearer" = [])),
    responses((status = 200, body = String, content_type = "text/html")))]
async fn read(State(hub): State<Arc<Hub>>, CatalogueReader(caller): CatalogueReader) -> Result<Response, Problem> {
    let page = Body::from_stream(document(hub, caller.tenant, Document::Page).await?);
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(PAGE_POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ];
    Ok((headers, page).into_response())
}

//! Event types: descriptions, schemas in versions, and examples.

pub(crate) mod catalogue;

use std::sync::Arc;

use axum::extract::State;
use http::header::LOCATION;
use http::{HeaderValue, StatusCode};
use http_kit::extract::{Json, Path};
use http_kit::field::Field;
use http_kit::idempotency::{JsonBody, Mutation, RequestIdentity, StoredResponse};
use http_kit::page::{Listing, NoFilters, Page};
use http_kit::problem::Problem;
use serde::Deserialize;
use serde_json::value::RawValue;
use service::idempotency::{Effect, StoreResponse, find_response};
use sqlx::{Postgres, Transaction};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Hub;
use crate::access::{CatalogueManager, CatalogueReader, page_scope};
use crate::event_types::cache::VALID_TIME;
use crate::event_types::flow;
use crate::event_types::flow::TypeFields;
use crate::event_types::flow::version::NewVersion;
use crate::event_types::http::catalogue::document_permit;
use crate::event_types::view::{EventTypeView, EventTypeWithVersions};

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(show, update, delete))
        .routes(routes!(add_version))
}

/// An event type to add to the catalogue.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "order.shipped", "description": "An order has left the warehouse.",
    "schema": {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}, "examples": [{"id": 17}]}))]
struct NewEventType {
    /// Letters, digits and `_` in parts joined by dots. Types that begin with `hub.` are reserved.
    #[schema(pattern = r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$", max_length = 200, example = "order.shipped")]
    name: String,
    #[serde(default)]
    #[schema(max_length = 10000)]
    description: String,
    #[serde(default)]
    deprecated: bool,
    /// Whether payloads are checked against the schema. Default: true.
    enforce: Option<bool>,
    /// A JSON Schema (draft 2020-12) that becomes version 1. Without schema and examples, the type has no version.
    #[schema(value_type = Option<Value>)]
    schema: Option<Box<RawValue>>,
    /// Payloads that match the schema.
    #[serde(default)]
    #[schema(value_type = Vec<Value>, max_items = 10)]
    examples: Vec<Box<RawValue>>,
}

/// Changes of an event type. Absent fields stay unchanged; null resets a field to its default.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"deprecated": true}))]
struct ChangedEventType {
    #[serde(default)]
    #[schema(value_type = Option<String>, max_length = 10000)]
    description: Field<String>,
    #[serde(default)]
    #[schema(value_type = Option<bool>)]
    deprecated: Field<bool>,
    #[serde(default)]
    #[schema(value_type = Option<bool>)]
    enforce: Field<bool>,
}

/// A version to add to an event type.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewEventTypeVersion, example = json!({"schema": {"type": "object"}, "examples": [{"id": 17}], "force": true}))]
struct NewTypeVersion {
    /// A JSON Schema (draft 2020-12).
    #[schema(value_type = Value)]
    schema: Box<RawValue>,
    /// Payloads that match the schema.
    #[serde(default)]
    #[schema(value_type = Vec<Value>, max_items = 10)]
    examples: Vec<Box<RawValue>>,
    /// Adds the version even if it may refuse payloads that the previous version accepts.
    #[serde(default)]
    force: bool,
}

/// List event types by name
#[utoipa::path(get, path = "/hub/v1/event-types", operation_id = "listEventTypes", tag = "hub", params(Listing<NoFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<EventTypeView>)))]
async fn list(
    State(hub): State<Arc<Hub>>,
    CatalogueReader(caller): CatalogueReader,
    Listing { filters, limit, cursor }: Listing<NoFilters>,
) -> Result<Page<EventTypeView>, Problem> {
    let scope = page_scope(&hub, "event-types", &caller, &filters);
    let after = scope.position(cursor.as_deref())?;
    let types = flow::list(&hub, &caller.tenant, after, limit + 1).await?;
    Ok(scope.cut(types, limit, |event_type| event_type.name.clone()).map(EventTypeView::from))
}

/// Add an event type
///
/// From the response on, payloads of the type are checked against its schema, over HTTP and in SQL.
#[utoipa::path(post, path = "/hub/v1/event-types", operation_id = "createEventType", tag = "hub", request_body = NewEventType,
    params(("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 201, body = EventTypeWithVersions,
        headers(("location" = String, description = "The path of the event type"))),
        (status = 409, description = "There is already such an event type, or there are too many")))]
async fn create(
    State(hub): State<Arc<Hub>>,
    CatalogueManager(caller): CatalogueManager,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<NewEventType>>,
) -> Result<StoredResponse, Problem> {
    let fields = TypeFields {
        description: Some(body.description),
        is_deprecated: Some(body.deprecated),
        is_enforced: body.enforce,
    };
    let version = match (body.schema, body.examples) {
        (None, examples) if examples.is_empty() => None,
        (schema, examples) => {
            Some(NewVersion { schema: schema.unwrap_or_else(|| RawValue::TRUE.to_owned()), examples })
        }
    };
    let path = format!("/hub/v1/event-types/{}", body.name);
    let version = flow::check(&hub, &caller.tenant, &body.name, &fields, version).await?;
    change(&hub, identity.as_ref(), |tx, hub| {
        Box::pin(async move {
            let created = flow::create(tx, &caller.tenant, body.name, fields, version, hub.clock.now()).await?;
            let location = HeaderValue::try_from(path).map_err(|error| Problem::internal(&error))?;
            Ok(StoredResponse::json(StatusCode::CREATED, &created).with_header(LOCATION, location))
        })
    })
    .await
}

/// Show an event type with its versions
#[utoipa::path(get, path = "/hub/v1/event-types/{name}", operation_id = "getEventType", tag = "hub", params(("name" = String, Path)), security(("bearer" = [])),
    responses((status = 200, body = EventTypeWithVersions), (status = 404, description = "There is no such event type")))]
async fn show(
    State(hub): State<Arc<Hub>>,
    CatalogueReader(caller): CatalogueReader,
    Path(name): Path<String>,
) -> Result<Json<EventTypeWithVersions>, Problem> {
    let _place = document_permit(&hub).await?;
    let (event_type, versions) = flow::show(&hub, &caller.tenant, &name).await?;
    Ok(Json(EventTypeWithVersions::new(event_type, versions)))
}

/// Change an event type
///
/// Its schema changes with a new version.
#[utoipa::path(patch, path = "/hub/v1/event-types/{name}", operation_id = "updateEventType", tag = "hub", request_body = ChangedEventType,
    params(("name" = String, Path),
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 200, body = EventTypeWithVersions), (status = 404, description = "There is no such event type")))]
async fn update(
    State(hub): State<Arc<Hub>>,
    CatalogueManager(caller): CatalogueManager,
    Path(name): Path<String>,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<ChangedEventType>>,
) -> Result<StoredResponse, Problem> {
    let fields = TypeFields {
        description: given(body.description, String::new()),
        is_deprecated: given(body.deprecated, false),
        is_enforced: given(body.enforce, true),
    };
    change(&hub, identity.as_ref(), |tx, hub| {
        Box::pin(async move {
            let updated = flow::update(tx, &caller.tenant, name, fields, hub.clock.now()).await?;
            Ok(StoredResponse::json(StatusCode::OK, &updated))
        })
    })
    .await
}

/// The value of a field; null stands for the default.
fn given<T>(field: Field<T>, default: T) -> Option<T> {
    match field {
        Field::Absent => None,
        Field::Null => Some(default),
        Field::Given(value) => Some(value),
    }
}

/// Add a version to an event type
///
/// A version that may refuse payloads that the previous one accepts is refused with pointers to what breaks, unless `force` is
/// set.
#[utoipa::path(post, path = "/hub/v1/event-types/{name}/versions", operation_id = "createEventTypeVersion", tag = "hub", request_body = NewTypeVersion,
    params(("name" = String, Path),
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 201, body = EventTypeWithVersions), (status = 404, description = "There is no such event type"),
        (status = 409, description = "The version breaks what the previous one accepts, or there are too many")))]
async fn add_version(
    State(hub): State<Arc<Hub>>,
    CatalogueManager(caller): CatalogueManager,
    Path(name): Path<String>,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<NewTypeVersion>>,
) -> Result<StoredResponse, Problem> {
    let version = NewVersion { schema: body.schema, examples: body.examples };
    if let Some(repeated) = find_response(&hub.db, identity.as_ref()).await? {
        return Ok(repeated);
    }
    let checked = flow::check_addition(&hub, &caller.tenant, &name, version, body.force).await?;
    change(&hub, identity.as_ref(), |tx, hub| {
        Box::pin(async move {
            let changed = flow::add_version(tx, &caller.tenant, checked, hub.clock.now()).await?;
            Ok(StoredResponse::json(StatusCode::CREATED, &changed))
        })
    })
    .await
}

/// Delete an event type with its versions
#[utoipa::path(delete, path = "/hub/v1/event-types/{name}", operation_id = "deleteEventType", tag = "hub",
    params(("name" = String, Path),
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 204, description = "The event type is deleted"), (status = 404, description = "There is no such event type")))]
async fn delete(
    State(hub): State<Arc<Hub>>,
    CatalogueManager(caller): CatalogueManager,
    Path(name): Path<String>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change(&hub, identity.as_ref(), |tx, _| {
        Box::pin(async move {
            flow::delete(tx, &caller.tenant, &name).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

/// Makes a change in one transaction, once per `Idempotency-Key`. The response holds for every event that is posted afterwards: it
/// waits until no process uses the catalogue as it was before the commit.
pub(super) async fn change<F>(
    hub: &Arc<Hub>,
    identity: Option<&RequestIdentity>,
    effect: F,
) -> Result<StoredResponse, Problem>
where
    F: for<'t> FnOnce(&'t mut Transaction<'_, Postgres>, Arc<Hub>) -> Effect<'t> + Send,
{
    let response = hub.run_once(identity, StoreResponse::WithBody, effect).await?;
    if response.status().is_success() {
        tokio::time::sleep(VALID_TIME).await;
    }
    Ok(response)
}

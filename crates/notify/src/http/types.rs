//! Aggregate types: what business events can be about.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use http_kit::auth::Operator;
use http_kit::extract::{Json, Path};
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::problem::{FieldError, Problem};
use pillarbox::log::aggregate_types;
use serde::{Deserialize, Serialize};
use service::idempotency::{StoreResponse, run_once};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::IDEMPOTENCY_KEY;
use crate::Notify;
use crate::domain::business_event::check_aggregate_type;
use crate::error::Error;
use crate::flow::produce;
use crate::handlers::{RESERVED_TYPES, listener_name};

pub(super) fn router() -> OpenApiRouter<Arc<Notify>> {
    OpenApiRouter::new().routes(routes!(list, add)).routes(routes!(delete))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewAggregateType, example = json!({"name": "COURIER"}))]
struct NewType {
    #[schema(pattern = "^[A-Z][A-Z0-9_]{0,49}$")]
    name: String,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AggregateType)]
struct TypeView {
    name: String,
    /// The consumer that turns its events into notifications.
    listener: String,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AggregateTypes)]
struct Types {
    items: Vec<TypeView>,
}

impl From<String> for TypeView {
    fn from(name: String) -> TypeView {
        TypeView { listener: listener_name(&name), name }
    }
}

/// List the aggregate types
///
/// For operators.
#[utoipa::path(get, path = "/notify/v1/aggregate-types", operation_id = "listAggregateTypes", tag = "notify", security(("bearer" = [])),
    responses((status = 200, body = Types)))]
async fn list(State(notify): State<Arc<Notify>>, _: Operator) -> Result<Json<Types>, Problem> {
    let mut db = notify.db.acquire().await.map_err(Error::from)?;
    let names = aggregate_types(&mut db).await.map_err(Error::from)?;
    Ok(Json(Types { items: names.into_iter().map(TypeView::from).collect() }))
}

/// Add an aggregate type
///
/// For operators. Producers can use it at once; within seconds its queue exists and its listener runs.
#[utoipa::path(post, path = "/notify/v1/aggregate-types", operation_id = "createAggregateType", tag = "notify", request_body = NewType,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 201, body = TypeView), (status = 200, body = TypeView, description = "The type exists already")))]
async fn add(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Mutation { body: JsonBody(NewType { name }), identity }: Mutation<JsonBody<NewType>>,
) -> Result<StoredResponse, Problem> {
    let invalid = |detail: String| Problem::validation(vec![FieldError::body("/name", detail)]);
    check_aggregate_type(&name).map_err(|error| invalid(error.to_owned()))?;
    if RESERVED_TYPES.contains(&name.as_str()) {
        return Err(invalid(format!(
            "must not be one of {}: other consumers have these names",
            RESERVED_TYPES.join(", ")
        )));
    }
    run_once(&notify.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let status = if produce::add_type(tx, &name).await? { StatusCode::CREATED } else { StatusCode::OK };
            Ok(StoredResponse::json(status, &TypeView::from(name)))
        })
    })
    .await
}

/// Delete an aggregate type
///
/// For operators. Refused while it has recipients. Its events that are still to be processed have no recipients; its queue and its
/// consumer remain until you delete them.
#[utoipa::path(delete, path = "/notify/v1/aggregate-types/{name}", operation_id = "deleteAggregateType", tag = "notify",
    params(("name" = String, Path), ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 204, description = "The type is deleted"), (status = 404, description = "The type does not exist"),
        (status = 409, description = "The type has recipients")))]
async fn delete(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Path(name): Path<String>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    run_once(&notify.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            produce::delete_type(tx, &name).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

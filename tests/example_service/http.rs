//! The HTTP API of the greetings service, under `/greeting/v1`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use http_kit::auth::User;
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::problem::Problem;
use serde::{Deserialize, Serialize};
use service::idempotency::{StoreResponse, run_once};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{Greetings, flow};

pub(super) fn router() -> OpenApiRouter<Arc<Greetings>> {
    OpenApiRouter::new().routes(routes!(create))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct NewGreeting {
    name: String,
}

#[derive(Debug, Serialize, ToSchema)]
struct Greeting {
    id: Uuid,
}

/// Send a greeting
#[utoipa::path(post, path = "/greeting/v1/greetings", tag = "greetings", request_body = NewGreeting,
    params(("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key has no further effect")),
    security(("bearer" = [])), responses((status = 201, body = Greeting)))]
async fn create(
    State(greetings): State<Arc<Greetings>>,
    _: User,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<NewGreeting>>,
) -> Result<StoredResponse, Problem> {
    let now = greetings.clock.now();
    run_once(&greetings.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let id = flow::receive(tx, &body.name, now).await?;
            Ok(StoredResponse::json(StatusCode::CREATED, &Greeting { id }))
        })
    })
    .await
}

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{ETAG, LOCATION};
use axum::response::{IntoResponse, Response};
use chrono::TimeDelta;
use http::HeaderValue;
use kit::etag::{self, IfMatch, IfNoneMatch};
use kit::extract::{Json, Path};
use kit::idempotency::{Answer, JsonBody, Mutation};
use kit::page::{Listing, Page};
use kit::problem::Problem;
use mailbox::idempotency::Keep;
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{Manager, once, scope};
use crate::Hub;
use crate::error::Error;
use crate::fields::{Fields, NewFields};
use crate::flow::subscriber as flow;
use crate::store::subscriber::{Known, Which};
use crate::view::{SubscriberWithSecret, SubscriberWithSecrets, TestResult};

const OVERLAP_HOURS_DEFAULT: i64 = 24;
const OVERLAP_HOURS_MAX: i64 = 168;

pub(super) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(show, update, delete))
        .routes(routes!(rotate_secret))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(test))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SubscriberFilters {
    is_active: Option<bool>,
    /// Those that are sent this type.
    #[param(example = "order.paid")]
    event_type: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct RotateSecret {
    /// How long the secrets before sign yet, beside the new one; 0 ends them at once.
    #[schema(minimum = 0, maximum = 168, default = 24)]
    overlap_hours: Option<i64>,
}

/// List subscribers, newest first
#[utoipa::path(get, path = "/hub/v1/subscribers", tag = "hub", params(Listing<SubscriberFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<SubscriberWithSecrets>)))]
async fn list(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Listing { filters, limit, cursor }: Listing<SubscriberFilters>,
) -> Result<Page<SubscriberWithSecrets>, Problem> {
    let scope = scope("subscribers", &caller, &filters);
    let before = cursor.map(|cursor| hub.cursor_key.open(&scope, &cursor)).transpose()?;
    let which = Which { is_active: filters.is_active, event_type: filters.event_type };
    let known = flow::list(&hub, &caller.tenant, &which, (before, limit + 1)).await?;
    let page = Page::cut(known, limit, &hub.cursor_key, &scope, |known| known.subscriber.id);
    Ok(page.map(|known| SubscriberWithSecrets::from(&known)))
}

/// Make a subscriber; the answer is the only place that shows its secret
#[utoipa::path(post, path = "/hub/v1/subscribers", tag = "hub", request_body = NewFields,
    params(("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 201, body = SubscriberWithSecret,
        headers(("location" = String, description = "Its address"), ("etag" = String, description = "Its version")))))]
async fn create(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Mutation { body: JsonBody(NewFields(fields)), identity }: Mutation<JsonBody<NewFields>>,
) -> Result<Answer, Problem> {
    let (now, made) = (hub.clock.now(), hub.clone());
    once(&hub, identity.as_ref(), Keep::NoAnswer, |tx| {
        Box::pin(async move {
            let (known, secret) = flow::create(tx, &made, &caller.tenant, fields, now).await?;
            let answer = Answer::json(StatusCode::CREATED, &SubscriberWithSecret::revealing(&known, &secret));
            let location = HeaderValue::try_from(format!("/hub/v1/subscribers/{}", known.subscriber.id));
            let location = location.map_err(|error| Problem::internal(&error))?;
            Ok(answer.with_header(LOCATION, location).with_header(ETAG, etag::of(known.subscriber.version)))
        })
    })
    .await
}

/// Show a subscriber
#[utoipa::path(get, path = "/hub/v1/subscribers/{id}", tag = "hub",
    params(("id" = Uuid, Path), ("if-none-match" = Option<String>, Header, description = "The ETag of the copy that you have")),
    security(("bearer" = [])),
    responses((status = 200, body = SubscriberWithSecrets, headers(("etag" = String, description = "Its version"))),
        (status = 304, description = "You have it as it is"), (status = 404, description = "There is no such subscriber")))]
async fn show(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    let known = flow::show(&hub, &caller.tenant, id).await?;
    let tag = [(ETAG, etag::of(known.subscriber.version))];
    if if_none_match.has(known.subscriber.version) {
        return Ok((StatusCode::NOT_MODIFIED, tag).into_response());
    }
    Ok((tag, Json(SubscriberWithSecrets::from(&known))).into_response())
}

/// Change a subscriber
///
/// What is absent stays; null is the default, or none. Switching one on again makes messages of the events from then on.
#[utoipa::path(patch, path = "/hub/v1/subscribers/{id}", tag = "hub", request_body = Fields,
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag that the change is meant for"),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 200, body = SubscriberWithSecrets, headers(("etag" = String, description = "Its version"))),
        (status = 404, description = "There is no such subscriber"), (status = 412, description = "It was changed meanwhile")))]
async fn update(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { body: JsonBody(fields), identity }: Mutation<JsonBody<Fields>>,
) -> Result<Answer, Problem> {
    let (now, changed) = (hub.clock.now(), hub.clone());
    once(&hub, identity.as_ref(), Keep::Answer, |tx| {
        Box::pin(async move {
            let known = flow::update(tx, &changed, (&caller.tenant, id), &if_match, fields, now).await?;
            Ok(shown(&known))
        })
    })
    .await
}

/// Delete a subscriber; what was to be sent to it goes nowhere any more
#[utoipa::path(delete, path = "/hub/v1/subscribers/{id}", tag = "hub",
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag that is meant"),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 204, description = "It is gone"), (status = 404, description = "There is no such subscriber"),
        (status = 412, description = "It was changed meanwhile")))]
async fn delete(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    once(&hub, identity.as_ref(), Keep::Answer, |tx| {
        Box::pin(async move {
            flow::delete(tx, (&caller.tenant, id), &if_match).await?;
            Ok(Answer::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

/// Make a new secret; the answer is the only place that shows it
///
/// Deliveries carry a signature of each secret that has not ended, at most 5. Earlier ones end after `overlap_hours`, or
/// when they were to end anyway.
#[utoipa::path(post, path = "/hub/v1/subscribers/{id}/rotate-secret", tag = "hub", request_body = RotateSecret,
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag that is meant"),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 200, body = SubscriberWithSecret, headers(("etag" = String, description = "Its version"))),
        (status = 404, description = "There is no such subscriber"), (status = 409, description = "It has too many secrets"),
        (status = 412, description = "It was changed meanwhile")))]
async fn rotate_secret(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<RotateSecret>>,
) -> Result<Answer, Problem> {
    let hours = body.overlap_hours.unwrap_or(OVERLAP_HOURS_DEFAULT);
    if !(0..=OVERLAP_HOURS_MAX).contains(&hours) {
        return Err(Error::field("/overlap_hours", format!("takes a number from 0 to {OVERLAP_HOURS_MAX}")).into());
    }
    let (overlap, now, rotated) = (TimeDelta::hours(hours), hub.clock.now(), hub.clone());
    once(&hub, identity.as_ref(), Keep::NoAnswer, |tx| {
        Box::pin(async move {
            let (known, secret) = flow::rotate(tx, &rotated, (&caller.tenant, id), &if_match, (overlap, now)).await?;
            let answer = Answer::json(StatusCode::OK, &SubscriberWithSecret::revealing(&known, &secret));
            Ok(answer.with_header(ETAG, etag::of(known.subscriber.version)))
        })
    })
    .await
}

/// Let a subscriber's messages wait; they are still made
#[utoipa::path(post, path = "/hub/v1/subscribers/{id}/pause", tag = "hub",
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag that is meant"),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 200, body = SubscriberWithSecrets, headers(("etag" = String, description = "Its version"))),
        (status = 404, description = "There is no such subscriber"), (status = 412, description = "It was changed meanwhile")))]
async fn pause(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    let (now, paused) = (hub.clock.now(), hub.clone());
    once(&hub, identity.as_ref(), Keep::Answer, |tx| {
        Box::pin(async move { Ok(shown(&flow::pause(tx, &paused, (&caller.tenant, id), &if_match, now).await?)) })
    })
    .await
}

/// Let a paused subscriber's messages go on, in their order
///
/// One that is switched off stays so: change `is_active` for that.
#[utoipa::path(post, path = "/hub/v1/subscribers/{id}/resume", tag = "hub",
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag that is meant"),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 200, body = SubscriberWithSecrets, headers(("etag" = String, description = "Its version"))),
        (status = 404, description = "There is no such subscriber"), (status = 412, description = "It was changed meanwhile")))]
async fn resume(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    let (now, resumed) = (hub.clock.now(), hub.clone());
    once(&hub, identity.as_ref(), Keep::Answer, |tx| {
        Box::pin(async move { Ok(shown(&flow::resume(tx, &resumed, (&caller.tenant, id), &if_match, now).await?)) })
    })
    .await
}

/// Send one signed event of type `hub.test` at once, and say what came of it
///
/// It goes beside the log and whatever waits, also if the subscriber is paused or switched off, and within 20 s.
#[utoipa::path(post, path = "/hub/v1/subscribers/{id}/test", tag = "hub", params(("id" = Uuid, Path)), security(("bearer" = [])),
    responses((status = 200, body = TestResult), (status = 404, description = "There is no such subscriber")))]
async fn test(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
) -> Result<Json<TestResult>, Problem> {
    Ok(Json(flow::test(&hub, &caller.tenant, id).await?))
}

fn shown(known: &Known) -> Answer {
    Answer::json(StatusCode::OK, &SubscriberWithSecrets::from(known))
        .with_header(ETAG, etag::of(known.subscriber.version))
}

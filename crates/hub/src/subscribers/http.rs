//! Subscribers: managing them and their secrets, and test deliveries.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::ETAG;
use axum::response::{IntoResponse, Response};
use chrono::TimeDelta;
use http_kit::etag::{self, IfMatch, IfNoneMatch};
use http_kit::extract::{Json, Path};
use http_kit::field::Whole;
use http_kit::idempotency::{JsonBody, Mutation, OptionalJsonBody, StoredResponse};
use http_kit::page::{Listing, Page};
use http_kit::problem::Problem;
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::Hub;
use crate::access::{Manager, page_scope};
use crate::error::Error;
use crate::subscribers::fields::{ChangedSubscriberFields, NewSubscriberFields, SubscriberFields};
use crate::subscribers::flow;
use crate::subscribers::flow::ChangeRequest;
use crate::subscribers::store::SubscriberFilter;
use crate::subscribers::view::{
    ChangeView, SubscriberWithSecret, SubscriberWithSecrets, TestResult, VerificationResult,
};

/// How long earlier secrets still sign after a rotation.
const OVERLAP_HOURS_DEFAULT: i64 = 24;
const OVERLAP_HOURS_MAX: i64 = 168;

/// The description of the header `Idempotency-Key` of changes.
const KEY_OF_CHANGE: &str = "A repeat with the same key has no further effect. Unlike other responses, the status of a change \
                             is not repeated: a repeat waits again, and is answered with 202 only if the change is still not \
                             confirmed";

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(show, update, delete))
        .routes(routes!(rotate_secret))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(test))
        .routes(routes!(verify))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SubscriberFilters {
    is_active: Option<bool>,
    /// Only subscribers whose `event_types` match this type.
    #[param(example = "order.paid")]
    event_type: Option<String>,
    /// Only subscribers whose name contains this text, in upper or lower case.
    #[param(example = "billing")]
    q: Option<String>,
}

/// Options of a rotation.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"overlap_hours": 24}))]
struct RotateSecret {
    /// For how many hours earlier secrets still sign, in addition to the new one. 0 ends them at once.
    #[schema(value_type = Option<i64>, minimum = 0, maximum = 168, default = 24)]
    overlap_hours: Option<Whole>,
}

/// What a test delivery sends.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({}))]
struct TestDelivery {
    /// An event type of the catalogue: the first example of its newest version is sent. Absent: an event of type `hub.test`.
    event_type: Option<String>,
}

/// List subscribers, newest first
#[utoipa::path(get, path = "/hub/v1/subscribers", operation_id = "listSubscribers", tag = "hub", params(Listing<SubscriberFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<SubscriberWithSecrets>)))]
async fn list(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Listing { filters, limit, cursor }: Listing<SubscriberFilters>,
) -> Result<Page<SubscriberWithSecrets>, Problem> {
    let scope = page_scope(&hub, "subscribers", &caller, &filters);
    let before = scope.position(cursor.as_deref())?;
    let filter = SubscriberFilter { is_active: filters.is_active, event_type: filters.event_type, name: filters.q };
    let subscribers = flow::list(&hub, &caller.tenant, &filter, (before, limit + 1)).await?;
    let page = scope.cut(subscribers, limit, |stored| stored.subscriber.id);
    Ok(page.map(|stored| SubscriberWithSecrets::from(&stored)))
}

/// Create a subscriber
///
/// The response contains the signing secret, which is not shown again. Events that are posted from now on are sent to
/// the subscriber; with a `backfill`, what was posted before is sent first.
#[utoipa::path(post, path = "/hub/v1/subscribers", operation_id = "createSubscriber", tag = "hub", request_body = NewSubscriberFields,
    params(("idempotency-key" = Option<String>, Header,
        description = "A repeat with the same key has no further effect, and does not show the secret again")),
    security(("bearer" = [])),
    responses((status = 201, body = SubscriberWithSecret,
        headers(("location" = String, description = "The path of the subscriber"),
        ("etag" = String, description = "The version of the subscriber")))))]
async fn create(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Mutation { body: JsonBody(NewSubscriberFields(fields)), identity }: Mutation<JsonBody<NewSubscriberFields>>,
) -> Result<StoredResponse, Problem> {
    flow::create(&hub, (caller.tenant, caller.principal), fields, identity.as_ref()).await
}

/// Show a subscriber
#[utoipa::path(get, path = "/hub/v1/subscribers/{id}", operation_id = "getSubscriber", tag = "hub",
    params(("id" = Uuid, Path),
        ("if-none-match" = Option<String>, Header, description = "The ETag of the copy that the caller has")),
    security(("bearer" = [])),
    responses((status = 200, body = SubscriberWithSecrets, headers(("etag" = String,
        description = "The version of the subscriber"))),
        (status = 304, description = "The subscriber has not changed"),
        (status = 404, description = "There is no such subscriber")))]
async fn show(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    let stored = flow::show(&hub, &caller.tenant, id).await?;
    let tag = etag::of(stored.subscriber.version, stored.subscriber.updated_at);
    if if_none_match.matches(&tag) {
        return Ok((StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response());
    }
    Ok(([(ETAG, tag)], Json(SubscriberWithSecrets::from(&stored))).into_response())
}

/// Change a subscriber
///
/// Absent fields stay unchanged; null resets a field to its default. A subscriber that is activated again gets the
/// events that are posted from then on, not those that were posted while it was inactive.
///
/// A change of the `url` to another scheme, host or port requires `headers` in the same request if the subscriber has
/// any: their stored values are not sent to another receiver.
///
/// The change holds when the response arrives: messages of events that are posted afterwards are sent with the new
/// settings, and only requests that were already on their way used the old ones. The response waits for that.
#[utoipa::path(patch, path = "/hub/v1/subscribers/{id}", operation_id = "updateSubscriber", tag = "hub", request_body = ChangedSubscriberFields,
    params(("id" = Uuid, Path),
        ("if-match" = Option<String>, Header, description = "Fails with 412 unless this is the current ETag"),
        ("idempotency-key" = Option<String>, Header, description = KEY_OF_CHANGE)),
    security(("bearer" = [])),
    responses((status = 200, body = SubscriberWithSecrets, headers(("etag" = String,
        description = "The version of the subscriber"))),
        (status = 202, body = SubscriberWithSecrets,
        description = "The change is stored, but a dispatcher has not confirmed it in time: `effective` is false"),
        (status = 404, description = "There is no such subscriber"),
        (status = 412, description = "The subscriber has another version than `If-Match`")))]
async fn update(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { body: JsonBody(fields), identity }: Mutation<JsonBody<SubscriberFields>>,
) -> Result<StoredResponse, Problem> {
    flow::update(&hub, ChangeRequest { tenant: caller.tenant, id, if_match, identity }, fields).await
}

/// Delete a subscriber
///
/// Messages that wait for the subscriber are not sent. Nothing is sent once the response has arrived, except requests that
/// were already on their way.
#[utoipa::path(delete, path = "/hub/v1/subscribers/{id}", operation_id = "deleteSubscriber", tag = "hub",
    params(("id" = Uuid, Path),
        ("if-match" = Option<String>, Header, description = "Fails with 412 unless this is the current ETag"),
        ("idempotency-key" = Option<String>, Header, description = KEY_OF_CHANGE)),
    security(("bearer" = [])),
    responses((status = 204, description = "The subscriber is deleted"),
        (status = 202, body = ChangeView,
        description = "The subscriber is deleted, but a dispatcher has not confirmed that in time: `effective` is false"),
        (status = 404, description = "There is no such subscriber"),
        (status = 412, description = "The subscriber has another version than `If-Match`")))]
async fn delete(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    flow::delete(&hub, ChangeRequest { tenant: caller.tenant, id, if_match, identity }).await
}

/// Rotate the signing secret
///
/// Generates a new secret of the same kind. The response contains it, and it is not shown again. Deliveries carry one
/// signature for each active secret, at most 5. Earlier secrets expire after `overlap_hours`, or earlier if they
/// already expire.
#[utoipa::path(post, path = "/hub/v1/subscribers/{id}/rotate-secret", operation_id = "rotateSubscriberSecret", tag = "hub", request_body = RotateSecret,
    params(("id" = Uuid, Path),
        ("if-match" = Option<String>, Header, description = "Fails with 412 unless this is the current ETag"),
        ("idempotency-key" = Option<String>, Header,
        description = "A repeat with the same key has no further effect, and does not show the secret again. It is \
            answered with 409 already-answered, whether the first response was 200 or 202")),
    security(("bearer" = [])),
    responses((status = 200, body = SubscriberWithSecret, headers(("etag" = String,
        description = "The version of the subscriber"))),
        (status = 202, body = SubscriberWithSecret,
        description = "The change is stored, but a dispatcher has not confirmed it in time: `effective` is false"),
        (status = 404, description = "There is no such subscriber"),
        (status = 409, description = "The subscriber has too many active secrets"),
        (status = 412, description = "The subscriber has another version than `If-Match`")))]
async fn rotate_secret(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<RotateSecret>>,
) -> Result<StoredResponse, Problem> {
    let hours = body.overlap_hours.map_or(OVERLAP_HOURS_DEFAULT, |Whole(hours)| hours);
    if !(0..=OVERLAP_HOURS_MAX).contains(&hours) {
        return Err(Error::field("/overlap_hours", format!("must be a number from 0 to {OVERLAP_HOURS_MAX}")).into());
    }
    let request = ChangeRequest { tenant: caller.tenant, id, if_match, identity };
    flow::rotate_secret(&hub, request, TimeDelta::hours(hours)).await
}

/// Pause a subscriber
///
/// Events still become messages for the subscriber, and the messages wait until it is resumed. Nothing is sent once the
/// response has arrived, except requests that were already on their way.
#[utoipa::path(post, path = "/hub/v1/subscribers/{id}/pause", operation_id = "pauseSubscriber", tag = "hub",
    params(("id" = Uuid, Path),
        ("if-match" = Option<String>, Header, description = "Fails with 412 unless this is the current ETag"),
        ("idempotency-key" = Option<String>, Header, description = KEY_OF_CHANGE)),
    security(("bearer" = [])),
    responses((status = 200, body = SubscriberWithSecrets, headers(("etag" = String,
        description = "The version of the subscriber"))),
        (status = 202, body = SubscriberWithSecrets,
        description = "The change is stored, but a dispatcher has not confirmed it in time: `effective` is false"),
        (status = 404, description = "There is no such subscriber"),
        (status = 412, description = "The subscriber has another version than `If-Match`")))]
async fn pause(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    flow::pause(&hub, ChangeRequest { tenant: caller.tenant, id, if_match, identity }).await
}

/// Resume a paused subscriber
///
/// The messages that wait are sent in their order. An inactive subscriber stays inactive: change `is_active` to
/// activate it.
#[utoipa::path(post, path = "/hub/v1/subscribers/{id}/resume", operation_id = "resumeSubscriber", tag = "hub",
    params(("id" = Uuid, Path),
        ("if-match" = Option<String>, Header, description = "Fails with 412 unless this is the current ETag"),
        ("idempotency-key" = Option<String>, Header, description = KEY_OF_CHANGE)),
    security(("bearer" = [])),
    responses((status = 200, body = SubscriberWithSecrets, headers(("etag" = String,
        description = "The version of the subscriber"))),
        (status = 202, body = SubscriberWithSecrets,
        description = "The change is stored, but a dispatcher has not confirmed it in time: `effective` is false"),
        (status = 404, description = "There is no such subscriber"),
        (status = 412, description = "The subscriber has another version than `If-Match`")))]
async fn resume(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    flow::resume(&hub, ChangeRequest { tenant: caller.tenant, id, if_match, identity }).await
}

/// Send a test delivery
///
/// Sends one signed event at once, within at most 20 seconds, and returns the result: the first example of an event type, or
/// an event of type `hub.test`. The event bypasses the messages that wait, and is sent even if the subscriber is paused or
/// inactive, but not if the tenant is suspended.
#[utoipa::path(post, path = "/hub/v1/subscribers/{id}/test", operation_id = "testSubscriber", tag = "hub", request_body = Option<TestDelivery>, params(("id" = Uuid, Path)), security(("bearer" = [])),
    responses((status = 200, body = TestResult), (status = 404, description = "There is no such subscriber")))]
async fn test(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    Mutation { body: OptionalJsonBody(body), .. }: Mutation<OptionalJsonBody<TestDelivery>>,
) -> Result<Json<TestResult>, Problem> {
    caller.require_active_tenant()?;
    Ok(Json(flow::test(&hub, &caller.tenant, id, body.event_type).await?))
}

/// Verify the endpoint of a subscriber
///
/// Sends a challenge to an endpoint that has to be verified (`unverified_since`), within at most 20 seconds: a signed POST of
/// the type `hub.endpoint.verification` with the body `{"challenge": "…", "subscriber_id": "…"}`. The endpoint answers with
/// 2xx and the challenge, alone or as the field `challenge` of a JSON object. Then the messages that wait are sent.
#[utoipa::path(post, path = "/hub/v1/subscribers/{id}/verify", operation_id = "verifySubscriber", tag = "hub", params(("id" = Uuid, Path)), security(("bearer" = [])),
    responses((status = 200, body = VerificationResult), (status = 404, description = "There is no such subscriber")))]
async fn verify(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
) -> Result<Json<VerificationResult>, Problem> {
    Ok(Json(flow::verification::verify(&hub, &caller.tenant, id).await?))
}

//! Subscribers: managing them and their secrets, and test deliveries.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use axum::extract::{FromRequestParts, State};
use axum::http::header::{ETAG, LOCATION};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use chrono::TimeDelta;
use http_kit::etag::{self, IfMatch, IfNoneMatch};
use http_kit::extract::{Json, Path};
use http_kit::field::Whole;
use http_kit::idempotency::{JsonBody, Mutation, OptionalJsonBody, RequestIdentity, StoredResponse};
use http_kit::page::{Listing, Page};
use http_kit::problem::Problem;
use serde::Deserialize;
use service::idempotency::{Effect, StoreResponse};
use sqlx::{Postgres, Transaction};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::Hub;
use crate::access::{Manager, page_scope};
use crate::error::Error;
use crate::subscribers::fields::{ChangedSubscriberFields, NewSubscriberFields, SubscriberFields};
use crate::subscribers::flow;
use crate::subscribers::flow::SubscriberTarget;
use crate::subscribers::store::SubscriberFilter;
use crate::subscribers::view::{
    ChangeView, SubscriberWithSecret, SubscriberWithSecrets, TestResult, VerificationResult, not_yet_effective,
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
    let subscribers = flow::list(&hub, &caller.tenant, &filter, before, limit + 1).await?;
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
    let (tenant, unverified) = (caller.tenant.clone(), Arc::new(OnceLock::new()));
    let created = unverified.clone();
    let response = hub
        .run_once(identity.as_ref(), StoreResponse::WithoutBody, |tx, hub| {
            Box::pin(async move {
                let (tenant, by) = (&caller.tenant, caller.principal);
                let (stored, secret) = flow::create(tx, &hub, tenant, by, fields, hub.clock.now()).await?;
                let id = stored.subscriber.id;
                if stored.subscriber.unverified_since.is_some() {
                    let _ = created.set(id);
                }
                let location = HeaderValue::try_from(format!("/hub/v1/subscribers/{id}"))
                    .map_err(|error| Problem::internal(&error))?;
                let response = SubscriberWithSecret::response(StatusCode::CREATED, &stored, &secret);
                Ok(response.with_header(LOCATION, location).shown_once(next_step(id)))
            })
        })
        .await?;
    // After the commit: the challenge is sent by a task that reads the subscriber.
    if let Some(id) = unverified.get() {
        flow::verification::start(&hub, tenant, *id);
    }
    Ok(response)
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
    target: SubscriberTarget,
    Mutation { body: JsonBody(fields), identity }: Mutation<JsonBody<SubscriberFields>>,
) -> Result<StoredResponse, Problem> {
    let (tenant, id, is_unverified) = (target.tenant.clone(), target.id, Arc::new(AtomicBool::new(false)));
    let needs_verification = is_unverified.clone();
    let response = change(&hub, identity.as_ref(), StoreResponse::WithBody, |tx, hub| {
        Box::pin(async move {
            let updated = flow::update(tx, &hub, &target, fields, hub.clock.now()).await?;
            needs_verification.store(updated.needs_verification, Ordering::Relaxed);
            Ok(SubscriberWithSecrets::response(&updated.stored))
        })
    })
    .await?;
    if is_unverified.load(Ordering::Relaxed) {
        flow::verification::start(&hub, tenant, id);
    }
    Ok(response)
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
    target: SubscriberTarget,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change(&hub, identity.as_ref(), StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            flow::delete(tx, &target).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
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
    target: SubscriberTarget,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<RotateSecret>>,
) -> Result<StoredResponse, Problem> {
    let hours = body.overlap_hours.map_or(OVERLAP_HOURS_DEFAULT, |Whole(hours)| hours);
    if !(0..=OVERLAP_HOURS_MAX).contains(&hours) {
        return Err(Error::field("/overlap_hours", format!("must be a number from 0 to {OVERLAP_HOURS_MAX}")).into());
    }
    change(&hub, identity.as_ref(), StoreResponse::WithoutBody, |tx, hub| {
        Box::pin(async move {
            let (overlap, now) = (TimeDelta::hours(hours), hub.clock.now());
            let (stored, secret) = flow::rotate_secret(tx, &hub, &target, overlap, now).await?;
            Ok(SubscriberWithSecret::response(StatusCode::OK, &stored, &secret).shown_once(next_step(target.id)))
        })
    })
    .await
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
    target: SubscriberTarget,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    set_paused(&hub, target, true, identity).await
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
    target: SubscriberTarget,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    set_paused(&hub, target, false, identity).await
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

impl FromRequestParts<Arc<Hub>> for SubscriberTarget {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, hub: &Arc<Hub>) -> Result<SubscriberTarget, Problem> {
        let Manager(caller) = Manager::from_request_parts(parts, hub).await?;
        let Path(id) = Path::from_request_parts(parts, hub).await?;
        let if_match = IfMatch::from_request_parts(parts, hub).await?;
        Ok(SubscriberTarget { tenant: caller.tenant, id, if_match })
    }
}

async fn set_paused(
    hub: &Arc<Hub>,
    target: SubscriberTarget,
    is_paused: bool,
    identity: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    change(hub, identity.as_ref(), StoreResponse::WithBody, |tx, hub| {
        Box::pin(async move {
            let stored = flow::set_paused(tx, &hub, &target, is_paused, hub.clock.now()).await?;
            Ok(SubscriberWithSecrets::response(&stored))
        })
    })
    .await
}

/// Makes a change in one transaction, once per `Idempotency-Key`. Waits until no dispatcher uses an older version of any subscriber,
/// also if this request has changed nothing or is a repeat: the request that made the change may not have waited for its end. After
/// `hub.change_wait_ms` the response says that the change is not effective yet.
async fn change<F>(
    hub: &Arc<Hub>,
    identity: Option<&RequestIdentity>,
    keep: StoreResponse,
    effect: F,
) -> Result<StoredResponse, Problem>
where
    F: for<'t> FnOnce(&'t mut Transaction<'_, Postgres>, Arc<Hub>) -> Effect<'t> + Send,
{
    let response = hub.run_once(identity, keep, effect).await?;
    let is_effective =
        !response.status().is_success() || hub.directory.wait_until_applied(&hub.db, hub.change_time_max).await;
    Ok(if is_effective { response } else { not_yet_effective(response) })
}

/// How a caller continues who has lost a response with a secret.
fn next_step(subscriber: Uuid) -> String {
    format!(
        "subscriber {subscriber} exists; for a new secret, send POST /hub/v1/subscribers/{subscriber}/rotate-secret with a \
         new Idempotency-Key"
    )
}

//! Subscriptions to paid plans.

use std::sync::Arc;

use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::header::{ETAG, LOCATION};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use http::HeaderValue;
use http_kit::auth::Caller;
use http_kit::etag::{self, IfMatch, IfNoneMatch};
use http_kit::extract::{Json, Path};
use http_kit::idempotency::{JsonBody, Mutation, RequestIdentity, StoredResponse};
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::Problem;
use serde::Deserialize;
use service::idempotency::{StoreResponse, run_once};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{CurrentOperator, IDEMPOTENCY_KEY, Member};
use crate::Identity;
use crate::domain::{Role, Status, Subscription};
use crate::error::Error;
use crate::fields::{self, Checks};
use crate::flow::subscription::{self as flow, Actor};
use crate::view::SubscriptionView;

pub(super) fn router() -> OpenApiRouter<Arc<Identity>> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(show))
        .routes(routes!(cancel))
        .routes(routes!(set_status))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewSubscription, example = json!({"plan": "pro"}))]
struct NewSubscription {
    #[schema(pattern = "^[a-z0-9][a-z0-9_-]{0,62}$")]
    plan: String,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewSubscriptionStatus, example = json!({"status": "active"}))]
struct NewStatus {
    status: Status,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SubscriptionFilters {
    /// The subscriptions of this user. Only for operators; by default, the own ones.
    user_id: Option<Uuid>,
}

/// A member, for their own subscriptions, or an operator, for all of them. As the first extractor of a handler it rejects
/// other callers before anything else of the request is read.
struct Permitted(Actor);

impl FromRequestParts<Arc<Identity>> for Permitted {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, identity: &Arc<Identity>) -> Result<Permitted, Problem> {
        let caller = <Caller as FromRequestParts<Arc<Identity>>>::from_request_parts(parts, identity).await?;
        Lister::of(&caller, parts, identity).await.map(|Lister { actor, .. }| Permitted(actor))
    }
}

/// The same, with the account of the caller: an operator may have none.
struct Lister {
    actor: Actor,
    account: Option<Uuid>,
}

impl Lister {
    async fn of(caller: &Caller, parts: &mut Parts, identity: &Arc<Identity>) -> Result<Lister, Problem> {
        // The session of an operator with an account must also be alive, and the account still an admin's.
        if caller.session.is_none() && caller.is_operator() {
            return Ok(Lister { actor: Actor::Operator, account: None });
        }
        let Member { account, .. } = Member::from_request_parts(parts, identity).await?;
        let actor =
            if caller.is_operator() && account.role == Role::Admin { Actor::Operator } else { Actor::User(account.id) };
        Ok(Lister { actor, account: Some(account.id) })
    }
}

impl FromRequestParts<Arc<Identity>> for Lister {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, identity: &Arc<Identity>) -> Result<Lister, Problem> {
        let caller = <Caller as FromRequestParts<Arc<Identity>>>::from_request_parts(parts, identity).await?;
        Lister::of(&caller, parts, identity).await
    }
}

/// Subscribe to a plan
///
/// It begins with the status `trialing`; billing changes it. There is one live subscription for each plan.
#[utoipa::path(post, path = "/identity/v1/subscriptions", operation_id = "createSubscription", tag = "identity", request_body = NewSubscription,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 201, body = SubscriptionView, headers(("location" = String, description = "The path of the subscription"),
        ("etag" = String, description = "Changes when the subscription changes")))))]
async fn create(
    State(identity): State<Arc<Identity>>,
    Member { account, .. }: Member,
    Mutation { body: JsonBody(body), identity: request }: Mutation<JsonBody<NewSubscription>>,
) -> Result<StoredResponse, Problem> {
    let mut checks = Checks::default();
    let plan = checks.check("/plan", fields::plan(body.plan));
    let (plan, now) = (checks.finish(plan).map_err(Error::Invalid)?, identity.clock.now());
    let created = run_once(&identity.db, request.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move { Ok(response(StatusCode::CREATED, flow::create(tx, account.id, plan, now).await?)) })
    });
    with_headers(created.await?)
}

/// List the subscriptions of a user, newest first
///
/// For the user, and for billing: admins of the tenant `main`.
#[utoipa::path(get, path = "/identity/v1/subscriptions", operation_id = "listSubscriptions", tag = "identity", params(Listing<SubscriptionFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<SubscriptionView>)))]
async fn list(
    State(identity): State<Arc<Identity>>,
    Lister { actor, account }: Lister,
    Listing { filters, limit, cursor }: Listing<SubscriptionFilters>,
) -> Result<Page<SubscriptionView>, Problem> {
    let user = match (actor, filters.user_id.or(account)) {
        (Actor::User(own), user) if user == Some(own) => own,
        (Actor::User(_), _) => return Err(Problem::forbidden("only operators may list the subscriptions of others")),
        (Actor::Operator, Some(user)) => user,
        (Actor::Operator, None) => {
            let detail = "an API key has no subscriptions: name a user with ?user_id=UUID";
            return Err(Problem::forbidden(detail));
        }
    };
    let scope = PageScope::of_owner(&identity.cursor_key, "identity subscriptions", user, &filters);
    let before: Option<(DateTime<Utc>, Uuid)> = scope.position(cursor.as_deref())?;
    let subscriptions = flow::list(&identity, user, before, limit + 1).await?;
    let page = scope.cut(subscriptions, limit, |subscription| (subscription.created_at, subscription.id));
    Ok(page.map(SubscriptionView::from))
}

/// Show a subscription
///
/// For its user, and for admins of the tenant `main`.
#[utoipa::path(get, path = "/identity/v1/subscriptions/{id}", operation_id = "getSubscription", tag = "identity",
    params(("id" = Uuid, Path), ("if-none-match" = Option<String>, Header, description = "The ETag of the response that the client has cached")),
    security(("bearer" = [])),
    responses((status = 200, body = SubscriptionView, headers(("etag" = String, description = "Changes when the subscription changes"))),
        (status = 304, description = "The cached response is current"), (status = 404, description = "The subscription does not exist")))]
async fn show(
    State(identity): State<Arc<Identity>>,
    Permitted(actor): Permitted,
    Path(id): Path<Uuid>,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    let found = flow::show(&identity, actor, id).await?;
    let tag = etag::of(found.version, found.updated_at);
    if if_none_match.matches(&tag) {
        return Ok((StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response());
    }
    Ok(([(ETAG, tag)], Json(SubscriptionView::from(found))).into_response())
}

/// Cancel a subscription permanently
///
/// For its user, and for admins of the tenant `main`.
#[utoipa::path(post, path = "/identity/v1/subscriptions/{id}/cancel", operation_id = "cancelSubscription", tag = "identity",
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag of the subscription as the client knows it; the request is refused if it has changed since"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = SubscriptionView, headers(("etag" = String, description = "Changes when the subscription changes"))),
        (status = 404, description = "The subscription does not exist"), (status = 409, description = "The subscription has ended"),
        (status = 412, description = "The subscription has changed since the given ETag")))]
async fn cancel(
    State(identity): State<Arc<Identity>>,
    Permitted(actor): Permitted,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity: request, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change_status(&identity, actor, id, Status::Cancelled, if_match, request).await
}

/// Set the status of a subscription
///
/// For billing: admins of the tenant `main`.
#[utoipa::path(post, path = "/identity/v1/subscriptions/{id}/status", operation_id = "setSubscriptionStatus", tag = "identity", request_body = NewStatus,
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag of the subscription as the client knows it; the request is refused if it has changed since"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = SubscriptionView, headers(("etag" = String, description = "Changes when the subscription changes"))),
        (status = 404, description = "The subscription does not exist"), (status = 409, description = "The status does not allow it"),
        (status = 412, description = "The subscription has changed since the given ETag")))]
async fn set_status(
    State(identity): State<Arc<Identity>>,
    CurrentOperator(_): CurrentOperator,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { body: JsonBody(NewStatus { status }), identity: request }: Mutation<JsonBody<NewStatus>>,
) -> Result<StoredResponse, Problem> {
    change_status(&identity, Actor::Operator, id, status, if_match, request).await
}

async fn change_status(
    identity: &Identity,
    actor: Actor,
    id: Uuid,
    status: Status,
    if_match: IfMatch,
    request: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let now = identity.clock.now();
    let changed = run_once(&identity.db, request.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let changed = flow::change_status(tx, actor, id, status, &if_match, now).await?;
            Ok(response(StatusCode::OK, changed))
        })
    });
    with_headers(changed.await?)
}

fn response(status: StatusCode, subscription: Subscription) -> StoredResponse {
    StoredResponse::json(status, &SubscriptionView::from(subscription))
}

/// Adds `ETag` and, for a new subscription, `Location`. Both are derived from the body, so the stored response of a repeated
/// request also gets them.
fn with_headers(response: StoredResponse) -> Result<StoredResponse, Problem> {
    #[derive(Deserialize)]
    struct Body {
        id: Uuid,
        version: i64,
        updated_at: DateTime<Utc>,
    }
    if !response.status().is_success() {
        return Ok(response);
    }
    let body: Body = serde_json::from_slice(response.body()).map_err(|error| Problem::internal(&error))?;
    let is_new = response.status() == StatusCode::CREATED;
    let response = response.with_header(ETAG, etag::of(body.version, body.updated_at));
    if !is_new {
        return Ok(response);
    }
    let location = HeaderValue::try_from(format!("/identity/v1/subscriptions/{}", body.id));
    Ok(response.with_header(LOCATION, location.map_err(|error| Problem::internal(&error))?))
}

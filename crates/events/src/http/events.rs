//! Creating, showing, changing and listing events.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, ETAG};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::HeaderValue;
use http_kit::auth::{Caller, Operator, Principal, User};
use http_kit::etag::{IfMatch, IfNoneMatch};
use http_kit::extract::Path;
use http_kit::field::printable;
use http_kit::idempotency::{JsonBody, Mutation, OptionalJsonBody, RequestIdentity, StoredResponse};
use http_kit::page::{Listing, NoFilters, Page, PageScope};
use http_kit::problem::{FieldError, Problem};
use serde::Deserialize;
use service::idempotency::{StoreResponse, run_once};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{IDEMPOTENCY_KEY, OwnerOrAdmin, with_headers};
use crate::Events;
use crate::coalesced_reads::{FoundEvent, ShownVersion};
use crate::domain::{Action, Actor, Event, Status};
use crate::fields::{Fields, NewFields};
use crate::flow::event::{self as flow, RequestedChange};
use crate::flow::handover;
use crate::store::audit::AuditFilter;
use crate::view::{EventSummary, EventView, StatusChangeView};

pub(super) fn router() -> OpenApiRouter<Arc<Events>> {
    OpenApiRouter::new()
        .routes(routes!(create))
        .routes(routes!(show, update))
        .routes(routes!(publish))
        .routes(routes!(unpublish))
        .routes(routes!(cancel))
        .routes(routes!(offer))
        .routes(routes!(accept))
        .routes(routes!(history))
        .routes(routes!(audit))
        .routes(routes!(list_mine))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MyFilters {
    status: Option<Status>,
}

/// The body of a request that withdraws an event. It may be absent.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = GatheringWithdrawal, example = json!({"reason": "The venue is closed."}))]
struct Withdrawal {
    /// Required of an admin who acts on the event of another user. The owner sees it in the history, and the message about
    /// the change carries it.
    #[schema(min_length = 1, max_length = 500)]
    reason: Option<String>,
}

/// The user who is to become the owner.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = GatheringOffer, example = json!({"user_id": "00000000-0000-7000-8000-000000000003"}))]
struct Offer {
    user_id: Uuid,
    /// Required of an admin who acts on the event of another user.
    #[schema(min_length = 1, max_length = 500)]
    reason: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AuditFilters {
    /// Only changes of this event.
    event_id: Option<Uuid>,
    /// Only changes that this user or API key made: `user:<id>` or `key:<id>`.
    #[param(value_type = Option<String>, pattern = "^(user|key):[0-9a-fA-F-]{36}$")]
    actor: Option<Principal>,
}

const REASON_CHARS_MAX: usize = 500;

/// Create an event
///
/// The event is a draft, visible to its owner and to admins, until it is published.
#[utoipa::path(post, path = "/event/v1/events", operation_id = "createGathering", tag = "events", request_body = NewFields,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 201, body = EventView,
        headers(("location" = String, description = "The path of the event"), ("etag" = String, description = "Changes when the event or its participant count changes")))))]
async fn create(
    State(events): State<Arc<Events>>,
    User(user): User,
    Mutation { body: JsonBody(NewFields(fields)), identity }: Mutation<JsonBody<NewFields>>,
) -> Result<StoredResponse, Problem> {
    let now = events.clock.now();
    let created = run_once(&events.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move { Ok(response(StatusCode::CREATED, flow::create(tx, user, fields, now).await?)) })
    });
    with_headers(created.await?)
}

/// Show an event
///
/// A draft is visible to its owner and to admins. The ETag also changes with the number of participants; a change with
/// `If-Match` is refused only if the event itself has changed.
#[utoipa::path(get, path = "/event/v1/events/{id}", operation_id = "getGathering", tag = "events",
    params(("id" = Uuid, Path), ("if-none-match" = Option<String>, Header, description = "The ETag of the response that the client has cached")),
    security((), ("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Changes when the event or its participant count changes"))),
        (status = 304, description = "The cached response is current"), (status = 404, description = "The event does not exist")))]
async fn show(
    State(events): State<Arc<Events>>,
    caller: Option<Caller>,
    Path(id): Path<Uuid>,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    let caller = caller.as_ref().map(Actor::from);
    let (tag, body) = match flow::show(&events, caller, id).await? {
        FoundEvent::Hidden(event) => (ShownVersion::of(&event).etag(), Bytes::from(EventView::from(*event).to_json())),
        FoundEvent::Public { version, body } => (version.etag(), body),
    };
    if if_none_match.matches(&tag) {
        return Ok((StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response());
    }
    let headers = [(ETAG, tag), (CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    Ok((headers, body).into_response())
}

/// Change an event
///
/// Absent fields stay unchanged. Other services are informed if the event is published. A canceled event cannot be
/// changed.
#[utoipa::path(patch, path = "/event/v1/events/{id}", operation_id = "updateGathering", tag = "events", request_body = Fields,
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag of the event as the client knows it; the change is refused if the event has changed since"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Changes when the event or its participant count changes"))),
        (status = 404, description = "The event does not exist"), (status = 409, description = "The event is canceled"),
        (status = 412, description = "The event has changed since the given ETag")))]
async fn update(
    State(events): State<Arc<Events>>,
    User(_): User,
    caller: Caller,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { body: JsonBody(fields), identity }: Mutation<JsonBody<Fields>>,
) -> Result<StoredResponse, Problem> {
    let change = requested(&events, Actor::from(&caller), id, Action::Update, if_match);
    let (now, delivery) = (events.clock.now(), change.delivery.clone());
    let updated = run_once(&events.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move { Ok(response(StatusCode::OK, flow::update(tx, &change, fields, now).await?)) })
    });
    let updated = updated.await?;
    delivery.wait().await;
    with_headers(updated)
}

/// Publish a draft
///
/// Everyone can see the event and join it: if this process handles the event's messages for the joins service, the response
/// waits until it knows the event. An event that has ended cannot be published.
#[utoipa::path(post, path = "/event/v1/events/{id}/publish", operation_id = "publishGathering", tag = "events",
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag of the event as the client knows it; the request is refused if the event has changed since"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Changes when the event or its participant count changes"))),
        (status = 404, description = "The event does not exist"), (status = 409, description = "The event is not a draft (`transition-refused`), or has ended (`event-ended`)"),
        (status = 412, description = "The event has changed since the given ETag")))]
async fn publish(
    State(events): State<Arc<Events>>,
    User(_): User,
    caller: Caller,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    let change = requested(&events, Actor::from(&caller), id, Action::Publish, if_match);
    change_status(&events, change, identity).await
}

/// Make a published event a draft again
///
/// It can no longer be joined; existing registrations stay. An admin may do this with the event of any user, and must give a reason;
/// the owner can correct the event and publish it again.
#[utoipa::path(post, path = "/event/v1/events/{id}/unpublish", operation_id = "unpublishGathering", tag = "events", request_body = Option<Withdrawal>,
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag of the event as the client knows it; the request is refused if the event has changed since"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Changes when the event or its participant count changes"))),
        (status = 404, description = "The event does not exist"), (status = 409, description = "The event is not published"),
        (status = 412, description = "The event has changed since the given ETag")))]
async fn unpublish(
    State(events): State<Arc<Events>>,
    OwnerOrAdmin { actor, id }: OwnerOrAdmin,
    if_match: IfMatch,
    Mutation { body: OptionalJsonBody(Withdrawal { reason }), identity }: Mutation<OptionalJsonBody<Withdrawal>>,
) -> Result<StoredResponse, Problem> {
    let reason = checked_reason(reason)?;
    let change = RequestedChange { reason, ..requested(&events, actor, id, Action::Unpublish, if_match) };
    change_status(&events, change, identity).await
}

/// Cancel an event permanently
///
/// An admin may do this with the event of any user, and must give a reason.
#[utoipa::path(post, path = "/event/v1/events/{id}/cancel", operation_id = "cancelGathering", tag = "events", request_body = Option<Withdrawal>,
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag of the event as the client knows it; the request is refused if the event has changed since"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Changes when the event or its participant count changes"))),
        (status = 404, description = "The event does not exist"), (status = 409, description = "The event is already canceled"),
        (status = 412, description = "The event has changed since the given ETag")))]
async fn cancel(
    State(events): State<Arc<Events>>,
    OwnerOrAdmin { actor, id }: OwnerOrAdmin,
    if_match: IfMatch,
    Mutation { body: OptionalJsonBody(Withdrawal { reason }), identity }: Mutation<OptionalJsonBody<Withdrawal>>,
) -> Result<StoredResponse, Problem> {
    let reason = checked_reason(reason)?;
    let change = RequestedChange { reason, ..requested(&events, actor, id, Action::Cancel, if_match) };
    change_status(&events, change, identity).await
}

/// Offer an event to another user
///
/// The user becomes the owner when they accept the offer. A later offer replaces it; an offer to the owner withdraws it. An admin
/// may do this with the event of any user, and must give a reason.
#[utoipa::path(post, path = "/event/v1/events/{id}/handover", operation_id = "offerGathering", tag = "events", request_body = Offer,
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag of the event as the client knows it; the request is refused if the event has changed since"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 204, description = "The user can accept the event, or the last offer is withdrawn"),
        (status = 404, description = "The event does not exist"), (status = 409, description = "The event is canceled"),
        (status = 412, description = "The event has changed since the given ETag")))]
async fn offer(
    State(events): State<Arc<Events>>,
    OwnerOrAdmin { actor, id }: OwnerOrAdmin,
    if_match: IfMatch,
    Mutation { body: JsonBody(Offer { user_id, reason }), identity }: Mutation<JsonBody<Offer>>,
) -> Result<StoredResponse, Problem> {
    let reason = checked_reason(reason)?;
    let change = RequestedChange { reason, ..requested(&events, actor, id, Action::HandOver, if_match) };
    let now = events.clock.now();
    let offered = run_once(&events.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            handover::offer(tx, &change, user_id, now).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    });
    offered.await
}

/// Accept an event that was offered to you
///
/// You become its owner: you can change it, and moderate its registrations. The history of the event records it.
#[utoipa::path(post, path = "/event/v1/events/{id}/handover/accept", operation_id = "acceptGathering", tag = "events",
    params(("id" = Uuid, Path), ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Changes when the event or its participant count changes"))),
        (status = 404, description = "The event does not exist, or was not offered to you (`not-offered`)"), (status = 409, description = "The event is canceled")))]
async fn accept(
    State(events): State<Arc<Events>>,
    User(user): User,
    Path(id): Path<Uuid>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    let (now, delivery) = (events.clock.now(), events.local_handlers.delivery());
    let expected = delivery.clone();
    let accepted = run_once(&events.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move { Ok(response(StatusCode::OK, handover::accept(tx, user, id, expected, now).await?)) })
    });
    let accepted = accepted.await?;
    delivery.wait().await;
    with_headers(accepted)
}

/// List the status changes of an event, oldest first
///
/// For the owner of the event and for admins.
#[utoipa::path(get, path = "/event/v1/events/{id}/history", operation_id = "listGatheringHistory", tag = "events", params(("id" = Uuid, Path), Listing<NoFilters>),
    security(("bearer" = [])),
    responses((status = 200, body = Page<StatusChangeView>), (status = 404, description = "The event does not exist")))]
async fn history(
    State(events): State<Arc<Events>>,
    caller: Caller,
    Path(id): Path<Uuid>,
    Listing { filters, limit, cursor }: Listing<NoFilters>,
) -> Result<Page<StatusChangeView>, Problem> {
    let scope = PageScope::of_owner(&events.cursor_key, "events history", id, &filters);
    let after = scope.position(cursor.as_deref())?;
    let changes = flow::history(&events, Actor::from(&caller), id, after, limit + 1).await?;
    Ok(scope.cut(changes, limit, |change| change.version).map(StatusChangeView::from))
}

/// List the status changes of all events, newest first
///
/// The audit trail, for admins of the tenant `main`.
#[utoipa::path(get, path = "/event/v1/audit", operation_id = "listGatheringAuditTrail", tag = "events", params(Listing<AuditFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<StatusChangeView>)))]
async fn audit(
    State(events): State<Arc<Events>>,
    Operator(_): Operator,
    Listing { filters, limit, cursor }: Listing<AuditFilters>,
) -> Result<Page<StatusChangeView>, Problem> {
    let scope = PageScope::global(&events.cursor_key, "events audit", &filters);
    let before = scope.position(cursor.as_deref())?;
    let filter = AuditFilter { event_id: filters.event_id, by: filters.actor };
    let changes = flow::audit(&events, &filter, before, limit + 1).await?;
    let page = scope.cut(changes, limit, |change| (change.at, change.event_id, change.version));
    Ok(page.map(StatusChangeView::from))
}

/// List your events, newest first
#[utoipa::path(get, path = "/event/v1/me/events", operation_id = "listMyGatherings", tag = "events", params(Listing<MyFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<EventSummary>)))]
async fn list_mine(
    State(events): State<Arc<Events>>,
    User(user): User,
    Listing { filters, limit, cursor }: Listing<MyFilters>,
) -> Result<Page<EventSummary>, Problem> {
    let scope = PageScope::of_owner(&events.cursor_key, "events mine", user, &filters);
    let before = scope.position(cursor.as_deref())?;
    let mine = flow::list_mine(&events, user, filters.status, before, limit + 1).await?;
    let page = scope.cut(mine, limit, |event| (event.created_at, event.id));
    Ok(page.map(EventSummary::from))
}

/// A change without a reason.
fn requested(events: &Events, actor: Actor, event_id: Uuid, action: Action, if_match: IfMatch) -> RequestedChange {
    RequestedChange { actor, event_id, action, if_match, reason: None, delivery: events.local_handlers.delivery() }
}

fn checked_reason(reason: Option<String>) -> Result<Option<String>, Problem> {
    let checked = reason.as_deref().map_or(Ok(()), |reason| printable(reason, REASON_CHARS_MAX));
    checked.map_err(|detail| Problem::validation(vec![FieldError::body("/reason", detail)]))?;
    Ok(reason)
}

/// Changes the status. The response waits, for a bounded time, for the handlers of this process: a client that has published
/// an event can join it at once.
async fn change_status(
    events: &Events,
    change: RequestedChange,
    identity: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let (now, delivery) = (events.clock.now(), change.delivery.clone());
    let changed = run_once(&events.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move { Ok(response(StatusCode::OK, flow::change_status(tx, &change, now).await?)) })
    });
    let changed = changed.await?;
    delivery.wait().await;
    with_headers(changed)
}

fn response(status: StatusCode, event: Event) -> StoredResponse {
    StoredResponse::json(status, &EventView::from(event))
}

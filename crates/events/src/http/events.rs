//! Creating, showing, changing and listing events.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, ETAG};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::HeaderValue;
use kit::auth::{Caller, User};
use kit::etag::{IfMatch, IfNoneMatch};
use kit::extract::Path;
use kit::idempotency::{JsonBody, Mutation, RequestIdentity, StoredResponse};
use kit::page::{Listing, NoFilters, Page, PageScope};
use kit::problem::Problem;
use mailbox::idempotency::{StoreResponse, run_once};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{IDEMPOTENCY_KEY, with_headers};
use crate::Events;
use crate::coalesced_reads::{FoundEvent, ShownVersion};
use crate::domain::{Action, Event, Status};
use crate::fields::{Fields, NewFields};
use crate::flow::event as flow;
use crate::view::{EventSummary, EventView, StatusChangeView};

pub(super) fn router() -> OpenApiRouter<Arc<Events>> {
    OpenApiRouter::new()
        .routes(routes!(create))
        .routes(routes!(show, update))
        .routes(routes!(publish))
        .routes(routes!(unpublish))
        .routes(routes!(cancel))
        .routes(routes!(history))
        .routes(routes!(list_mine))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MyFilters {
    status: Option<Status>,
}

/// Create an event
///
/// The event is a draft, visible to its owner alone, until it is published.
#[utoipa::path(post, path = "/event/v1/events", tag = "events", request_body = NewFields,
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
/// A draft is visible to its owner alone. The ETag also changes with the number of participants; a change with
/// `If-Match` is refused only if the event itself has changed.
#[utoipa::path(get, path = "/event/v1/events/{id}", tag = "events",
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
    let user = caller.and_then(|caller| caller.user_id());
    let (tag, body) = match flow::show(&events, user, id).await? {
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
#[utoipa::path(patch, path = "/event/v1/events/{id}", tag = "events", request_body = Fields,
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag of the event as the client knows it; the change is refused if the event has changed since"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Changes when the event or its participant count changes"))),
        (status = 404, description = "The event does not exist"), (status = 409, description = "The event is canceled"),
        (status = 412, description = "The event has changed since the given ETag")))]
async fn update(
    State(events): State<Arc<Events>>,
    User(user): User,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { body: JsonBody(fields), identity }: Mutation<JsonBody<Fields>>,
) -> Result<StoredResponse, Problem> {
    let now = events.clock.now();
    let updated = run_once(&events.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(
            async move { Ok(response(StatusCode::OK, flow::update(tx, (user, id), &if_match, fields, now).await?)) },
        )
    });
    with_headers(updated.await?)
}

/// Publish a draft
///
/// Everyone can see the event and join it.
#[utoipa::path(post, path = "/event/v1/events/{id}/publish", tag = "events",
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag of the event as the client knows it; the request is refused if the event has changed since"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Changes when the event or its participant count changes"))),
        (status = 404, description = "The event does not exist"), (status = 409, description = "The event is not a draft"),
        (status = 412, description = "The event has changed since the given ETag")))]
async fn publish(
    State(events): State<Arc<Events>>,
    User(user): User,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change_status(&events, (user, id), if_match, Action::Publish, identity).await
}

/// Make a published event a draft again
///
/// Nobody can join it; existing registrations stay.
#[utoipa::path(post, path = "/event/v1/events/{id}/unpublish", tag = "events",
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag of the event as the client knows it; the request is refused if the event has changed since"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Changes when the event or its participant count changes"))),
        (status = 404, description = "The event does not exist"), (status = 409, description = "The event is not published"),
        (status = 412, description = "The event has changed since the given ETag")))]
async fn unpublish(
    State(events): State<Arc<Events>>,
    User(user): User,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change_status(&events, (user, id), if_match, Action::Unpublish, identity).await
}

/// Cancel an event permanently
#[utoipa::path(post, path = "/event/v1/events/{id}/cancel", tag = "events",
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag of the event as the client knows it; the request is refused if the event has changed since"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Changes when the event or its participant count changes"))),
        (status = 404, description = "The event does not exist"), (status = 409, description = "The event is already canceled"),
        (status = 412, description = "The event has changed since the given ETag")))]
async fn cancel(
    State(events): State<Arc<Events>>,
    User(user): User,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change_status(&events, (user, id), if_match, Action::Cancel, identity).await
}

/// List the status changes of an event, oldest first
///
/// For the owner of the event.
#[utoipa::path(get, path = "/event/v1/events/{id}/history", tag = "events", params(("id" = Uuid, Path), Listing<NoFilters>),
    security(("bearer" = [])),
    responses((status = 200, body = Page<StatusChangeView>), (status = 404, description = "The event does not exist")))]
async fn history(
    State(events): State<Arc<Events>>,
    User(user): User,
    Path(id): Path<Uuid>,
    Listing { filters, limit, cursor }: Listing<NoFilters>,
) -> Result<Page<StatusChangeView>, Problem> {
    let scope = PageScope::of_owner(&events.cursor_key, "events history", id, &filters);
    let after = scope.position(cursor.as_deref())?;
    let changes = flow::history(&events, (user, id), (after, limit + 1)).await?;
    Ok(scope.cut(changes, limit, |change| change.version).map(StatusChangeView::from))
}

/// List your events, newest first
#[utoipa::path(get, path = "/event/v1/me/events", tag = "events", params(Listing<MyFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<EventSummary>)))]
async fn list_mine(
    State(events): State<Arc<Events>>,
    User(user): User,
    Listing { filters, limit, cursor }: Listing<MyFilters>,
) -> Result<Page<EventSummary>, Problem> {
    let scope = PageScope::of_owner(&events.cursor_key, "events mine", user, &filters);
    let before = scope.position(cursor.as_deref())?;
    let mine = flow::list_mine(&events, user, filters.status, (before, limit + 1)).await?;
    let page = scope.cut(mine, limit, |event| (event.created_at, event.id));
    Ok(page.map(EventSummary::from))
}

async fn change_status(
    events: &Events,
    user_and_event: (Uuid, Uuid),
    if_match: IfMatch,
    action: Action,
    identity: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let now = events.clock.now();
    let changed = run_once(&events.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let event = flow::change_status(tx, user_and_event, &if_match, action, now).await?;
            Ok(response(StatusCode::OK, event))
        })
    });
    with_headers(changed.await?)
}

fn response(status: StatusCode, event: Event) -> StoredResponse {
    StoredResponse::json(status, &EventView::from(event))
}

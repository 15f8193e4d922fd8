use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, ETAG};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::HeaderValue;
use kit::auth::{Caller, User};
use kit::etag::{self, IfMatch, IfNoneMatch};
use kit::extract::Path;
use kit::idempotency::{Answer, Identity, JsonBody, Mutation};
use kit::page::{Listing, NoFilters, Page};
use kit::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::once;
use crate::Events;
use crate::domain::{Action, Event, Status};
use crate::fields::{Fields, NewFields};
use crate::flow::event as flow;
use crate::reads::Seen;
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

/// Make an event; it is a draft of its owner until it is published
#[utoipa::path(post, path = "/event/v1/events", tag = "events", request_body = NewFields,
    params(("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 201, body = EventView,
        headers(("location" = String, description = "Its address"), ("etag" = String, description = "Its version and its count")))))]
async fn create(
    State(events): State<Arc<Events>>,
    User(user): User,
    Mutation { body: JsonBody(NewFields(fields)), identity }: Mutation<JsonBody<NewFields>>,
) -> Result<Answer, Problem> {
    let now = events.clock.now();
    once(&events, identity.as_ref(), |tx| {
        Box::pin(async move { Ok(shown(StatusCode::CREATED, flow::create(tx, user, fields, now).await?)) })
    })
    .await
}

/// Show an event; a draft only to its owner
///
/// The ETag covers the number of participants, too: it is another one when that changes. A change made with it is refused
/// only if the event itself was changed meanwhile.
#[utoipa::path(get, path = "/event/v1/events/{id}", tag = "events",
    params(("id" = Uuid, Path), ("if-none-match" = Option<String>, Header, description = "The ETag of the copy that you have")),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Its version and its count"))),
        (status = 304, description = "You have it as it is"), (status = 404, description = "There is no such event")))]
async fn show(
    State(events): State<Arc<Events>>,
    caller: Option<Caller>,
    Path(id): Path<Uuid>,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    let user = caller.and_then(|caller| caller.user_id());
    let (tag, body) = match flow::show(&events, user, id).await? {
        Seen::Hidden(event) => (tag_of(&event), Bytes::from(EventView::from(*event).to_json())),
        Seen::Public { version, active_participants, body } => (etag::beside(version, active_participants), body),
    };
    if if_none_match.has_tag(&tag) {
        return Ok((StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response());
    }
    let headers = [(ETAG, tag), (CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    Ok((headers, body).into_response())
}

/// Change an event; what is absent stays
///
/// People who joined hear of it if it is published. One that is canceled stays as it is.
#[utoipa::path(patch, path = "/event/v1/events/{id}", tag = "events", request_body = Fields,
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag that the change is meant for"),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Its version and its count"))),
        (status = 404, description = "There is no such event"), (status = 409, description = "It is canceled"),
        (status = 412, description = "It was changed meanwhile")))]
async fn update(
    State(events): State<Arc<Events>>,
    User(user): User,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { body: JsonBody(fields), identity }: Mutation<JsonBody<Fields>>,
) -> Result<Answer, Problem> {
    let now = events.clock.now();
    once(&events, identity.as_ref(), |tx| {
        Box::pin(async move { Ok(shown(StatusCode::OK, flow::update(tx, (user, id), &if_match, fields, now).await?)) })
    })
    .await
}

/// Publish a draft: anyone can see it, and join
#[utoipa::path(post, path = "/event/v1/events/{id}/publish", tag = "events",
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag that is meant"),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Its version and its count"))),
        (status = 404, description = "There is no such event"), (status = 409, description = "It is no draft"),
        (status = 412, description = "It was changed meanwhile")))]
async fn publish(
    State(events): State<Arc<Events>>,
    User(user): User,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    act(&events, (user, id), if_match, Action::Publish, identity).await
}

/// Make a published event a draft again: nobody can join, and who has stays
#[utoipa::path(post, path = "/event/v1/events/{id}/unpublish", tag = "events",
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag that is meant"),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Its version and its count"))),
        (status = 404, description = "There is no such event"), (status = 409, description = "It is not published"),
        (status = 412, description = "It was changed meanwhile")))]
async fn unpublish(
    State(events): State<Arc<Events>>,
    User(user): User,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    act(&events, (user, id), if_match, Action::Unpublish, identity).await
}

/// Cancel an event, for good
#[utoipa::path(post, path = "/event/v1/events/{id}/cancel", tag = "events",
    params(("id" = Uuid, Path), ("if-match" = Option<String>, Header, description = "The ETag that is meant"),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 200, body = EventView, headers(("etag" = String, description = "Its version and its count"))),
        (status = 404, description = "There is no such event"), (status = 409, description = "It is canceled already"),
        (status = 412, description = "It was changed meanwhile")))]
async fn cancel(
    State(events): State<Arc<Events>>,
    User(user): User,
    Path(id): Path<Uuid>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    act(&events, (user, id), if_match, Action::Cancel, identity).await
}

/// Show who changed an event's status and when, oldest first; to its owner
#[utoipa::path(get, path = "/event/v1/events/{id}/history", tag = "events", params(("id" = Uuid, Path), Listing<NoFilters>),
    security(("bearer" = [])),
    responses((status = 200, body = Page<StatusChangeView>), (status = 404, description = "There is no such event")))]
async fn history(
    State(events): State<Arc<Events>>,
    User(user): User,
    Path(id): Path<Uuid>,
    Listing { filters: NoFilters {}, limit, cursor }: Listing<NoFilters>,
) -> Result<Page<StatusChangeView>, Problem> {
    let scope = format!("events history {id}");
    let after = cursor.map(|cursor| events.cursor_key.open(&scope, &cursor)).transpose()?;
    let changes = flow::history(&events, (user, id), (after, limit + 1)).await?;
    Ok(Page::cut(changes, limit, &events.cursor_key, &scope, |change| change.version).map(StatusChangeView::from))
}

/// List the events that you made, newest first
#[utoipa::path(get, path = "/event/v1/me/events", tag = "events", params(Listing<MyFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<EventSummary>)))]
async fn list_mine(
    State(events): State<Arc<Events>>,
    User(user): User,
    Listing { filters, limit, cursor }: Listing<MyFilters>,
) -> Result<Page<EventSummary>, Problem> {
    let scope = format!("events mine {user} {filters:?}");
    let before = cursor.map(|cursor| events.cursor_key.open(&scope, &cursor)).transpose()?;
    let mine = flow::list_mine(&events, user, filters.status, (before, limit + 1)).await?;
    let page = Page::cut(mine, limit, &events.cursor_key, &scope, |event| (event.created_at, event.id));
    Ok(page.map(EventSummary::from))
}

async fn act(
    events: &Events,
    whose: (Uuid, Uuid),
    if_match: IfMatch,
    action: Action,
    identity: Option<Identity>,
) -> Result<Answer, Problem> {
    let now = events.clock.now();
    once(events, identity.as_ref(), |tx| {
        Box::pin(async move { Ok(shown(StatusCode::OK, flow::act(tx, whose, &if_match, action, now).await?)) })
    })
    .await
}

fn shown(status: StatusCode, event: Event) -> Answer {
    Answer::json(status, &EventView::from(event))
}

fn tag_of(event: &Event) -> HeaderValue {
    etag::beside(event.version, event.active_participants)
}

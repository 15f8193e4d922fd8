//! Streams: managing them, and reading them by pulls.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::LOCATION;
use axum::http::{HeaderValue, StatusCode};
use http_kit::etag::IfMatch;
use http_kit::extract::{Json, Path};
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::page::{Listing, NoFilters, Page};
use http_kit::problem::Problem;
use service::idempotency::StoreResponse;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Hub;
use crate::access::{Manager, page_scope};
use crate::error::Error;
use crate::streams::fields::{
    AcknowledgeFields, NewStreamFields, PullFields, ReleaseFields, SeekFields, StreamFields, StreamName,
};
use crate::streams::flow;
use crate::streams::flow::StreamTarget;
use crate::streams::flow::pull::ReaderOf;
use crate::streams::view::{PulledView, StreamView, StreamWithState};

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(show, update, delete))
        .routes(routes!(pull))
        .routes(routes!(acknowledge))
        .routes(routes!(release))
        .routes(routes!(seek))
}

/// List streams by name
#[utoipa::path(get, path = "/hub/v1/streams", operation_id = "listStreams", tag = "hub", params(Listing<NoFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<StreamView>)))]
async fn list(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Listing { filters, limit, cursor }: Listing<NoFilters>,
) -> Result<Page<StreamView>, Problem> {
    let scope = page_scope(&hub, "streams", &caller, &filters);
    let after = scope.position(cursor.as_deref())?;
    let streams = flow::list(&hub, &caller.tenant, after, limit + 1).await?;
    Ok(scope.cut(streams, limit, |stream| stream.name.clone()).map(StreamView::from))
}

/// Create a stream
///
/// The stream contains the events that are posted from now on.
#[utoipa::path(post, path = "/hub/v1/streams", operation_id = "createStream", tag = "hub", request_body = NewStreamFields,
    params(("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 201, body = StreamView,
        headers(("location" = String, description = "The path of the stream"),
        ("etag" = String, description = "The version of the stream")))))]
async fn create(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Mutation { body: JsonBody(fields), identity }: Mutation<JsonBody<NewStreamFields>>,
) -> Result<StoredResponse, Problem> {
    hub.run_once(identity.as_ref(), StoreResponse::WithBody, |tx, hub| {
        Box::pin(async move {
            let stream = flow::create(tx, caller.tenant, fields.into_parts(), hub.clock.now()).await?;
            let location = HeaderValue::try_from(format!("/hub/v1/streams/{}", stream.name))
                .map_err(|error| Problem::internal(&error))?;
            Ok(StreamView::response(StatusCode::CREATED, stream).with_header(LOCATION, location))
        })
    })
    .await
}

/// Show a stream with its positions, its lag and its readers
#[utoipa::path(get, path = "/hub/v1/streams/{name}", operation_id = "getStream", tag = "hub", security(("bearer" = [])),
    params(("name" = String, Path, pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", max_length = 100)),
    responses((status = 200, body = StreamWithState), (status = 404, description = "There is no such stream")))]
async fn show(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(name): Path<StreamName>,
) -> Result<Json<StreamWithState>, Problem> {
    Ok(Json(flow::show(&hub, &caller.tenant, &name).await?))
}

/// Change which events a stream contains
///
/// Absent fields stay unchanged; null resets a field to its default. The change applies to events that are posted when the
/// response has arrived. What the stream contains already stays.
#[utoipa::path(patch, path = "/hub/v1/streams/{name}", operation_id = "updateStream", tag = "hub", request_body = StreamFields,
    params(("name" = String, Path, pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", max_length = 100),
        ("if-match" = Option<String>, Header, description = "Fails with 412 unless this is the current ETag"),
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 200, body = StreamView, headers(("etag" = String, description = "The version of the stream"))),
        (status = 404, description = "There is no such stream"),
        (status = 412, description = "The stream has another version than `If-Match`")))]
async fn update(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(name): Path<StreamName>,
    if_match: IfMatch,
    Mutation { body: JsonBody(fields), identity }: Mutation<JsonBody<StreamFields>>,
) -> Result<StoredResponse, Problem> {
    let target = StreamTarget { tenant: caller.tenant, name, if_match };
    hub.run_once(identity.as_ref(), StoreResponse::WithBody, |tx, hub| {
        Box::pin(async move {
            let stream = flow::update(tx, &target, fields, hub.clock.now()).await?;
            Ok(StreamView::response(StatusCode::OK, stream))
        })
    })
    .await
}

/// Delete a stream
///
/// Its positions and readers are deleted. A new stream of the same name starts empty.
#[utoipa::path(delete, path = "/hub/v1/streams/{name}", operation_id = "deleteStream", tag = "hub",
    params(("name" = String, Path, pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", max_length = 100),
        ("if-match" = Option<String>, Header, description = "Fails with 412 unless this is the current ETag"),
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 204, description = "The stream is deleted"),
        (status = 404, description = "There is no such stream"),
        (status = 412, description = "The stream has another version than `If-Match`")))]
async fn delete(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(name): Path<StreamName>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    let target = StreamTarget { tenant: caller.tenant, name, if_match };
    hub.run_once(identity.as_ref(), StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            flow::delete(tx, &target).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

/// Pull the next messages of a stream
///
/// Returns unacknowledged messages, in order per lane, of the parts that this reader has. A pull without an
/// acknowledgement in between returns the same messages again. Several readers share the parts of a stream evenly, and a part
/// has one reader at a time, until the reader releases it or its lease ends.
///
/// Without a message, the response waits for one, up to `wait_ms`.
#[utoipa::path(post, path = "/hub/v1/streams/{name}/pull", operation_id = "pullStream", tag = "hub", request_body = PullFields,
    params(("name" = String, Path, pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", max_length = 100)),
    security(("bearer" = [])),
    responses((status = 200, body = PulledView),
        (status = 404, description = "There is no such stream"),
        (status = 409, description = "The cursor in `acknowledge` is refused, or there are too many readers"),
        (status = 410, description = "Unacknowledged messages are no longer retained")))]
async fn pull(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(name): Path<StreamName>,
    Json(fields): Json<PullFields>,
) -> Result<Json<PulledView>, Problem> {
    caller.require_active_tenant()?;
    let limits = fields.limits().map_err(Error::Invalid)?;
    let of = ReaderOf { tenant: &caller.tenant, stream: &name, reader: &fields.reader };
    Ok(Json(flow::pull::pull(&hub, &caller, &of, limits, fields.acknowledge.as_deref()).await?))
}

/// Acknowledge messages of a stream
///
/// Everything that the pull with this cursor has returned is processed and does not come again. A repeat has no further
/// effect. If the lease has ended and another reader has the messages, nothing is acknowledged.
#[utoipa::path(post, path = "/hub/v1/streams/{name}/acknowledge", operation_id = "acknowledgeStream", tag = "hub", request_body = AcknowledgeFields,
    params(("name" = String, Path, pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", max_length = 100)),
    security(("bearer" = [])),
    responses((status = 204, description = "The messages are acknowledged"),
        (status = 404, description = "There is no such stream"),
        (status = 409, description = "Another reader has the messages, or a seek has moved the position")))]
async fn acknowledge(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(name): Path<StreamName>,
    Json(AcknowledgeFields { reader, cursor }): Json<AcknowledgeFields>,
) -> Result<StatusCode, Problem> {
    let of = ReaderOf { tenant: &caller.tenant, stream: &name, reader: &reader };
    flow::pull::acknowledge(&hub, &of, &cursor).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// End the lease of a reader
///
/// Other readers continue after what this one has acknowledged. Its cursors are refused from then on.
#[utoipa::path(post, path = "/hub/v1/streams/{name}/release", operation_id = "releaseStream", tag = "hub", request_body = ReleaseFields,
    params(("name" = String, Path, pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", max_length = 100)),
    security(("bearer" = [])),
    responses((status = 204, description = "The reader has no parts"),
        (status = 404, description = "There is no such stream")))]
async fn release(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(name): Path<StreamName>,
    Json(ReleaseFields { reader }): Json<ReleaseFields>,
) -> Result<StatusCode, Problem> {
    flow::pull::release(&hub, &ReaderOf { tenant: &caller.tenant, stream: &name, reader: &reader }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Move the position of a stream
///
/// The stream continues at a time, after an event, or at one of its ends, for all readers. It is refused while readers have
/// leases, unless `force` ends them. All cursors are refused afterwards.
#[utoipa::path(post, path = "/hub/v1/streams/{name}/seek", operation_id = "seekStream", tag = "hub", request_body = SeekFields,
    params(("name" = String, Path, pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", max_length = 100),
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 200, body = StreamWithState),
        (status = 404, description = "There is no such stream, or it does not contain the event"),
        (status = 409, description = "A reader has a lease"),
        (status = 410, description = "The messages of that time are no longer retained")))]
async fn seek(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(name): Path<StreamName>,
    Mutation { body: JsonBody(fields), identity }: Mutation<JsonBody<SeekFields>>,
) -> Result<StoredResponse, Problem> {
    let target = fields.target().map_err(Error::Invalid)?;
    hub.run_once(identity.as_ref(), StoreResponse::WithBody, |tx, hub| {
        Box::pin(async move {
            let (stream, state) = flow::seek(tx, &caller.tenant, &name, target, fields.force).await?;
            hub.stream_waiters.wake(&[stream]);
            Ok(StoredResponse::json(StatusCode::OK, &state))
        })
    })
    .await
}

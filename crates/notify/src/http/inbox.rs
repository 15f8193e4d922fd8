//! The in-app inbox of the signed-in user, under `/notify/v1/inbox`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use http_kit::auth::User;
use http_kit::event_stream::EventStream;
use http_kit::extract::{Json, Path, Query};
use http_kit::field::Whole;
use http_kit::idempotency::{JsonBody, Mutation, RequestIdentity, StoredResponse};
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::{FieldError, Problem};
use serde::Deserialize;
use service::idempotency::{StoreResponse, run_in_steps, run_once, unfinished};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::IDEMPOTENCY_KEY;
use crate::Notify;
use crate::flow::inbox as flow;
use crate::flow::inbox::{ShownEntries, StreamPosition};
use crate::store::inbox::{InboxChange, InboxEntry, InboxFilter};
use crate::view::inbox::{InboxItem, InboxStateView};

/// The largest number in a request: more than any inbox has.
const SEQ_MAX: i64 = 1_000_000_000;

pub(super) fn router() -> OpenApiRouter<Arc<Notify>> {
    OpenApiRouter::new()
        .routes(routes!(list_inbox))
        .routes(routes!(show_inbox_item))
        .routes(routes!(unread_count))
        .routes(routes!(read_all))
        .routes(routes!(read_one))
        .routes(routes!(mark_unread))
        .routes(routes!(archive))
        .routes(routes!(stream_inbox))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct InboxFilters {
    /// `true`: only unread notifications; `false`: only read ones.
    unread: Option<bool>,
    /// `true`: the archive instead of the inbox.
    archived: Option<bool>,
}

/// Up to which notification all are read.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = InboxReadRequest, example = json!({"up_to": 17}))]
struct ReadAll {
    /// The number of the newest notification that the user has seen. Newer ones stay unread.
    #[schema(value_type = i64, minimum = 0, maximum = 1000000000)]
    up_to: Whole,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct StreamParams {
    /// Begin after this number; 0 sends everything. Ignored if the request has `Last-Event-ID`.
    #[param(minimum = 0)]
    after: Option<i64>,
}

/// List your notifications, newest first
///
/// A page with large notifications may have fewer items than `limit`; continue until there is no `next_cursor`.
#[utoipa::path(get, path = "/notify/v1/inbox", operation_id = "listInbox", tag = "notify", params(Listing<InboxFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<InboxItem>)))]
async fn list_inbox(
    State(notify): State<Arc<Notify>>,
    User(user): User,
    Listing { filters, limit, cursor }: Listing<InboxFilters>,
) -> Result<Page<InboxItem>, Problem> {
    let scope = PageScope::of_owner(&notify.cursor_key, "inbox", user, &filters);
    let before = scope.position(cursor.as_deref())?;
    let filter = InboxFilter { unread: filters.unread, archived: filters.archived.unwrap_or(false) };
    let ShownEntries { entries, name, locale } = flow::list(&notify.db, user, filter, before, limit + 1).await?;
    let item = |entry: InboxEntry| InboxItem::new(entry, &notify.recorder.templates, &name, &locale);
    Ok(scope.cut_by_size(entries, limit, InboxEntry::bytes, |entry| entry.seq).map(item))
}

/// Show one of your notifications
#[utoipa::path(get, path = "/notify/v1/inbox/{seq}", operation_id = "getInboxItem", tag = "notify", params(("seq" = i64, Path)),
    security(("bearer" = [])),
    responses((status = 200, body = InboxItem), (status = 404, description = "The notification does not exist")))]
async fn show_inbox_item(
    State(notify): State<Arc<Notify>>,
    User(user): User,
    Path(seq): Path<i64>,
) -> Result<Json<InboxItem>, Problem> {
    let ShownEntries { entries, name, locale } = flow::one(&notify.db, user, seq).await?;
    let item = |entry: InboxEntry| InboxItem::new(entry, &notify.recorder.templates, &name, &locale);
    let found = entries.into_iter().next().map(item);
    found.map(Json).ok_or_else(|| crate::error::Error::InboxItemNotFound.into())
}

/// Count your unread notifications
#[utoipa::path(get, path = "/notify/v1/inbox/unread-count", operation_id = "getUnreadCount", tag = "notify", security(("bearer" = [])),
    responses((status = 200, body = InboxStateView)))]
async fn unread_count(State(notify): State<Arc<Notify>>, User(user): User) -> Result<Json<InboxStateView>, Problem> {
    Ok(Json(flow::state(&notify.db, user).await?.into()))
}

/// Mark your notifications up to a number as read
///
/// Those that have arrived since the user has seen that number stay unread. If there are many, they are marked in steps; a request
/// that fails in between is repeated, and continues.
#[utoipa::path(post, path = "/notify/v1/inbox/read", operation_id = "markInboxRead", tag = "notify", request_body = ReadAll,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])), responses((status = 200, body = InboxStateView)))]
async fn read_all(
    State(notify): State<Arc<Notify>>,
    User(user): User,
    Mutation { body: JsonBody(ReadAll { up_to: Whole(up_to) }), identity }: Mutation<JsonBody<ReadAll>>,
) -> Result<StoredResponse, Problem> {
    if !(0..=SEQ_MAX).contains(&up_to) {
        let detail = format!("must be a number from 0 to {SEQ_MAX}");
        return Err(Problem::validation(vec![FieldError::body("/up_to", detail)]));
    }
    run_in_steps(&notify.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let state = flow::read_next(tx, user, up_to).await?;
            let response = |state| StoredResponse::json(StatusCode::OK, &InboxStateView::from(state));
            Ok(state.map_or_else(unfinished, response))
        })
    })
    .await
}

/// Mark a notification as read
#[utoipa::path(post, path = "/notify/v1/inbox/{seq}/read", operation_id = "markInboxItemRead", tag = "notify",
    params(("seq" = i64, Path), ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = InboxStateView), (status = 404, description = "The notification does not exist")))]
async fn read_one(
    State(notify): State<Arc<Notify>>,
    User(user): User,
    Path(seq): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change(&notify, user, seq, InboxChange::Read, identity).await
}

/// Mark a notification as unread again
///
/// It also returns from the archive.
#[utoipa::path(post, path = "/notify/v1/inbox/{seq}/unread", operation_id = "markInboxItemUnread", tag = "notify",
    params(("seq" = i64, Path), ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = InboxStateView), (status = 404, description = "The notification does not exist")))]
async fn mark_unread(
    State(notify): State<Arc<Notify>>,
    User(user): User,
    Path(seq): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change(&notify, user, seq, InboxChange::Unread, identity).await
}

/// Archive a notification
///
/// It is also read.
#[utoipa::path(post, path = "/notify/v1/inbox/{seq}/archive", operation_id = "archiveInboxItem", tag = "notify",
    params(("seq" = i64, Path), ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = InboxStateView), (status = 404, description = "The notification does not exist")))]
async fn archive(
    State(notify): State<Arc<Notify>>,
    User(user): User,
    Path(seq): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change(&notify, user, seq, InboxChange::Archive, identity).await
}

/// Receive your notifications as they arrive
///
/// Server-sent events with the name `notification`; `id` is the number and the time, and `data` is the notification as in the
/// list. A connection that ends is opened again with `Last-Event-ID`: nothing is missing, and nothing is sent twice,
/// whichever process answers. A new connection begins with the next notification, unless `after` names another beginning.
#[utoipa::path(get, path = "/notify/v1/inbox/events", operation_id = "watchInbox", tag = "notify",
    params(StreamParams, ("last-event-id" = Option<String>, Header, description = "The id of the last event that the client has got")),
    security(("bearer" = [])),
    responses((status = 200, body = InboxItem, content_type = "text/event-stream", description = "A stream that stays open; `data` of each event is the notification")))]
async fn stream_inbox(
    State(notify): State<Arc<Notify>>,
    User(user): User,
    Query(StreamParams { after }): Query<StreamParams>,
    stream: EventStream,
) -> Result<Response, Problem> {
    if after.is_some_and(|after| after < 0) {
        return Err(http_kit::extract::query_problem("/after", "must be a number from 0"));
    }
    let last = match stream.last_event_id.as_deref().map(str::parse) {
        None => None,
        Some(Ok(last)) => Some(last),
        Some(Err(())) => {
            let detail = "last-event-id: must be the id of an event of this stream, such as 17-1800000000123456";
            return Err(Problem::bad_request("malformed-header", detail));
        }
    };
    let after = after.map(|seq| StreamPosition { seq, created_at: None });
    let events = notify.streams.open(Arc::clone(&notify.recorder), user, last.or(after)).await?;
    Ok(stream.respond(events))
}

async fn change(
    notify: &Notify,
    user: Uuid,
    seq: i64,
    change: InboxChange,
    identity: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    run_once(&notify.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let state = flow::change(tx, user, seq, change).await?;
            Ok(StoredResponse::json(StatusCode::OK, &InboxStateView::from(state)))
        })
    })
    .await
}

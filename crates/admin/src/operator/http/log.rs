//! `/admin/v1/log`: the messages of the log.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, Utc};
use http_kit::auth::Operator;
use http_kit::extract::{Json, Path, Query, query_problem};
use http_kit::page::{Listing, PAGE_BYTES_MAX, Page, PageScope};
use http_kit::problem::Problem;
use pillarbox::log::{Filter, MessagePattern, Tenant};
use pillarbox::operations::browse::{self, LogPage, Selection};
use pillarbox::operations::tail::tail;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Administration;
use crate::operator::{Error, MessageIdInput, MessageView, MessageWithOutcomes, flow};

pub(super) fn router() -> OpenApiRouter<Arc<Administration>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(follow)).routes(routes!(show))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct LogFilters {
    /// Only this topic and the topics below it, such as `order`.
    topic: Option<String>,
    #[param(value_type = Option<http_kit::openapi::TenantName>)]
    tenant: Option<Tenant>,
    /// Only messages of this source, such as `sql`.
    source: Option<String>,
    /// Only the message with this id: `evt_` and a UUID, or the UUID alone.
    #[param(value_type = Option<String>, pattern = r"^(evt_)?[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$")]
    message_id: Option<MessageIdInput>,
    /// Posted at this time or later.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Posted before this time.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    to: Option<DateTime<Utc>>,
}

/// List the messages of the log, newest first
///
/// Each page searches a bounded part of the log, so a page can be short or empty although there is a next page.
#[utoipa::path(get, path = "/admin/v1/log", operation_id = "listLogMessages", tag = "operator", params(Listing<LogFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<MessageView>)))]
async fn list(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<LogFilters>,
) -> Result<Page<MessageView>, Problem> {
    let scope = PageScope::global(&admin.cursor_key, "log", &filters);
    let before = scope.position(cursor.as_deref())?;
    let which = Selection {
        topic: filters.topic,
        tenant: filters.tenant.map(String::from),
        source: filters.source,
        filter: None,
        consumer: None,
        from: filters.from,
        to: filters.to,
    };
    let mut db = admin.db.acquire().await.map_err(Error::Database)?;
    let page = match filters.message_id {
        None => browse::page(&mut db, &which, before, limit).await.map_err(Error::Database)?,
        Some(MessageIdInput(id)) => {
            let found = browse::find(&mut db, id).await.map_err(Error::Database)?;
            LogPage { messages: found.into_iter().filter(|found| which.matches(found)).collect(), before: None }
        }
    };
    let next_cursor = page.before.map(|before| scope.cursor(&before));
    Ok(Page { items: page.messages, next_cursor }.map(MessageView::brief))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TailQuery {
    /// Only this topic and the topics below it, such as `order`.
    #[param(pattern = r"^([A-Za-z0-9_]+|\*|#)(\.([A-Za-z0-9_]+|\*|#))*$")]
    topic: Option<String>,
    /// Start with the first message that was posted at this time or later. Absent: with the next one that is posted.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// The `next` of the previous response.
    #[param(pattern = "^[A-Za-z0-9_-]+$")]
    after: Option<String>,
}

/// Messages in the order of the log, with their headers and payloads.
#[derive(Debug, Serialize, ToSchema)]
struct LogTail {
    items: Vec<MessageView>,
    /// Pass it as `after` to get the messages that follow, now or later.
    next: String,
    /// Whether the response ends with the newest message. If not, there can be more although `items` is empty.
    is_at_end: bool,
}

/// Follow the log: messages in its order, each once
///
/// Repeat the request with the `next` of the last response as `after`, and with the same filters. A message that was committed late comes late,
/// and is not lost.
#[utoipa::path(get, path = "/admin/v1/log/tail", operation_id = "followLog", tag = "operator", params(TailQuery), security(("bearer" = [])),
    responses((status = 200, body = LogTail)))]
async fn follow(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Query(TailQuery { topic, from, after }): Query<TailQuery>,
) -> Result<Json<LogTail>, Problem> {
    let filter = match &topic {
        Some(topic) => {
            let pattern = MessagePattern::topic(&format!("{topic}.#"));
            pattern.check().map_err(|error| query_problem("/topic", error))?;
            Filter::matching(&pattern)
        }
        None => Filter::everything(),
    };
    let scope = PageScope::global(&admin.cursor_key, "log-tail", &(topic, from));
    let position = scope.position(after.as_deref()).map_err(|_| {
        query_problem(
            "/after",
            "is not valid: pass the `next` of the previous response, unchanged, with the same filters",
        )
    })?;
    let mut db = admin.db.acquire().await.map_err(Error::Database)?;
    let page = tail(&mut db, filter, from, position, PAGE_BYTES_MAX).await.map_err(Error::Database)?;
    drop(db);
    Ok(Json(LogTail {
        items: page.messages.into_iter().map(MessageView::full).collect(),
        next: scope.cursor(&page.next),
        is_at_end: page.is_at_end,
    }))
}

/// Get a message with its status for each consumer
#[utoipa::path(get, path = "/admin/v1/log/{event_id}", operation_id = "getLogMessage", tag = "operator", security(("bearer" = [])),
    params(("event_id" = String, Path, pattern = r"^(evt_)?[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$", description = "`evt_` and a UUID, or the UUID alone")),
    responses((status = 200, body = MessageWithOutcomes), (status = 404, description = "The log has no message with this id")))]
async fn show(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(MessageIdInput(id)): Path<MessageIdInput>,
) -> Result<Json<MessageWithOutcomes>, Problem> {
    Ok(Json(flow::message(&admin.db, id).await?))
}

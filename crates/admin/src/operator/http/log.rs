//! `/admin/v1/log`: the messages of the log.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, Utc};
use http_kit::auth::Operator;
use http_kit::extract::{Json, Path};
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::Problem;
use pillarbox::log::Tenant;
use pillarbox::operations::browse::{self, LogPage, Selection};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Administration;
use crate::operator::{Error, MessageIdInput, MessageView, MessageWithOutcomes, flow};

pub(super) fn router() -> OpenApiRouter<Arc<Administration>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(show))
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

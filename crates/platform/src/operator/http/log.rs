use axum::extract::State;
use chrono::{DateTime, Utc};
use kit::auth::{Operator, Tenant};
use kit::extract::{Json, Path};
use kit::page::{Listing, Page};
use kit::problem::Problem;
use mailbox::browse::{self, Stretch, Which};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::scope;
use crate::app::App;
use crate::operator::{Error, MessageName, MessageView, MessageWithOutcomes, flow};

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(show))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct LogFilters {
    /// This topic and what is below it.
    #[param(example = "order")]
    topic: Option<String>,
    tenant: Option<Tenant>,
    /// Who posted it.
    #[param(example = "sql")]
    source: Option<String>,
    /// Only this one: `evt_` and a UUID, or the UUID alone.
    #[param(value_type = Option<String>)]
    message_id: Option<MessageName>,
    /// Posted then or later.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Posted before then.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    to: Option<DateTime<Utc>>,
}

/// List the messages of the log, newest first
///
/// A page looks through a bounded part of the log: it can be short, or empty, and have a next one.
#[utoipa::path(get, path = "/admin/v1/log", tag = "operator", params(Listing<LogFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<MessageView>)))]
async fn list(
    State(app): State<App>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<LogFilters>,
) -> Result<Page<MessageView>, Problem> {
    let scope = scope("log", &filters);
    let before = cursor.map(|cursor| app.cursor_key.open(&scope, &cursor)).transpose()?;
    let which = Which {
        topic: filters.topic,
        tenant: filters.tenant.map(String::from),
        source: filters.source,
        filter: None,
        from: filters.from,
        to: filters.to,
    };
    let mut db = app.db.acquire().await.map_err(Error::Database)?;
    let stretch = match filters.message_id {
        None => browse::page(&mut db, &which, before, limit).await.map_err(Error::Database)?,
        Some(MessageName(id)) => {
            let found = browse::find(&mut db, id).await.map_err(Error::Database)?;
            Stretch { messages: found.into_iter().filter(|found| which.means(found)).collect(), before: None }
        }
    };
    let next_cursor = stretch.before.map(|before| app.cursor_key.seal(&scope, &before));
    Ok(Page { items: stretch.messages, next_cursor }.map(MessageView::brief))
}

/// Show a message, and what each consumer has made of it
#[utoipa::path(get, path = "/admin/v1/log/{event_id}", tag = "operator", security(("bearer" = [])),
    params(("event_id" = String, Path, description = "`evt_` and a UUID, or the UUID alone")),
    responses((status = 200, body = MessageWithOutcomes), (status = 404, description = "The log has no such message")))]
async fn show(
    State(app): State<App>,
    _: Operator,
    Path(MessageName(id)): Path<MessageName>,
) -> Result<Json<MessageWithOutcomes>, Problem> {
    Ok(Json(flow::message(&app.db, id).await?))
}

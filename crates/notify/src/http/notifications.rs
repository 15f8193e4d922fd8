//! Notifications for operators, under `/admin/v1/notifications`.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, Utc};
use http_kit::auth::Operator;
use http_kit::extract::{Json, Path};
use http_kit::idempotency::{Mutation, StoredResponse};
use http_kit::openapi;
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::Problem;
use serde::Deserialize;
use serde_json::json;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{IntoParams, PartialSchema, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::IDEMPOTENCY_KEY;
use super::retry::{self, Retried};
use crate::Notify;
use crate::domain::delivery_rules::Channel;
use crate::domain::notification::NotificationStatus;
use crate::error::Error;
use crate::flow::{notifications, operator};
use crate::store::notifications::{DeadNotifications, NotificationFilter};
use crate::view::BulkRetry;
use crate::view::notifications::NotificationView;

pub(super) fn router() -> OpenApiRouter<Arc<Notify>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(retry_many)).routes(routes!(retry_one))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct NotificationFilters {
    /// Only notifications with this status.
    #[param(inline)]
    status: Option<NotificationStatus>,
    /// Only notifications over this channel.
    #[param(inline)]
    channel: Option<Channel>,
    /// Only notifications to this user.
    user_id: Option<Uuid>,
    /// Only notifications about events of this type, such as `join.promoted`.
    event_type: Option<String>,
    /// Only notifications about this event: its id here, with or without `evt_`, or the `event_id` of its producer.
    event_id: Option<String>,
}

/// Selects the dead notifications of a bulk retry: filters, or `all`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = DeadNotificationSelection)]
struct DeadNotificationSelection {
    /// Only notifications over this channel.
    #[schema(inline)]
    channel: Option<Channel>,
    /// Only notifications about events of this type.
    event_type: Option<String>,
    /// Only notifications to this user.
    user_id: Option<Uuid>,
    /// Only notifications that were created before this time.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    to: Option<DateTime<Utc>>,
    /// All dead notifications, without a filter.
    #[serde(default)]
    all: bool,
}

impl DeadNotificationSelection {
    /// Fails unless it has either filters or `all`: an empty request must not affect every notification.
    fn into_dead_notifications(self) -> Result<DeadNotifications, Error> {
        let DeadNotificationSelection { channel, event_type, user_id, to, all } = self;
        let has_filter = channel.is_some() || event_type.is_some() || user_id.is_some() || to.is_some();
        if all && has_filter {
            return Err(Error::AllAndFilters);
        }
        if !all && !has_filter {
            return Err(Error::NoFilter);
        }
        Ok(DeadNotifications { channel, event_type, user_id, to })
    }
}

/// Describes a [`DeadNotificationSelection`] that is not empty.
struct DeadNotificationChoice;

impl PartialSchema for DeadNotificationChoice {
    fn schema() -> RefOr<Schema> {
        openapi::filters_or_all(DeadNotificationSelection::schema(), json!({"event_type": "order.paid"}))
    }
}

impl ToSchema for DeadNotificationChoice {
    fn name() -> std::borrow::Cow<'static, str> {
        DeadNotificationSelection::name()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        DeadNotificationSelection::schemas(schemas);
    }
}

/// List notifications, newest first
#[utoipa::path(get, path = "/admin/v1/notifications", operation_id = "listNotifications", tag = "notify",
    params(Listing<NotificationFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<NotificationView>)))]
async fn list(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<NotificationFilters>,
) -> Result<Page<NotificationView>, Problem> {
    let scope = PageScope::global(&notify.cursor_key, "notifications", &filters);
    let before = scope.position(cursor.as_deref())?;
    let NotificationFilters { status, channel, user_id, event_type, event_id } = filters;
    let event_ids = match event_id {
        Some(event_id) => Some(notifications::event_ids_of(&notify.db, &event_id).await?),
        None => None,
    };
    let filter = NotificationFilter { status, channel, user_id, event_type, event_ids };
    let found = notifications::list(&notify.db, &filter, before, limit + 1).await?;
    Ok(scope.cut(found, limit, |record| record.id).map(NotificationView::from))
}

/// Deliver a dead or skipped notification again
#[utoipa::path(post, path = "/admin/v1/notifications/{id}/retry", operation_id = "retryNotification", tag = "notify",
    params(("id" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 202, description = "The notification is due now"),
        (status = 404, description = "The notification does not exist"),
        (status = 409, description = "The notification is neither dead nor skipped")))]
async fn retry_one(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Path(id): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    retry::retry(&notify, Retried::Notification(id), identity).await
}

/// Deliver many dead notifications again
///
/// Makes up to 100,000 notifications due again in transactions of 1,000; `more` tells whether to repeat the request. Skipped ones
/// stay as they are. It needs no Idempotency-Key: retried notifications are no longer dead, so a repeated request continues
/// with the rest.
#[utoipa::path(post, path = "/admin/v1/notifications/retry", operation_id = "retryNotifications", tag = "notify",
    request_body = DeadNotificationChoice, security(("bearer" = [])), responses((status = 200, body = BulkRetry)))]
async fn retry_many(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Json(selection): Json<DeadNotificationSelection>,
) -> Result<Json<BulkRetry>, Problem> {
    let selection = selection.into_dead_notifications()?;
    let retried = operator::retry_dead_notifications(&notify.db, &selection).await.map_err(Error::Database)?;
    notify.wakes.deliveries.wake();
    Ok(Json(retried))
}

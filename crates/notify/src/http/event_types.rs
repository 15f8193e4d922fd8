//! Event types: the list, and their rules for operators.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::ETAG;
use axum::response::{IntoResponse, Response};
use contracts::notify::EVENT_TYPE_CHARS_MAX;
use http::HeaderValue;
use http_kit::auth::Operator;
use http_kit::etag::{self, IfMatch, IfNoneMatch};
use http_kit::extract::{Json, Path};
use http_kit::field::Whole;
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::page::{Listing, NoFilters, Page, PageScope};
use http_kit::problem::{FieldError, Problem};
use serde::Deserialize;
use service::idempotency::{StoreResponse, run_once};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{IDEMPOTENCY_KEY, Reader};
use crate::Notify;
use crate::domain::delivery_rules::{Channel, Version};
use crate::flow::preferences as flow;
use crate::store::preferences::{EventTypeRules, StoredEventType};
use crate::view::preferences::{EventTypeView, KnownTypeView};

const DIGEST_MINUTES_MAX: i64 = 10_080;
pub(super) const EVENT_TYPE_DETAIL: &str = "must have at most 187 letters, digits and _, in parts joined by dots";

pub(super) fn router() -> OpenApiRouter<Arc<Notify>> {
    OpenApiRouter::new().routes(routes!(list_event_types)).routes(routes!(
        show_event_type,
        save_event_type,
        delete_event_type
    ))
}

/// How the events of a type are delivered.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewEventTypeRules, example = json!({"critical": false, "channels": ["email", "in_app", "webhook"], "digest_minutes": 60}))]
struct EventTypeBody {
    /// It cannot be muted, and it waits neither for quiet hours nor for a digest.
    #[serde(default)]
    critical: bool,
    /// Absent or null: `email` and `in_app`.
    channels: Option<Vec<Channel>>,
    /// For how many minutes e-mails to one person are collected into one. Absent or null: the setting
    /// `notify.digest_minutes`. A critical event type is not collected: it has none, or 0.
    #[schema(value_type = Option<i64>, minimum = 0, maximum = 10080)]
    digest_minutes: Option<Whole>,
}

/// List event types by name
///
/// For users and operators: the types of Pillarbox itself, those with rules, and those of stored events, of which a user sees
/// those that concern them. Everything that is not critical can be muted.
#[utoipa::path(get, path = "/notify/v1/event-types", operation_id = "listNotifiedEventTypes", tag = "notify", params(Listing<NoFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<KnownTypeView>)))]
async fn list_event_types(
    State(notify): State<Arc<Notify>>,
    Reader { user }: Reader,
    Listing { filters, limit, cursor }: Listing<NoFilters>,
) -> Result<Page<KnownTypeView>, Problem> {
    let scope = match user {
        Some(user) => PageScope::of_owner(&notify.cursor_key, "event types", user, &filters),
        None => PageScope::global(&notify.cursor_key, "event types", &filters),
    };
    let after: Option<String> = scope.position(cursor.as_deref())?;
    let mut known = flow::event_types(&notify.db, user, &notify.policy.default_rules).await?;
    known.retain(|known| after.as_ref().is_none_or(|after| known.name > *after));
    known.truncate(limit as usize + 1);
    Ok(scope.cut(known, limit, |known| known.name.clone()).map(KnownTypeView::from))
}

/// Show how an event type is delivered
#[utoipa::path(get, path = "/notify/v1/event-types/{name}", operation_id = "getNotifiedEventType", tag = "notify",
    params(("name" = String, Path), ("if-none-match" = Option<String>, Header, description = "The ETag of the response that the client has cached")),
    security(("bearer" = [])),
    responses((status = 200, body = EventTypeView, headers(("etag" = String, description = "Changes with the rules"))),
        (status = 304, description = "The cached response is current"),
        (status = 404, description = "No rules were set for the event type")))]
async fn show_event_type(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Path(name): Path<String>,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    let StoredEventType { rules, version, .. } = flow::event_type(&notify.db, &name).await?;
    let tag = tag_of(version);
    if if_none_match.matches(&tag) {
        Ok((StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response())
    } else {
        Ok(([(ETAG, tag)], Json(EventTypeView::new(name, rules))).into_response())
    }
}

/// Set how an event type is delivered
#[utoipa::path(put, path = "/notify/v1/event-types/{name}", operation_id = "setNotifiedEventType", tag = "notify", request_body = EventTypeBody,
    params(("name" = String, Path), ("if-match" = Option<String>, Header, description = "The ETag of the rules as the client knows them"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = EventTypeView, headers(("etag" = String, description = "Changes with the rules"))),
        (status = 201, body = EventTypeView, headers(("etag" = String, description = "Changes with the rules"))),
        (status = 412, description = "The rules have changed since the given ETag")))]
async fn save_event_type(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Path(name): Path<String>,
    if_match: IfMatch,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<EventTypeBody>>,
) -> Result<StoredResponse, Problem> {
    if !is_event_type(&name) {
        return Err(Problem::bad_request("malformed-path", format!("name: {EVENT_TYPE_DETAIL}")));
    }
    let digest_minutes = body.digest_minutes.map(|Whole(minutes)| minutes);
    if digest_minutes.is_some_and(|minutes| !(0..=DIGEST_MINUTES_MAX).contains(&minutes)) {
        let detail = format!("must be a number from 0 to {DIGEST_MINUTES_MAX}");
        return Err(Problem::validation(vec![FieldError::body("/digest_minutes", detail)]));
    }
    if body.critical && digest_minutes.is_some_and(|minutes| minutes > 0) {
        let digest = "must be absent or 0 for a critical event type: its e-mails are sent at once and never collected";
        let critical = "must be false or absent for an event type whose e-mails are collected";
        let errors = [("/digest_minutes", digest), ("/critical", critical)];
        let errors = errors.map(|(pointer, detail)| FieldError::body(pointer, detail));
        return Err(Problem::validation(errors.to_vec()));
    }
    let mut channels = body.channels;
    channels.iter_mut().for_each(|channels| {
        channels.sort();
        channels.dedup();
    });
    let digest_minutes = digest_minutes.and_then(|minutes| u32::try_from(minutes).ok());
    let rules = EventTypeRules { critical: body.critical, channels, digest_minutes };
    run_once(&notify.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let (version, is_new) = flow::save_event_type(tx, &name, &if_match, &rules).await?;
            let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
            let view = EventTypeView::new(name, rules);
            Ok(StoredResponse::json(status, &view).with_header(ETAG, tag_of(version)))
        })
    })
    .await
}

/// Deliver an event type by the defaults again
#[utoipa::path(delete, path = "/notify/v1/event-types/{name}", operation_id = "deleteNotifiedEventType", tag = "notify",
    params(("name" = String, Path), ("if-match" = Option<String>, Header, description = "The ETag of the rules as the client knows them"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 204, description = "The defaults apply"),
        (status = 404, description = "No rules were set for the event type"),
        (status = 412, description = "The rules have changed since the given ETag")))]
async fn delete_event_type(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Path(name): Path<String>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    run_once(&notify.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            flow::delete_event_type(tx, &name, &if_match).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

pub(super) fn is_event_type(name: &str) -> bool {
    let is_part = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    name.len() <= EVENT_TYPE_CHARS_MAX && name.split('.').all(is_part)
}

pub(super) fn tag_of(version: Version) -> HeaderValue {
    etag::of(version.number, version.changed_at)
}

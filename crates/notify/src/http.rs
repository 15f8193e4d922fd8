//! The HTTP API. Under `/notify/v1`: [`events`] for producers, aggregate [`types`], [`event_types`] and [`recipients`] for
//! operators, [`preferences`], the [`inbox`] and [`unsubscribe`] for users. Under `/admin/v1`: e-mails ([`mail`]),
//! [`notifications`] and [`announcements`] for operators.

mod announcements;
mod event_types;
mod events;
mod inbox;
mod mail;
mod notifications;
mod preferences;
mod recipients;
mod retry;
mod types;
mod unsubscribe;

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use http_kit::auth::{Caller, Role};
use http_kit::openapi::{self, RouteProblem};
use http_kit::problem::Problem;
use pillarbox::log::Tenant;
use utoipa_axum::router::OpenApiRouter;
use uuid::Uuid;

use crate::Notify;

/// The description of the header `Idempotency-Key` in the OpenAPI document.
const IDEMPOTENCY_KEY: &str = "A repeated request with the same key has no further effect and gets the same response";

/// The problems of the service's own errors, for the OpenAPI document.
const PROBLEMS: &[RouteProblem] = &[
    ("POST /notify/v1/events", 400, "unfit-event", "PostgreSQL cannot store the event: it may be nested too deeply"),
    ("POST /notify/v1/events", 409, "event-id-conflict", "this event_id was posted before with another payload"),
    (
        "POST /notify/v1/events",
        503,
        "event-in-progress",
        "another transaction that has posted this event_id has not ended",
    ),
    ("DELETE /notify/v1/aggregate-types/{name}", 404, "aggregate-type-not-found", "there is no such aggregate type"),
    ("DELETE /notify/v1/aggregate-types/{name}", 409, "aggregate-type-in-use", "the aggregate type has recipients"),
    ("GET /admin/v1/mail/{id}", 404, "mail-not-found", "there is no such e-mail (any more)"),
    ("POST /admin/v1/mail/{id}/retry", 404, "mail-not-found", "there is no such e-mail (any more)"),
    ("POST /admin/v1/mail/{id}/retry", 409, "mail-not-dead", "only a dead e-mail can be retried"),
    ("POST /admin/v1/mail/{id}/retry", 409, "mail-erased", "this e-mail has expired, and its text was erased"),
    (
        "POST /admin/v1/notifications/{id}/retry",
        404,
        "notification-not-found",
        "there is no such notification (any more)",
    ),
    (
        "POST /admin/v1/notifications/{id}/retry",
        409,
        "notification-not-dead",
        "only a dead or skipped notification can be delivered again",
    ),
    (
        "POST /admin/v1/announcements/{id}/retry",
        404,
        "announcement-not-found",
        "there is no such announcement (any more)",
    ),
    (
        "POST /admin/v1/announcements/{id}/retry",
        409,
        "announcement-not-given-up",
        "only an announcement that was given up can be continued",
    ),
    ("GET /notify/v1/inbox/{seq}", 404, "notification-not-found", "there is no such notification (any more)"),
    ("POST /notify/v1/inbox/{seq}/read", 404, "notification-not-found", "there is no such notification (any more)"),
    ("POST /notify/v1/inbox/{seq}/unread", 404, "notification-not-found", "there is no such notification (any more)"),
    ("POST /notify/v1/inbox/{seq}/archive", 404, "notification-not-found", "there is no such notification (any more)"),
    ("PUT /notify/v1/preferences", 409, "event-type-critical", "a critical event type cannot be muted"),
    ("PUT /notify/v1/preferences", 409, "too-many-preferences", "a user may have at most 500 preferences"),
    ("PATCH /notify/v1/preferences", 409, "event-type-critical", "a critical event type cannot be muted"),
    ("PATCH /notify/v1/preferences", 409, "too-many-preferences", "a user may have at most 500 preferences"),
    ("GET /notify/v1/event-types/{name}", 404, "event-type-not-found", "no rules were set for the event type"),
    ("DELETE /notify/v1/event-types/{name}", 404, "event-type-not-found", "no rules were set for the event type"),
    ("GET /notify/v1/unsubscribe", 404, "unsubscribe-link-invalid", "the link is not valid"),
    ("POST /notify/v1/unsubscribe", 404, "unsubscribe-link-invalid", "the link is not valid"),
    ("POST /notify/v1/unsubscribe", 409, "event-type-critical", "a critical event type cannot be muted"),
];

pub(crate) fn router() -> OpenApiRouter<Arc<Notify>> {
    let mut router = OpenApiRouter::new()
        .merge(events::router())
        .merge(types::router())
        .merge(recipients::router())
        .merge(preferences::router())
        .merge(event_types::router())
        .merge(unsubscribe::router())
        .merge(inbox::router())
        .merge(mail::router())
        .merge(notifications::router())
        .merge(announcements::router());
    openapi::document(router.get_openapi_mut(), PROBLEMS);
    router
}

/// A caller who may post business events: an API key of the tenant `main`, in which the services are, with the role `ingest`.
/// Handlers extract it first, so that the permission is checked before anything else of the request.
struct Producer;

impl<S: Send + Sync> FromRequestParts<S> for Producer {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Producer, Problem> {
        of_main(parts, state, Role::Ingest).await.map(|()| Producer)
    }
}

/// A caller who may manage recipients: one of the tenant `main` with the role `manage`.
struct RecipientManager;

impl<S: Send + Sync> FromRequestParts<S> for RecipientManager {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<RecipientManager, Problem> {
        of_main(parts, state, Role::Manage).await.map(|()| RecipientManager)
    }
}

/// A user, or an operator. As the first extractor of a handler it rejects other API keys before anything else of the request.
struct Reader {
    /// None for an operator.
    user: Option<Uuid>,
}

impl<S: Send + Sync> FromRequestParts<S> for Reader {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Reader, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        let user = caller.user_id().filter(|_| !caller.is_operator());
        if user.is_none() && !caller.is_operator() {
            return Err(Problem::forbidden("only users and operators may do this: use a user's token"));
        }
        Ok(Reader { user })
    }
}

async fn of_main<S: Send + Sync>(parts: &mut Parts, state: &S, role: Role) -> Result<(), Problem> {
    let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
    caller.require(role)?;
    if caller.tenant == Tenant::main() {
        Ok(())
    } else {
        Err(Problem::forbidden("this request requires a caller of the tenant main"))
    }
}

//! The HTTP API of the hub under `/hub/v1`: [`ingest`] for producers, and the rest for managers of subscribers.
//!
//! A handler for producers extracts a [`Producer`], a management handler a [`Manager`], which sees only the caller's tenant. A handler that changes something in
//! one transaction honours `Idempotency-Key`.

mod dead_letters;
mod events;
mod ingest;
mod messages;
mod subscribers;

use std::fmt::Debug;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use http::request::Parts;
use kit::auth::{Caller, Role};
use kit::openapi::{self, RouteProblem};
use kit::page::PageScope;
use kit::problem::Problem;
use utoipa_axum::router::OpenApiRouter;

use crate::Hub;

/// The problems of the hub's own errors, for the OpenAPI document.
const PROBLEMS: &[RouteProblem] = &[
    ("POST /events", 400, "unfit-event", UNFIT_EVENT),
    ("POST /events", 429, "too-many-waiting", TOO_MANY_WAITING),
    ("POST /hub/v1/events*", 400, "unfit-event", UNFIT_EVENT),
    ("POST /hub/v1/events*", 429, "too-many-waiting", TOO_MANY_WAITING),
    ("GET /hub/v1/events/{id}", 404, "event-not-found", "there is no such hub event, or its retention has expired"),
    ("* /hub/v1/subscribers/{id}*", 404, "subscriber-not-found", NO_SUBSCRIBER),
    ("POST /hub/v1/subscribers", 409, "too-many-subscribers", "a tenant can have at most 10000 subscribers"),
    ("POST /hub/v1/subscribers", 409, "already-answered", ALREADY_ANSWERED),
    ("PATCH /hub/v1/subscribers/{id}", 409, "subscriber-unopened", UNDECRYPTABLE),
    ("POST /hub/v1/subscribers/{id}/*", 409, "subscriber-unopened", UNDECRYPTABLE),
    ("POST /hub/v1/subscribers/{id}/rotate-secret", 409, "too-many-secrets", "the subscriber has 5 active secrets"),
    ("POST /hub/v1/subscribers/{id}/rotate-secret", 409, "already-answered", ALREADY_ANSWERED),
    ("GET /hub/v1/messages", 404, "subscriber-not-found", NO_SUBSCRIBER),
    ("* /hub/v1/messages/{id}*", 404, "message-not-found", "there is no such message, or its retention has expired"),
    ("POST /hub/v1/messages/{id}/dead-letter", 409, "message-settled", "the message is already delivered"),
    ("* /hub/v1/dead-letters/{id}*", 404, "dead-letter-not-found", "there is no such dead letter"),
    ("POST /hub/v1/dead-letters/{id}/retry", 409, "already-retried", "the dead letter was already retried"),
    ("POST /hub/v1/dead-letters/{id}/retry", 409, "subscriber-gone", "the subscriber of this dead letter was deleted"),
    ("POST /hub/v1/dead-letters/{id}/retry", 409, "event-gone", "the log no longer had the event"),
];
const NO_SUBSCRIBER: &str = "there is no such subscriber";
const UNFIT_EVENT: &str = "PostgreSQL cannot store the payload as JSON; it may be nested too deeply";
const TOO_MANY_WAITING: &str = "1000001 messages of the tenant `acme` wait for their subscribers";
const UNDECRYPTABLE: &str =
    "the subscriber's headers and secrets cannot be decrypted with the keys of this installation";
const ALREADY_ANSWERED: &str = "the first request succeeded, and the secret in its response is shown only once: for a new \
                                secret, send POST /hub/v1/subscribers/{id}/rotate-secret with a new Idempotency-Key";

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    let mut router = OpenApiRouter::new()
        .merge(ingest::router())
        .merge(subscribers::router())
        .merge(events::router())
        .merge(messages::router())
        .merge(dead_letters::router());
    openapi::document(router.get_openapi_mut(), PROBLEMS);
    router
}

/// A caller with the role `ingest`. Handlers extract it first, so that the role is checked before anything else of the
/// request.
struct Producer(Caller);

impl<S: Send + Sync> FromRequestParts<S> for Producer {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Producer, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        caller.require(Role::Ingest)?;
        Ok(Producer(caller))
    }
}

/// A caller with the role `manage`. Handlers extract it first, so that the role is checked before anything else of the
/// request.
struct Manager(Caller);

impl<S: Send + Sync> FromRequestParts<S> for Manager {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Manager, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        caller.require(Role::Manage)?;
        Ok(Manager(caller))
    }
}

/// The scope of a list that contains the rows of the caller's tenant.
fn page_scope<'a>(hub: &'a Hub, list: &str, caller: &Caller, filters: &impl Debug) -> PageScope<'a> {
    PageScope::of_owner(&hub.cursor_key, format_args!("hub {list}"), caller.tenant.as_str(), filters)
}

/// Accepts the pattern `order.*` of a subscription for the filter `order`, which matches the type and all types below
/// it.
fn type_prefix(event_type: Option<String>) -> Option<String> {
    event_type.map(|event_type| event_type.strip_suffix(".*").unwrap_or(&event_type).to_owned())
}

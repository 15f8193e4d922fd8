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
use kit::page::PageScope;
use kit::problem::Problem;
use utoipa_axum::router::OpenApiRouter;

use crate::Hub;

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new()
        .merge(ingest::router())
        .merge(subscribers::router())
        .merge(events::router())
        .merge(messages::router())
        .merge(dead_letters::router())
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

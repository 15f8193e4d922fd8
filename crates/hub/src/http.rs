//! The door for producers ([`ingest`]) and for people, under `/hub/v1`. What people call takes a [`Manager`], sees its
//! tenant alone, and honours `Idempotency-Key` where it changes something in one transaction.

mod dead_letters;
mod events;
mod ingest;
mod messages;
mod subscribers;

use std::sync::Arc;

use axum::extract::FromRequestParts;
use http::request::Parts;
use kit::auth::{Caller, Role};
use kit::idempotency::{Answer, Identity};
use kit::problem::Problem;
use mailbox::idempotency::{self, Effect, Keep};
use sqlx::{Postgres, Transaction};
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

/// Who may manage what its tenant has. A handler that takes one cannot forget to ask, and nothing else of the request is
/// looked at before.
struct Manager(Caller);

impl<S: Send + Sync> FromRequestParts<S> for Manager {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Manager, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        caller.require(Role::Manage)?;
        Ok(Manager(caller))
    }
}

/// Does it once for each `Idempotency-Key`.
async fn once<F>(hub: &Hub, identity: Option<&Identity>, keep: Keep, effect: F) -> Result<Answer, Problem>
where
    F: for<'t> FnOnce(&'t mut Transaction<'_, Postgres>) -> Effect<'t> + Send,
{
    idempotency::once(&hub.db, identity, keep, hub.clock.now(), effect).await
}

/// What a page's cursor belongs to: a tenant's list and its filters.
fn scope(list: &str, caller: &Caller, filters: &impl std::fmt::Debug) -> String {
    format!("hub {list} {}?{filters:?}", caller.tenant.as_str())
}

/// `order.*` as it stands in a subscription means what is below `order`.
fn topic(event_type: Option<String>) -> Option<String> {
    event_type.map(|event_type| event_type.strip_suffix(".*").unwrap_or(&event_type).to_owned())
}

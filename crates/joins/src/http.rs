//! The door for people, under `/join/v1`.

mod moderation;
mod people;
mod registration;

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use kit::auth::{Caller, Principal};
use kit::extract::Path;
use kit::idempotency::{Answer, Mutation};
use kit::problem::Problem;
use utoipa_axum::router::OpenApiRouter;
use uuid::Uuid;

use crate::Joins;
use crate::desk::Request;
use crate::domain::{Actor, Command, Event, Order};
use crate::flow::look;

pub(crate) fn router() -> OpenApiRouter<Arc<Joins>> {
    OpenApiRouter::new().merge(registration::router()).merge(people::router()).merge(moderation::router())
}

/// Who organizes the event of the path: its owner, or an operator. A handler that takes one cannot forget to ask, and
/// nothing else of the request is looked at before.
struct Organizer {
    event: Event,
    principal: Principal,
}

impl FromRequestParts<Arc<Joins>> for Organizer {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, joins: &Arc<Joins>) -> Result<Organizer, Problem> {
        let caller = <Caller as FromRequestParts<Arc<Joins>>>::from_request_parts(parts, joins).await?;
        let Path(id) = Path::<Uuid>::from_request_parts(parts, joins).await?;
        let event = look::event(joins, id).await?;
        if caller.user_id() == Some(event.owner_id) || caller.is_operator() {
            return Ok(Organizer { event, principal: caller.principal });
        }
        Err(look::not_organizer(joins, &event, caller.user_id()).await?.into())
    }
}

/// Has it done, once for each `Idempotency-Key`, which it must have.
async fn order<T>(
    joins: &Joins,
    event_id: Uuid,
    principal: Principal,
    request: &Mutation<T>,
    command: Command,
) -> Result<Answer, Problem> {
    let identity = request.require_identity()?.clone();
    let order = Order::new(event_id, Actor::Caller(principal), command);
    joins.desks.submit(Request { order, identity }).await
}

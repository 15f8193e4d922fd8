//! The door for people, under `/event/v1`. What changes something takes a [`kit::auth::User`], and honours `Idempotency-Key` and
//! `If-Match`; what is public anyone may read.

mod events;
mod feed;

use std::sync::Arc;

use http::header::{ETAG, LOCATION};
use http::{HeaderValue, StatusCode};
use kit::etag;
use kit::idempotency::{Answer, Identity};
use kit::problem::Problem;
use mailbox::idempotency::{self, Effect, Keep};
use serde::Deserialize;
use sqlx::{Postgres, Transaction};
use utoipa_axum::router::OpenApiRouter;
use uuid::Uuid;

use crate::Events;

pub(crate) fn router() -> OpenApiRouter<Arc<Events>> {
    OpenApiRouter::new().merge(feed::router()).merge(events::router())
}

/// Does it once for each `Idempotency-Key`, and lets the news of it go out at once. The effect answers with an event.
async fn once<F>(events: &Events, identity: Option<&Identity>, effect: F) -> Result<Answer, Problem>
where
    F: for<'t> FnOnce(&'t mut Transaction<'_, Postgres>) -> Effect<'t> + Send,
{
    let answer = idempotency::once(&events.db, identity, Keep::Answer, events.clock.now(), effect).await?;
    events.watcher.nudge();
    with_headers(answer)
}

/// Where it is, and its tag: they follow from the event, so a repeat has them, too.
fn with_headers(answer: Answer) -> Result<Answer, Problem> {
    #[derive(Deserialize)]
    struct Shown {
        id: Uuid,
        version: i64,
        active_participants: i32,
    }
    if !answer.status().is_success() {
        return Ok(answer);
    }
    let shown: Shown = serde_json::from_slice(answer.body()).map_err(|error| Problem::internal(&error))?;
    let is_new = answer.status() == StatusCode::CREATED;
    let answer = answer.with_header(ETAG, etag::beside(shown.version, shown.active_participants));
    if !is_new {
        return Ok(answer);
    }
    let location = HeaderValue::try_from(format!("/event/v1/events/{}", shown.id));
    Ok(answer.with_header(LOCATION, location.map_err(|error| Problem::internal(&error))?))
}

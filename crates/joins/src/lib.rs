//! Joins: who takes part in an event, who waits for a seat, and who may not come.
//!
//! An order (join, cancel, kick, ban, an event's news, what time brings) goes to the [`desk`] of its event, or comes in a
//! message's transaction; a [`flow::ledger`] locks the events, the [`domain`] decides, and what changed is written together
//! with the history and the messages.
//!
//! Owns the schema `pillarbox_joins`: `event_capacity` (an event as it was told of, and its counts; its lock is the lock of
//! all that belongs to the event), `joins`, `history` (appended only), `event_bans`.
//!
//! Messages in, of source `events`: `event.published|updated|unpublished|canceled`, and for reconciliation `event.versions` and
//! `event.restated`. Out, of source `joins` and with the event's id as key: `join.confirmed|waitlisted|canceled|promoted|
//! expired`, `mod.kicked|banned|unbanned`, `join.recounted`; and `join.counted`, the answer to `event.versions`.
//!
//! What holds: never more active than the capacity, unless it was lowered; seq without a gap; whoever waits moves up in the
//! order of seq, in the transaction that frees the seat; what is counted is what there is; a repeated request does nothing
//! more.

mod desk;
mod domain;
mod error;
mod flow;
mod http;
mod inbox;
#[cfg(test)]
mod model;
mod store;
mod view;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use kit::clock::Clock;
use kit::page::CursorKey;
use mailbox::runtime::{Runtime, Subscription};
use mailbox::watch::Watcher;
use sqlx::PgPool;
use utoipa_axum::router::OpenApiRouter;

use crate::desk::Desks;

const SWEEP_PAUSE: Duration = Duration::from_secs(1);

/// What its routes share.
pub struct Joins {
    pub(crate) db: PgPool,
    pub(crate) clock: Clock,
    pub(crate) cursor_key: CursorKey,
    pub(crate) desks: Desks,
}

impl Joins {
    /// The service, and the loop that settles its requests, which ends when the service is dropped.
    pub fn new(
        db: PgPool,
        clock: Clock,
        cursor_key: CursorKey,
        watcher: &Watcher,
    ) -> (Joins, impl Future<Output = ()> + Send + use<>) {
        let (desks, settling) = Desks::new(&db, &clock, watcher);
        (Joins { db, clock, cursor_key, desks }, settling)
    }

    /// What it listens to.
    pub fn subscriptions(&self) -> Vec<Subscription> {
        vec![inbox::subscription(self.clock.clone())]
    }

    /// Does what is due without being asked: tells people that an event is over, and lets many move up.
    pub fn maintain(&self, runtime: &Runtime) {
        let (worker, db) = (runtime.worker("joins.sweep".to_owned(), SWEEP_PAUSE), runtime.db().clone());
        let (clock, watcher) = (self.clock.clone(), runtime.watcher().clone());
        runtime.spawn(async move { worker.run(|| workers::sweep(&db, &clock, &watcher)).await });
    }
}

/// All of its routes.
pub fn router() -> OpenApiRouter<Arc<Joins>> {
    http::router()
}

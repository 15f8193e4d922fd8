//! Joins: registrations for events, their waitlists, and bans.
//!
//! A command (join, cancel, kick, ban, an update of the event, a due sweep) either passes through the
//! [`command_batcher`] of its event or runs in the transaction of a message handler. A [`flow::command_batch`] locks
//! the events, the [`domain`] decides, and the changes are saved in one transaction with their history entries and
//! messages.
//!
//! Owns the schema `pillarbox_joins`: `event_capacity` (an event as last reported by the events service, and its
//! counts; the lock on this row protects everything that belongs to the event), `joins` (registrations), `history`
//! (append-only), `event_bans`.
//!
//! Consumes messages of source `events`: `event.published|updated|unpublished|canceled`, and for reconciliation
//! `event.versions` and `event.restated`. Publishes messages of source `joins` with the event's id as key:
//! `join.confirmed|waitlisted|canceled|promoted|expired`, `mod.kicked|banned|unbanned`, `join.recounted`; and
//! `join.counted`, the reply to `event.versions`.
//!
//! Invariants: the number of active registrations never exceeds the capacity, unless the capacity was lowered later.
//! The sequence numbers of an event have no gaps. The waitlist is promoted in the order of the sequence numbers, in the
//! transaction that frees the seat. The stored counts equal the rows. A repeated request has no further effect.

mod command_batcher;
mod domain;
mod error;
mod flow;
mod http;
mod inbox;
#[cfg(test)]
mod model_test;
mod store;
mod view;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use http_kit::page::CursorKey;
use pillarbox::consumers::{Runtime, Subscription};
use pillarbox::database::time::maintain;
use pillarbox::database::{Database, SchemaMigrations};
use runtime::MetricHelp;
use runtime::clock::Clock;
use runtime::config::InvalidSetting;
use service::{Role, Service, ServiceContext};
use utoipa_axum::router::OpenApiRouter;

use crate::command_batcher::CommandBatchers;

/// The migrations of the schema `pillarbox_joins`.
pub const MIGRATIONS: SchemaMigrations =
    SchemaMigrations { schema: "pillarbox_joins", texts: &[include_str!("../migrations/0001_pillarbox_joins.sql")] };

/// Pause between two sweeps while nothing is due.
const SWEEP_PAUSE: Duration = Duration::from_secs(1);

/// The joins service of one process.
pub struct Joins {
    pub(crate) db: Database,
    pub(crate) clock: Clock,
    pub(crate) cursor_key: CursorKey,
    pub(crate) command_batchers: CommandBatchers,
}

impl Service for Joins {
    const NAME: &'static str = "joins";
    const DESCRIPTION: &'static str = "Registrations. All routes require a user's token; the routes for organizers require \
                                       the token of the event's owner, or the role `admin` in the tenant `main`.";
    const WORK: &'static [(Role, &'static str)] = &[(Role::Consume, "joins.events")];
    const METRICS: &'static [MetricHelp] = &[
        ("pillarbox_joins_commands_total", "Commands that change registrations, such as joins."),
        ("pillarbox_joins_batch_size", "Commands that are written in one transaction."),
    ];
    const MIGRATIONS: SchemaMigrations = MIGRATIONS;
    type Settings = ();

    fn build(context: &ServiceContext, (): &()) -> Result<Joins, InvalidSetting> {
        let (db, clock) = (context.db.clone(), context.clock.clone());
        let (command_batchers, command_loop) = CommandBatchers::new(&db, &clock);
        context.spawn(command_loop);
        Ok(Joins { db, clock, cursor_key: context.cursor_key.clone(), command_batchers })
    }

    fn routes() -> OpenApiRouter<Arc<Joins>> {
        http::router()
    }

    fn subscriptions(&self) -> Vec<Subscription> {
        inbox::subscriptions(&self.clock)
    }

    /// Starts the sweep, which ends the registrations of finished events and promotes long waitlists in steps.
    fn start_maintenance(&self, runtime: &Runtime) {
        let worker = runtime.worker("joins.sweep".to_owned(), SWEEP_PAUSE);
        let (db, clock) = (runtime.db().clone(), self.clock.clone());
        runtime.spawn(async move { worker.run(|| maintain(db.pool(), workers::sweep(&db, &clock))).await });
    }
}

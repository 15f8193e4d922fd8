//! Periodic tasks. Every process with the role runs them; row locks in the database distribute the work.

use pillarbox::database::Database;
use runtime::clock::Clock;
use runtime::worker::Round;

use crate::error::Error;
use crate::flow;

/// Sweeps one step of one due event in one transaction. The event is then scheduled behind all other due events, so
/// that a large event does not delay the others.
pub(crate) async fn sweep(db: &Database, clock: &Clock) -> Result<Round, Error> {
    if flow::sweep::sweep_next(db, clock).await? { Ok(Round::Busy) } else { Ok(Round::Idle) }
}

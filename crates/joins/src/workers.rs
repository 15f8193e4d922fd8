//! Timed rounds.

use kit::clock::Clock;
use kit::worker::Round;
use mailbox::watch::Watcher;
use sqlx::PgPool;

use crate::error::Error;
use crate::flow;

/// A step of what is due for one event: one transaction, so that a crash loses nothing. Then it is behind all others that are
/// due, so a large event holds up no other.
pub(crate) async fn sweep(db: &PgPool, clock: &Clock, watcher: &Watcher) -> Result<Round, Error> {
    match flow::sweep(db, clock).await? {
        true => {
            watcher.nudge();
            Ok(Round::Busy)
        }
        false => Ok(Round::Idle),
    }
}

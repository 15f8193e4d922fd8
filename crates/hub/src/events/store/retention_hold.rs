//! Holds the log for events that fan-out or a request has referenced since the last maintenance.

use chrono::{DateTime, TimeDelta, Utc};
use pillarbox::operations::retention_hold::{self, HoldVersion};
use sqlx::PgConnection;

/// Maintenance renews the retention hold of the hub every few minutes, and drops no day from yesterday on. So it needs to
/// know of a reference to an older entry at once, in the transaction that makes it.
pub(crate) const OLD_REFERENCE_AGE: TimeDelta = TimeDelta::hours(12);

/// The holder of the log for what fan-out has referenced since the last maintenance.
const FAN_OUT_HOLDER: &str = "hub.fanout";

/// Holds the log at once for references that the transaction of fan-out creates, until [`merge`].
pub(crate) async fn extend(tx: &mut PgConnection, from: DateTime<Utc>) -> sqlx::Result<()> {
    retention_hold::extend(tx, FAN_OUT_HOLDER, from).await
}

/// The version of the hold of fan-out. Everything that belongs to it is visible to later statements.
pub(crate) async fn version(db: &mut PgConnection) -> sqlx::Result<Option<HoldVersion>> {
    retention_hold::version(db, FAN_OUT_HOLDER).await
}

/// Removes the hold of fan-out after the hub's own hold was computed from the tables, unless fan-out has extended its hold
/// since this version.
pub(crate) async fn merge(db: &mut PgConnection, version: Option<HoldVersion>) -> sqlx::Result<()> {
    match version {
        Some(version) => retention_hold::remove_version(db, FAN_OUT_HOLDER, &version).await,
        None => Ok(()),
    }
}

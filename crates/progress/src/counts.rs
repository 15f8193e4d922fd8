//! Counts of items: their identity, their values, and their changes.

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use crate::domain::{Project, Rate, RateColumns, Snapshot};

/// Which counts a request means.
#[derive(Debug, Clone)]
pub(crate) struct Counts {
    pub(crate) project_id: String,
    pub(crate) token: Uuid,
    /// The server on which they were initialised.
    pub(crate) run: String,
}

impl Counts {
    /// The counts of a project; `None` before they are initialised.
    pub(crate) fn of(project: &Project) -> Option<Counts> {
        let run = project.run.clone()?;
        Some(Counts { project_id: project.id.clone(), token: project.token, run })
    }
}

/// The limits of the counts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// The largest number of items that are counted in one project.
    pub(crate) items_max: i64,
    /// How long final counts stay, at least, for those that cannot be archived at once.
    pub(crate) keep: TimeDelta,
}

/// The counts after a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Changed {
    #[sqlx(flatten)]
    pub(crate) snapshot: Snapshot,
    /// How many items were counted.
    pub(crate) counted: i64,
    /// Since when the status is final.
    #[sqlx(rename = "ended_at")]
    pub(crate) ended: Option<DateTime<Utc>>,
}

/// The counts and their recent rate.
#[derive(Debug, Clone, Copy, PartialEq, sqlx::FromRow)]
pub(crate) struct Reading {
    #[sqlx(flatten)]
    pub(crate) snapshot: Snapshot,
    #[sqlx(flatten, try_from = "RateColumns")]
    pub(crate) rate: Option<Rate>,
    /// Since when the status is final.
    #[sqlx(rename = "ended_at")]
    pub(crate) ended: Option<DateTime<Utc>>,
}

impl Reading {
    /// Counts without a rate.
    pub(crate) fn of(snapshot: Snapshot) -> Reading {
        Reading { snapshot, rate: None, ended: None }
    }
}

/// The result of a change that depends on what was read before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Replaced {
    Changed(Changed),
    /// The status or the total is another one by now.
    Conflict,
    Lost,
}

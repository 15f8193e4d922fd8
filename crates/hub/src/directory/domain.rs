//! The directory: what fan-out needs to know about subscribers and streams.

mod matching;

use chrono::{DateTime, Utc};
use pillarbox::database::Incarnation;
use pillarbox::log::Tenant;
use uuid::Uuid;

pub(crate) use self::matching::{EventTypes, Filter, check_pointer, is_reserved, lane_at};

/// What fan-out needs to know about a subscriber or a stream: which events match it, and their lanes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Interest {
    /// The id of the subscriber or stream.
    pub(crate) subscriber: Uuid,
    pub(crate) is_stream: bool,
    pub(crate) tenant: Tenant,
    pub(crate) event_types: Vec<EventTypes>,
    pub(crate) filter: Option<Filter>,
    pub(crate) ordering_key: Option<String>,
    pub(crate) is_active: bool,
    /// When the subscriber or stream was created.
    pub(crate) since: DateTime<Utc>,
    /// Set if the subscriber was created with a backfill.
    pub(crate) backfill: Option<Backfill>,
}

/// How a subscriber was backfilled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backfill {
    /// It still is: the backfill creates all its messages.
    Active,
    /// The backfill has covered the deferred events up to this one.
    Ended { deferred_to: i64 },
}

/// The version of the directory. The counter repeats after a failover, so it counts only within an incarnation of the
/// database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DirectoryVersion {
    /// None if no process has begun the incarnation yet.
    pub(crate) incarnation: Option<Incarnation>,
    pub(crate) count: i64,
}

#[cfg(test)]
pub(crate) mod fixtures {
    use super::*;

    pub(crate) fn directory_version(count: i64) -> DirectoryVersion {
        DirectoryVersion { incarnation: None, count }
    }
}

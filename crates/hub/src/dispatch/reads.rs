//! What the dispatcher reads, and the answers of the store.

use std::collections::{HashMap, HashSet};

use pillarbox::database::Incarnation;
use uuid::Uuid;

use super::changes::LaneRow;
use crate::deliveries::command::PendingCommand;
use crate::deliveries::message::{HubMessage, LaneKey};
use crate::directory::domain::DirectoryVersion;
use crate::directory::store::VersionColumns;

/// The stored state of one subscriber's deliveries, from which a subscriber queue starts.
#[derive(Debug, Default)]
pub(crate) struct StoredState {
    pub(crate) position: i64,
    /// Each detached lane with its first message that has no final outcome.
    pub(crate) lanes: Vec<(LaneRow, i64)>,
    /// Messages beyond the position that have a final outcome.
    pub(crate) completed: HashSet<i64>,
}

/// The result of a poll for new messages.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct NewMessages {
    #[sqlx(flatten, try_from = "VersionColumns")]
    pub(crate) directory_version: DirectoryVersion,
    pub(crate) newest: i64,
    /// Subscribers with new messages or new commands.
    pub(crate) subscribers: Vec<Uuid>,
    /// Those of them that may have new commands.
    pub(crate) commanded: Vec<Uuid>,
}

/// What the dispatcher reads in one round trip for many subscriber queues.
#[derive(Debug, Default, Clone)]
pub(crate) struct ReadRequest {
    pub(crate) queues: Vec<QueueReadRequest>,
    pub(crate) lanes: Vec<(Uuid, LaneReadRequest)>,
    /// Subscribers whose commands are read.
    pub(crate) commands: Vec<Uuid>,
}

/// A request for the next messages of a subscriber, of all its lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueReadRequest {
    pub(crate) subscriber: Uuid,
    pub(crate) after: i64,
    pub(crate) limit: usize,
}

/// A request for the messages of a detached lane with numbers above `after`, up to and including `to`.
#[derive(Debug, Clone)]
pub(crate) struct LaneReadRequest {
    pub(crate) key: LaneKey,
    pub(crate) after: i64,
    pub(crate) to: i64,
    pub(crate) limit: usize,
    /// The head of the lane, if it is a dead letter that an operator retries.
    pub(crate) retried_head: Option<i64>,
}

impl ReadRequest {
    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.lanes.is_empty() && self.commands.is_empty()
    }
}

/// The answer to a [`ReadRequest`]. Messages are in the order of their numbers.
#[derive(Debug, Default)]
pub(crate) struct ReadResult {
    /// The incarnation of the database that the messages belong to. None if there are no messages.
    pub(crate) incarnation: Option<Incarnation>,
    pub(crate) queues: HashMap<Uuid, Vec<HubMessage>>,
    pub(crate) lanes: HashMap<(Uuid, LaneKey), Vec<HubMessage>>,
    pub(crate) commands: Vec<(Uuid, PendingCommand)>,
}

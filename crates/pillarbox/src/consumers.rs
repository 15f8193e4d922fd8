//! Consumers: named readers of the log that process its messages in order per key.
//!
//! The [`Runtime`] of a process starts one watcher, one heartbeat, and some shard workers per consumer. A
//! [`ShardWorker`] leases shards, reads their messages, and gives them to a [`Processor`]: a [`HandlerProcessor`] with
//! a [`Handler`], which acts in this database, or one that sends the messages elsewhere. Outcomes and new positions are
//! committed together.

mod commit;
mod consumer;
pub(crate) mod dead_letter_notice;
pub(crate) mod filter_changes;
mod follower;
mod handler;
pub mod inbox;
mod lease_clock;
mod leases;
mod local_handlers;
mod outcomes;
mod owned_shards;
pub(crate) mod parked_messages;
pub(crate) mod positions;
mod processor;
mod replay_reader;
pub(crate) mod replica;
mod retry;
mod runtime;
mod shard_worker;
mod unrouted_messages;

pub use self::runtime::{ConsumerOptions, Runtime, Subscription};
pub use consumer::{Consumer, ConsumerKind, StartAt};
pub use follower::{FollowerPosition, LogFollower};
pub use handler::{Handler, HandlerError, HandlerFuture, HandlerProcessor};
pub use lease_clock::Lease;
pub use leases::{Fence, ShardAssignment, existing_workers, has_unknown_workers};
pub use local_handlers::{LocalDelivery, LocalHandlers};
pub use positions::have_passed;
pub use processor::{BatchResult, ConsumerError, Delivery, Outcome, Processor, WorkerContext};
pub use replica::{Replica, end_all_leases};
pub use retry::RetryPolicy;
pub use shard_worker::{ShardWorker, ShardWorkerOptions};

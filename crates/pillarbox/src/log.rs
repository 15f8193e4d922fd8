//! The log: posting messages, and reading them without losing or waiting for late commits.
//!
//! [`post()`] appends. A [`Reader`] reads from [`Snapshot`] to [`Snapshot`] and remembers a [`Position`] per shard. The
//! watcher of a process polls for new snapshots and wakes its readers.

mod business_events;
mod confidential;
mod filter;
mod message;
mod position;
mod post;
mod reader;
mod tenants;
pub(crate) mod time_search;
mod watcher;
mod window;

pub use crate::database::snapshot::Snapshot;
pub use business_events::{
    BusinessEvent, BusinessEventError, add_aggregate_type, aggregate_types, delete_aggregate_type,
    lock_aggregate_types, message_id_of, post_business_event,
};
pub(crate) use confidential::blank;
pub use confidential::{BLANKED, REDACTED, blank_key, is_confidential_topic};
pub use filter::{Filter, InvalidPattern, MessagePattern};
pub use message::{LogRef, Message, load_messages, load_up_to};
pub use position::Position;
pub use post::{AggregateId, MESSAGE_BYTES_MAX, Post, PostError, Source, post, post_all, post_alone};
pub use reader::Reader;
pub use tenants::{
    InvalidTenant, STANDING_COLUMNS, Tenant, TenantStanding, lock_tenant, payload_limits, standing_of,
    unknown_tenant_text, unknown_tenants,
};
pub use time_search::created_at;
pub(crate) use watcher::{POLL_INTERVAL, Watcher};

use sqlx::PgConnection;

/// The number of hash buckets of keys. The SQL functions `shard_of` and `shards` use the same number.
pub const SHARDS: i16 = 16;

/// Creates the log's partitions of today and of the next `days` days. Returns how many it created; fails with
/// `lock_not_available` if the table is locked for more than 200 ms.
pub async fn create_partitions(db: &mut PgConnection, days: i32) -> sqlx::Result<i32> {
    sqlx::query_scalar("select pillarbox.make_log_partitions($1)").bind(days).fetch_one(db).await
}

//! PostgreSQL below the log: connections, migrations, errors, partitions, and the identity of the cluster.

mod admission;
pub mod cluster_identity;
mod dedicated_connection;
mod errors;
mod incarnation;
mod invalidations;
mod migrations;
pub mod partition;
mod pool;
pub mod pooler;
mod redacted_error;
pub(crate) mod snapshot;
mod statements;
mod step;
pub mod time;
mod transaction;
mod work_lock;

pub use admission::{Admission, AdmissionFuture, AdmissionPermit};
pub use dedicated_connection::{ConnectionGuard, DedicatedConnection};
pub use errors::{is_connection_lost, is_data_error, is_transient};
pub use incarnation::Incarnation;
pub use migrations::{
    LockHolder, LockWait, MIGRATION_LOCK, MigrationError, MigrationId, Migrations, SchemaMigrations, apply_migrations,
    migrate, migrate_all, migrate_reporting, missing_migrations,
};
pub use pool::{PoolLimits, ping, pool, pool_behind_pooler};
pub use redacted_error::redacted_error;
pub use step::{SHORT_STEP_TIME_MAX, close_idle, connect, is_no_response, step};
pub use transaction::{Database, DatabaseConnection, DatabaseTransaction};
pub use work_lock::{try_work_lock, work_lock};

pub(crate) use invalidations::Invalidations;
pub(crate) use redacted_error::one_line;
pub(crate) use step::no_response;

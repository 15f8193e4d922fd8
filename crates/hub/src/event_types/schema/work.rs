//! The work on schemas: parsing, compiling, comparing and checking.
//!
//! A tenant chooses what it costs, so it runs on separate threads, on which tenants take turns, and each job ends when its
//! steps are spent. No thread of the runtime computes, except for checks of at most [`INLINE_STEPS`], which cost less than the
//! way to another thread, and no transaction is open during a check.

use std::sync::Arc;
use std::time::Duration;

use pillarbox::log::Tenant;
use runtime::work_pool::{WorkPool, WorkPoolOptions, WorkRefused};

use crate::error::NoVerdict;
use crate::event_types::schema;

/// Steps of the checks of one request, or of fan-out for one tenant and batch, on the thread that asks for them: a fifth of a
/// millisecond.
pub(crate) const INLINE_STEPS: u64 = 20_000;
/// Steps of a check of one payload: a fifth of a second.
pub(crate) const CHECK_STEPS: u64 = 20_000_000;
/// Steps of the checks of all payloads of one request.
pub(crate) const REQUEST_STEPS: u64 = 2 * CHECK_STEPS;
/// Steps of the comparison of two versions.
pub(crate) const COMPARE_STEPS: u64 = 20_000_000;
/// How long a request waits for its verdict.
pub(crate) const VERDICT_TIME_MAX: Duration = Duration::from_secs(1);

const OPTIONS: WorkPoolOptions = WorkPoolOptions {
    name: "event-schemas",
    threads: 2,
    queue_max: 1_000,
    queue_per_key_max: 100,
    running_per_key_max: 1,
    on_idle: schema::pattern::release_scratch,
};

/// The threads of one process. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct SchemaWork {
    pool: Arc<WorkPool<Tenant>>,
}

impl SchemaWork {
    /// Starts the threads. Fails if one cannot be started.
    pub(crate) fn start() -> std::io::Result<SchemaWork> {
        Ok(SchemaWork { pool: Arc::new(WorkPool::start(OPTIONS)?) })
    }

    /// Runs a job when it is the turn of the tenant, and waits for its result for at most a second.
    pub(crate) async fn verdict<T: Send + 'static>(
        &self,
        tenant: &Tenant,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoVerdict> {
        tokio::time::timeout(VERDICT_TIME_MAX, self.run(tenant, job)).await.unwrap_or(Err(NoVerdict::Busy))
    }

    /// Like [`SchemaWork::verdict`], without a limit of time, for work that no request waits for.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        tenant: &Tenant,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoVerdict> {
        self.pool.run(tenant.clone(), job).await.map_err(|refused| match refused {
            WorkRefused::CallerQueueFull | WorkRefused::QueueFull => NoVerdict::Busy,
            WorkRefused::Failed => NoVerdict::Failed,
        })
    }
}

//! Decides when a task may use a connection of a pool: by default as soon as the pool has one.
//!
//! A server whose callers share one pool can be fairer than the pool, which knows no callers: it sets an [`Admission`].

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use sqlx::postgres::PgPoolOptions;

/// What [`Admission::enter`] returns.
pub type AdmissionFuture<'a> = Pin<Box<dyn Future<Output = sqlx::Result<Option<AdmissionPermit>>> + Send + 'a>>;

/// Decides when a task may use a connection of a pool.
pub trait Admission: fmt::Debug + Send + Sync {
    /// Returns the same rules for another pool.
    fn for_pool(&self, options: &PgPoolOptions) -> Arc<dyn Admission>;

    /// Waits until the current task may use a connection. Returns None if it needs no permit, for example because it has one.
    fn enter(&self) -> AdmissionFuture<'_>;
}

/// Held as long as the connection is used. Its content is dropped with it.
pub struct AdmissionPermit(#[expect(dead_code, reason = "its drop is its effect")] Box<dyn Any + Send + Sync>);

impl AdmissionPermit {
    /// A permit that drops `held` when it is dropped.
    pub fn new(held: impl Any + Send + Sync) -> AdmissionPermit {
        AdmissionPermit(Box::new(held))
    }
}

impl fmt::Debug for AdmissionPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdmissionPermit")
    }
}

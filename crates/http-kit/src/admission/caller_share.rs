//! The share of one caller in something that all requests of a process need, such as the connections of a pool: a caller with
//! hundreds of slow requests uses its share, and its other requests wait for each other, not those of other callers.
//! [`CallerId`] defines what one caller is.

use std::cell::Cell;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use std::io;

use pillarbox::database::{Admission, AdmissionFuture, AdmissionPermit};
use sqlx::postgres::PgPoolOptions;

use crate::admission::caller_id::CallerId;
use crate::admission::fair_permits::{FairPermit, FairPermits};

tokio::task_local! {
    /// The caller of the request that this task processes.
    static REQUEST: Request;
}

struct Request {
    caller: CallerId,
    /// How many permits the request has. A request that has one needs no other: it must not wait for requests that wait for it.
    permits: Cell<u32>,
}

/// Processes a request of this caller.
pub fn scope<F: Future>(caller: CallerId, responding: F) -> impl Future<Output = F::Output> + use<F> {
    REQUEST.scope(Request { caller, permits: Cell::new(0) }, responding)
}

/// The caller of a request, for work that continues after the request was answered, such as a stream.
#[derive(Debug, Clone, Copy)]
pub struct RequestCaller(Option<CallerId>);

/// Returns the caller of the request that this task processes.
pub fn request_caller() -> RequestCaller {
    RequestCaller(REQUEST.try_with(|request| request.caller).ok())
}

impl RequestCaller {
    /// Runs work for the caller, which uses its share.
    pub async fn run<F: Future>(self, work: F) -> F::Output {
        match self.0 {
            Some(caller) => scope(caller, work).await,
            None => work.await,
        }
    }
}

/// Returns whether this task processes a request that has no permit of any share.
fn is_request_without_permit() -> bool {
    REQUEST.try_with(|request| request.permits.get() == 0).unwrap_or(false)
}

/// For [`PoolLimits::before_acquire`](pillarbox::database::PoolLimits): tests find code of a request that uses a pool without
/// its `Database`.
pub fn assert_admitted() {
    debug_assert!(!is_request_without_permit(), "a request acquires a connection without a share of its caller");
}

/// A caller uses its share, and its requests wait for longer than they may.
#[derive(Debug, thiserror::Error)]
#[error(
    "too many requests of this user, tenant or address are being processed: send fewer at the same time, or this one again later"
)]
pub struct ShareExhausted;

/// The shares of all callers.
#[derive(Debug)]
pub struct CallerShares {
    permits: Arc<FairPermits>,
    wait_max: Duration,
}

/// A part of the share of a caller.
#[derive(Debug)]
pub struct SharePermit {
    _permit: FairPermit,
}

impl Drop for SharePermit {
    fn drop(&mut self) {
        let _ = REQUEST.try_with(|request| request.permits.set(request.permits.get().saturating_sub(1)));
    }
}

impl CallerShares {
    /// One busy caller gets half of the permits, two get a third each, and so on. A request waits for one at most so long.
    pub fn new(permits: usize, wait_max: Duration) -> CallerShares {
        CallerShares { permits: FairPermits::new(permits, usize::MAX), wait_max }
    }

    /// The shares in the connections of a pool. A request waits for a permit as long as for a connection.
    pub fn of_connections(options: &PgPoolOptions) -> CallerShares {
        CallerShares::new(options.get_max_connections() as usize, options.get_acquire_timeout())
    }

    /// Waits for a permit of the caller whose request this task processes. None if it processes none, or the request has a
    /// permit.
    pub async fn enter(&self) -> Result<Option<SharePermit>, ShareExhausted> {
        let caller = REQUEST.try_with(|request| (request.permits.get() == 0).then_some(request.caller));
        let Ok(Some(caller)) = caller else { return Ok(None) };
        let waiting = tokio::time::timeout(self.wait_max, self.permits.acquire(Some(caller)));
        let permit = waiting.await.map_err(|_| ShareExhausted)?;
        let _ = REQUEST.try_with(|request| request.permits.set(request.permits.get() + 1));
        Ok(Some(SharePermit { _permit: permit }))
    }
}

impl Admission for CallerShares {
    fn for_pool(&self, options: &PgPoolOptions) -> Arc<dyn Admission> {
        Arc::new(CallerShares::of_connections(options))
    }

    fn enter(&self) -> AdmissionFuture<'_> {
        Box::pin(async {
            let permit = CallerShares::enter(self).await;
            let permit = permit.map_err(|exhausted| sqlx::Error::Io(io::Error::other(exhausted)))?;
            Ok(permit.map(AdmissionPermit::new))
        })
    }
}

/// A limit on one kind of expensive work, such as searches: for each caller, and for all of them. Work that finds no place in time
/// is refused.
#[derive(Debug)]
pub struct CallerLimit {
    permits: Arc<FairPermits>,
    wait_max: Duration,
}

/// A place of the limit. Dropping it makes space for another request.
#[derive(Debug)]
pub struct LimitPermit {
    _permit: FairPermit,
}

impl CallerLimit {
    /// Each caller gets at most `of_caller` places, all together at most `total`, and a request waits for one at most so long.
    pub fn new(of_caller: usize, total: usize, wait_max: Duration) -> CallerLimit {
        CallerLimit { permits: FairPermits::new(total, of_caller), wait_max }
    }

    /// Waits for a place for the request that this task processes. All work without a request is one caller.
    pub async fn enter(&self) -> Result<LimitPermit, ShareExhausted> {
        self.enter_for(REQUEST.try_with(|request| request.caller).ok()).await
    }

    /// Waits for a place for this caller, such as a network whose requests come from many users.
    pub async fn enter_for(&self, caller: Option<CallerId>) -> Result<LimitPermit, ShareExhausted> {
        let permit = tokio::time::timeout(self.wait_max, self.permits.acquire(caller)).await;
        Ok(LimitPermit { _permit: permit.map_err(|_| ShareExhausted)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caller::{Caller, Principal};
    use pillarbox::log::Tenant;
    use uuid::Uuid;

    fn user() -> CallerId {
        CallerId::of(Some(&Caller::new(Principal::User(Uuid::new_v4()), Tenant::main(), None)), None)
    }

    #[tokio::test]
    async fn a_caller_waits_for_itself_and_no_other_does() {
        let shares = CallerShares::new(4, Duration::from_millis(50));
        let (first, second) = (user(), user());
        let enter = async |caller| scope(caller, shares.enter()).await;
        let mut permits = vec![enter(first).await.unwrap(), enter(first).await.unwrap()];
        assert!(enter(first).await.is_err(), "the share is used for longer than a request waits");
        assert!(enter(second).await.unwrap().is_some());
        assert!(shares.enter().await.unwrap().is_none(), "other work has no share");
        permits.pop();
        assert!(enter(first).await.unwrap().is_some());
    }

    #[tokio::test]
    async fn a_request_does_not_wait_for_itself() {
        let shares = CallerShares::new(1, Duration::from_millis(50));
        scope(user(), async {
            assert!(is_request_without_permit());
            let permit = shares.enter().await.unwrap();
            assert!(permit.is_some() && shares.enter().await.unwrap().is_none());
            assert!(!is_request_without_permit());
            drop(permit);
            assert!(shares.enter().await.unwrap().is_some());
        })
        .await;
        assert!(!is_request_without_permit(), "this task processes no request");
    }

    #[tokio::test]
    async fn a_limit_applies_to_each_caller_and_to_all_together() {
        let limit = CallerLimit::new(2, 4, Duration::from_millis(50));
        let (first, second, third) = (user(), user(), user());
        let enter = async |caller| scope(caller, limit.enter()).await;
        let mut places = vec![enter(first).await.unwrap(), enter(first).await.unwrap()];
        assert!(enter(first).await.is_err(), "of the caller");
        places.push(enter(second).await.unwrap());
        assert!(enter(second).await.is_err(), "the last place is for another caller");
        places.push(enter(third).await.unwrap());
        assert!(enter(user()).await.is_err(), "in total");
        places.remove(0);
        assert!(enter(user()).await.is_ok());
    }
}

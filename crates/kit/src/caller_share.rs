//! The share of one caller in something that all requests of a process need, such as the connections of a pool: a caller with
//! hundreds of slow requests uses its share, and its other requests wait for each other, not those of other callers.
//!
//! The users of a tenant are callers of their own; all API keys of a tenant are one caller, as in `body_budget`; and so are all
//! requests without a caller from one network.

use std::cell::Cell;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;

use crate::auth::{Caller, Principal};
use crate::client_address::ClientAddress;
use crate::gates::Gates;

/// A hash instead of a name, which would be an allocation for each request. Two callers with the same hash have one share.
type CallerHash = u64;

static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

tokio::task_local! {
    /// The caller of the request that this task processes.
    static REQUEST: Request;
}

struct Request {
    caller: CallerHash,
    /// How many permits the request has. A request that has one needs no other: it must not wait for requests that wait for it.
    permits: Cell<u32>,
}

/// Processes a request of this caller, or of somebody in the network of this address.
pub(crate) fn scope<F: Future>(
    caller: Option<&Caller>,
    client: Option<ClientAddress>,
    responding: F,
) -> impl Future<Output = F::Output> + use<F> {
    let caller = match caller {
        Some(Caller { principal: Principal::User(id), .. }) => HASHER.hash_one(("user", id)),
        Some(Caller { tenant, .. }) => HASHER.hash_one(("tenant", tenant.as_str())),
        None => HASHER.hash_one(("address", client.map(ClientAddress::network))),
    };
    REQUEST.scope(Request { caller, permits: Cell::new(0) }, responding)
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
    gates: Gates<CallerHash>,
    wait_max: Duration,
}

/// A part of the share of a caller.
#[derive(Debug)]
pub struct SharePermit {
    _permit: OwnedSemaphorePermit,
}

impl Drop for SharePermit {
    fn drop(&mut self) {
        let _ = REQUEST.try_with(|request| request.permits.set(request.permits.get().saturating_sub(1)));
    }
}

impl CallerShares {
    /// A caller gets at most so many permits, and its requests wait for one at most so long.
    pub fn new(permits: usize, wait_max: Duration) -> CallerShares {
        CallerShares { gates: Gates::new(permits), wait_max }
    }

    /// Waits for a permit of the caller whose request this task processes. None if it processes none, or the request has a
    /// permit.
    pub async fn enter(&self) -> Result<Option<SharePermit>, ShareExhausted> {
        let caller = REQUEST.try_with(|request| (request.permits.get() == 0).then_some(request.caller));
        let Ok(Some(caller)) = caller else { return Ok(None) };
        let permit = match self.gates.try_enter(&caller) {
            Some(permit) => Some(permit),
            None => {
                let waiting = tokio::time::timeout(self.wait_max, self.gates.enter(&caller));
                waiting.await.map_err(|_| ShareExhausted)?
            }
        };
        let _ = REQUEST.try_with(|request| request.permits.set(request.permits.get() + 1));
        Ok(permit.map(|permit| SharePermit { _permit: permit }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::Tenant;
    use uuid::Uuid;

    fn user() -> Caller {
        Caller::new(Principal::User(Uuid::new_v4()), Tenant::main(), None)
    }

    #[tokio::test]
    async fn requests_without_a_caller_have_one_share_for_each_network() {
        let shares = CallerShares::new(1, Duration::from_millis(50));
        let enter = async |address: &str| {
            scope(None, Some(ClientAddress(address.parse().unwrap())), shares.enter()).await.ok().flatten()
        };
        let permits = [enter("192.0.2.1").await, enter("192.0.2.2").await, enter("2001:db8::1").await];
        assert!(permits.iter().all(Option::is_some));
        assert!(enter("192.0.2.1").await.is_none());
        assert!(enter("2001:db8::2").await.is_none(), "a host can use all addresses of its /64");
        assert!(enter("2001:db8:0:1::1").await.is_some());
    }

    #[tokio::test]
    async fn a_caller_waits_for_itself_and_no_other_does() {
        let shares = CallerShares::new(2, Duration::from_millis(50));
        let (first, second) = (user(), user());
        let enter = async |caller: Option<&Caller>| scope(caller, None, shares.enter()).await;
        let mut permits = vec![enter(Some(&first)).await.unwrap(), enter(Some(&first)).await.unwrap()];
        assert!(enter(Some(&first)).await.is_err(), "the share is used for longer than a request waits");
        assert!(enter(Some(&second)).await.unwrap().is_some());
        assert!(enter(None).await.unwrap().is_some());
        assert!(shares.enter().await.unwrap().is_none(), "other work has no share");
        permits.pop();
        assert!(enter(Some(&first)).await.unwrap().is_some());
    }

    #[tokio::test]
    async fn a_request_does_not_wait_for_itself() {
        let (shares, caller) = (CallerShares::new(1, Duration::from_millis(50)), user());
        scope(Some(&caller), None, async {
            let permit = shares.enter().await.unwrap();
            assert!(permit.is_some() && shares.enter().await.unwrap().is_none());
            drop(permit);
            assert!(shares.enter().await.unwrap().is_some());
        })
        .await;
    }
}

//! Rate limits per caller, with the `RateLimit-*` headers.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use governor::clock::{Clock as _, DefaultClock};
use governor::middleware::StateInformationMiddleware;
use governor::state::keyed::DashMapStateStore;
use governor::{Quota, RateLimiter};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::problem::Problem;

type Limiter = RateLimiter<String, DashMapStateStore<String>, DefaultClock, StateInformationMiddleware>;

const LIMIT: HeaderName = HeaderName::from_static("ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("ratelimit-reset");

/// A limit of requests per second for each caller. A burst of one second's requests is allowed at once.
#[derive(Clone)]
pub struct RateLimit {
    limiter: Arc<Limiter>,
    clock: DefaultClock,
    /// The callers above the limit, each with the end of its wait.
    exhausted: Arc<Mutex<HashMap<String, Instant>>>,
}

impl RateLimit {
    pub fn per_second(rate: NonZeroU32) -> RateLimit {
        let limiter = RateLimiter::keyed(Quota::per_second(rate)).with_middleware::<StateInformationMiddleware>();
        RateLimit { limiter: Arc::new(limiter), clock: DefaultClock::default(), exhausted: Arc::default() }
    }

    /// Counts one request of `caller` and returns the headers for its response. Fails with 429 above the limit.
    pub fn check(&self, caller: &str) -> Result<HeaderMap, Problem> {
        match self.limiter.check_key(&caller.to_owned()) {
            Ok(state) => Ok(headers(state.quota(), state.remaining_burst_capacity(), Duration::from_secs(1))),
            Err(rejected) => {
                let wait = rejected.wait_time_from(self.clock.now());
                self.exhausted().insert(caller.to_owned(), Instant::now() + wait);
                let detail = format!(
                    "more than {} requests per second; wait as long as the header Retry-After says",
                    rejected.quota().burst_size()
                );
                let mut problem = Problem::new(StatusCode::TOO_MANY_REQUESTS, "rate-limited", detail).retry_after(wait);
                for (name, value) in &headers(rejected.quota(), 0, wait) {
                    problem = problem.with_header(name.clone(), value.clone());
                }
                Err(problem)
            }
        }
    }

    /// Returns true if the caller is above the limit now. Does not count a request.
    pub(crate) fn is_exhausted(&self, caller: &str) -> bool {
        self.exhausted().get(caller).is_some_and(|until| *until > Instant::now())
    }

    fn exhausted(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        self.exhausted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the state of idle callers, so that memory use follows the number of active callers.
    pub fn drop_idle(&self) {
        self.exhausted().retain(|_, until| *until > Instant::now());
        self.limiter.retain_recent();
        self.limiter.shrink_to_fit();
    }
}

fn headers(quota: Quota, remaining: u32, reset: Duration) -> HeaderMap {
    let reset_seconds = reset.as_secs_f64().ceil() as u64;
    HeaderMap::from_iter([
        (LIMIT, HeaderValue::from(quota.burst_size().get())),
        (REMAINING, HeaderValue::from(remaining)),
        (RESET, HeaderValue::from(reset_seconds)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::response::IntoResponse;

    #[test]
    fn a_caller_above_the_limit_gets_a_retry_after() {
        let limit = RateLimit::per_second(NonZeroU32::new(5).unwrap());
        for left in (0..5).rev() {
            assert_eq!(limit.check("a").unwrap()[REMAINING], left.to_string());
        }
        let rejected = limit.check("a").unwrap_err().into_response();
        assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(rejected.headers()[http::header::RETRY_AFTER], "1");
        assert_eq!(rejected.headers()[LIMIT], "5");
        assert!(limit.check("b").is_ok(), "another caller is not affected");
    }
}

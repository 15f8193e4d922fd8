//! Rate limits per caller, answered as the HTTP rate-limit headers say.

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

/// So many requests a second for each caller; a burst of one second's worth is taken at once.
#[derive(Clone)]
pub struct RateLimit {
    limiter: Arc<Limiter>,
    clock: DefaultClock,
    /// Who is over the limit, and until when.
    exhausted: Arc<Mutex<HashMap<String, Instant>>>,
}

impl RateLimit {
    pub fn per_second(rate: NonZeroU32) -> RateLimit {
        let limiter = RateLimiter::keyed(Quota::per_second(rate)).with_middleware::<StateInformationMiddleware>();
        RateLimit { limiter: Arc::new(limiter), clock: DefaultClock::default(), exhausted: Arc::default() }
    }

    /// Counts one request of `caller`: headers for its answer, or the 429.
    pub fn check(&self, caller: &str) -> Result<HeaderMap, Problem> {
        match self.limiter.check_key(&caller.to_owned()) {
            Ok(state) => Ok(headers(state.quota(), state.remaining_burst_capacity(), Duration::from_secs(1))),
            Err(refused) => {
                let wait = refused.wait_time_from(self.clock.now());
                self.exhausted().insert(caller.to_owned(), Instant::now() + wait);
                let detail = format!("more than {} requests in a second", refused.quota().burst_size());
                let mut problem = Problem::new(StatusCode::TOO_MANY_REQUESTS, "rate-limited", detail).retry_after(wait);
                for (name, value) in &headers(refused.quota(), 0, wait) {
                    problem = problem.with_header(name.clone(), value.clone());
                }
                Err(problem)
            }
        }
    }

    /// Whether a caller is over the limit now; counts nothing.
    pub fn is_exhausted(&self, caller: &str) -> bool {
        self.exhausted().get(caller).is_some_and(|until| *until > Instant::now())
    }

    fn exhausted(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        self.exhausted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets callers that have been quiet, so that memory follows the callers of now.
    pub fn forget_quiet(&self) {
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
    fn the_one_over_the_limit_is_told_when_to_come_back() {
        let limit = RateLimit::per_second(NonZeroU32::new(5).unwrap());
        for left in (0..5).rev() {
            assert_eq!(limit.check("a").unwrap()[REMAINING], left.to_string());
        }
        let refused = limit.check("a").unwrap_err().into_response();
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(refused.headers()[http::header::RETRY_AFTER], "1");
        assert_eq!(refused.headers()[LIMIT], "5");
        assert!(limit.check("b").is_ok(), "another caller is not affected");
    }
}

//! Rate limits per caller and per tenant, with the `RateLimit-*` headers.
//!
//! A limit of a key or of a tenant holds over all processes. Each process has a share of it, which follows from the demand of
//! all processes: once a second a background task reports the [`RateLimits::demands`] of this process, and applies those of the
//! others with [`RateLimits::apply`]. A request only looks at memory. A process that knows nothing of a subject yet, or cannot
//! exchange demands, uses an even share. So all processes together exceed a limit only while demands move from one process to
//! another, for about a second.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::admission::caller_id::{CallerId, Subject};
use crate::caller::Principal;
use crate::problem::Problem;

const LIMIT: HeaderName = HeaderName::from_static("ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("ratelimit-reset");

/// Demands below this part of an even share are not reported: they change nothing that matters, and most subjects have one.
const REPORTED_MIN: f64 = 0.1;
/// How long a subject without requests is remembered.
const IDLE_TIME_MAX: Duration = Duration::from_secs(10);
/// How long shares are used after the last exchange of demands.
const SHARE_TIME_MAX: Duration = Duration::from_secs(3);

/// The name by which all processes know a subject whose limit they share. None: each process limits it on its own.
fn shared_name(subject: Subject<'_>) -> Option<String> {
    match subject {
        Subject::Principal(principal @ (Principal::Key(_) | Principal::Portal(_))) => Some(principal.to_string()),
        Subject::Tenant(name) => Some(format!("tenant:{name}")),
        Subject::Principal(Principal::User(_)) | Subject::Network(_) => None,
    }
}

/// The first part of the sentence with the limit, and the unit.
fn described(subject: Subject<'_>) -> (String, &'static str) {
    let limit = match subject {
        Subject::Principal(Principal::Key(_)) => "the limit of this API key",
        Subject::Principal(Principal::Portal(_)) => "the limit of this portal token",
        Subject::Principal(Principal::User(_)) => "the limit of this user",
        Subject::Network(_) => "the limit of requests without valid credentials from this address",
        Subject::Tenant(name) => return (format!("the limit of the tenant `{name}`"), "events"),
    };
    (limit.to_owned(), "requests")
}

/// How much a subject wanted from this process since the last report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    pub subject: String,
    pub count: u32,
}

/// The limits of all subjects, as this process knows them. A burst of one second's requests is allowed at once.
#[derive(Clone)]
pub struct RateLimits {
    state: Arc<Mutex<State>>,
}

struct State {
    buckets: HashMap<CallerId, Bucket>,
    /// The processes that share the limits, this one included.
    processes: u32,
    exchanged_at: Option<Instant>,
}

struct Bucket {
    rate: u32,
    /// The name of the subject, if all processes share the limit.
    shared_name: Option<String>,
    /// The part of the rate that this process may use. None: an even share.
    share: Option<f64>,
    /// May be negative after a request that counts more than is left.
    tokens: f64,
    refilled_at: Instant,
    /// Since the last report, refused requests included.
    demand: u32,
    is_reported: bool,
    exhausted_until: Option<Instant>,
}

impl Default for RateLimits {
    fn default() -> RateLimits {
        RateLimits { state: Arc::new(Mutex::new(State { buckets: HashMap::new(), processes: 1, exchanged_at: None })) }
    }
}

impl RateLimits {
    /// Counts `count` requests or events of the subject and returns the headers for the response. Fails with 429 above the
    /// limit of `rate` per second.
    pub fn check(&self, subject: Subject<'_>, rate: NonZeroU32, count: u32) -> Result<HeaderMap, Problem> {
        self.check_at(subject, rate, count, Instant::now())
    }

    fn check_at(&self, subject: Subject<'_>, rate: NonZeroU32, count: u32, now: Instant) -> Result<HeaderMap, Problem> {
        let mut state = self.state();
        let processes = state.processes;
        let bucket = state.buckets.entry(subject.into()).or_insert_with(|| Bucket::new(rate, subject, processes, now));
        bucket.rate = rate.get();
        match bucket.spend(count, processes, now) {
            Ok(remaining) => Ok(headers(rate, remaining, Duration::from_secs(1))),
            Err(wait) => {
                bucket.exhausted_until = Some(now + wait);
                let (limit, unit) = described(subject);
                let detail = format!(
                    "{limit} is {rate} {unit} per second, in all processes together; wait as long as the header Retry-After says"
                );
                let mut problem = Problem::new(StatusCode::TOO_MANY_REQUESTS, "rate-limited", detail).retry_after(wait);
                for (name, value) in &headers(rate, 0, wait) {
                    problem = problem.with_header(name.clone(), value.clone());
                }
                Err(problem)
            }
        }
    }

    /// Returns true if the subject is above the limit now. Does not count a request.
    pub(crate) fn is_exhausted(&self, subject: Subject<'_>) -> bool {
        let state = self.state();
        let until = state.buckets.get(&subject.into()).and_then(|bucket| bucket.exhausted_until);
        until.is_some_and(|until| until > Instant::now())
    }

    /// Returns the demands since the last call that other processes have to know. Without other processes: none.
    pub fn demands(&self) -> Vec<Demand> {
        let mut state = self.state();
        let processes = state.processes;
        let mut demands = Vec::new();
        for bucket in state.buckets.values_mut() {
            let Some(name) = &bucket.shared_name else { continue };
            let count = std::mem::take(&mut bucket.demand);
            let reported_min = f64::from(bucket.rate) / f64::from(processes) * REPORTED_MIN;
            let is_reported = processes > 1 && count > 0 && f64::from(count) >= reported_min;
            // Once more after the last demand, so that the others learn of the end.
            if is_reported || bucket.is_reported {
                demands.push(Demand { subject: name.clone(), count });
            }
            bucket.is_reported = is_reported;
        }
        demands
    }

    /// Applies what other processes have reported: their demands, and the number of all processes. `own`: what this process
    /// has reported.
    pub fn apply(&self, own: &[Demand], others: &HashMap<String, u64>, processes: u32) {
        let mut state = self.state();
        state.processes = processes.max(1);
        state.exchanged_at = Some(Instant::now());
        let processes = state.processes;
        let own: HashMap<&str, u32> = own.iter().map(|demand| (demand.subject.as_str(), demand.count)).collect();
        for bucket in state.buckets.values_mut() {
            let Some(name) = bucket.shared_name.as_deref() else { continue };
            if let Some(own) = own.get(name) {
                bucket.share = Some(share_of(*own, others.get(name).copied().unwrap_or(0), processes));
            } else if !bucket.is_reported {
                bucket.share = None;
            }
        }
    }

    /// Drops the state of idle subjects, so that memory use follows the number of active ones, and the shares of processes
    /// that have not exchanged demands for some time.
    pub fn drop_idle(&self) {
        let mut state = self.state();
        let now = Instant::now();
        if state.exchanged_at.is_some_and(|at| now.duration_since(at) > SHARE_TIME_MAX) {
            state.exchanged_at = None;
            state.buckets.values_mut().for_each(|bucket| bucket.share = None);
        }
        state.buckets.retain(|_, bucket| now.duration_since(bucket.refilled_at) < IDLE_TIME_MAX);
        state.buckets.shrink_to_fit();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The part of a limit that a process may use: in proportion to the demands, but so much that a new demand is noticed.
fn share_of(own: u32, others: u64, processes: u32) -> f64 {
    let floor = REPORTED_MIN / f64::from(processes);
    match others {
        0 => 1.0,
        others => (f64::from(own) / (f64::from(own) + others as f64)).max(floor),
    }
}

impl Bucket {
    fn new(rate: NonZeroU32, subject: Subject<'_>, processes: u32, now: Instant) -> Bucket {
        let mut bucket = Bucket {
            rate: rate.get(),
            shared_name: shared_name(subject),
            share: None,
            tokens: 0.0,
            refilled_at: now,
            demand: 0,
            is_reported: false,
            exhausted_until: None,
        };
        bucket.tokens = bucket.per_second(processes);
        bucket
    }

    /// The requests per second of this process. At least one, because a burst of less than one would allow none.
    fn per_second(&self, processes: u32) -> f64 {
        let even = if self.shared_name.is_some() { 1.0 / f64::from(processes) } else { 1.0 };
        (f64::from(self.rate) * self.share.unwrap_or(even)).max(1.0)
    }

    /// Returns how many requests are left. Fails with the time until this one would be accepted. A request that counts more
    /// than a second's rate is accepted when nothing of the second is used.
    fn spend(&mut self, count: u32, processes: u32, now: Instant) -> Result<u32, Duration> {
        let per_second = self.per_second(processes);
        let elapsed = now.saturating_duration_since(self.refilled_at).as_secs_f64();
        self.tokens = (self.tokens + elapsed * per_second).min(per_second);
        self.refilled_at = now;
        self.demand = self.demand.saturating_add(count);
        let needed = f64::from(count).min(per_second);
        // The sum of many small refills may miss a whole number by a rounding error.
        if self.tokens + 1e-9 < needed {
            return Err(Duration::from_secs_f64((needed - self.tokens) / per_second));
        }
        self.tokens -= f64::from(count);
        Ok(self.tokens.max(0.0) as u32)
    }
}

fn headers(rate: NonZeroU32, remaining: u32, reset: Duration) -> HeaderMap {
    let reset_seconds = reset.as_secs_f64().ceil() as u64;
    HeaderMap::from_iter([
        (LIMIT, HeaderValue::from(rate.get())),
        (REMAINING, HeaderValue::from(remaining)),
        (RESET, HeaderValue::from(reset_seconds)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::response::IntoResponse;

    const KEY: Subject<'static> = Subject::Principal(Principal::Key(uuid::Uuid::nil()));

    fn rate(rate: u32) -> NonZeroU32 {
        NonZeroU32::new(rate).unwrap()
    }

    #[test]
    fn a_caller_above_the_limit_gets_a_retry_after() {
        let (limits, now) = (RateLimits::default(), Instant::now());
        let check = |subject| limits.check_at(subject, rate(5), 1, now);
        for left in (0..5).rev() {
            assert_eq!(check(KEY).unwrap()[REMAINING], left.to_string());
        }
        let rejected = check(KEY).unwrap_err().into_response();
        assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(rejected.headers()[http::header::RETRY_AFTER], "1");
        assert_eq!(rejected.headers()[LIMIT], "5");
        assert!(check(Subject::Principal(Principal::Key(uuid::Uuid::max()))).is_ok(), "another caller is not affected");
        assert!(limits.check_at(KEY, rate(5), 1, now + Duration::from_millis(200)).is_ok(), "a fifth of a second");
    }

    #[test]
    fn a_large_request_is_accepted_once_and_then_waited_for() {
        let (limits, now) = (RateLimits::default(), Instant::now());
        let post = |count, millis| {
            limits.check_at(Subject::Tenant("acme"), rate(10), count, now + Duration::from_millis(millis)).is_ok()
        };
        assert!(post(25, 0), "more than a second's events, when none was used");
        assert!(!post(1, 1_000), "they are paid for first");
        assert!(post(1, 1_700));
    }

    /// Sends `wanted` requests to each process within every simulated second. Returns how many all processes accepted in the
    /// last five of eight seconds.
    fn accepted(limit: u32, wanted: &[u32], is_exchanged: bool) -> u32 {
        let (start, mut accepted) = (Instant::now(), 0);
        let processes: Vec<RateLimits> = wanted.iter().map(|_| RateLimits::default()).collect();
        processes.iter().for_each(|process| process.apply(&[], &HashMap::new(), wanted.len() as u32));
        for second in 0..8u32 {
            for (process, wanted) in processes.iter().zip(wanted) {
                for n in 0..*wanted {
                    let now = start + Duration::from_secs(second.into()) + Duration::from_secs(1) * n / *wanted;
                    let is_accepted = process.check_at(KEY, rate(limit), 1, now).is_ok();
                    accepted += u32::from(is_accepted && second >= 3);
                }
            }
            if !is_exchanged {
                continue;
            }
            let reports: Vec<Vec<Demand>> = processes.iter().map(RateLimits::demands).collect();
            for (at, process) in processes.iter().enumerate() {
                let mut others = HashMap::new();
                let reported =
                    reports.iter().enumerate().filter(|(other, _)| *other != at).flat_map(|(_, report)| report);
                reported
                    .for_each(|demand| *others.entry(demand.subject.clone()).or_default() += u64::from(demand.count));
                process.apply(&reports[at], &others, wanted.len() as u32);
            }
        }
        accepted
    }

    #[test]
    fn processes_share_a_limit_in_proportion_to_their_demands() {
        let seconds = 5;
        for wanted in [&[300, 300][..], &[300, 0], &[500, 60, 40], &[200, 200, 200, 200]] {
            let accepted = accepted(100, wanted, true);
            assert!((95 * seconds..=112 * seconds).contains(&accepted), "{wanted:?}: {accepted}");
        }
        assert_eq!(accepted(100, &[40, 50], true), 90 * seconds, "below the limit nothing is refused");
    }

    #[test]
    fn a_process_without_an_exchange_uses_an_even_share() {
        let accepted = accepted(100, &[300, 300], false);
        assert!((490..=510).contains(&accepted), "{accepted}");
        assert_eq!(self::accepted(100, &[300, 0], false), 250, "and no more");
    }
}

//! A caller who takes no part in the attack, and measures the answers to its own requests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::client::{Client, Request};
use crate::Outcome;

/// The time between two requests, unless the bystander has another one. They are sent whether or not earlier ones are
/// answered, so that a pause of the server delays every request of that time, as it would with independent callers.
const PERIOD_DEFAULT: Duration = Duration::from_millis(40);
/// Requests in flight at most. Waiting for its turn also delays a request.
const IN_FLIGHT_MAX: usize = 32;

#[derive(Clone)]
pub(super) struct Bystander {
    client: Client,
    /// Creates the request with a number.
    requests: Arc<dyn Fn(u64) -> Request + Send + Sync>,
    period: Duration,
    ratio_max: Option<f64>,
}

/// The answers to the requests of a bystander.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Latencies {
    pub(super) requests: usize,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) max_ms: f64,
    /// Answers other than 2xx, by status, and requests without an answer as `none`.
    pub(super) errors: BTreeMap<String, u64>,
}

/// The time to an answer in milliseconds, and its error.
type Sample = (f64, Option<String>);

impl Bystander {
    pub(super) fn new(client: Client, requests: impl Fn(u64) -> Request + Send + Sync + 'static) -> Bystander {
        Bystander { client, requests: Arc::new(requests), period: PERIOD_DEFAULT, ratio_max: None }
    }

    /// The same, whose p99 beside the attack is at most this many times as long as alone.
    pub(super) fn within(self, ratio_max: f64) -> Bystander {
        Bystander { ratio_max: Some(ratio_max), ..self }
    }

    pub(super) fn ratio_max(&self) -> Option<f64> {
        self.ratio_max
    }

    /// The same with another time between two requests.
    pub(super) fn every(self, period: Duration) -> Bystander {
        Bystander { period, ..self }
    }

    /// Sends requests until `stop` is cancelled, on a separate thread: the tasks of the attack must not delay it.
    pub(super) fn watch(&self, stop: CancellationToken) -> impl Future<Output = Outcome<Latencies>> + use<> {
        let bystander = self.clone();
        let thread = tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            Outcome::Ok(runtime.block_on(bystander.send_until(stop)))
        });
        async move { Ok(Latencies::of(thread.await??)) }
    }

    async fn send_until(self, stop: CancellationToken) -> Vec<Sample> {
        let turns = Arc::new(Semaphore::new(IN_FLIGHT_MAX));
        let mut ticks = tokio::time::interval(self.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let (mut sending, mut number) = (JoinSet::new(), 0);
        while let Some(due) = stop.run_until_cancelled(ticks.tick()).await {
            let (client, request, turns) = (self.client.clone(), (self.requests)(number), turns.clone());
            sending.spawn(async move {
                let _turn = turns.acquire_owned().await;
                let error = match client.send(&request).await {
                    Ok(answer) if (200..300).contains(&answer.status) => None,
                    Ok(answer) => Some(answer.status.to_string()),
                    Err(_) => Some("none".to_owned()),
                };
                ((Instant::now() - due.into_std()).as_secs_f64() * 1e3, error)
            });
            number += 1;
        }
        sending.join_all().await
    }
}

impl Latencies {
    fn of(samples: Vec<Sample>) -> Latencies {
        let mut errors = BTreeMap::new();
        let mut times = Vec::with_capacity(samples.len());
        for (time, error) in samples {
            times.push(time);
            if let Some(error) = error {
                *errors.entry(error).or_default() += 1;
            }
        }
        times.sort_by(f64::total_cmp);
        let at = |percent: usize| times.get(times.len() * percent / 100).copied().unwrap_or(0.0);
        let max_ms = times.last().copied().unwrap_or(0.0);
        Latencies { requests: times.len(), p50_ms: at(50), p99_ms: at(99), max_ms, errors }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slow_answer_in_a_hundred_is_the_p99_and_errors_are_counted_by_status() {
        let samples = (1..=99).map(|n| (f64::from(n), None)).chain([(5_000.0, Some("503".to_owned()))]).collect();
        let latencies = Latencies::of(samples);
        assert_eq!((latencies.requests, latencies.p50_ms, latencies.p99_ms), (100, 51.0, 5_000.0));
        assert_eq!(latencies.errors, BTreeMap::from([("503".to_owned(), 1)]));
        assert_eq!(Latencies::of(Vec::new()).p99_ms, 0.0);
    }
}

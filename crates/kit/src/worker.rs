//! The loop under every worker.
//!
//! A wake-up during a round is kept until the round ends, so what commits while it looks for work is not missed. Stop is
//! looked at between rounds only, so a round need not be cancel-safe. A round that fails or panics is logged, counted
//! and tried again with backoff; while it fails, readiness says so, and the log once a minute.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::health::Probe;

const FAILURE_PAUSE_MIN: Duration = Duration::from_millis(100);
const FAILURE_PAUSE_MAX: Duration = Duration::from_secs(10);
/// How often the log tells that it still fails.
const TOLD_PAUSE: Duration = Duration::from_secs(60);

/// What a round found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    /// There may be more: go on at once.
    Busy,
    /// Nothing more for now: wait for a wake-up or the pause.
    Idle,
}

/// Wakes a worker; cheap, and never lost: a wake-up during a round makes another round.
#[derive(Debug, Clone, Default)]
pub struct Wake(Arc<Notify>);

impl Wake {
    pub fn wake(&self) {
        // Keeps one permit while the worker is not waiting; `notify_waiters` would keep none.
        self.0.notify_one();
    }

    /// Waits for a wake-up, at most so long.
    pub async fn waited(&self, most: Duration) {
        tokio::select! {
            () = self.0.notified() => {}
            () = tokio::time::sleep(most) => {}
        }
    }
}

/// A worker's name, its rhythm and its way to be stopped.
pub struct Worker {
    pub name: String,
    /// How long an idle worker waits when nothing wakes it.
    pub pause: Duration,
    pub wake: Wake,
    pub stop: CancellationToken,
    pub probe: Probe,
}

impl Worker {
    /// Runs rounds until stopped.
    pub async fn run<E, F>(self, mut round: impl FnMut() -> F)
    where
        E: std::fmt::Display,
        F: Future<Output = Result<Round, E>>,
    {
        let mut failures = Failures::default();
        while !self.stop.is_cancelled() {
            // Called inside, so that a panic before the first await is caught as well.
            let outcome = AssertUnwindSafe(async { round().await }).catch_unwind().await;
            let pause = match outcome {
                Ok(Ok(found)) => {
                    failures = Failures::default();
                    self.probe.up();
                    if found == Round::Busy {
                        // A round that never waits must not starve its neighbours.
                        tokio::task::yield_now().await;
                        continue;
                    }
                    self.pause
                }
                Ok(Err(error)) => self.failed(&mut failures, &error.to_string()),
                Err(panic) => self.failed(&mut failures, &format!("panic: {}", panic_text(&*panic))),
            };
            tokio::select! {
                () = self.wake.0.notified(), if failures.count == 0 => {}
                () = tokio::time::sleep(pause) => {}
                () = self.stop.cancelled() => {}
            }
        }
    }

    fn failed(&self, failures: &mut Failures, error: &str) -> Duration {
        let pause = FAILURE_PAUSE_MIN.saturating_mul(1 << failures.count.min(10)).min(FAILURE_PAUSE_MAX);
        failures.count += 1;
        metrics::counter!("pillarbox_worker_failures_total", "worker" => self.name.clone()).increment(1);
        // The first is the probe's to tell.
        self.probe.down(error);
        let told_at = failures.told_at.get_or_insert_with(Instant::now);
        if told_at.elapsed() >= TOLD_PAUSE {
            *told_at = Instant::now();
            tracing::warn!(worker = %self.name, error, failures = failures.count, "still fails; will try again");
        }
        pause
    }
}

/// In a row.
#[derive(Default)]
struct Failures {
    count: u32,
    told_at: Option<Instant>,
}

/// What a panic said.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::Health;
    use std::sync::atomic::{AtomicU32, Ordering};

    struct Fixture {
        stop: CancellationToken,
        rounds: Arc<AtomicU32>,
        health: Health,
        task: tokio::task::JoinHandle<()>,
    }

    fn start(wake: Wake, round: impl Fn(u32) -> Result<Round, String> + Send + 'static) -> Fixture {
        let (stop, rounds, health) = (CancellationToken::new(), Arc::<AtomicU32>::default(), Health::default());
        let worker = Worker {
            name: "test".to_owned(),
            pause: Duration::from_secs(3600),
            wake,
            stop: stop.clone(),
            probe: health.task("test", true),
        };
        let counted = rounds.clone();
        // The round runs before its future is made: what panics there must be caught, too.
        let task = tokio::spawn(worker.run(move || std::future::ready(round(counted.fetch_add(1, Ordering::SeqCst)))));
        Fixture { stop, rounds, health, task }
    }

    async fn until(condition: impl Fn() -> bool) {
        tokio::time::timeout(Duration::from_secs(5), async {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .expect("in time");
    }

    #[tokio::test]
    async fn a_wake_up_during_a_round_makes_another_round() {
        let wake = Wake::default();
        let fixture = start(wake.clone(), move |round| {
            if round == 0 {
                wake.wake(); // something commits while the round looks
            }
            Ok(Round::Idle)
        });
        until(|| fixture.rounds.load(Ordering::SeqCst) >= 2).await;
        fixture.stop.cancel();
        fixture.task.await.unwrap();
    }

    #[tokio::test]
    async fn busy_rounds_follow_at_once_and_stop_ends_between_rounds() {
        let fixture = start(Wake::default(), |_| Ok(Round::Busy));
        until(|| fixture.rounds.load(Ordering::SeqCst) > 100).await;
        fixture.stop.cancel();
        fixture.task.await.unwrap();
    }

    #[tokio::test]
    async fn failures_and_panics_are_tried_again_and_shown() {
        let fixture = start(Wake::default(), |round| match round {
            0 => Err("away".to_owned()),
            1 => panic!("oops"),
            _ => Ok(Round::Idle),
        });
        until(|| fixture.health.report().iter().any(|state| state.error.is_some())).await;
        until(|| fixture.rounds.load(Ordering::SeqCst) >= 3).await;
        until(|| fixture.health.report().iter().all(|state| state.error.is_none())).await;
        fixture.stop.cancel();
        fixture.task.await.unwrap();
    }
}

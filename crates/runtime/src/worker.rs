//! The loop of every background worker.
//!
//! A wake-up during a round starts another round, so that work committed during the round is not missed. The worker
//! checks for stop only between rounds, so a round need not be cancel-safe. A round that fails or panics is counted
//! and repeated with backoff. While it fails, readiness reports it, and the log once a minute.
//!
//! A round that takes too long is dropped, because what it waits for may never respond ([`RoundLimits`]). So it must leave
//! a state with which the next round can begin. Rounds that legitimately take long have time limits for their steps.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::Notify;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::backoff::Backoff;
use crate::deadline::{self, Expired};
use crate::health::Probe;

/// The pause after failed rounds.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
/// The pause between two log lines about a worker that keeps failing.
const LOG_PAUSE: Duration = Duration::from_secs(60);

/// The result of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    /// There may be more work: the next round starts at once.
    Busy,
    /// There is no more work: the worker waits for a wake-up or the pause.
    Idle,
    /// There is no work before this time has passed: the worker waits for it or for a wake-up, at most for the pause.
    IdleFor(Duration),
}

/// Wakes a worker. It is cheap, and no wake-up is lost: one during a round starts another round.
#[derive(Debug, Clone, Default)]
pub struct Wake(Arc<Notify>);

impl Wake {
    /// Wakes the worker, or makes its next wait return at once.
    pub fn wake(&self) {
        // `notify_one` stores a permit while the worker is not waiting; `notify_waiters` would not.
        self.0.notify_one();
    }

    /// Waits for a wake-up, at most `time_max`.
    pub async fn wait(&self, time_max: Duration) {
        tokio::select! {
            () = self.0.notified() => {}
            () = tokio::time::sleep(time_max) => {}
        }
    }
}

/// The time limits of a round.
#[derive(Debug, Clone, Copy)]
pub struct RoundLimits {
    /// Readiness reports a round that takes longer.
    pub slow_after: Duration,
    /// A round that takes longer is dropped, and counts as failed.
    pub time_max: Duration,
}

impl RoundLimits {
    /// For rounds that delete or rewrite much data, in many statements that each have the database's own time limit.
    pub const LONG: RoundLimits =
        RoundLimits { slow_after: Duration::from_secs(300), time_max: Duration::from_secs(900) };
    /// For rounds with many steps, each of which has a separate time limit: the batch of a consumer.
    pub const STEPS: RoundLimits =
        RoundLimits { slow_after: Duration::from_secs(30), time_max: Duration::from_secs(1_800) };
}

impl Default for RoundLimits {
    /// For rounds of a few short statements.
    fn default() -> RoundLimits {
        RoundLimits { slow_after: Duration::from_secs(10), time_max: Duration::from_secs(30) }
    }
}

/// The settings of a worker.
pub struct Worker {
    pub name: String,
    /// How long an idle worker waits without a wake-up.
    pub pause: Duration,
    pub wake: Wake,
    pub stop: CancellationToken,
    pub probe: Probe,
    pub limits: RoundLimits,
}

impl Worker {
    /// Sets the time limits of a round.
    pub fn with_limits(self, limits: RoundLimits) -> Worker {
        Worker { limits, ..self }
    }

    /// Runs rounds until `stop`.
    pub async fn run<E, F>(self, mut round: impl FnMut() -> F)
    where
        E: std::fmt::Display,
        F: Future<Output = Result<Round, E>>,
    {
        self.failures_counter().increment(0);
        let mut failures = Failures::default();
        let mut lost_connections = self.probe.lost_connections();
        while !self.stop.is_cancelled() {
            self.probe.begin_round(self.limits.slow_after);
            // `round` is called inside the future, so that a panic before its first await is caught as well.
            let result = {
                let running = pin!(AssertUnwindSafe(async { round().await }).catch_unwind());
                self.within_limits(running, &mut lost_connections).await
            };
            let pause = match result {
                Err(ended) => self.report_failure(&mut failures, &ended.to_string()),
                Ok(Ok(Ok(found))) => {
                    failures = Failures::default();
                    self.probe.up();
                    match found {
                        Round::Busy => {
                            // A round that never awaits must not starve other tasks.
                            tokio::task::yield_now().await;
                            continue;
                        }
                        Round::Idle => self.pause,
                        Round::IdleFor(time) => time.min(self.pause),
                    }
                }
                Ok(Ok(Err(error))) => self.report_failure(&mut failures, &error.to_string()),
                Ok(Err(panic)) => self.report_failure(&mut failures, &format!("panic: {}", panic_text(&*panic))),
            };
            tokio::select! {
                () = self.wake.0.notified(), if failures.count == 0 => {}
                () = tokio::time::sleep(pause) => {}
                () = self.stop.cancelled() => {}
            }
        }
    }

    /// Runs a round. Fails with the reason if it takes too long, or if connections turn out to be dead while it waits; the
    /// caller drops it then.
    async fn within_limits<T>(
        &self,
        round: Pin<&mut impl Future<Output = T>>,
        lost_connections: &mut watch::Receiver<u64>,
    ) -> Result<T, RoundEnded> {
        // However short it has waited: its connection may have been one of the dead ones.
        let round = deadline::unless_connections_are_lost(lost_connections, Duration::ZERO, round);
        match deadline::within(self.limits.time_max, round).await {
            Ok(Some(outcome)) => Ok(outcome),
            Ok(None) => Err(RoundEnded::LostConnection { worker: self.name.clone() }),
            Err(expired) => Err(RoundEnded::TimeLimit { worker: self.name.clone(), expired }),
        }
    }

    fn failures_counter(&self) -> metrics::Counter {
        metrics::counter!("pillarbox_worker_failures_total", "worker" => self.name.clone())
    }

    /// Counts and reports a failure. Returns the pause before the next round.
    fn report_failure(&self, failures: &mut Failures, error: &str) -> Duration {
        failures.count = failures.count.saturating_add(1);
        self.failures_counter().increment(1);
        // The probe logs the first failure.
        self.probe.down(error);
        let logged_at = failures.logged_at.get_or_insert_with(Instant::now);
        if logged_at.elapsed() >= LOG_PAUSE {
            *logged_at = Instant::now();
            tracing::warn!(worker = %self.name, error, failures = failures.count, "keeps failing; will try again");
        }
        BACKOFF.pause(failures.count)
    }
}

/// Why a round was dropped before its end.
#[derive(Debug, thiserror::Error)]
enum RoundEnded {
    #[error("{worker}: the round waited for a connection that is probably dead")]
    LostConnection { worker: String },
    #[error("{worker}: the round did not end: {expired}")]
    TimeLimit { worker: String, expired: Expired },
}

/// Consecutive failures.
#[derive(Default)]
struct Failures {
    count: u32,
    logged_at: Option<Instant>,
}

/// Returns the message of a panic.
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
        // The closure panics before it returns a future; the worker must catch that as well.
        start_async(wake, move |number| std::future::ready(round(number)))
    }

    fn start_async<F>(wake: Wake, round: impl Fn(u32) -> F + Send + 'static) -> Fixture
    where
        F: Future<Output = Result<Round, String>> + Send + 'static,
    {
        let (stop, rounds, health) = (CancellationToken::new(), Arc::<AtomicU32>::default(), Health::default());
        let worker = Worker {
            name: "test".to_owned(),
            pause: Duration::from_secs(3600),
            wake,
            stop: stop.clone(),
            probe: health.task("test", true),
            limits: RoundLimits { time_max: Duration::from_millis(300), ..RoundLimits::default() },
        };
        let counted = rounds.clone();
        let task = tokio::spawn(worker.run(move || round(counted.fetch_add(1, Ordering::SeqCst))));
        Fixture { stop, rounds, health, task }
    }

    async fn until(condition: impl Fn() -> bool) {
        tokio::time::timeout(Duration::from_secs(5), async {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .expect("the condition holds in time");
    }

    #[tokio::test]
    async fn a_wake_up_during_a_round_starts_another_round() {
        let wake = Wake::default();
        let fixture = start(wake.clone(), move |round| {
            if round == 0 {
                wake.wake(); // Work is committed while the round runs.
            }
            Ok(Round::Idle)
        });
        until(|| fixture.rounds.load(Ordering::SeqCst) >= 2).await;
        fixture.stop.cancel();
        fixture.task.await.unwrap();
    }

    #[tokio::test]
    async fn busy_rounds_follow_at_once_until_stop() {
        let fixture = start(Wake::default(), |_| Ok(Round::Busy));
        until(|| fixture.rounds.load(Ordering::SeqCst) > 100).await;
        fixture.stop.cancel();
        fixture.task.await.unwrap();
    }

    #[tokio::test]
    async fn failures_and_panics_are_reported_and_repeated() {
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

    #[tokio::test]
    async fn a_round_that_hangs_is_dropped_and_named_and_the_next_one_runs() {
        let fixture = start_async(Wake::default(), |round| async move {
            match round {
                0 => std::future::pending().await,
                _ => Ok(Round::Idle),
            }
        });
        until(|| fixture.health.report().iter().any(|state| state.error.is_some())).await;
        let report = fixture.health.report();
        let error = report[0].error.clone().unwrap_or_default();
        assert!(error.contains("test: the round did not end"), "{report:?}");
        until(|| fixture.health.report().iter().all(|state| state.error.is_none())).await;
        assert!(fixture.rounds.load(Ordering::SeqCst) >= 2);
        fixture.stop.cancel();
        fixture.task.await.unwrap();
    }
}

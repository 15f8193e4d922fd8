//! Time limits of steps that wait for a server.
//!
//! A server or a network that stops responding without closing its connections leaves every caller waiting. So each such
//! step has a time limit. A step that exceeds it is dropped, and its connections are dropped in the middle of an
//! exchange: nobody can tell whether they are slow or dead. [`expired_recently`] tells a connection pool that it must not
//! wait for connections that it gets back now.

use std::future::Future;
use std::pin::pin;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// How long after an abandoned step its connections may still be on their way back to their pool.
const RETURN_TIME: Duration = Duration::from_secs(5);

/// The step did not end within its time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no response within {} s", .0.as_secs_f64())]
pub struct Expired(pub Duration);

/// Runs a step. Fails, and drops the step, if it does not end within `time_max`.
pub async fn within<T>(time_max: Duration, step: impl Future<Output = T>) -> Result<T, Expired> {
    let mut step = pin!(step);
    match tokio::time::timeout(time_max, &mut step).await {
        Ok(output) => Ok(output),
        Err(_) => {
            // Before `step` is dropped and its connections return to their pool.
            note_expired();
            Err(Expired(time_max))
        }
    }
}

/// Runs a step. Returns None, and drops the step, if it has waited for at least `waited_min` when connections turn out to be
/// dead.
pub async fn unless_connections_are_lost<T>(
    lost_connections: &mut watch::Receiver<u64>,
    waited_min: Duration,
    step: impl Future<Output = T>,
) -> Option<T> {
    let began = Instant::now();
    lost_connections.mark_unchanged();
    let mut step = pin!(step);
    loop {
        tokio::select! {
            biased;
            output = &mut step => return Some(output),
            changed = lost_connections.changed() => match changed {
                Ok(()) if began.elapsed() >= waited_min => {
                    note_expired();
                    return None;
                }
                Ok(()) => {}
                // Nobody can announce anything any more.
                Err(_) => return Some(step.await),
            },
        }
    }
}

/// Runs a step that the caller may drop before its end, for example because a client has closed its connection.
pub async fn droppable<T>(step: impl Future<Output = T>) -> T {
    struct Pending(bool);
    impl Drop for Pending {
        fn drop(&mut self) {
            if self.0 {
                note(&DROPPED_AT);
            }
        }
    }
    // Variables are dropped in the reverse order of their declaration: `pending` before `step`.
    let mut step = pin!(step);
    let mut pending = Pending(true);
    let output = step.as_mut().await;
    pending.0 = false;
    output
}

static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);
/// When a step of this process did not end in time, in milliseconds after [`STARTED`], plus one. 0: never.
static EXPIRED_AT: AtomicU64 = AtomicU64::new(0);
/// The same for a step that its caller dropped.
static DROPPED_AT: AtomicU64 = AtomicU64::new(0);

/// Whether a step of this process did not end in time a short while ago. A connection that returns to its pool now may be
/// dead.
pub fn expired_recently() -> bool {
    is_recent(&EXPIRED_AT)
}

/// Like [`expired_recently`], and also if a caller dropped a step before its end.
pub fn abandoned_recently() -> bool {
    is_recent(&EXPIRED_AT) || is_recent(&DROPPED_AT)
}

fn note_expired() {
    note(&EXPIRED_AT);
}

fn note(at: &AtomicU64) {
    at.fetch_max(elapsed_ms() + 1, Ordering::SeqCst);
}

fn is_recent(at: &AtomicU64) -> bool {
    match at.load(Ordering::SeqCst) {
        0 => false,
        at => u128::from(elapsed_ms().saturating_sub(at)) <= RETURN_TIME.as_millis(),
    }
}

fn elapsed_ms() -> u64 {
    u64::try_from(STARTED.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    /// Records, when it is dropped, whether the pool would know that it was abandoned.
    struct Connection(Arc<AtomicBool>);

    impl Drop for Connection {
        fn drop(&mut self) {
            self.0.store(abandoned_recently(), Ordering::SeqCst);
        }
    }

    #[tokio::test]
    async fn a_step_that_expires_is_noted_before_its_connections_are_dropped() {
        let noted = Arc::<AtomicBool>::default();
        let connection = Connection(noted.clone());
        let time_max = Duration::from_millis(10);
        let step = async move {
            std::future::pending::<()>().await;
            drop(connection);
        };
        assert_eq!(within(time_max, step).await, Err(Expired(time_max)));
        assert!(noted.load(Ordering::SeqCst));
    }

    #[tokio::test]
    async fn a_step_that_its_caller_drops_is_noted_before_its_connections_are_dropped() {
        let noted = Arc::<AtomicBool>::default();
        let connection = Connection(noted.clone());
        let step = droppable(async move {
            std::future::pending::<()>().await;
            drop(connection);
        });
        tokio::time::timeout(Duration::from_millis(10), step).await.expect_err("it never ends");
        assert!(noted.load(Ordering::SeqCst));
        assert_eq!(droppable(async { 7 }).await, 7);
    }

    #[tokio::test]
    async fn only_a_step_that_has_waited_for_long_gives_up_when_connections_are_lost() {
        let (announced, mut lost) = watch::channel(0);
        let mut also_lost = lost.clone();
        let waited_min = Duration::from_millis(100);
        let long = tokio::spawn(async move {
            unless_connections_are_lost(&mut lost, waited_min, std::future::pending::<()>()).await
        });
        tokio::time::sleep(waited_min * 2).await;
        let step = tokio::time::sleep(waited_min);
        let short = tokio::spawn(async move { unless_connections_are_lost(&mut also_lost, Duration::MAX, step).await });
        tokio::task::yield_now().await;
        announced.send_modify(|count| *count += 1);
        let given_up = tokio::time::timeout(Duration::from_secs(5), long).await;
        assert_eq!(given_up.expect("it gives up").unwrap(), None);
        assert_eq!(short.await.unwrap(), Some(()));
    }
}

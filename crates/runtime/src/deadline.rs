//! Time limits of steps that wait for a server.
//!
//! A server or a network that stops responding without closing its connections leaves every caller waiting. So each such
//! step has a time limit. A step that exceeds it is dropped, and its connections are dropped in the middle of an
//! exchange, so that it is unknown whether they are slow or dead. [`expired_recently`] says that a connection pool must not
//! wait for connections that it gets back now.

use std::future::Future;
use std::pin::Pin;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use pin_project_lite::pin_project;
use tokio::sync::watch;
use tokio::time::Timeout;

/// How long after an abandoned step its connections may still be on their way back to their pool.
const RETURN_TIME: Duration = Duration::from_secs(5);

/// The step did not end within its time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no response within {} s", .0.as_secs_f64())]
pub struct Expired(pub Duration);

/// Runs a step. Fails, and drops the step, if it does not end within `time_max`.
///
/// This is a separate type, as [`Droppable`] is: an `async fn` would have the step twice, as its parameter and as the
/// variable that it awaits, so that each of these functions around a step would double its size.
pub fn within<F: Future>(time_max: Duration, step: F) -> Within<F> {
    Within { step: tokio::time::timeout(time_max, step), time_max }
}

pin_project! {
    /// The future of [`within`].
    #[derive(Debug)]
    pub struct Within<F> {
        #[pin]
        step: Timeout<F>,
        time_max: Duration,
    }
}

impl<F: Future> Future for Within<F> {
    type Output = Result<F::Output, Expired>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        this.step.poll(cx).map_err(|_| {
            // Before the step is dropped and its connections return to their pool.
            note_expired();
            Expired(*this.time_max)
        })
    }
}

/// Runs a step. Returns None if it has waited for at least `waited_min` when connections turn out to be dead; the caller must
/// drop it then.
pub async fn unless_connections_are_lost<T>(
    lost_connections: &mut watch::Receiver<u64>,
    waited_min: Duration,
    mut step: Pin<&mut impl Future<Output = T>>,
) -> Option<T> {
    let began = Instant::now();
    lost_connections.mark_unchanged();
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
                // All senders are dropped, so there will be no announcement.
                Err(_) => return Some(step.await),
            },
        }
    }
}

/// Runs a step that the caller may drop before its end, for example because a client has closed its connection.
pub fn droppable<F: Future>(step: F) -> Droppable<F> {
    Droppable { step, is_pending: true }
}

pin_project! {
    /// The future of [`droppable`].
    #[derive(Debug)]
    pub struct Droppable<F> {
        #[pin]
        step: F,
        is_pending: bool,
    }

    impl<F> PinnedDrop for Droppable<F> {
        // Before the step is dropped.
        fn drop(this: Pin<&mut Self>) {
            if this.is_pending {
                note(&DROPPED_AT);
            }
        }
    }
}

impl<F: Future> Future for Droppable<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let output = std::task::ready!(this.step.poll(cx));
        *this.is_pending = false;
        Poll::Ready(output)
    }
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
    use std::pin::pin;
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
            unless_connections_are_lost(&mut lost, waited_min, pin!(std::future::pending::<()>())).await
        });
        tokio::time::sleep(waited_min * 2).await;
        let short = tokio::spawn(async move {
            let step = pin!(tokio::time::sleep(waited_min));
            unless_connections_are_lost(&mut also_lost, Duration::MAX, step).await
        });
        tokio::task::yield_now().await;
        announced.send_modify(|count| *count += 1);
        let given_up = tokio::time::timeout(Duration::from_secs(5), long).await;
        assert_eq!(given_up.expect("it gives up").unwrap(), None);
        assert_eq!(short.await.unwrap(), Some(()));
    }
}

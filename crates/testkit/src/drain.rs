//! Waiting for something to become true.

use std::fmt::Debug;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// Asks `condition` until it holds, and returns what it found.
///
/// The condition answers `bool`, `Option<T>` or `Result<T, State>`; with the last, a failure shows the state it saw:
///
/// ```
/// # use std::time::Duration;
/// # use pillarbox_testkit::drain;
/// # async fn example(count: impl AsyncFn() -> u64) {
/// drain("every message is delivered", Duration::from_secs(10), async || match count().await {
///     20 => Ok(()),
///     other => Err(other),
/// })
/// .await;
/// # }
/// ```
///
/// # Panics
/// At the deadline, with `what` and the last answer. A condition that hangs is given up then, too.
pub async fn drain<P: Progress>(what: &str, deadline: Duration, mut condition: impl AsyncFnMut() -> P) -> P::Found {
    let ends_at = Instant::now() + deadline;
    let mut pause = PAUSE_MIN;
    let mut last_state = "no answer at all".to_owned();
    while let Ok(answer) = timeout_at(ends_at, condition()).await {
        match answer.found() {
            Ok(found) => return found,
            Err(state) => last_state = state,
        }
        if Instant::now() >= ends_at {
            break;
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
    panic!("not within {deadline:?}: {what}; last seen: {last_state}");
}

/// An answer to "is it so by now?".
pub trait Progress {
    type Found;

    /// What was waited for, or how things stand instead.
    fn found(self) -> Result<Self::Found, String>;
}

impl Progress for bool {
    type Found = ();

    fn found(self) -> Result<(), String> {
        self.then_some(()).ok_or_else(|| "false".to_owned())
    }
}

impl<T> Progress for Option<T> {
    type Found = T;

    fn found(self) -> Result<T, String> {
        self.ok_or_else(|| "nothing".to_owned())
    }
}

impl<T, S: Debug> Progress for Result<T, S> {
    type Found = T;

    fn found(self) -> Result<T, String> {
        self.map_err(|state| format!("{state:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn returns_what_the_condition_finds() {
        let mut asked = 0;
        let found = drain("the third answer", Duration::from_secs(5), async || {
            asked += 1;
            (asked == 3).then_some("here")
        })
        .await;
        assert_eq!((found, asked), ("here", 3));
    }

    #[tokio::test]
    #[should_panic(expected = "not within 30ms: all twenty arrive; last seen: 19")]
    async fn names_what_was_waited_for_and_the_last_state() {
        drain("all twenty arrive", Duration::from_millis(30), async || Err::<(), _>(19)).await;
    }

    #[tokio::test]
    #[should_panic(expected = "not within 30ms: an answer; last seen: no answer at all")]
    async fn gives_up_on_a_condition_that_hangs() {
        drain("an answer", Duration::from_millis(30), async || std::future::pending::<bool>().await).await;
    }
}

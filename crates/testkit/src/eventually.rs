//! Polls a condition until it is true, with a deadline.

use std::fmt::Debug;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use crate::watchdog;

const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// Polls `condition` until it is met, and returns the value that it produced.
///
/// The condition returns `bool`, `Option<T>` or `Result<T, State>`. With a `Result`, the panic message contains the
/// last state:
///
/// ```
/// # use std::time::Duration;
/// # use pillarbox_testkit::eventually;
/// # async fn example(count: impl AsyncFn() -> u64) {
/// eventually("every message is delivered", Duration::from_secs(10), async || match count().await {
///     20 => Ok(()),
///     other => Err(other),
/// })
/// .await;
/// # }
/// ```
///
/// # Panics
/// At the deadline, with `what` and the last state. A condition that hangs is also abandoned at the deadline.
pub async fn eventually<C: Condition>(
    what: &str,
    deadline: Duration,
    mut condition: impl AsyncFnMut() -> C,
) -> C::Output {
    watchdog::register_test();
    let ends_at = Instant::now() + deadline;
    let mut pause = PAUSE_MIN;
    let mut last_state = "the condition never returned".to_owned();
    while let Ok(result) = timeout_at(ends_at, condition()).await {
        match result.check() {
            Ok(output) => return output,
            Err(state) => last_state = state,
        }
        if Instant::now() >= ends_at {
            break;
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
    panic!("not within {deadline:?}: {what}; last state: {last_state}");
}

/// The result of evaluating a condition once.
pub trait Condition {
    type Output;

    /// Returns the output if the condition is met, and otherwise a description of the current state.
    fn check(self) -> Result<Self::Output, String>;
}

impl Condition for bool {
    type Output = ();

    fn check(self) -> Result<(), String> {
        self.then_some(()).ok_or_else(|| "false".to_owned())
    }
}

impl<T> Condition for Option<T> {
    type Output = T;

    fn check(self) -> Result<T, String> {
        self.ok_or_else(|| "None".to_owned())
    }
}

impl<T, S: Debug> Condition for Result<T, S> {
    type Output = T;

    fn check(self) -> Result<T, String> {
        self.map_err(|state| format!("{state:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_output_of_the_condition_is_returned() {
        let mut calls = 0;
        let output = eventually("the third call", Duration::from_secs(5), async || {
            calls += 1;
            (calls == 3).then_some("found")
        })
        .await;
        assert_eq!((output, calls), ("found", 3));
    }

    #[tokio::test]
    #[should_panic(expected = "not within 30ms: all twenty arrive; last state: 19")]
    async fn a_timeout_names_the_condition_and_the_last_state() {
        eventually("all twenty arrive", Duration::from_millis(30), async || Err::<(), _>(19)).await;
    }

    #[tokio::test]
    #[should_panic(expected = "not within 30ms: a response; last state: the condition never returned")]
    async fn a_condition_that_hangs_is_abandoned() {
        eventually("a response", Duration::from_millis(30), async || std::future::pending::<bool>().await).await;
    }
}

//! A time limit for every test: a test that hangs fails by its name instead of blocking the whole run.
//!
//! libtest has no time limit. It runs each test on a thread that is named after the test, so the first testkit helper
//! that a test calls registers that thread here. A background thread ends the process when a registered test exceeds
//! the limit. The registration ends with the test's thread, which also yields the duration of the test.
//!
//! A test that runs on the main thread (`--test-threads=1`) has no name and is not registered.

use std::collections::HashMap;
use std::io::Write;
use std::sync::{Mutex, Once, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// A test may run for this long, several times the duration of the slowest one, so that a loaded machine does not fail a
/// healthy test. `PBX_SOAK` multiplies it by [`SOAK_FACTOR`].
const TIME_LIMIT: Duration = Duration::from_secs(240);
const SOAK_FACTOR: u32 = 10;
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The exit code of a test binary with a failed test.
const EXIT_CODE_FAILED: i32 = 101;

/// Names a file to which each test appends a line `<seconds> <binary> <test>` when it ends.
const DURATIONS_FILE: &str = "PBX_TEST_DURATIONS";

static RUNNING: Mutex<Option<HashMap<ThreadId, RunningTest>>> = Mutex::new(None);
static WATCHDOG: Once = Once::new();

struct RunningTest {
    name: String,
    started_at: Instant,
}

/// Lives as long as the thread of the test.
struct Registration(ThreadId);

thread_local! {
    static REGISTRATION: Option<Registration> = Registration::of_this_thread();
}

/// Registers the test that runs on this thread, unless it is registered already.
pub(crate) fn register_test() {
    // Fails only while the thread is ending, when the registration has also ended.
    let _ = REGISTRATION.try_with(|_| ());
}

impl Registration {
    fn of_this_thread() -> Option<Registration> {
        let thread = thread::current();
        let name = thread.name().filter(|name| is_test_name(name))?.to_owned();
        WATCHDOG.call_once(|| {
            thread::spawn(watch);
        });
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let test = RunningTest { name, started_at: Instant::now() };
        running.get_or_insert_default().insert(thread.id(), test);
        Some(Registration(thread.id()))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(test) = running.as_mut().and_then(|running| running.remove(&self.0)) {
            record_duration(&test);
        }
    }
}

/// The threads of libtest's main function and of tokio's runtimes run no tests.
fn is_test_name(name: &str) -> bool {
    name != "main" && !name.starts_with("tokio")
}

fn watch() {
    let limit = match std::env::var_os("PBX_SOAK") {
        Some(_) => TIME_LIMIT * SOAK_FACTOR,
        None => TIME_LIMIT,
    };
    loop {
        thread::sleep(CHECK_INTERVAL);
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let expired = running.iter().flatten().find(|(_, test)| test.started_at.elapsed() > limit);
        if let Some((_, test)) = expired {
            // Written to the stream itself: libtest captures what the macros print, and never shows it after an exit.
            let _ =
                writeln!(std::io::stderr(), "\ntest {} exceeded its time limit of {} s", test.name, limit.as_secs());
            std::process::exit(EXIT_CODE_FAILED);
        }
    }
}

/// Appends to the file of durations, if the environment names one. A duration that cannot be written fails no test.
fn record_duration(test: &RunningTest) {
    let Some(path) = std::env::var_os(DURATIONS_FILE) else { return };
    let binary = std::env::current_exe().unwrap_or_default();
    let binary = binary.file_stem().unwrap_or_default().to_string_lossy();
    let binary = binary.rsplit_once('-').map_or(&*binary, |(name, _)| name);
    let line = format!("{:.2} {binary} {}\n", test.started_at.elapsed().as_secs_f64(), test.name);
    // One write, so that the lines of binaries that run side by side do not mix.
    if let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(path) {
        let _ = file.write_all(line.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_running(name: &str) -> bool {
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        running.iter().flatten().any(|(_, test)| test.name == name)
    }

    #[test]
    fn a_registration_ends_with_the_thread_of_its_test() {
        let test = || {
            register_test();
            register_test();
            is_running("sample::of_a_test")
        };
        let thread = thread::Builder::new().name("sample::of_a_test".to_owned()).spawn(test).unwrap();
        assert!(thread.join().unwrap());
        assert!(!is_running("sample::of_a_test"));
    }

    #[test]
    fn threads_without_a_test_are_not_registered() {
        for name in ["main", "tokio-runtime-worker"] {
            assert!(!is_test_name(name), "{name}");
        }
        assert!(is_test_name("watchdog::tests::threads_without_a_test_are_not_registered"));
    }
}

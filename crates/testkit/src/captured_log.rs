//! What the code of a test logs.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, Once, PoisonError};

use tracing::subscriber::DefaultGuard;
use tracing_subscriber::fmt::MakeWriter;

static DISCARDING: Once = Once::new();

/// The log of the current thread, from its creation to its end. A test with a runtime of one thread captures all of its
/// tasks; the log of a process is that of [`Pillarbox`](crate::Pillarbox).
pub struct CapturedLog {
    lines: Lines,
    _guard: DefaultGuard,
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl CapturedLog {
    pub fn start() -> CapturedLog {
        // Tests of other threads log at the same places without a subscriber. `tracing` caches that no subscriber is interested in a
        // place, for all threads; with a subscriber for every thread it does not.
        DISCARDING.call_once(|| {
            let discarding = tracing_subscriber::fmt().with_writer(io::sink).finish();
            let _ = tracing::subscriber::set_global_default(discarding);
        });
        let lines = Lines::default();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(lines.clone()).finish();
        CapturedLog { lines, _guard: tracing::subscriber::set_default(subscriber) }
    }

    /// Whether a line of this level (`WARN`, `ERROR`) contains the text.
    pub fn has(&self, level: &str, text: &str) -> bool {
        self.text().lines().any(|line| line.contains(&format!(" {level} ")) && line.contains(text))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.lines.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Lines;

    fn make_writer(&'a self) -> Lines {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_log_of_all_tasks_of_a_test_is_captured_with_its_levels() {
        let log = CapturedLog::start();
        tokio::spawn(async { tracing::warn!(consumer = "c", "a message failed") }).await.unwrap();
        assert!(log.has("WARN", "a message failed") && !log.has("ERROR", "a message failed"), "{}", log.text());
    }
}

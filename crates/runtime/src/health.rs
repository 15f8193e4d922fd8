//! Health: the dependencies and tasks of this process, and whether each is up.
//!
//! A dependency is `required` if no request can be served without it. Only a required dependency makes the process
//! unready; without another one the service is degraded (messages wait, caches miss), and the report names it.
//!
//! A task that hangs reports nothing, so the report itself checks how long the current round of a task has taken.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// The registry of all dependencies and tasks. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Health {
    entries: Arc<Mutex<Vec<Entry>>>,
    /// How often connections were found to be dead although they had not been closed.
    lost_connections: Arc<watch::Sender<u64>>,
}

#[derive(Debug)]
struct Entry {
    name: String,
    kind: Kind,
    required: bool,
    /// The reason why it is down; None while it is up.
    error: Option<String>,
    /// The current round of a task: when it began, and after which time it is too slow.
    round: Option<(Instant, Duration)>,
}

impl Entry {
    /// The reason why it is down, which includes a round that takes too long.
    fn current_error(&self) -> Option<String> {
        let slow = || {
            let (began, slow_after) = self.round?;
            let elapsed = began.elapsed();
            (elapsed > slow_after).then(|| format!("the current round has taken {} s so far", elapsed.as_secs()))
        };
        self.error.clone().or_else(slow)
    }
}

/// Whether an entry is a server or a background task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Dependency,
    Task,
}

/// One dependency or task, as `/readyz` shows it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct State {
    pub name: String,
    pub kind: Kind,
    pub required: bool,
    pub up: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Sets the state of one entry.
#[derive(Debug, Clone)]
pub struct Probe {
    health: Health,
    index: usize,
}

impl Health {
    /// Registers a server that this process uses. It counts as down until the first check.
    pub fn dependency(&self, name: impl Into<String>, required: bool) -> Probe {
        self.add(Entry {
            name: name.into(),
            kind: Kind::Dependency,
            required,
            error: Some("not checked yet".to_owned()),
            round: None,
        })
    }

    /// Registers a background task of this process. It counts as up until it fails.
    pub fn task(&self, name: impl Into<String>, required: bool) -> Probe {
        self.add(Entry { name: name.into(), kind: Kind::Task, required, error: None, round: None })
    }

    /// Returns the current state of all entries, in the order of their registration.
    pub fn report(&self) -> Vec<State> {
        self.with(|entries| {
            let state = |entry: &Entry| {
                let error = entry.current_error();
                State {
                    name: entry.name.clone(),
                    kind: entry.kind,
                    required: entry.required,
                    up: error.is_none(),
                    error,
                }
            };
            entries.iter().map(state).collect()
        })
    }

    /// Announces that connections were dead although they had not been closed, while new ones work. Whatever has waited for
    /// a response since before should give up and use a new connection.
    pub fn announce_lost_connections(&self) {
        tracing::warn!("connections to the database are dead although they were not closed; new ones are opened");
        self.lost_connections.send_modify(|count| *count += 1);
    }

    /// Returns a receiver that changes with each such announcement from now on.
    pub fn lost_connections(&self) -> watch::Receiver<u64> {
        self.lost_connections.subscribe()
    }

    fn add(&self, entry: Entry) -> Probe {
        let index = self.with(|entries| {
            entries.push(entry);
            entries.len() - 1
        });
        Probe { health: self.clone(), index }
    }

    fn with<R>(&self, access: impl FnOnce(&mut Vec<Entry>) -> R) -> R {
        access(&mut self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Probe {
    pub fn up(&self) {
        self.set(None);
    }

    pub fn down(&self, error: &str) {
        self.set(Some(error.to_owned()));
    }

    /// A round of the task begins. The task counts as down while the round takes longer than `slow_after`.
    pub fn begin_round(&self, slow_after: Duration) {
        self.health.with(|entries| entries[self.index].round = Some((Instant::now(), slow_after)));
    }

    /// Returns a receiver that changes whenever connections were found to be dead.
    pub fn lost_connections(&self) -> watch::Receiver<u64> {
        self.health.lost_connections()
    }

    /// Logs only changes between up and down.
    fn set(&self, error: Option<String>) {
        let changed = self.health.with(|entries| {
            let entry = &mut entries[self.index];
            entry.round = None;
            let was_up = entry.error.is_none();
            entry.error = error;
            (was_up != entry.error.is_none()).then(|| (entry.name.clone(), entry.error.clone()))
        });
        match changed {
            Some((name, Some(error))) => tracing::warn!(name, error, "down"),
            Some((name, None)) => tracing::info!(name, "up"),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_is_down_while_its_round_is_too_slow() {
        let health = Health::default();
        let task = health.task("task", true);
        task.begin_round(Duration::from_secs(3_600));
        assert!(health.report()[0].up);
        task.begin_round(Duration::ZERO);
        std::thread::sleep(Duration::from_millis(1));
        let report = health.report();
        assert!(!report[0].up && report[0].error.as_ref().is_some_and(|error| error.contains("round")), "{report:?}");
        task.up();
        assert!(health.report()[0].up, "the round has ended");
    }
}

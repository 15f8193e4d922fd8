//! Health: the dependencies and tasks of this process, and whether each is up.
//!
//! A dependency is `required` if no request can be served without it. Only a required dependency makes the process
//! unready; without another one the service is degraded (messages wait, caches miss), and the report names it.

use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The registry of all dependencies and tasks. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Health {
    entries: Arc<Mutex<Vec<Entry>>>,
}

#[derive(Debug)]
struct Entry {
    name: String,
    kind: Kind,
    required: bool,
    /// The reason why it is down; None while it is up.
    error: Option<String>,
}

/// Whether an entry is a server or a background task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Dependency,
    Task,
}

/// One dependency or task, as `/readyz` shows it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct State {
    #[schema(example = "postgres")]
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
        })
    }

    /// Registers a background task of this process. It counts as up until it fails.
    pub fn task(&self, name: impl Into<String>, required: bool) -> Probe {
        self.add(Entry { name: name.into(), kind: Kind::Task, required, error: None })
    }

    /// Returns the current state of all entries, in the order of their registration.
    pub fn report(&self) -> Vec<State> {
        self.with(|entries| {
            let state = |entry: &Entry| State {
                name: entry.name.clone(),
                kind: entry.kind,
                required: entry.required,
                up: entry.error.is_none(),
                error: entry.error.clone(),
            };
            entries.iter().map(state).collect()
        })
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

    /// Logs only changes between up and down.
    fn set(&self, error: Option<String>) {
        let (name, was) = self.health.with(|entries| {
            let entry = &mut entries[self.index];
            (entry.name.clone(), std::mem::replace(&mut entry.error, error.clone()))
        });
        match (was, error) {
            (None, Some(error)) => tracing::warn!(name, error, "down"),
            (Some(_), None) => tracing::info!(name, "up"),
            (None, None) | (Some(_), Some(_)) => {}
        }
    }
}

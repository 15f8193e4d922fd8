//! The settings of a queue that is read into the log.

use pillarbox::log::Tenant;
use serde::{Deserialize, Serialize};

/// The default of [`IntakeQueue::prefetch`].
const PREFETCH: u16 = 10;

/// Settings of a queue that is read into the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntakeQueue {
    pub queue: String,
    /// The largest number of messages that are delivered and not yet acknowledged.
    #[serde(default = "default_prefetch")]
    pub prefetch: u16,
    /// The tenant of the messages.
    #[serde(default = "Tenant::main")]
    pub tenant: Tenant,
    /// What the bodies are.
    #[serde(default)]
    pub format: IntakeFormat,
}

/// What the bodies of a queue are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IntakeFormat {
    /// Our envelope, or any other JSON.
    #[default]
    Json,
    /// E-mails, as on the old exchange: the object `data` of a request to send an e-mail. They are posted as such requests,
    /// for the consumer of e-mails.
    Email,
}

fn default_prefetch() -> u16 {
    PREFETCH
}

/// Invalid settings of a queue, with its name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidIntake {
    #[error("queue `{0}` must have 1 to 200 characters without whitespace")]
    Name(String),
    #[error("queue `{0}`: prefetch must be a number from 1")]
    Prefetch(String),
}

impl IntakeQueue {
    /// Returns the settings of a queue with the defaults of all other fields.
    pub fn new(queue: &str) -> IntakeQueue {
        IntakeQueue { queue: queue.to_owned(), prefetch: PREFETCH, tenant: Tenant::main(), format: IntakeFormat::Json }
    }

    /// Checks the values. Fails with the invalid one and the accepted values.
    pub fn check(&self) -> Result<(), InvalidIntake> {
        if self.queue.is_empty() || self.queue.len() > 200 || self.queue.contains(|c: char| c.is_whitespace()) {
            return Err(InvalidIntake::Name(self.queue.clone()));
        }
        match self.prefetch {
            0 => Err(InvalidIntake::Prefetch(self.queue.clone())),
            _ => Ok(()),
        }
    }
}

//! Messages of the greetings service. The key of a message is the id of its greeting.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The source of these messages.
pub const SOURCE: &str = "greetings";
pub const RECEIVED: &str = "greeting.received";

#[derive(Debug, Serialize, Deserialize)]
pub struct GreetingReceived {
    pub id: Uuid,
}

//! The envelope: the format of a message on RabbitMQ. Only routes with the format `bare` publish without it.

use std::fmt;
use std::str::FromStr;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

/// Maximum size of a payload in bytes, without the envelope. Larger content is stored elsewhere and referenced.
pub const MESSAGE_BYTES_MAX: usize = 256 * 1024;

/// The version of the envelope that this crate writes.
pub const SCHEMA_VERSION: u32 = 1;

/// `evt_<uuid>`: the id of a message. Every redelivery has the same id, on every transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EventId(pub Uuid);

#[derive(Debug, thiserror::Error)]
#[error("an event id must be evt_ followed by a UUID")]
pub struct InvalidEventId;

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "evt_{}", self.0)
    }
}

impl FromStr for EventId {
    type Err = InvalidEventId;

    fn from_str(text: &str) -> Result<EventId, InvalidEventId> {
        let uuid = text.strip_prefix("evt_").ok_or(InvalidEventId)?;
        uuid.parse().map(EventId).map_err(|_| InvalidEventId)
    }
}

impl Serialize for EventId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for EventId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<EventId, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A message as it travels on RabbitMQ. Maps to CloudEvents: event_id is id, event_type is type, timestamp is time,
/// payload is data.
#[derive(Debug, Serialize, Deserialize)]
pub struct Envelope {
    pub event_id: EventId,
    pub event_type: String,
    pub timestamp: DateTime<Utc>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aggregate_type: Option<String>,
    /// The JSON value as posted, so that a number remains a number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aggregate_id: Option<Box<RawValue>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    pub schema_version: u32,
    /// The id that the producer of a business event has given it, if that is no UUID: `event_id` is derived from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_event_id: Option<String>,
    /// The JSON text as posted, byte for byte.
    pub payload: Box<RawValue>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_and_aggregate_id_are_preserved_byte_for_byte() {
        let text = concat!(
            r#"{"event_id":"evt_01890a5d-ac96-774b-bcce-b302099a8057","event_type":"order.created","#,
            r#""timestamp":"2026-01-01T00:00:00Z","aggregate_type":"RESTAURANT","aggregate_id":5,"#,
            r#""trace_id":"4bf92f3577b34da6a3ce929d0e0e4736","schema_version":1,"payload":{"b": 1.50,"a":"é" }}"#
        );
        let envelope: Envelope = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&envelope).unwrap(), text);
    }

    #[test]
    fn a_reader_ignores_unknown_fields() {
        let text = r#"{"event_id":"evt_01890a5d-ac96-774b-bcce-b302099a8057","event_type":"a.b","timestamp":"2026-01-01T00:00:00Z","schema_version":2,"payload":null,"new":true}"#;
        assert!(serde_json::from_str::<Envelope>(text).is_ok());
    }

    #[test]
    fn an_event_id_requires_its_prefix() {
        assert!("01890a5d-ac96-774b-bcce-b302099a8057".parse::<EventId>().is_err());
        assert!("evt_123".parse::<EventId>().is_err());
    }
}

//! What a webhook's body is, in each format.

use bytes::Bytes;
use chrono::{DateTime, SecondsFormat, Utc};
use contracts::EventId;
use http::HeaderValue;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::domain::Format;

/// An event as it is told to subscribers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event<'a> {
    pub(crate) id: EventId,
    pub(crate) event_type: &'a str,
    pub(crate) at: DateTime<Utc>,
    /// Sent byte for byte.
    pub(crate) payload: &'a RawValue,
}

#[derive(Debug, Clone)]
pub(crate) struct Content {
    pub(crate) content_type: HeaderValue,
    pub(crate) body: Bytes,
}

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const CLOUDEVENTS: HeaderValue = HeaderValue::from_static("application/cloudevents+json");

#[derive(Serialize)]
struct Standard<'a> {
    #[serde(rename = "type")]
    event_type: &'a str,
    timestamp: String,
    data: &'a RawValue,
}

#[derive(Serialize)]
struct CloudEvent<'a> {
    specversion: &'a str,
    id: EventId,
    source: &'a str,
    #[serde(rename = "type")]
    event_type: &'a str,
    time: String,
    datacontenttype: &'a str,
    data: &'a RawValue,
}

pub(crate) fn content(format: Format, event: Event<'_>) -> Content {
    let Event { id, event_type, at, payload } = event;
    let time = || at.to_rfc3339_opts(SecondsFormat::Micros, true);
    match format {
        Format::Raw => Content { content_type: JSON, body: Bytes::copy_from_slice(payload.get().as_bytes()) },
        Format::Standard => {
            Content { content_type: JSON, body: json(&Standard { event_type, timestamp: time(), data: payload }) }
        }
        Format::Cloudevents => {
            let event = CloudEvent {
                specversion: "1.0",
                id,
                source: "/hub",
                event_type,
                time: time(),
                datacontenttype: "application/json",
                data: payload,
            };
            Content { content_type: CLOUDEVENTS, body: json(&event) }
        }
    }
}

fn json(value: &impl Serialize) -> Bytes {
    // Structs of texts always serialise.
    serde_json::to_vec(value).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_the_same_bytes_in_every_format() {
        let payload = RawValue::from_string(r#"{"b": 1.50,  "a":"\u00fc"}"#.to_owned()).unwrap();
        let event = Event {
            id: EventId(uuid::Uuid::nil()),
            event_type: "order.paid",
            at: DateTime::from_timestamp(0, 5_000).unwrap(),
            payload: &payload,
        };
        let text = |format| String::from_utf8(content(format, event).body.to_vec()).unwrap();
        assert_eq!(text(Format::Raw), payload.get());
        assert_eq!(
            text(Format::Standard),
            format!(r#"{{"type":"order.paid","timestamp":"1970-01-01T00:00:00.000005Z","data":{}}}"#, payload.get())
        );
        let cloud: serde_json::Value = serde_json::from_str(&text(Format::Cloudevents)).unwrap();
        assert_eq!((&cloud["specversion"], &cloud["type"]), (&"1.0".into(), &"order.paid".into()));
        assert!(text(Format::Cloudevents).contains(payload.get()));
    }
}

//! Streams, their readers and their messages in API responses.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use contracts::EventId;
use http::StatusCode;
use http::header::ETAG;
use http_kit::etag;
use http_kit::idempotency::StoredResponse;
use pillarbox::log::Message as Logged;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::directory::domain::{EventTypes, Filter};
use crate::streams::domain::{Part, Stream};
use crate::streams::store::messages::StreamMessage;
use crate::streams::store::{LockedStream, PartLag};

/// A stream: events that readers pull.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Stream)]
pub(crate) struct StreamView {
    id: Uuid,
    name: String,
    event_types: Vec<EventTypes>,
    /// Conditions on the payload that must all be met. Absent: the stream contains every event.
    #[serde(skip_serializing_if = "Option::is_none")]
    filter: Option<Filter>,
    /// The JSON pointer into the payload that defines the lane. Absent: the `ordering_key` of the event defines it.
    #[serde(skip_serializing_if = "Option::is_none")]
    ordering_key: Option<String>,
    /// Grows with each change. The `ETag` is made of it.
    version: i64,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

/// A stream with its positions, its lag and its readers.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct StreamWithState {
    #[serde(flatten)]
    stream: StreamView,
    lag: LagView,
    /// The parts of the stream, 16. All messages of a key are in one of them.
    parts: Vec<PartView>,
    readers: Vec<ReaderView>,
}

/// The messages that are not acknowledged yet.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = StreamLag)]
pub(crate) struct LagView {
    /// The number of messages. At most 1,000 are counted per part.
    messages: i64,
    /// The age of the oldest of them. 0 if there is none.
    seconds: i64,
}

/// One part of a stream.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = StreamPart)]
pub(crate) struct PartView {
    part: i16,
    /// The number of the last message that is acknowledged. Numbers grow, but not by one.
    acknowledged: i64,
    /// The messages after it, counted up to 1,000.
    lag_messages: i64,
    /// When the oldest of them was posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    oldest_at: Option<DateTime<Utc>>,
    /// The reader that has the part. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    reader: Option<String>,
    /// Messages after the position are no longer retained: pulls are answered with 410 until a seek.
    lapsed: bool,
}

/// A reader of a stream.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = StreamReader)]
pub(crate) struct ReaderView {
    reader: String,
    /// When its lease ends. A reader whose lease has ended is shown for an hour.
    lease_until: DateTime<Utc>,
    parts: Vec<i16>,
}

/// The response to a pull.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = StreamPulled)]
pub(crate) struct PulledView {
    pub(crate) items: Vec<StreamItem>,
    /// Acknowledges the items.
    pub(crate) cursor: String,
    /// The parts that the reader has. None: other readers have them all; pull again.
    pub(crate) parts: Vec<i16>,
    /// When the lease ends, by the clock of the database.
    pub(crate) lease_until: DateTime<Utc>,
}

/// A message of a stream.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct StreamItem {
    #[schema(value_type = String, example = "evt_01890a5d-ac96-774b-bcce-b302099a8057")]
    event_id: EventId,
    #[schema(example = "order.paid")]
    event_type: String,
    /// The publisher: `hub`, `sql`, or the name of a service.
    #[schema(example = "hub")]
    source: String,
    /// The ordering key with which the event was posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    ordering_key: Option<String>,
    /// Messages of one lane come in order. Absent: the message waits for no other.
    #[serde(skip_serializing_if = "Option::is_none")]
    lane: Option<String>,
    /// The number of the message in its lane of this stream, from 1 and without a gap.
    #[serde(skip_serializing_if = "Option::is_none")]
    seq: Option<i64>,
    received_at: DateTime<Utc>,
    /// The headers with which the message was posted in SQL.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    headers: BTreeMap<String, String>,
    /// The payload as it was posted.
    #[schema(value_type = serde_json::Value)]
    payload: Box<RawValue>,
}

impl StreamItem {
    pub(crate) fn new(message: StreamMessage, logged: &Logged) -> StreamItem {
        StreamItem {
            event_id: EventId(logged.message_id),
            event_type: logged.topic.clone(),
            source: logged.source.clone(),
            ordering_key: logged.key.clone(),
            lane: message.lane,
            seq: message.seq,
            received_at: logged.at,
            headers: logged.producer_headers(),
            payload: logged.payload.clone(),
        }
    }
}

impl From<Stream> for StreamView {
    fn from(stream: Stream) -> StreamView {
        StreamView {
            id: stream.id,
            name: stream.name,
            event_types: stream.settings.event_types,
            filter: stream.settings.filter,
            ordering_key: stream.settings.ordering_key,
            version: stream.version,
            created_at: stream.created_at,
            updated_at: stream.updated_at,
        }
    }
}

impl StreamView {
    /// The response that shows a stream.
    pub(crate) fn response(status: StatusCode, stream: Stream) -> StoredResponse {
        let tag = etag::of(stream.version, stream.updated_at);
        StoredResponse::json(status, &StreamView::from(stream)).with_header(ETAG, tag)
    }
}

impl StreamWithState {
    pub(crate) fn new(found: LockedStream, lag: &[PartLag]) -> StreamWithState {
        let LockedStream { stream, assignment, now, .. } = found;
        let oldest = lag.iter().filter_map(|part| part.oldest_at).min();
        let seconds = oldest.map_or(0, |oldest| (now - oldest).num_seconds().max(0));
        let part = |part: &Part| {
            let waiting = lag.iter().find(|lag| lag.part == part.part);
            PartView {
                part: part.part,
                acknowledged: part.acknowledged,
                lag_messages: waiting.map_or(0, |waiting| waiting.messages),
                oldest_at: waiting.and_then(|waiting| waiting.oldest_at),
                reader: part.reader.clone(),
                lapsed: part.acknowledged < part.dropped_to,
            }
        };
        let parts = assignment.parts.iter().map(part).collect();
        let reader = |reader: &crate::streams::domain::Reader| ReaderView {
            reader: reader.name.clone(),
            lease_until: reader.lease_until,
            parts: assignment.parts_of(&reader.name).map(|part| part.part).collect(),
        };
        let readers = assignment.readers.iter().map(reader).collect();
        let messages = lag.iter().map(|part| part.messages).sum();
        StreamWithState { stream: stream.into(), lag: LagView { messages, seconds }, parts, readers }
    }
}

//! The content of a webhook: its body and its headers, for a single message and for a batch.

use std::borrow::Cow;

use bytes::Bytes;
use chrono::{DateTime, SecondsFormat, Utc};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use sha2::{Digest, Sha256};
use uuid::Uuid;
use webhook_client::signature::{WEBHOOK_ID, WEBHOOK_SIGNATURE, WEBHOOK_TIMESTAMP, active_secrets, sign};

use crate::deliveries::domain::Format;
use crate::deliveries::message::{HubEvent, HubMessage, without_replay};
use crate::deliveries::recipient::Recipient;

const LANE: HeaderName = HeaderName::from_static("webhook-lane");
/// The ASCII characters that are percent-encoded in texts of a producer: control characters, which a header value cannot contain,
/// the space, which would be trimmed at its ends, and `%`, so that the encoding is unambiguous. The crate
/// encodes everything that is not ASCII.
const ENCODED_IN_HEADER: &AsciiSet = &CONTROLS.add(b' ').add(b'%');
const SEQ: HeaderName = HeaderName::from_static("webhook-seq");
/// The type of the event. It is not part of the signature, which Standard Webhooks define over id, timestamp and body.
const EVENT_TYPE: HeaderName = HeaderName::from_static("webhook-event-type");
/// The number of messages in a batch.
const BATCH: HeaderName = HeaderName::from_static("webhook-batch");
/// The replay that has created the message, or all messages of a batch.
const REPLAY: HeaderName = HeaderName::from_static("webhook-replay");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// The beginning of the names of the headers that the producer has posted with the message in SQL.
const OF_PRODUCER: &str = "webhook-header-";

/// The request body: the same bytes on every attempt.
pub(super) fn body(format: Format, event: &HubEvent) -> Bytes {
    let payload = &event.payload;
    // The payload is embedded as it was posted. Sources, types and times contain no character that JSON escapes.
    let envelope = |before: String| {
        let mut body = Vec::with_capacity(before.len() + payload.len() + 1);
        body.extend_from_slice(before.as_bytes());
        body.extend_from_slice(payload);
        body.push(b'}');
        Bytes::from(body)
    };
    match format {
        Format::Raw => payload.clone(),
        Format::Standard => envelope(format!(r#"{{"type":"{}","timestamp":"{}","data":"#, event.topic, time_of(event))),
        Format::Cloudevents => envelope(format!("{},\"data\":", cloud_event(event))),
    }
}

/// The beginning of a CloudEvent: all attributes but the data.
fn cloud_event(event: &HubEvent) -> String {
    format!(
        r#"{{"specversion":"1.0","id":"evt_{}","source":"/pillarbox/{}","type":"{}","time":"{}","datacontenttype":"application/json""#,
        event.id,
        event.source,
        event.topic,
        time_of(event)
    )
}

fn time_of(event: &HubEvent) -> String {
    event.at.to_rfc3339_opts(SecondsFormat::Micros, true)
}

pub(super) fn headers(
    recipient: &Recipient,
    message: &HubMessage,
    event: &HubEvent,
    body: &Bytes,
    now: DateTime<Utc>,
) -> HeaderMap {
    let content_type = match recipient.format {
        Format::Raw | Format::Standard => "application/json",
        Format::Cloudevents => "application/cloudevents+json",
    };
    let mut headers = signed_headers(recipient, &format!("evt_{}", event.id), content_type, body, now);
    insert(&mut headers, EVENT_TYPE, &event.topic);
    if let Some((lane, seq)) = lane_of(message) {
        insert(&mut headers, LANE, &percent_encoded(lane));
        if let Some(seq) = seq {
            headers.insert(SEQ, HeaderValue::from(seq));
        }
    }
    insert_replay(&mut headers, message);
    if let Some(trace) = &event.traceparent {
        insert(&mut headers, TRACEPARENT, trace);
    }
    for (name, value) in &event.headers {
        // `pillarbox.post` accepts no other names than those that are valid here.
        if let Ok(name) = HeaderName::try_from(format!("{OF_PRODUCER}{name}")) {
            insert(&mut headers, name, &percent_encoded(value));
        }
    }
    headers
}

/// The name of the message's lane as callers know it, and its number there. The lanes of a replay have no numbers.
fn lane_of(message: &HubMessage) -> Option<(&str, Option<i64>)> {
    let lane = message.lane.as_deref()?;
    match without_replay(lane, message.replay) {
        Some(name) => Some((name, None)),
        None => message.seq.map(|seq| (lane, Some(seq))),
    }
}

fn insert_replay(headers: &mut HeaderMap, message: &HubMessage) {
    if let Some(replay) = message.replay {
        insert(headers, REPLAY, &replay.to_string());
    }
}

/// The body of a batch: an array with an item for each message, in their order. The order within a lane is that of its
/// messages.
pub(super) fn batch_body(format: Format, items: &[(&HubMessage, &HubEvent)]) -> Bytes {
    let bytes = items.iter().map(|(_, event)| event.payload.len() + 300).sum::<usize>();
    let mut body = Vec::with_capacity(bytes);
    for (message, event) in items {
        body.push(if body.is_empty() { b'[' } else { b',' });
        let lane = lane_of(message).map(|(lane, seq)| (json_text(lane), seq));
        match format {
            Format::Raw | Format::Standard => {
                let (id, topic, at) = (event.id, &event.topic, time_of(event));
                body.extend_from_slice(format!(r#"{{"id":"evt_{id}","type":"{topic}","timestamp":"{at}""#).as_bytes());
                if let Some((lane, seq)) = lane {
                    body.extend_from_slice(format!(r#","lane":{lane}"#).as_bytes());
                    let number = seq.map(|seq| format!(r#","seq":{seq}"#)).unwrap_or_default();
                    body.extend_from_slice(number.as_bytes());
                }
                if !event.headers.is_empty() {
                    let headers = serde_json::to_string(&event.headers).unwrap_or_default();
                    body.extend_from_slice(format!(r#","headers":{headers}"#).as_bytes());
                }
            }
            // The names of CloudEvents' own extensions. A sequence is a string there.
            Format::Cloudevents => {
                body.extend_from_slice(cloud_event(event).as_bytes());
                if let Some((lane, seq)) = lane {
                    body.extend_from_slice(format!(r#","partitionkey":{lane}"#).as_bytes());
                    let number = seq.map(|seq| format!(r#","sequence":"{seq}""#)).unwrap_or_default();
                    body.extend_from_slice(number.as_bytes());
                }
                if let Some(trace) = &event.traceparent {
                    body.extend_from_slice(format!(r#","traceparent":{}"#, json_text(trace)).as_bytes());
                }
            }
        }
        body.extend_from_slice(b",\"data\":");
        body.extend_from_slice(&event.payload);
        body.push(b'}');
    }
    body.push(b']');
    body.into()
}

pub(super) fn batch_headers(
    recipient: &Recipient,
    items: &[(&HubMessage, &HubEvent)],
    body: &Bytes,
    now: DateTime<Utc>,
) -> HeaderMap {
    let content_type = match recipient.format {
        Format::Raw | Format::Standard => "application/json",
        Format::Cloudevents => "application/cloudevents-batch+json",
    };
    let id = batch_id(recipient.id, items.iter().map(|(_, event)| event.id));
    let mut headers = signed_headers(recipient, &id, content_type, body, now);
    headers.insert(BATCH, HeaderValue::from(items.len()));
    if let Some((message, _)) = items.first() {
        insert_replay(&mut headers, message);
    }
    // A batch of several types has no type.
    if let Some((_, first)) = items.first()
        && items.iter().all(|(_, event)| event.topic == first.topic)
    {
        insert(&mut headers, EVENT_TYPE, &first.topic);
    }
    headers
}

/// The id of a batch is derived from its events, so that it is the same whenever the same events are sent together again,
/// also by another process.
fn batch_id(subscriber: Uuid, events: impl Iterator<Item = Uuid>) -> String {
    let mut digest = Sha256::new_with_prefix(subscriber.as_bytes());
    events.for_each(|event| digest.update(event.as_bytes()));
    let mut id = [0; 16];
    id.copy_from_slice(&digest.finalize()[..16]);
    format!("bat_{}", Uuid::from_bytes(id))
}

/// The custom headers, the type of the content, and the headers of Standard Webhooks.
fn signed_headers(
    recipient: &Recipient,
    id: &str,
    content_type: &'static str,
    body: &Bytes,
    now: DateTime<Utc>,
) -> HeaderMap {
    let mut headers = recipient.headers.clone();
    let timestamp = now.timestamp();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(WEBHOOK_SIGNATURE, sign(active_secrets(&recipient.secrets, now), id, timestamp, body));
    insert(&mut headers, WEBHOOK_ID, id);
    headers.insert(WEBHOOK_TIMESTAMP, HeaderValue::from(timestamp));
    headers
}

fn json_text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A text as a header value, percent-encoded where necessary.
fn percent_encoded(text: &str) -> Cow<'_, str> {
    utf8_percent_encode(text, ENCODED_IN_HEADER).into()
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use chrono::TimeDelta;
    use serde_json::{Value, json};
    use webhook_client::signature::SigningSecret;

    use super::*;
    use crate::deliveries::message::fixtures::event;
    use crate::deliveries::recipient::fixtures::recipient;

    #[test]
    fn a_secret_that_has_expired_since_it_was_loaded_does_not_sign() {
        let (now, secret) = (Utc::now(), SigningSecret::parse("whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD").unwrap());
        let expiring = [None, Some(now + TimeDelta::seconds(1)), Some(now), Some(now - TimeDelta::days(1))];
        let secrets = expiring.map(|expires_at| (secret.clone(), expires_at)).to_vec();
        let (recipient, event) = (Recipient { secrets, ..recipient() }, event(0));
        let message = HubMessage { n: 1, lane: None, seq: None, attempts_before: 0, replay: None, event: None };
        let headers = headers(&recipient, &message, &event, &Bytes::new(), now);
        let signatures = headers[WEBHOOK_SIGNATURE].to_str().unwrap().split(' ').count();
        assert_eq!(signatures, 2, "the current one, and the one that is still valid");
    }

    #[test]
    fn a_message_of_a_replay_names_the_replay_and_its_lane_but_has_no_number() {
        let (recipient, replay) = (recipient(), Uuid::now_v7());
        let event = HubEvent { payload: Bytes::from_static(b"{}"), ..event(0) };
        let message = |lane: &str, seq, replay| HubMessage {
            n: 1,
            lane: Some(lane.into()),
            seq,
            attempts_before: 0,
            replay,
            event: None,
        };
        let shown = |message: &HubMessage| {
            let headers = headers(&recipient, message, &event, &Bytes::new(), Utc::now());
            [LANE, SEQ, REPLAY].map(|name| headers.get(name).map(|value| value.to_str().unwrap().to_owned()))
        };
        let text = |text: &str| Some(text.to_owned());
        let replayed = message(&crate::deliveries::message::replay_lane(replay, "k"), None, Some(replay));
        assert_eq!(shown(&replayed), [text("k"), None, text(&replay.to_string())]);
        let items = [(&replayed, &event)];
        let batch: Value = serde_json::from_slice(&batch_body(Format::Raw, &items)).unwrap();
        assert_eq!((&batch[0]["lane"], batch[0].get("seq")), (&json!("k"), None));
        let headers = batch_headers(&recipient, &items, &Bytes::new(), Utc::now());
        assert_eq!(headers[REPLAY], replay.to_string());
        assert_eq!(shown(&message("k", Some(7), None)), [text("k"), text("7"), None]);
        let backfilled = message("k", Some(7), Some(replay));
        assert_eq!(shown(&backfilled), [text("k"), text("7"), text(&replay.to_string())]);
        let lookalike = crate::deliveries::message::replay_lane(replay, "k");
        assert_eq!(
            shown(&message(&lookalike, Some(7), None)),
            [text(&lookalike), text("7"), None],
            "a key is any text"
        );
    }

    #[test]
    fn a_lane_is_printable_ascii_and_unambiguous() {
        for byte in 0..=255_u8 {
            let is_plain = (0x21..=0x7e).contains(&byte) && byte != b'%';
            let expected = if is_plain { char::from(byte).to_string() } else { format!("%{byte:02X}") };
            assert_eq!(percent_encoding::percent_encode(&[byte], ENCODED_IN_HEADER).to_string(), expected, "{byte:#x}");
        }
        assert_eq!(percent_encoded("order/Zürich 5%\n"), "order/Z%C3%BCrich%205%25%0A");
        assert!(matches!(percent_encoded("order/5"), Cow::Borrowed("order/5")));
    }

    /// Two messages of a lane with a name that JSON escapes, and one without a lane.
    fn messages() -> Vec<HubMessage> {
        let lanes = [Some("a \"b\"\n"), Some("a \"b\"\n"), None];
        let message = |(n, lane): (i64, Option<&str>)| {
            let payload = format!("{{ \"n\": {n}.50 }}").into();
            let event = HubEvent { id: Uuid::from_u128(n as u128), payload, ..event(0) };
            let (lane, seq) = (lane.map(Arc::from), lane.map(|_| n));
            HubMessage { n, lane, seq, attempts_before: 0, replay: None, event: Some(Arc::new(event)) }
        };
        (1..).zip(lanes).map(message).collect()
    }

    #[test]
    fn a_batch_is_an_array_with_the_payloads_byte_for_byte() {
        let messages = messages();
        let items: Vec<(&HubMessage, &HubEvent)> =
            messages.iter().filter_map(|message| Some((message, message.event.as_deref()?))).collect();
        for format in [Format::Raw, Format::Standard, Format::Cloudevents] {
            let body = batch_body(format, &items);
            let text = std::str::from_utf8(&body).unwrap();
            assert!(text.contains("\"data\":{ \"n\": 2.50 }"), "{text}");
            let parsed: Value = serde_json::from_str(text).unwrap();
            assert_eq!(parsed.as_array().unwrap().len(), 3);
            let (lane, seq) = match format {
                Format::Raw | Format::Standard => ("lane", ("seq", json!(2))),
                Format::Cloudevents => ("partitionkey", ("sequence", json!("2"))),
            };
            assert_eq!((&parsed[1][lane], &parsed[1][seq.0]), (&json!("a \"b\"\n"), &seq.1), "{text}");
            assert!(parsed[2].get(lane).is_none() && parsed[2].get(seq.0).is_none(), "{text}");
            assert_eq!(parsed[0]["id"], "evt_00000000-0000-0000-0000-000000000001");
        }
        assert_eq!(&batch_body(Format::Raw, &[])[..], b"]", "never sent");
    }

    #[test]
    fn the_id_of_a_batch_depends_on_its_events_and_nothing_else() {
        let (subscriber, now) = (Uuid::from_u128(7), Utc::now());
        let recipient = Recipient { id: subscriber, ..recipient() };
        let messages = messages();
        let all: Vec<(&HubMessage, &HubEvent)> =
            messages.iter().filter_map(|message| Some((message, message.event.as_deref()?))).collect();
        let of = |items: &[(&HubMessage, &HubEvent)], now| {
            let headers = batch_headers(&recipient, items, &Bytes::new(), now);
            (headers[WEBHOOK_ID].to_str().unwrap().to_owned(), headers[BATCH].to_str().unwrap().to_owned())
        };
        let (id, count) = of(&all, now);
        assert!(id.starts_with("bat_") && count == "3", "{id} {count}");
        assert_eq!(of(&all, now + TimeDelta::days(1)).0, id);
        assert_ne!(of(&all[..2], now).0, id);
        assert_ne!(batch_id(Uuid::nil(), all.iter().map(|(_, event)| event.id)), id, "another subscriber");
    }

    #[test]
    fn a_batch_names_its_type_only_if_it_has_one() {
        let other = HubEvent { topic: "u".to_owned(), ..event(0) };
        let (first, message) = (event(0), &messages()[0]);
        let of = |events: &[&HubEvent]| {
            let items: Vec<(&HubMessage, &HubEvent)> = events.iter().map(|event| (message, *event)).collect();
            batch_headers(&recipient(), &items, &Bytes::new(), Utc::now()).get(EVENT_TYPE).cloned()
        };
        assert_eq!(of(&[&first, &first]).unwrap(), "t");
        assert_eq!(of(&[&first, &other]), None);
    }
}

//! One attempt: the HTTP request for a hub message, and the meaning of the response.

use std::time::Instant;

use bytes::Bytes;
use chrono::{SecondsFormat, Utc};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use kit::clock::Clock;

use crate::client::{Client, WebhookRequest};
use crate::delivery::{AttemptResult, Recipient};
use crate::domain::{Format, Reason, Verdict, verdict};
use crate::hub_message::{HubEvent, HubMessage};
use crate::signature::{WEBHOOK_ID, WEBHOOK_SIGNATURE, WEBHOOK_TIMESTAMP, active_secrets, sign};

const LANE: HeaderName = HeaderName::from_static("webhook-lane");
const SEQ: HeaderName = HeaderName::from_static("webhook-seq");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Sends the message once and returns the result. A failure to send is a result, too.
pub(crate) async fn attempt(
    client: &Client,
    recipient: &Recipient,
    message: &HubMessage,
    clock: &Clock,
) -> AttemptResult {
    let started = Instant::now();
    let Some(event) = &message.event else {
        return AttemptResult::not_sent(Reason::Expired, "the log no longer has it");
    };
    let body = body(recipient.format, event);
    let headers = headers(recipient, message, event, &body, clock.now());
    let sent =
        client.post(WebhookRequest { target: &recipient.target, headers, body, timeout: recipient.timeout }).await;
    let latency = started.elapsed();
    match sent {
        Ok(answer) => {
            let status = answer.status.as_u16();
            let verdict = verdict(Some(status), &recipient.retry.statuses);
            AttemptResult {
                verdict,
                retry_after: answer.retry_after,
                status: Some(status),
                latency,
                error: (verdict != Verdict::Delivered).then_some("status"),
                detail: None,
                excerpt: (!answer.excerpt.is_empty()).then_some(answer.excerpt),
                not_sent: None,
            }
        }
        Err(failure) => AttemptResult {
            verdict: verdict(None, &[]),
            retry_after: None,
            status: None,
            latency,
            error: Some(failure.class.as_str()),
            detail: Some(failure.text),
            excerpt: None,
            not_sent: None,
        },
    }
}

/// The request body: the same bytes on every attempt.
fn body(format: Format, event: &HubEvent) -> Bytes {
    let payload = &event.payload;
    let at = || event.at.to_rfc3339_opts(SecondsFormat::Micros, true);
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
        Format::Standard => envelope(format!(r#"{{"type":"{}","timestamp":"{}","data":"#, event.topic, at())),
        Format::Cloudevents => envelope(format!(
            r#"{{"specversion":"1.0","id":"evt_{}","source":"/pillarbox/{}","type":"{}","time":"{}","datacontenttype":"application/json","data":"#,
            event.id,
            event.source,
            event.topic,
            at()
        )),
    }
}

fn headers(
    recipient: &Recipient,
    message: &HubMessage,
    event: &HubEvent,
    body: &Bytes,
    now: chrono::DateTime<Utc>,
) -> HeaderMap {
    let mut headers = recipient.headers.clone();
    let id = format!("evt_{}", event.id);
    let timestamp = now.timestamp();
    let content_type = match recipient.format {
        Format::Raw | Format::Standard => "application/json",
        Format::Cloudevents => "application/cloudevents+json",
    };
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(WEBHOOK_SIGNATURE, sign(active_secrets(&recipient.secrets, now), &id, timestamp, body));
    insert(&mut headers, WEBHOOK_ID, &id);
    headers.insert(WEBHOOK_TIMESTAMP, HeaderValue::from(timestamp));
    if let (Some(lane), Some(seq)) = (&message.lane, message.seq) {
        insert(&mut headers, LANE, &percent_encoded(lane));
        headers.insert(SEQ, HeaderValue::from(seq));
    }
    if let Some(trace) = &event.traceparent {
        insert(&mut headers, TRACEPARENT, trace);
    }
    headers
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// Percent-encodes all bytes that a header value cannot contain, and `%` itself, so that the encoding is unambiguous.
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'%' | 0..=0x20 | 0x7f.. => encoded.push_str(&format!("%{byte:02X}")),
            byte => encoded.push(char::from(byte)),
        }
    }
    encoded
}

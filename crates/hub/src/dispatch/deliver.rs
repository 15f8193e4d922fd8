//! One attempt: what is sent, and what the answer means.

use std::time::{Duration, Instant};

use bytes::Bytes;
use chrono::{SecondsFormat, Utc};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use kit::clock::Clock;

use super::feed::Came;
use super::{Event, Mail, Recipient};
use crate::client::{Client, Outgoing};
use crate::domain::{Format, Reason, Verdict, verdict};
use crate::signature::{WEBHOOK_ID, WEBHOOK_SIGNATURE, WEBHOOK_TIMESTAMP, live, sign};

const LANE: HeaderName = HeaderName::from_static("webhook-lane");
const SEQ: HeaderName = HeaderName::from_static("webhook-seq");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

pub(crate) async fn deliver(client: &Client, recipient: &Recipient, mail: &Mail, clock: &Clock) -> Came {
    let began = Instant::now();
    let Some(event) = &mail.event else {
        return Came::unsent(Reason::Expired, "the log no longer has it");
    };
    let body = body(recipient.format, event);
    let headers = headers(recipient, mail, event, &body, clock.now());
    let sent = client.post(Outgoing { target: &recipient.target, headers, body, timeout: recipient.timeout }).await;
    let latency = began.elapsed();
    match sent {
        Ok(answer) => {
            let status = answer.status.as_u16();
            let verdict = verdict(Some(status), &recipient.retry_statuses);
            Came {
                verdict,
                retry_after: answer.retry_after,
                status: Some(status),
                latency,
                error: (verdict != Verdict::Delivered).then_some("status"),
                detail: None,
                excerpt: (!answer.excerpt.is_empty()).then_some(answer.excerpt),
                unsent: None,
            }
        }
        Err(failure) => failed(failure.text, failure.class.as_str(), latency),
    }
}

fn failed(detail: String, error: &'static str, latency: Duration) -> Came {
    Came {
        verdict: verdict(None, &[]),
        retry_after: None,
        status: None,
        latency,
        error: Some(error),
        detail: Some(detail),
        excerpt: None,
        unsent: None,
    }
}

/// The same bytes on every attempt.
fn body(format: Format, event: &Event) -> Bytes {
    let payload = &event.payload;
    let at = || event.at.to_rfc3339_opts(SecondsFormat::Micros, true);
    // The payload goes in as it was posted; sources, types and times hold nothing that JSON would escape.
    let wrapped = |before: String| {
        let mut body = Vec::with_capacity(before.len() + payload.len() + 1);
        body.extend_from_slice(before.as_bytes());
        body.extend_from_slice(payload);
        body.push(b'}');
        Bytes::from(body)
    };
    match format {
        Format::Raw => payload.clone(),
        Format::Standard => wrapped(format!(r#"{{"type":"{}","timestamp":"{}","data":"#, event.topic, at())),
        Format::Cloudevents => wrapped(format!(
            r#"{{"specversion":"1.0","id":"evt_{}","source":"/pillarbox/{}","type":"{}","time":"{}","datacontenttype":"application/json","data":"#,
            event.id,
            event.source,
            event.topic,
            at()
        )),
    }
}

fn headers(recipient: &Recipient, mail: &Mail, event: &Event, body: &Bytes, now: chrono::DateTime<Utc>) -> HeaderMap {
    let mut headers = recipient.headers.clone();
    let id = format!("evt_{}", event.id);
    let timestamp = now.timestamp();
    let content_type = match recipient.format {
        Format::Raw | Format::Standard => "application/json",
        Format::Cloudevents => "application/cloudevents+json",
    };
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(WEBHOOK_SIGNATURE, sign(live(&recipient.secrets, now), &id, timestamp, body));
    insert(&mut headers, WEBHOOK_ID, &id);
    headers.insert(WEBHOOK_TIMESTAMP, HeaderValue::from(timestamp));
    if let (Some(lane), Some(seq)) = (&mail.lane, mail.seq) {
        insert(&mut headers, LANE, &ascii(lane));
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

/// Percent-encoded where a header could not hold it, and where it could be taken for that.
fn ascii(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'%' | 0..=0x20 | 0x7f.. => encoded.push_str(&format!("%{byte:02X}")),
            byte => encoded.push(char::from(byte)),
        }
    }
    encoded
}

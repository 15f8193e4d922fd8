//! One attempt: the HTTP request for a hub message, and the meaning of the response.

use std::borrow::Cow;
use std::time::Instant;

use bytes::Bytes;
use chrono::{SecondsFormat, Utc};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use kit::clock::Clock;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::client::{Client, WebhookRequest};
use crate::delivery::{AttemptResult, Recipient};
use crate::domain::{Format, Reason, Verdict, verdict};
use crate::hub_message::{HubEvent, HubMessage};
use crate::send_permit::SendPermit;
use crate::signature::{WEBHOOK_ID, WEBHOOK_SIGNATURE, WEBHOOK_TIMESTAMP, active_secrets, sign};

const LANE: HeaderName = HeaderName::from_static("webhook-lane");
/// The ASCII characters that are percent-encoded in [`LANE`]: control characters, which a header value cannot contain,
/// the space, which would be trimmed at its ends, and `%`, so that the encoding is unambiguous. The crate
/// encodes everything that is not ASCII.
const ENCODED_IN_LANE: &AsciiSet = &CONTROLS.add(b' ').add(b'%');
const SEQ: HeaderName = HeaderName::from_static("webhook-seq");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Sends the message once and returns the result. A failure to send is a result, too. Returns None if the permit
/// had ended before the first bytes were written, so that nothing was sent.
pub(crate) async fn attempt(
    client: &Client,
    recipient: &Recipient,
    message: &HubMessage,
    clock: &Clock,
    permit: Option<SendPermit>,
) -> Option<AttemptResult> {
    let started = Instant::now();
    let Some(event) = &message.event else {
        return Some(AttemptResult::not_sent(Reason::Expired, "the log no longer has it"));
    };
    let body = body(recipient.format, event);
    let headers = headers(recipient, message, event, &body, clock.now());
    let request = WebhookRequest { target: &recipient.target, headers, body, timeout: recipient.timeout };
    let sent = client.post_if(request, permit).await;
    let latency = started.elapsed();
    Some(match sent {
        Ok(None) => return None,
        Ok(Some(answer)) => {
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
    })
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
        insert(&mut headers, LANE, &encoded_lane(lane));
        headers.insert(SEQ, HeaderValue::from(seq));
    }
    if let Some(trace) = &event.traceparent {
        insert(&mut headers, TRACEPARENT, trace);
    }
    headers
}

/// The lane as a header value, percent-encoded where necessary.
fn encoded_lane(lane: &str) -> Cow<'_, str> {
    utf8_percent_encode(lane, ENCODED_IN_LANE).into()
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;
    use crate::delivery::fixtures::recipient;
    use crate::hub_message::fixtures::event;
    use crate::signature::SigningSecret;

    #[test]
    fn a_secret_that_has_expired_since_it_was_loaded_does_not_sign() {
        let (now, secret) = (Utc::now(), SigningSecret::parse("whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD").unwrap());
        let expiring = [None, Some(now + TimeDelta::seconds(1)), Some(now), Some(now - TimeDelta::days(1))];
        let secrets = expiring.map(|expires_at| (secret.clone(), expires_at)).to_vec();
        let (recipient, event) = (Recipient { secrets, ..recipient() }, event(0));
        let message = HubMessage { n: 1, lane: None, seq: None, attempts_before: 0, event: None };
        let headers = headers(&recipient, &message, &event, &Bytes::new(), now);
        let signatures = headers[WEBHOOK_SIGNATURE].to_str().unwrap().split(' ').count();
        assert_eq!(signatures, 2, "the current one, and the one that is still valid");
    }

    #[test]
    fn a_lane_is_printable_ascii_and_unambiguous() {
        for byte in 0..=255_u8 {
            let is_plain = (0x21..=0x7e).contains(&byte) && byte != b'%';
            let expected = if is_plain { char::from(byte).to_string() } else { format!("%{byte:02X}") };
            assert_eq!(percent_encoding::percent_encode(&[byte], ENCODED_IN_LANE).to_string(), expected, "{byte:#x}");
        }
        assert_eq!(encoded_lane("order/Zürich 5%\n"), "order/Z%C3%BCrich%205%25%0A");
        assert!(matches!(encoded_lane("order/5"), Cow::Borrowed("order/5")));
    }
}

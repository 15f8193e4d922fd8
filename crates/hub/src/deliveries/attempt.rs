//! One attempt: the HTTP request for a hub message or a batch of them, and the meaning of the response.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{HeaderMap, StatusCode};
use runtime::clock::Clock;
use webhook_client::{Client, Permit, RequestError, TokenSource, WebhookRequest, WebhookResponse};

use super::webhook::{batch_body, batch_headers, body, headers};
use crate::deliveries::attempt_result::AttemptResult;
use crate::deliveries::domain::{Reason, Verdict, verdict};
use crate::deliveries::message::{HubEvent, HubMessage};
use crate::deliveries::recipient::Recipient;

/// Sends the message once and returns the result. A failure to send is also a result. Returns None if the permit
/// had ended before the first bytes were written, so that nothing was sent.
pub(crate) async fn attempt(
    client: &Client,
    recipient: &Recipient,
    message: &HubMessage,
    clock: &Clock,
    permit: Option<Arc<dyn Permit>>,
) -> Option<AttemptResult> {
    let Some(event) = &message.event else { return Some(expired()) };
    let body = body(recipient.format, event);
    let headers = headers(recipient, message, event, &body, clock.now());
    send(client, recipient, (headers, body), permit).await
}

/// Sends the messages in one request, like [`attempt`]. The result is that of all of them.
pub(crate) async fn attempt_batch(
    client: &Client,
    recipient: &Recipient,
    messages: &[HubMessage],
    clock: &Clock,
    permit: Option<Arc<dyn Permit>>,
) -> Option<AttemptResult> {
    let items: Vec<(&HubMessage, &HubEvent)> =
        messages.iter().filter_map(|message| Some((message, message.event.as_deref()?))).collect();
    // A message without content is the only one of its batch.
    if items.is_empty() {
        return Some(expired());
    }
    let body = batch_body(recipient.format, &items);
    let headers = batch_headers(recipient, &items, &body, clock.now());
    send(client, recipient, (headers, body), permit).await
}

fn expired() -> AttemptResult {
    AttemptResult::not_sent(Reason::Expired, "the log no longer has it")
}

async fn send(
    client: &Client,
    recipient: &Recipient,
    (headers, body): (HeaderMap, Bytes),
    permit: Option<Arc<dyn Permit>>,
) -> Option<AttemptResult> {
    let started = Instant::now();
    let sent = match &recipient.token_source {
        None => client.post_if(request(recipient, headers, body), permit).await,
        // Boxed, because it is rare and large: every attempt would copy the space for it.
        Some(source) => Box::pin(send_with_token(client, recipient, source, (headers, body), permit)).await,
    };
    Some(result_of(recipient, sent.transpose()?, started))
}

fn request(recipient: &Recipient, headers: HeaderMap, body: Bytes) -> WebhookRequest<'_> {
    WebhookRequest { target: &recipient.target, headers, body, timeout: recipient.timeout }
}

/// Sends the request with an access token. If the endpoint answers 401 to a token of an earlier attempt, the token may have
/// been revoked: the request is sent once more with another one. The time limit is that of the whole attempt.
async fn send_with_token(
    client: &Client,
    recipient: &Recipient,
    source: &TokenSource,
    (mut headers, body): (HeaderMap, Bytes),
    permit: Option<Arc<dyn Permit>>,
) -> Result<Option<WebhookResponse>, RequestError> {
    let end = Instant::now() + recipient.timeout;
    let within = |headers, body| {
        let timeout = end.saturating_duration_since(Instant::now());
        WebhookRequest { timeout, ..request(recipient, headers, body) }
    };
    let token = client.access_token(source, None, end).await?;
    headers.insert(AUTHORIZATION, token.header.clone());
    let answer = client.post_if(within(headers.clone(), body.clone()), permit.clone()).await?;
    let is_refused = answer.as_ref().is_some_and(|answer| answer.status == StatusCode::UNAUTHORIZED);
    if !is_refused || token.is_new {
        return Ok(answer);
    }
    let token = client.access_token(source, Some(&token.header), end).await?;
    headers.insert(AUTHORIZATION, token.header);
    client.post_if(within(headers, body), permit).await
}

fn result_of(recipient: &Recipient, sent: Result<WebhookResponse, RequestError>, started: Instant) -> AttemptResult {
    let latency = started.elapsed();
    match sent {
        Ok(answer) => {
            let status = answer.status.as_u16();
            let verdict = verdict(Some(status), &recipient.retry.rules);
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
            verdict: verdict(None, &recipient.retry.rules),
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

//! Verifying that an endpoint wants the webhooks of a subscriber: it answers a challenge.

use std::collections::BTreeMap;
use std::sync::Arc;

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use http_kit::admission::caller_share::request_caller;
use pillarbox::log::Tenant;
use rand::RngCore;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::Hub;
use crate::deliveries::attempt::attempt;
use crate::deliveries::attempt_result::AttemptResult;
use crate::deliveries::domain::{Format, Reason, Verdict};
use crate::deliveries::message::{EVENT_SOURCE, HubEvent, HubMessage};
use crate::deliveries::recipient::Recipient;
use crate::error::Error;
use crate::subscribers::flow::{TEST_TIME_MAX, check_decrypted, sendable, show};
use crate::subscribers::store;
use crate::subscribers::view::VerificationResult;

const CHALLENGE_TYPE: &str = "hub.endpoint.verification";
const CHALLENGE_BYTES: usize = 32;
/// The kind of failure if the endpoint has answered, but not with the challenge.
const WRONG_ANSWER: &str = "challenge";

/// Sends the challenge in the background, so that the request that created or changed the subscriber does not wait for its
/// endpoint: the caller may have to configure the secret of the response first.
pub(crate) fn start(hub: &Arc<Hub>, tenant: Tenant, id: Uuid) {
    let hub = Arc::clone(hub);
    tokio::spawn(request_caller().run(async move {
        match verify(&hub, &tenant, id).await {
            Ok(result) => {
                tracing::info!(subscriber = %id, verified = result.verified, "sent a challenge to an endpoint")
            }
            Err(error) => tracing::warn!(subscriber = %id, %error, "cannot send a challenge to an endpoint"),
        }
    }));
}

/// Sends a challenge to the endpoint of a subscriber that is not verified. If the endpoint answers with it, the messages that
/// wait are sent. No transaction is open during the request. Fails if the tenant is suspended.
pub(crate) async fn verify(hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<VerificationResult, Error> {
    let stored = check_decrypted(show(hub, tenant, id).await?)?;
    if stored.is_tenant_suspended {
        return Err(Error::Suspended(tenant.clone()));
    }
    let Some(since) = stored.subscriber.unverified_since else { return Ok(VerificationResult::verified()) };
    let url = stored.subscriber.settings.url.clone();
    let recipient = sendable(stored)?;
    // Every endpoint gets the same body, whatever the format of its webhooks.
    let timeout = recipient.timeout.min(TEST_TIME_MAX);
    let recipient = Recipient { timeout, format: Format::Raw, batch: None, ..recipient };
    let challenge = new_challenge();
    let client = hub.clients.of(tenant.as_str());
    let result = attempt(client, &recipient, &challenge_message(hub, id, &challenge), &hub.clock, None).await;
    let result = result.unwrap_or_else(|| AttemptResult::not_sent(Reason::Manual, "it was not sent"));
    if result.verdict != Verdict::Delivered {
        return Ok(VerificationResult::failed(result));
    }
    if !is_answer(result.excerpt.as_deref().unwrap_or_default(), &challenge) {
        let detail = "the response does not contain the challenge: answer with the same JSON, {\"challenge\": \"…\"}, or with \
                      the challenge alone";
        let (error, detail) = (Some(WRONG_ANSWER), Some(detail.to_owned()));
        return Ok(VerificationResult::failed(AttemptResult { error, detail, ..result }));
    }
    let mut db = hub.db.acquire().await?;
    let is_current = store::set_verified(&mut db, tenant, id, &url, since, hub.clock.now()).await?;
    drop(db);
    if !is_current {
        // The endpoint may have answered another challenge in the meantime.
        let now = show(hub, tenant, id).await?.subscriber;
        if now.unverified_since.is_none() && now.settings.url == url {
            return Ok(VerificationResult::verified());
        }
        let detail = "the subscriber was changed during the verification: try again";
        let (error, detail) = (Some(WRONG_ANSWER), Some(detail.to_owned()));
        return Ok(VerificationResult::failed(AttemptResult { error, detail, ..result }));
    }
    hub.directory.wait_until_applied(&hub.db, hub.change_time_max).await;
    Ok(VerificationResult::verified())
}

fn new_challenge() -> String {
    let mut bytes = [0; CHALLENGE_BYTES];
    rand::rng().fill_bytes(&mut bytes);
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

fn challenge_message(hub: &Hub, subscriber: Uuid, challenge: &str) -> HubMessage {
    let payload = json!({"challenge": challenge, "subscriber_id": subscriber}).to_string().into();
    let (source, topic) = (EVENT_SOURCE.as_str().to_owned(), CHALLENGE_TYPE.to_owned());
    let (id, at) = (Uuid::now_v7(), hub.clock.now());
    let event = HubEvent {
        id,
        source: source.into(),
        topic,
        key: None,
        at,
        payload,
        traceparent: None,
        headers: BTreeMap::new(),
    };
    HubMessage { n: 0, lane: None, seq: None, attempts_before: 0, replay: None, event: Some(Arc::new(event)) }
}

/// Whether a response body is the challenge, or a JSON object with it.
fn is_answer(body: &str, challenge: &str) -> bool {
    let body = body.trim();
    let field = || serde_json::from_str::<Value>(body).ok().is_some_and(|json| json["challenge"] == challenge);
    body == challenge || field()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_the_challenge_alone_or_as_a_field() {
        let challenge = new_challenge();
        assert!(challenge.len() == 43 && challenge != new_challenge());
        for body in
            [challenge.clone(), format!(" {challenge} "), format!(r#"{{ "challenge" : "{challenge}", "a": 1 }}"#)]
        {
            assert!(is_answer(&body, &challenge), "{body}");
        }
        let part = &challenge[..42];
        for body in ["", "ok", part, &format!("x{challenge}"), &format!(r#"{{"challenge":"{part}"}}"#), "null", "[]"] {
            assert!(!is_answer(body, &challenge), "{body}");
        }
        assert!(!is_answer(&format!("\"{challenge}\""), &challenge), "a JSON string is neither");
    }
}

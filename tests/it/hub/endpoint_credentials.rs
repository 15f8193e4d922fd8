//! Endpoints that require credentials besides the signature: access tokens of OAuth 2, and client certificates.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use base64::prelude::{BASE64_STANDARD, Engine};
use serde_json::{Value, json};
use testkit::{Received, Receiver, Reply};

use crate::hub::fixture::{
    Fixture, attempts, error_pointers, numbered_events, patch_subscriber, post, post_batch, subscribe, subscriber_path,
    wait_for_outcome,
};
use crate::hub::rows::{start_api_only, subscriber_fields};
use crate::support::{caller, text, uuid_of};

const SECRET: &str = "hunter2 + more";
/// Self-signed, valid until 2093, and for a month of 2020. Made for this test.
const CERTIFICATE: &str = "\
-----BEGIN CERTIFICATE-----
MIIBeTCCAR+gAwIBAgIUde8ZMAeNnEsDAk1qyuBW6nTS1eowCgYIKoZIzj0EAwIw
ETEPMA0GA1UEAwwGY2xpZW50MCAXDTIwMDEwMTAwMDAwMFoYDzIwOTMxMjAzMDAw
MDAwWjARMQ8wDQYDVQQDDAZjbGllbnQwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNC
AASxQpOEAOM9kRrvaE8JuIYF/mY+qru5aS5TL0pZr7IVHoJzVcBPwjv0dAyL++Uv
qeX+r7UJmYME1rJ/TABRSG1mo1MwUTAdBgNVHQ4EFgQUrB9DFVCOy4JbiW2hDsGI
gacLOd4wHwYDVR0jBBgwFoAUrB9DFVCOy4JbiW2hDsGIgacLOd4wDwYDVR0TAQH/
BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiB88tSzg0DoJN2N/N25n41zbVlP8YGw
Sq3QLDHAHWEe8wIhAJFLSmLE/1RJOyo792stySo2fMdaaqFLN66PHlFwqKsU
-----END CERTIFICATE-----
";
const EXPIRED: &str = "\
-----BEGIN CERTIFICATE-----
MIIBeDCCAR2gAwIBAgIUSt6X8fHNvD1SUCEFiXXnUe4Frj4wCgYIKoZIzj0EAwIw
ETEPMA0GA1UEAwwGY2xpZW50MB4XDTIwMDEwMTAwMDAwMVoXDTIwMDEzMTAwMDAw
MVowETEPMA0GA1UEAwwGY2xpZW50MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE
sUKThADjPZEa72hPCbiGBf5mPqq7uWkuUy9KWa+yFR6Cc1XAT8I79HQMi/vlL6nl
/q+1CZmDBNayf0wAUUhtZqNTMFEwHQYDVR0OBBYEFKwfQxVQjsuCW4ltoQ7BiIGn
CzneMB8GA1UdIwQYMBaAFKwfQxVQjsuCW4ltoQ7BiIGnCzneMA8GA1UdEwEB/wQF
MAMBAf8wCgYIKoZIzj0EAwIDSQAwRgIhAJOzYIDxuikJnGvxEOwkj3jP6vbXIMza
hYNFydz2/KBzAiEAwgNk1xni2cw7kBQ9Ra2qNSwAR//UWOGsDxGgULbjy38=
-----END CERTIFICATE-----
";
const KEY: &str = "\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg62iMSiEtopK6duby
7yyuOrD+TwBQSiOUOhjawZ1oytuhRANCAASxQpOEAOM9kRrvaE8JuIYF/mY+qru5
aS5TL0pZr7IVHoJzVcBPwjv0dAyL++UvqeX+r7UJmYME1rJ/TABRSG1m
-----END PRIVATE KEY-----
";
const OTHER_KEY: &str = "\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgN7qHtsnNsG3vxTDp
NmgTQgd/DB5/BWSts8IUt8SsnRChRANCAARHJ3xeaABBGXxJjbkav0dVzb1pCSIa
MIpqbWxrm5nlBiEf40kMjx6+Fz+ataxdDnNejbrjZCpQCspOn5NiUYVR
-----END PRIVATE KEY-----
";

/// A token endpoint whose tokens are numbered from 1.
async fn token_endpoint() -> Receiver {
    let mut issued = 0;
    Receiver::with_reply(move |_| {
        issued += 1;
        token_reply(issued)
    })
    .await
}

fn token_reply(n: usize) -> Reply {
    // Larger than the excerpt of a response.
    let token = format!("{}{n}", "t".repeat(2_000));
    Reply {
        body: json!({"access_token": token, "token_type": "Bearer", "expires_in": 3600}).to_string(),
        ..Reply::status(200)
    }
}

fn oauth2(token_url: &str) -> Value {
    json!({"type": "oauth2", "token_url": token_url, "client_id": "hub:1", "client_secret": SECRET,
        "scope": "webhooks write", "audience": "https://api.example"})
}

/// The number of the token of a webhook.
fn token_of(received: &Received) -> usize {
    received.header("authorization").strip_prefix("Bearer ").unwrap().trim_start_matches('t').parse().unwrap()
}

#[tokio::test]
async fn a_token_is_requested_once_and_again_after_a_401() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let (tokens, accepted) = (token_endpoint().await, Arc::new(AtomicUsize::new(1)));
    let current = accepted.clone();
    let receiver = Receiver::with_reply(move |received| {
        Reply::status(if token_of(received) == current.load(Ordering::SeqCst) { 200 } else { 401 })
    })
    .await;
    let subscriber = subscribe(manager, &receiver.url(), json!({"auth": oauth2(&tokens.url())})).await;
    for id in post_batch(manager, numbered_events(20, 1..=2)).await {
        wait_for_outcome(manager, &id, &subscriber, "delivered").await;
    }
    assert_eq!((tokens.count(), receiver.count()), (1, 40), "many messages, one token");
    let request = tokens.received().remove(0);
    let basic = request.header("authorization").strip_prefix("Basic ").unwrap();
    assert_eq!(BASE64_STANDARD.decode(basic).unwrap(), b"hub%3A1:hunter2%20%2B%20more");
    assert_eq!(request.header("content-type"), "application/x-www-form-urlencoded");
    let form = "grant_type=client_credentials&scope=webhooks%20write&audience=https%3A%2F%2Fapi.example";
    assert_eq!(String::from_utf8_lossy(&request.body), form);

    // The endpoint has revoked the token: one more request, within the same attempt.
    accepted.store(2, Ordering::SeqCst);
    let event = post(manager, "test.a", json!({}), None).await;
    let outcome = wait_for_outcome(manager, &event, &subscriber, "delivered").await;
    assert_eq!(attempts(manager, &outcome).await, [(Some(200), "delivered".to_owned())]);
    assert_eq!((tokens.count(), receiver.count()), (2, 42));
    // It refuses new tokens, too: no further request for one, and the status decides as usual.
    accepted.store(9, Ordering::SeqCst);
    let event = post(manager, "test.a", json!({}), None).await;
    let outcome = wait_for_outcome(manager, &event, &subscriber, "dead").await;
    assert_eq!(attempts(manager, &outcome).await, [(Some(401), "dead".to_owned())]);
    assert_eq!((tokens.count(), receiver.count()), (3, 44));
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_token_endpoint_that_fails_delays_a_message_and_says_why() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let refusal = json!({"error": "invalid_client", "error_description": SECRET}).to_string();
    let tokens = Receiver::with_reply(move |_| Reply { body: refusal.clone(), ..Reply::status(401) }).await;
    let receiver = Receiver::start().await;
    let fields = json!({"auth": oauth2(&tokens.url()), "retry_backoff_seconds": [1, 1, 1, 1, 1]});
    let subscriber = subscribe(manager, &receiver.url(), fields).await;
    let event = post(manager, "test.a", json!({}), None).await;
    let outcome = wait_for_outcome(manager, &event, &subscriber, "failed").await;
    let error = "oauth2: no access token: the token endpoint answered 401 (invalid_client)";
    assert_eq!(outcome["last_error"], error, "{outcome}");
    assert_eq!(receiver.count(), 0, "nothing is sent without a token");
    tokens.set_reply(|_| token_reply(1));
    wait_for_outcome(manager, &event, &subscriber, "delivered").await;
    let tested = manager.post(&format!("{}/test", subscriber_path(&subscriber)), json!({})).await;
    assert_eq!(tested.json()["delivered"], true, "{tested:?}");
    fixture.app.stop().await;
}

#[tokio::test]
async fn the_secrets_of_credentials_are_encrypted_never_shown_and_not_sent_elsewhere() {
    let (database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let mut fields = subscriber_fields("a");
    fields["auth"] = oauth2("https://id.example/token");
    let made = acme.post("/hub/v1/subscribers", fields).await;
    assert_eq!(made.status, 201, "{made:?}");
    assert!(!made.text.contains("hunter2"), "{made:?}");
    let mut shown = oauth2("https://id.example/token");
    shown["client_secret"] = json!("***");
    assert_eq!(made.json()["auth"], shown);
    let id = uuid_of(&made.json()["id"]);
    let stored: Vec<u8> = sqlx::query_scalar("select auth from pillarbox_hub.subscriber where id = $1")
        .bind(id)
        .fetch_one(database.pool())
        .await
        .unwrap();
    assert!(!stored.windows(7).any(|part| part == b"hunter2"));
    // What is shown can be sent back, for the same receiver and the same token endpoint only.
    let same = patch_subscriber(&acme, id, json!({"auth": shown.clone()})).await;
    assert_eq!((same.status, same.header("etag")), (200, made.header("etag")), "nothing has changed");
    let mut elsewhere = shown.clone();
    elsewhere["token_url"] = json!("https://evil.example/token");
    for (change, pointers) in [
        (json!({"auth": elsewhere}), vec!["/auth/client_secret"]),
        (json!({"url": "https://evil.example/"}), vec!["/auth"]),
        (json!({"url": "https://evil.example/", "auth": shown}), vec!["/auth/client_secret"]),
        (json!({"headers": {"authorization": "x"}}), vec!["/auth"]),
        (
            json!({"auth": {"type": "oauth2", "token_url": "http://10.0.0.1/", "client_id": "a", "client_secret": "b"}}),
            vec!["/auth/token_url"],
        ),
        (
            json!({"auth": {"type": "oauth2", "certificate": "x"}}),
            vec!["/auth/certificate", "/auth/token_url", "/auth/client_id", "/auth/client_secret"],
        ),
        (json!({"auth": {"type": "mtls", "certificate": "x", "private_key": KEY}}), vec!["/auth/certificate"]),
        (
            json!({"auth": {"type": "mtls", "certificate": format!("{CERTIFICATE}{KEY}"), "private_key": KEY}}),
            vec!["/auth/certificate"],
        ),
        (
            json!({"auth": {"type": "mtls", "certificate": CERTIFICATE, "private_key": "***"}}),
            vec!["/auth/private_key"],
        ),
        (
            json!({"auth": {"type": "mtls", "certificate": CERTIFICATE, "private_key": OTHER_KEY}}),
            vec!["/auth/private_key"],
        ),
        (json!({"auth": {"type": "mtls", "certificate": EXPIRED, "private_key": KEY}}), vec!["/auth/certificate"]),
        (
            json!({"url": "http://127.0.0.1/", "auth": {"type": "mtls", "certificate": CERTIFICATE, "private_key": KEY}}),
            vec!["/auth"],
        ),
    ] {
        let refused = patch_subscriber(&acme, id, change.clone()).await;
        assert_eq!(error_pointers(&refused), pointers, "{change}");
        assert!(!refused.text.contains("hunter2") && !refused.text.contains("PRIVATE KEY-----\n"), "{refused:?}");
    }
    let pair = json!({"type": "mtls", "certificate": CERTIFICATE, "private_key": KEY});
    let changed = patch_subscriber(&acme, id, json!({"auth": pair})).await;
    let shown = json!({"type": "mtls", "certificate": CERTIFICATE, "private_key": "***"});
    assert_eq!((changed.status, &changed.json()["auth"]), (200, &shown), "{changed:?}");
    let same = patch_subscriber(&acme, id, json!({"auth": shown})).await;
    assert_eq!(same.header("etag"), changed.header("etag"), "nothing has changed");
    let removed = patch_subscriber(&acme, id, json!({"auth": null})).await;
    assert!(removed.status == 200 && removed.json().get("auth").is_none(), "{removed:?}");
    assert_eq!(text(&removed.json()["name"]), "a");
    app.stop().await;
}

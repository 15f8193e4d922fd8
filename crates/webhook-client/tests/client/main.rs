//! Tests of the webhook client with real sockets on loopback.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

mod addresses;
mod connections;
mod mutual_tls;
mod proxies;
mod receiver;
mod responses;

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use webhook_client::{AllowedNetworks, Client, ClientSettings, RequestError, Target, WebhookRequest, WebhookResponse};

/// A deadline that no test reaches.
const LONG: Duration = Duration::from_secs(20);
/// A deadline that a test waits for.
const SHORT: Duration = Duration::from_millis(400);

fn loopback() -> ClientSettings {
    ClientSettings { allowed_networks: AllowedNetworks::loopback(), ..ClientSettings::default() }
}

fn client() -> Client {
    Client::new(loopback()).unwrap()
}

type PostResult = Result<WebhookResponse, RequestError>;

async fn post(client: &Client, url: &str) -> PostResult {
    post_within(client, url, LONG).await
}

async fn post_within(client: &Client, url: &str, timeout: Duration) -> PostResult {
    let target = Target::parse(url, false).unwrap();
    let headers = HeaderMap::from_iter([(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
    let request = WebhookRequest { target: &target, headers, body: Bytes::from_static(b"{\"n\":1}"), timeout };
    let started = Instant::now();
    let result = client.post(request).await;
    assert!(started.elapsed() < timeout + Duration::from_secs(5), "the request took longer than its timeout");
    result
}

/// Waits for something that the receiver reports. Panics after [`LONG`].
async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONG, future).await.unwrap_or_else(|_| panic!("not within {LONG:?}: {what}"))
}

//! The guarded client against real sockets on loopback.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

mod addresses;
mod answers;
mod connections;
mod proxies;
mod receiver;

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use pillarbox_hub::address::Allowed;
use pillarbox_hub::client::{Client, ClientSettings, Delivery, Outgoing};
use pillarbox_hub::target::Target;

const LONG: Duration = Duration::from_secs(20);
/// A deadline that a test waits for.
const SHORT: Duration = Duration::from_millis(400);

fn loopback() -> ClientSettings {
    ClientSettings { allowed_networks: Allowed::loopback(), ..ClientSettings::default() }
}

fn client() -> Client {
    Client::new(loopback()).unwrap()
}

async fn post(client: &Client, url: &str) -> Delivery {
    post_within(client, url, LONG).await
}

async fn post_within(client: &Client, url: &str, timeout: Duration) -> Delivery {
    let target = Target::parse(url, false).unwrap();
    let headers = HeaderMap::from_iter([(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
    let outgoing = Outgoing { target: &target, headers, body: Bytes::from_static(b"{\"n\":1}"), timeout };
    let started = Instant::now();
    let delivery = client.post(outgoing).await;
    assert!(started.elapsed() < timeout + Duration::from_secs(5), "the deadline was not held");
    delivery
}

/// Waits for something that the other end tells of.
async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONG, future).await.unwrap_or_else(|_| panic!("not within {LONG:?}: {what}"))
}

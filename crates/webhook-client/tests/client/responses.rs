//! The request that the client sends, and how it reads responses within their limits.

use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use webhook_client::{Client, ClientSettings, ErrorClass};

use crate::receiver::{OK, Peer, Receiver, SilentResolver, self_signed};
use crate::{LONG, SHORT, client, loopback, post, post_within, soon};

#[tokio::test]
async fn a_request_names_its_sender_and_asks_for_no_compression() {
    let receiver =
        Receiver::answering("HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 9\r\n\r\nnot\r\nnow\0").await;
    let answer = post(&client(), &receiver.url()).await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.excerpt.as_str()), (503, "not  now"));
    assert_eq!(answer.retry_after, Some(Duration::from_secs(7)));
    let requests = receiver.requests();
    let (head, body) = requests[0].split_once("\r\n\r\n").unwrap();
    let mut lines: Vec<_> = head.lines().collect();
    lines[1..].sort();
    assert_eq!(
        lines,
        [
            "POST /hook?q=1 HTTP/1.1",
            "accept-encoding: identity",
            "content-length: 7",
            "content-type: application/json",
            &format!("host: {}", receiver.address),
            &format!("user-agent: Pillarbox/{}", env!("CARGO_PKG_VERSION")),
        ]
    );
    assert_eq!(body, "{\"n\":1}");
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let elsewhere = Receiver::answering(OK).await;
    let location = elsewhere.url();
    for status in [300, 301, 302, 303, 307, 308] {
        let answer = format!("HTTP/1.1 {status} Go\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n");
        let receiver = Receiver::start(move |mut peer: Peer| {
            let answer = answer.clone();
            async move { while peer.answer(&answer).await {} }
        })
        .await;
        assert_eq!(post(&client(), &receiver.url()).await.unwrap().status.as_u16(), status);
    }
    assert_eq!(elsewhere.connections(), 0);
}

#[tokio::test]
async fn an_endless_body_is_abandoned_and_its_status_counts() {
    for head in ["transfer-encoding: chunked", "content-length: 99999999999", "connection: close"] {
        let (closed, mut is_closed) = mpsc::unbounded_channel();
        let receiver = Receiver::start(move |mut peer: Peer| {
            let closed = closed.clone();
            async move {
                peer.request().await;
                peer.write(format!("HTTP/1.1 201 Created\r\n{head}\r\n\r\n")).await;
                peer.drip(format!("1000\r\n{}\r\n", "a".repeat(0x1000)).as_bytes(), Duration::ZERO).await;
                closed.send(()).unwrap();
            }
        })
        .await;
        let started = Instant::now();
        let answer = post(&client(), &receiver.url()).await.unwrap();
        assert!(started.elapsed() < LONG / 2, "the body is abandoned before the deadline");
        assert_eq!((answer.status.as_u16(), answer.excerpt.len()), (201, 1024), "{head}");
        soon("the connection is dropped", is_closed.recv()).await.unwrap();
    }
}

#[tokio::test]
async fn a_slow_body_ends_at_the_deadline_and_its_status_counts() {
    let (closed, mut is_closed) = mpsc::unbounded_channel();
    let receiver = Receiver::start(move |mut peer: Peer| {
        let closed = closed.clone();
        async move {
            peer.request().await;
            peer.write("HTTP/1.1 410 Gone\r\nretry-after: 1\r\ncontent-length: 99999\r\n\r\n").await;
            peer.drip(b"drip", Duration::from_millis(20)).await;
            closed.send(()).unwrap();
        }
    })
    .await;
    let started = Instant::now();
    let answer = post_within(&client(), &receiver.url(), SHORT).await.unwrap();
    assert!(started.elapsed() >= SHORT);
    assert_eq!((answer.status.as_u16(), answer.retry_after), (410, Some(Duration::from_secs(1))));
    assert!(answer.excerpt.starts_with("drip"), "{answer:?}");
    soon("the connection is dropped", is_closed.recv()).await.unwrap();
}

#[tokio::test]
async fn one_deadline_covers_dns_tls_headers_and_interim_responses() {
    let cases = [("", ""), ("", "HTTP/1.1 100 Continue\r\n\r\n"), ("HTTP/1.1 200 OK\r\nx: ", "y")];
    for (head, drip) in cases {
        let receiver = Receiver::start(move |mut peer: Peer| async move {
            peer.request().await;
            peer.write(head).await;
            peer.drip(drip.as_bytes(), Duration::from_millis(20)).await;
        })
        .await;
        let failure = post_within(&client(), &receiver.url(), SHORT).await.unwrap_err();
        assert_eq!((failure.class, failure.text.as_str()), (ErrorClass::Timeout, "no response within 400ms"), "{drip}");
    }
    let mute = Receiver::start(async |peer: Peer| {
        tokio::time::sleep(SHORT * 9).await;
        drop(peer);
    })
    .await;
    let failure = post_within(&client(), &mute.url().replace("http:", "https:"), SHORT).await.unwrap_err();
    assert_eq!(failure.class, ErrorClass::Timeout);
    let unresolved = Client::with_resolver(loopback(), std::sync::Arc::new(SilentResolver)).unwrap();
    let failure = post_within(&unresolved, "http://slow.example/", SHORT).await.unwrap_err();
    assert_eq!(failure.class, ErrorClass::Timeout);
}

/// An interim response with many headers.
fn early_hints() -> String {
    let links = (0..90).map(|number| format!("x-{number}: y\r\n")).collect::<String>();
    format!("HTTP/1.1 103 Early Hints\r\n{links}\r\n")
}

#[tokio::test]
async fn a_flood_of_interim_responses_is_abandoned_and_a_few_of_them_are_skipped() {
    let (certificate, tls) = self_signed(&["127.0.0.1"]);
    let client = Client::new(ClientSettings { extra_roots: vec![certificate], ..loopback() }).unwrap();
    for tls in [None, Some(tls)] {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let (closed, mut is_closed) = mpsc::unbounded_channel();
        let receiver = Receiver::start_on("127.0.0.1:0", tls, move |mut peer: Peer| {
            let closed = closed.clone();
            async move {
                peer.request().await;
                peer.write(early_hints().repeat(10) + OK).await;
                peer.request().await;
                peer.drip(early_hints().as_bytes(), Duration::ZERO).await;
                closed.send(()).unwrap();
            }
        })
        .await;
        let url = receiver.url().replace("http", scheme);
        assert_eq!(post(&client, &url).await.unwrap().status.as_u16(), 200);
        let started = Instant::now();
        let failure = post(&client, &url).await.unwrap_err();
        assert_eq!(failure.class, ErrorClass::Protocol, "{failure:?}");
        assert!(failure.text.contains("together with those of interim (1xx) responses"), "{failure:?}");
        assert!(started.elapsed() < LONG / 2, "it is abandoned before the deadline");
        assert_eq!((receiver.connections(), receiver.requests().len()), (1, 2), "the request is not sent again");
        soon("the connection is dropped", is_closed.recv()).await.unwrap();
    }
}

/// 20,000 times `a`, compressed, in hexadecimal.
const GZIPPED: &str = concat!(
    "1f8b0800000000000203edc13101000000c2a0aceb5fc21a1e4001000000000000000000000000000000000000f0603187bd",
    "ca204e0000",
);

#[tokio::test]
async fn a_compressed_body_is_not_decompressed() {
    let bytes: Vec<u8> =
        (0..GZIPPED.len()).step_by(2).map(|at| u8::from_str_radix(&GZIPPED[at..at + 2], 16).unwrap()).collect();
    let receiver = Receiver::start(move |mut peer: Peer| {
        let bytes = bytes.clone();
        async move {
            while peer.request().await.is_some() {
                let head = "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-encoding: gzip\r\ncontent-length";
                peer.write([format!("{head}: {}\r\n\r\n", bytes.len()).as_bytes(), &bytes].concat()).await;
            }
        }
    })
    .await;
    let client = client();
    let answer = post(&client, &receiver.url()).await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.excerpt.as_str()), (200, ""));
    post(&client, &receiver.url()).await.unwrap();
    assert_eq!(receiver.connections(), 1, "the body was read to its end, so the connection is reused");
}

#[tokio::test]
async fn a_response_that_is_not_http_or_too_large_is_a_protocol_error() {
    let large = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "a".repeat(200_000));
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(1_000));
    for answer in ["SSH-2.0-OpenSSH_9.2\r\n\r\n".to_owned(), large, many] {
        let what = answer[..20].to_owned();
        let receiver = Receiver::start(move |mut peer: Peer| {
            let answer = answer.clone();
            async move {
                peer.answer(&answer).await;
                peer.request().await; // keeps the connection open
            }
        })
        .await;
        let failure = post(&client(), &receiver.url()).await.unwrap_err();
        assert_eq!(failure.class, ErrorClass::Protocol, "{what}: {failure:?}");
        assert_eq!(failure.text.contains("headers are too large"), what.starts_with("HTTP"), "{failure:?}");
    }
}

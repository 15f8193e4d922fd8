//! When connections are reused, that no request is sent twice, and TLS.

use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use webhook_client::{Client, ClientSettings, ErrorClass};

use crate::receiver::{FixedResolver, OK, Peer, Receiver, self_signed};
use crate::{LONG, SHORT, client, loopback, post, post_within, soon};

#[tokio::test]
async fn a_connection_is_reused_for_many_requests() {
    let receiver = Receiver::answering(OK).await;
    let client = client();
    for _ in 0..20 {
        assert_eq!(post(&client, &receiver.url()).await.unwrap().excerpt, "ok");
    }
    assert_eq!((receiver.connections(), receiver.requests().len()), (1, 20));
}

#[tokio::test]
async fn a_connection_is_not_reused_for_another_host_or_port() {
    let (one, other) = (Receiver::answering(OK).await, Receiver::answering(OK).await);
    let names = FixedResolver::of(&[("one.example", &[&["127.0.0.1"]]), ("other.example", &[&["127.0.0.1"]])]);
    let client = Client::with_resolver(loopback(), names).unwrap();
    for _ in 0..3 {
        for (host, receiver) in [("one.example", &one), ("one.example", &other), ("other.example", &one)] {
            post(&client, &format!("http://{host}:{}/", receiver.address.port())).await.unwrap();
        }
    }
    assert_eq!((one.connections(), one.requests().len()), (2, 6));
    assert_eq!((other.connections(), other.requests().len()), (1, 3));
}

/// Covers a silent close, and a close after an unrequested response.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_connection_closed_by_the_receiver_costs_no_delivery() {
    for last_words in ["", "HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"] {
        let (closed, mut is_closed) = mpsc::unbounded_channel();
        let (close, closing) = watch::channel(0);
        let receiver = Receiver::start(move |mut peer: Peer| {
            let (closed, mut closing) = (closed.clone(), closing.clone());
            async move {
                peer.answer(OK).await;
                closing.wait_for(|count| *count > peer.number).await.unwrap();
                peer.write(last_words).await;
                drop(peer);
                closed.send(()).unwrap();
            }
        })
        .await;
        let client = client();
        // Many rounds: usually, but not always, the runtime notices the end before the next request is written.
        for round in 1..=300 {
            let result = post(&client, &receiver.url()).await;
            assert_eq!(result.map(|answer| answer.status.as_u16()), Ok(200), "round {round}");
            assert_eq!((receiver.connections(), receiver.requests().len()), (round, round));
            close.send(round).unwrap();
            soon("the receiver closes", is_closed.recv()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_second_response_is_not_matched_to_the_next_request() {
    let (certificate, tls) = self_signed(&["127.0.0.1"]);
    let client = Client::new(ClientSettings { extra_roots: vec![certificate], ..loopback() }).unwrap();
    for tls in [None, Some(tls)] {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let (answered, is_answered) = watch::channel(0);
        let (written, mut is_written) = mpsc::unbounded_channel();
        let receiver = Receiver::start_on("127.0.0.1:0", tls, move |mut peer: Peer| {
            let (mut is_answered, written) = (is_answered.clone(), written.clone());
            async move {
                peer.answer(OK).await;
                is_answered.wait_for(|count| *count > peer.number).await.unwrap();
                peer.write("HTTP/1.1 299 Second\r\ncontent-length: 0\r\n\r\n").await;
                written.send(()).unwrap();
                peer.request().await; // keeps the connection open
            }
        })
        .await;
        let url = receiver.url().replace("http", scheme);
        for round in 1..=100 {
            let answer = post(&client, &url).await;
            assert_eq!(answer.map(|answer| answer.status.as_u16()), Ok(200), "round {round}");
            assert_eq!((receiver.connections(), receiver.requests().len()), (round, round), "each is sent once");
            answered.send(round).unwrap();
            soon("the second response is written", is_written.recv()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_request_that_may_have_been_processed_is_not_resent() {
    for is_reset in [false, true] {
        let receiver = Receiver::start(move |mut peer: Peer| async move {
            // The connection was used before: a client that retries on stale connections would resend the request.
            peer.answer(OK).await;
            if is_reset {
                // Closing with unread data sends a reset.
                drop(peer.stream.read_exact(&mut [0; 10]).await);
            } else {
                drop(peer.request().await);
            }
        })
        .await;
        let client = client();
        post(&client, &receiver.url()).await.unwrap();
        let failure = post(&client, &receiver.url()).await.unwrap_err();
        assert_eq!(failure.class, ErrorClass::Reset, "{failure:?}");
        assert_eq!(receiver.connections(), 1, "the request is not resent");
        post(&client, &receiver.url()).await.unwrap();
    }
}

#[tokio::test]
async fn a_late_response_is_not_matched_to_the_next_request() {
    let (time_out, timed_out) = watch::channel(false);
    let receiver = Receiver::start(move |mut peer: Peer| {
        let mut timed_out = timed_out.clone();
        async move {
            peer.request().await;
            if peer.number == 0 {
                timed_out.wait_for(|timed_out| *timed_out).await.unwrap();
                peer.write("HTTP/1.1 299 Late\r\ncontent-length: 0\r\n\r\n").await;
                peer.answer("HTTP/1.1 298 Later\r\ncontent-length: 0\r\n\r\n").await;
            } else {
                peer.write(OK).await;
            }
        }
    })
    .await;
    let client = client();
    assert_eq!(post_within(&client, &receiver.url(), SHORT).await.unwrap_err().class, ErrorClass::Timeout);
    time_out.send(true).unwrap();
    assert_eq!(post(&client, &receiver.url()).await.unwrap().status, 200);
    assert_eq!(receiver.connections(), 2);
}

#[tokio::test]
async fn a_closed_port_is_a_connect_error() {
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let failure = post(&client(), &format!("http://{free}/")).await.unwrap_err();
    assert_eq!(failure.class, ErrorClass::Connect);
    assert!(failure.text.contains("refused"), "{failure:?}");
}

#[tokio::test]
async fn an_unknown_name_is_a_dns_error() {
    // `invalid` never exists (RFC 6761), so no name server is queried.
    for client in [client(), Client::with_resolver(loopback(), FixedResolver::of(&[])).unwrap()] {
        let failure = post(&client, "http://nothing.invalid/").await.unwrap_err();
        assert_eq!(failure.class, ErrorClass::Dns);
        assert!(failure.text.contains("nothing.invalid: the name does not exist"), "{failure:?}");
    }
}

#[tokio::test]
async fn a_certificate_must_be_trusted_and_match_the_name() {
    let (certificate, tls) = self_signed(&["hooks.example", "127.0.0.1"]);
    let receiver =
        Receiver::start_on("127.0.0.1:0", Some(tls), async |mut peer: Peer| while peer.answer(OK).await {}).await;
    let port = receiver.address.port();
    let names = || FixedResolver::of(&[("hooks.example", &[&["127.0.0.1"]]), ("other.example", &[&["127.0.0.1"]])]);
    let stranger = Client::with_resolver(loopback(), names()).unwrap();
    let failure = post(&stranger, &format!("https://hooks.example:{port}/")).await.unwrap_err();
    assert_eq!(failure.class, ErrorClass::Tls);
    assert!(failure.text.contains("certificate"), "{failure:?}");
    assert_eq!(receiver.requests().len(), 0);

    let settings = ClientSettings { extra_roots: vec![certificate], ..loopback() };
    let trusting = Client::with_resolver(settings, names()).unwrap();
    let failure = post(&trusting, &format!("https://other.example:{port}/")).await.unwrap_err();
    assert_eq!(failure.class, ErrorClass::Tls);
    for host in ["hooks.example", "127.0.0.1"] {
        for _ in 0..2 {
            assert_eq!(post(&trusting, &format!("https://{host}:{port}/")).await.unwrap().status, 200);
        }
    }
    assert_eq!((receiver.connections(), receiver.requests().len()), (4, 4));
    assert!(receiver.requests()[0].contains(&format!("host: hooks.example:{port}\r\n")));
}

#[tokio::test]
async fn mixing_up_http_and_https_fails() {
    let receiver = Receiver::start(async |mut peer: Peer| {
        let _ = peer.stream.read_u8().await;
        peer.write("HTTP/1.1 400 Bad Request\r\n\r\n").await;
    })
    .await;
    let failure = post(&client(), &receiver.url().replace("http:", "https:")).await.unwrap_err();
    assert_eq!(failure.class, ErrorClass::Tls);
    let (_, tls) = self_signed(&["hooks.example"]);
    let receiver = Receiver::start_on("127.0.0.1:0", Some(tls), async |_| {}).await;
    let failure = post_within(&client(), &receiver.url(), LONG).await.unwrap_err();
    assert!(matches!(failure.class, ErrorClass::Reset | ErrorClass::Protocol), "{failure:?}");
}

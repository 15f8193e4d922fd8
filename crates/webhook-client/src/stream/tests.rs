//! Writes to sockets, and reads from them.

use std::future::poll_fn;
use std::io::IoSlice;
use std::sync::atomic::Ordering;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::permit::fixtures::revocable_permit;

const HEAD_BYTES_MAX: usize = 1_000;

async fn pair() -> (Socket, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    (Socket::new(client.unwrap()), accepted.unwrap().0)
}

#[tokio::test]
async fn the_first_bytes_of_a_request_are_written_only_while_its_permit_is_valid() {
    let (mut socket, mut receiver) = pair().await;
    let control = Arc::clone(&socket.control);
    let (permit, queue_exists) = revocable_permit();
    control.prepare_request(Some(permit.clone()), false, HEAD_BYTES_MAX);
    let first = socket.write(b"first ").await;
    queue_exists.store(false, Ordering::SeqCst);
    let rest = socket.write(b"rest").await;
    assert_eq!((first.unwrap(), rest.unwrap()), (6, 4), "a request that has begun is completed");
    assert_eq!(control.not_sent(), None);

    for vectored in [false, true] {
        control.prepare_request(Some(permit.clone()), false, HEAD_BYTES_MAX);
        let refused = poll_fn(|cx| {
            let socket = Pin::new(&mut socket);
            if vectored {
                socket.poll_write_vectored(cx, &[IoSlice::new(b"late")])
            } else {
                socket.poll_write(cx, b"late")
            }
        });
        assert!(refused.await.is_err());
        assert_eq!(control.not_sent(), Some(NotSent::PermitEnded));
    }
    drop(socket);
    let mut received = String::new();
    receiver.read_to_string(&mut received).await.unwrap();
    assert_eq!(received, "first rest");
}

#[tokio::test]
async fn nothing_is_written_to_a_reused_connection_on_which_data_or_its_end_has_arrived() {
    for is_reused in [false, true] {
        for last_words in ["", "HTTP/1.1 200 OK"] {
            let (mut socket, mut receiver) = pair().await;
            receiver.write_all(last_words.as_bytes()).await.unwrap();
            receiver.shutdown().await.unwrap();
            // The runtime is not asked: it may not know yet what has arrived.
            while !has_unread_data(&socket.tcp) {
                std::thread::yield_now();
            }
            socket.control.prepare_request(None, is_reused, HEAD_BYTES_MAX);
            let written = socket.write(b"request").await;
            assert_eq!(written.is_ok(), !is_reused, "{written:?}");
            assert_eq!(socket.control.not_sent(), is_reused.then_some(NotSent::ConnectionUnusable));
        }
    }
}

#[tokio::test]
async fn what_arrives_before_a_request_is_begun_is_not_read_as_its_response() {
    let (mut socket, mut receiver) = pair().await;
    receiver.write_all(b"HTTP/1.1 200 OK").await.unwrap();
    // The request is buffered, and its write has not succeeded yet.
    socket.control.prepare_request(None, true, HEAD_BYTES_MAX);
    assert!(socket.read_u8().await.is_err());
    assert_eq!(socket.control.not_sent(), Some(NotSent::ConnectionUnusable));
}

#[tokio::test]
async fn reading_stops_at_its_limit_until_more_is_permitted() {
    let (mut socket, mut receiver) = pair().await;
    receiver.write_all(&[b'x'; 50]).await.unwrap();
    socket.control.prepare_request(None, false, 20);
    let mut part = [0; 15];
    for _ in 0..2 {
        socket.read_exact(&mut part).await.unwrap();
    }
    let error = socket.read_exact(&mut part).await.unwrap_err();
    assert!(error.get_ref().is_some_and(|inner| inner.is::<TooManyBytes>()), "{error:?}");
    socket.control.permit_bytes(5);
    socket.read_exact(&mut part).await.unwrap();
    assert!(socket.read_exact(&mut part).await.is_err());
}

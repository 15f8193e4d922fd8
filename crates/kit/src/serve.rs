//! The HTTP/1.1 server under the router.
//!
//! Bounded in connections, header size and header time. Stops by finishing what is in flight. What is not even HTTP
//! gets a problem too: hyper answers broken heads with an empty 400, which [`Courteous`] fills in.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::{Request, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use crate::problem::{CONTENT_TYPE, Problem};

/// Who is at the other end of the connection.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

#[derive(Debug, Clone, Copy)]
pub struct ServeLimits {
    pub connections_max: usize,
    /// From a connection's last answer, or its start, to the end of the next request's head.
    pub head_time_max: Duration,
    /// How long a peer may take nothing of an answer.
    pub write_time_max: Duration,
    /// How long requests in flight may go on after stop.
    pub drain_time_max: Duration,
}

impl Default for ServeLimits {
    fn default() -> ServeLimits {
        ServeLimits {
            connections_max: 10_000,
            head_time_max: Duration::from_secs(10),
            write_time_max: Duration::from_secs(20),
            drain_time_max: Duration::from_secs(20),
        }
    }
}

const HEAD_BYTES_MAX: usize = 64 * 1024;
const HEADERS_MAX: usize = 100;

/// Serves until `stop`, then drains.
pub async fn serve(listener: TcpListener, router: Router, limits: ServeLimits, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(limits.connections_max));
    let connections = TaskTracker::new();
    let cut = CancellationToken::new();
    loop {
        let place = tokio::select! {
            place = places.clone().acquire_owned() => place,
            () = stop.cancelled() => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of file handles, mostly: others must end before this one can begin.
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let (router, stop, cut) = (router.clone(), stop.clone(), cut.clone());
        connections.spawn(async move {
            tokio::select! {
                () = connection(stream, peer, router, limits, stop) => {}
                () = cut.cancelled() => {}
            }
            drop(place);
        });
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(limits.drain_time_max, connections.wait()).await.is_err() {
        tracing::warn!(open = connections.len(), "cutting requests that are still in flight");
        cut.cancel();
        connections.wait().await;
    }
}

async fn connection(stream: TcpStream, peer: SocketAddr, router: Router, limits: ServeLimits, stop: CancellationToken) {
    let _ = stream.set_nodelay(true); // a hint; the connection works without it
    let service = router.map_request(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(Peer(peer));
        request.map(Body::new)
    });
    let mut connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time_max)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .half_close(false)
        .serve_connection(
            TokioIo::new(Courteous::new(stream, limits.write_time_max)),
            TowerToHyperService::new(service),
        );

    let mut draining = false;
    let ended = loop {
        tokio::select! {
            ended = std::future::poll_fn(|cx| connection.poll_without_shutdown(cx)) => break ended,
            () = stop.cancelled(), if !draining => {
                draining = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
        }
    };
    let timed_out = ended.as_ref().is_err_and(hyper::Error::is_timeout);
    let parts = connection.into_parts();
    let mut stream = parts.io.into_inner().stream;
    if timed_out && !parts.read_buf.is_empty() {
        let detail = format!("the request's head took longer than {} s", limits.head_time_max.as_secs());
        let problem = Problem::new(StatusCode::REQUEST_TIMEOUT, "head-timeout", detail);
        // Nobody to tell if it fails.
        let _ = tokio::time::timeout(limits.write_time_max, stream.write_all(&raw_answer(&problem))).await;
    }
    linger(stream).await;
}

/// Closing a socket with unread bytes resets it, and the peer may lose our last answer. So: say that we are done, then
/// read what is still coming, for a bounded while.
async fn linger(mut stream: TcpStream) {
    const LINGER: Duration = Duration::from_millis(500);
    const READ_BYTES_MAX: usize = 1024 * 1024;
    if stream.shutdown().await.is_err() {
        return;
    }
    let reading = async {
        let mut scrap = vec![0; 16 * 1024];
        let mut total = 0;
        while let Ok(count @ 1..) = stream.read(&mut scrap).await {
            total += count;
            if total > READ_BYTES_MAX {
                break;
            }
        }
    };
    let _ = tokio::time::timeout(LINGER, reading).await;
}

fn raw_answer(problem: &Problem) -> Vec<u8> {
    let body = problem.to_json();
    let status = problem.status();
    let reason = status.canonical_reason().unwrap_or("Error");
    let mut answer = format!(
        "HTTP/1.1 {} {reason}\r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        status.as_u16(),
        body.len()
    )
    .into_bytes();
    answer.extend(body);
    answer
}

/// A stream that gives hyper's own bare error answers a body.
///
/// Every 4xx of ours has a content type. One without is hyper's: it could not parse the request's head, answers with
/// an empty body and closes.
struct Courteous {
    stream: TcpStream,
    /// An answer put in place of hyper's, and how much of it is written.
    replacing: Option<(Vec<u8>, usize)>,
    write_time_max: Duration,
    /// Runs while the peer takes nothing.
    patience: Option<Pin<Box<Sleep>>>,
}

impl Courteous {
    fn new(stream: TcpStream, write_time_max: Duration) -> Courteous {
        Courteous { stream, replacing: None, write_time_max, patience: None }
    }

    /// Passes on how a write went; one that has made no progress for too long ends the connection. Otherwise a peer
    /// that never reads would hold its place, and our memory, for good.
    fn patiently(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.patience = None;
            return written;
        }
        let patience = self.patience.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.write_time_max)));
        ready!(patience.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn poll_replacing(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some((answer, written)) = self.replacing.take() {
            let progress = Pin::new(&mut self.stream).poll_write(cx, &answer[written..]);
            match self.patiently(cx, progress) {
                Poll::Ready(Ok(count)) if written + count < answer.len() => {
                    self.replacing = Some((answer, written + count))
                }
                Poll::Ready(Ok(_)) => break,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    self.replacing = Some((answer, written));
                    return Poll::Pending;
                }
            }
        }
        Poll::Ready(Ok(()))
    }
}

fn replacement(head: &[u8]) -> Option<Vec<u8>> {
    let is_error = head.starts_with(b"HTTP/1.1 4") || head.starts_with(b"HTTP/1.0 4");
    if !is_error || !head.ends_with(b"\r\n\r\n") {
        return None;
    }
    let head = std::str::from_utf8(head).ok()?;
    if head.to_ascii_lowercase().contains("\r\ncontent-type:") {
        return None;
    }
    let problem = match head.get(9..12)? {
        "431" => Problem::new(
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            "head-too-large",
            "the request's headers are too large or too many",
        ),
        "414" => Problem::new(StatusCode::URI_TOO_LONG, "address-too-long", "the request's address is too long"),
        _ => Problem::bad_request("malformed-request", "this is not a well-formed HTTP/1.1 request"),
    };
    Some(raw_answer(&problem))
}

impl AsyncRead for Courteous {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Courteous {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.replacing.is_none() {
            this.replacing = replacement(buf).map(|answer| (answer, 0));
        }
        if this.replacing.is_some() {
            ready!(this.poll_replacing(cx))?;
            return Poll::Ready(Ok(buf.len()));
        }
        let written = Pin::new(&mut this.stream).poll_write(cx, buf);
        this.patiently(cx, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if bufs.len() == 1 || self.replacing.is_some() {
            let first = bufs.first().map_or(&[][..], |buf| buf);
            return self.poll_write(cx, first);
        }
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, bufs);
        this.patiently(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;

    static BEGUN: tokio::sync::Notify = tokio::sync::Notify::const_new();

    /// A slow request has reached its handler.
    async fn in_flight() {
        tokio::time::timeout(Duration::from_secs(5), BEGUN.notified()).await.expect("in time");
    }

    async fn start(limits: ServeLimits) -> (SocketAddr, CancellationToken, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let slow = || async {
            BEGUN.notify_one();
            tokio::time::sleep(Duration::from_millis(300)).await;
            "slow"
        };
        let router = Router::new()
            .route("/", get(|| async { "hello" }))
            .route("/large", get(|| async { vec![b'x'; 8 * 1024 * 1024] }))
            .route(
                "/never",
                get(|| async {
                    BEGUN.notify_one();
                    std::future::pending::<&str>().await
                }),
            )
            .route("/slow", get(slow));
        let stop = CancellationToken::new();
        let task = tokio::spawn(serve(listener, router, limits, stop.clone()));
        (address, stop, task)
    }

    async fn exchange(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        String::from_utf8(answer).unwrap()
    }

    #[tokio::test]
    async fn what_is_not_http_gets_a_problem() {
        let (address, ..) = start(ServeLimits::default()).await;
        let many_headers = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(500));
        let long_header = format!("GET / HTTP/1.1\r\na: {}\r\n\r\n", "x".repeat(200_000));
        let long_address = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(70_000));
        for request in [
            "\0\0\0\0\r\n\r\n",
            "GET / HTTP/9.9\r\n\r\n",
            "GET / HTTP/1.1\r\na\0b: c\r\n\r\n",
            &many_headers,
            &long_header,
            &long_address,
        ] {
            let answer = exchange(address, request.as_bytes()).await;
            assert!(answer.starts_with("HTTP/1.1 4"), "{answer}");
            assert!(answer.contains("application/problem+json"), "{answer}");
            let body = answer.split_once("\r\n\r\n").unwrap().1;
            assert!(serde_json::from_str::<serde_json::Value>(body).is_ok(), "{answer}");
        }
    }

    #[tokio::test]
    async fn slow_headers_time_out_with_a_problem() {
        let (address, ..) =
            start(ServeLimits { head_time_max: Duration::from_millis(200), ..ServeLimits::default() }).await;
        let answer = exchange(address, b"GET / HTTP/1.1\r\nx: ").await;
        assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("head-timeout"), "{answer}");
    }

    #[tokio::test]
    async fn a_peer_that_never_reads_loses_its_place() {
        let limits =
            ServeLimits { connections_max: 1, write_time_max: Duration::from_millis(200), ..ServeLimits::default() };
        let (address, ..) = start(limits).await;
        let mut greedy = TcpStream::connect(address).await.unwrap();
        let requests = "GET /large HTTP/1.1\r\nhost: x\r\n\r\n".repeat(20);
        greedy.write_all(requests.as_bytes()).await.unwrap();
        let answer = tokio::time::timeout(Duration::from_secs(5), exchange(address, b"GET / HTTP/1.0\r\n\r\n"));
        assert!(answer.await.expect("the place is free again").ends_with("hello"));
        drop(greedy);
    }

    #[tokio::test]
    async fn stopping_cuts_what_takes_too_long() {
        let limits = ServeLimits { drain_time_max: Duration::from_millis(200), ..ServeLimits::default() };
        let (address, stop, task) = start(limits).await;
        let mut stuck = TcpStream::connect(address).await.unwrap();
        stuck.write_all(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        in_flight().await;
        stop.cancel();
        tokio::time::timeout(Duration::from_secs(5), task).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn stopping_finishes_what_is_in_flight() {
        let (address, stop, task) = start(ServeLimits::default()).await;
        let slow = tokio::spawn(async move { exchange(address, b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await });
        in_flight().await;
        stop.cancel();
        assert!(slow.await.unwrap().ends_with("slow"));
        tokio::time::timeout(Duration::from_secs(5), task).await.unwrap().unwrap();
    }
}

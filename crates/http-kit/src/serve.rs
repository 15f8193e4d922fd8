//! The HTTP/1.1 server: accepts connections and runs the router on them.
//!
//! The number of connections, the size of a request's head and the time until it is complete are bounded. On stop the
//! server finishes the requests in flight. A request that is not valid HTTP gets a problem too: hyper answers it with
//! an empty 400, which `ProblemStream` replaces.

mod problem_stream;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::{Request, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use self::problem_stream::{ProblemStream, raw_response};
use crate::client_address::TrustedProxies;
use crate::event_stream::OpenStreams;
use crate::problem::Problem;

/// The limits of the server.
#[derive(Debug, Clone, Copy)]
pub struct ServeLimits {
    pub connections_max: usize,
    /// From the start of a connection, or its last response, to the end of the next request's head.
    pub head_time_max: Duration,
    /// How long a client may accept less than 64 KiB of a response that is not yet complete.
    pub write_time_max: Duration,
    /// How long requests in flight may continue after stop.
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

/// The largest head of a request, in bytes.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// The largest number of headers of a request.
const HEADERS_MAX: usize = 100;

/// Serves until `stop`, then waits for the requests in flight, at most `drain_time_max`.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: ServeLimits,
    proxies: TrustedProxies,
    stop: CancellationToken,
) {
    let permits = Arc::new(Semaphore::new(limits.connections_max));
    let connections = TaskTracker::new();
    let abort = CancellationToken::new();
    let streams = OpenStreams::new(limits.connections_max, stop.clone());
    loop {
        let permit = tokio::select! {
            permit = permits.clone().acquire_owned() => permit,
            () = stop.cancelled() => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Usually the process has no file handles left; another connection must end first.
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let (router, stop, abort) = (router.clone(), stop.clone(), abort.clone());
        let (proxies, streams) = (proxies.clone(), streams.clone());
        connections.spawn(async move {
            tokio::select! {
                () = connection(stream, (peer, proxies, streams), router, limits, stop) => {}
                () = abort.cancelled() => {}
            }
            drop(permit);
        });
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(limits.drain_time_max, connections.wait()).await.is_err() {
        tracing::warn!(open = connections.len(), "aborting requests that are still in flight");
        abort.cancel();
        connections.wait().await;
    }
}

async fn connection(
    stream: TcpStream,
    (peer, proxies, streams): (SocketAddr, TrustedProxies, OpenStreams),
    router: Router,
    limits: ServeLimits,
    stop: CancellationToken,
) {
    let _ = stream.set_nodelay(true); // Only an optimisation.
    let service = router.map_request(move |mut request: Request<Incoming>| {
        let client = proxies.client(peer.ip(), request.headers());
        request.extensions_mut().insert(client);
        request.extensions_mut().insert(streams.clone());
        request.map(Body::new)
    });
    let mut connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time_max)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .half_close(false)
        .serve_connection(
            TokioIo::new(ProblemStream::new(stream, limits.write_time_max)),
            TowerToHyperService::new(service),
        );

    let mut draining = false;
    let ended = loop {
        tokio::select! {
            ended = std::future::poll_fn(|cx| connection.poll_without_shutdown(cx)) => break ended,
            () = stop.cancelled(), if !draining => {
                draining = true;
                std::pin::Pin::new(&mut connection).graceful_shutdown();
            }
        }
    };
    let timed_out = ended.as_ref().is_err_and(hyper::Error::is_timeout);
    let parts = connection.into_parts();
    let mut stream = parts.io.into_inner().into_inner();
    if timed_out && !parts.read_buf.is_empty() {
        let detail = format!("the head of the request did not arrive within {} s", limits.head_time_max.as_secs());
        let problem = Problem::new(StatusCode::REQUEST_TIMEOUT, "head-timeout", detail);
        // A failure has no consequence: the connection is closed anyway.
        let _ = tokio::time::timeout(limits.write_time_max, stream.write_all(&raw_response(&problem))).await;
    }
    linger(stream).await;
}

/// Shuts down the connection and reads the rest of the client's data for a bounded time. Closing a socket with unread
/// data resets it, and the client could lose the last response.
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

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;

    /// Notified when a slow request has reached its handler.
    static STARTED: tokio::sync::Notify = tokio::sync::Notify::const_new();

    /// Waits until a slow request has reached its handler.
    async fn in_flight() {
        tokio::time::timeout(Duration::from_secs(5), STARTED.notified()).await.expect("in time");
    }

    async fn start(limits: ServeLimits) -> (SocketAddr, CancellationToken, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let slow = || async {
            STARTED.notify_one();
            tokio::time::sleep(Duration::from_millis(300)).await;
            "slow"
        };
        let router = Router::new()
            .route("/", get(|| async { "hello" }))
            .route("/large", get(|| async { vec![b'x'; 8 * 1024 * 1024] }))
            .route(
                "/never",
                get(|| async {
                    STARTED.notify_one();
                    std::future::pending::<&str>().await
                }),
            )
            .route("/slow", get(slow));
        let stop = CancellationToken::new();
        let task = tokio::spawn(serve(listener, router, limits, TrustedProxies::default(), stop.clone()));
        (address, stop, task)
    }

    async fn exchange(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request).await.unwrap();
        let mut response = Vec::new();
        stream.read_to_end(&mut response).await.unwrap();
        String::from_utf8(response).unwrap()
    }

    #[tokio::test]
    async fn a_request_that_is_not_http_gets_a_problem() {
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
            let response = exchange(address, request.as_bytes()).await;
            assert!(response.starts_with("HTTP/1.1 4"), "{response}");
            assert!(response.contains("application/problem+json"), "{response}");
            let body = response.split_once("\r\n\r\n").unwrap().1;
            assert!(serde_json::from_str::<serde_json::Value>(body).is_ok(), "{response}");
        }
    }

    #[tokio::test]
    async fn slow_headers_time_out_with_a_problem() {
        let (address, ..) =
            start(ServeLimits { head_time_max: Duration::from_millis(200), ..ServeLimits::default() }).await;
        let response = exchange(address, b"GET / HTTP/1.1\r\nx: ").await;
        assert!(response.starts_with("HTTP/1.1 408") && response.contains("head-timeout"), "{response}");
    }

    #[tokio::test]
    async fn a_client_that_never_reads_is_disconnected() {
        let limits =
            ServeLimits { connections_max: 1, write_time_max: Duration::from_millis(200), ..ServeLimits::default() };
        let (address, ..) = start(limits).await;
        let mut greedy = TcpStream::connect(address).await.unwrap();
        let requests = "GET /large HTTP/1.1\r\nhost: x\r\n\r\n".repeat(20);
        greedy.write_all(requests.as_bytes()).await.unwrap();
        let response = tokio::time::timeout(Duration::from_secs(5), exchange(address, b"GET / HTTP/1.0\r\n\r\n"));
        assert!(response.await.expect("the connection is free again").ends_with("hello"));
        drop(greedy);
    }

    #[tokio::test]
    async fn a_client_that_reads_a_little_now_and_then_is_disconnected() {
        let limits =
            ServeLimits { connections_max: 1, write_time_max: Duration::from_millis(500), ..ServeLimits::default() };
        let (address, ..) = start(limits).await;
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4_096).unwrap();
        let mut trickling = socket.connect(address).await.unwrap();
        let requests = "GET /large HTTP/1.1\r\nhost: x\r\n\r\n".repeat(20);
        trickling.write_all(requests.as_bytes()).await.unwrap();
        let reading = tokio::spawn(async move {
            let mut part = [0; 256];
            while trickling.read(&mut part).await.is_ok_and(|count| count > 0) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        let response = tokio::time::timeout(Duration::from_secs(5), exchange(address, b"GET / HTTP/1.0\r\n\r\n"));
        assert!(response.await.expect("the connection is free again").ends_with("hello"));
        reading.abort();
    }

    #[tokio::test]
    async fn stopping_aborts_slow_requests() {
        let limits = ServeLimits { drain_time_max: Duration::from_millis(200), ..ServeLimits::default() };
        let (address, stop, task) = start(limits).await;
        let mut stuck = TcpStream::connect(address).await.unwrap();
        stuck.write_all(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        in_flight().await;
        stop.cancel();
        tokio::time::timeout(Duration::from_secs(5), task).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn stopping_finishes_requests_in_flight() {
        let (address, stop, task) = start(ServeLimits::default()).await;
        let slow = tokio::spawn(async move { exchange(address, b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await });
        in_flight().await;
        stop.cancel();
        assert!(slow.await.unwrap().ends_with("slow"));
        tokio::time::timeout(Duration::from_secs(5), task).await.unwrap().unwrap();
    }
}

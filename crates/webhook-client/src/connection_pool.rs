//! HTTP/1 connections to receivers, and the pool of idle ones.
//!
//! A connection has no separate task: the caller that uses it also polls it. This saves a hand-over between tasks for
//! each request. A connection that is dropped, for example at the deadline, is closed together with the rest of its
//! response.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use tokio::time::{Instant, sleep};

use crate::permit::Permit;
use crate::stream::{NotSent, Stream, StreamControl};

/// How long a connection may be idle before it is closed.
const IDLE_TIME_MAX: Duration = Duration::from_secs(30);
/// Idle connections per origin (scheme, host and port).
const IDLE_PER_ORIGIN_MAX: usize = 256;
/// The pause between two searches for connections that were idle for too long.
const SWEEP_PAUSE: Duration = Duration::from_secs(5);
/// The size of everything that a receiver sends before the end of the response's headers: also of interim (1xx) responses,
/// whose number is not limited otherwise, and of TLS's own messages.
pub(crate) const HEAD_BYTES_MAX: usize = 64 * 1024;
/// The size of a response's body as it is transferred, with the framing of its chunks and of TLS.
const TRANSFERRED_BODY_BYTES_MAX: usize = 512 * 1024;

/// A connection that speaks HTTP/1.
pub(crate) struct HttpConnection {
    sender: SendRequest<Full<Bytes>>,
    /// None once the connection has ended.
    driver: Option<Driver>,
    /// Shared with the [`Stream`], which hyper owns.
    control: Arc<StreamControl>,
    /// It has carried a request.
    is_used: bool,
}

type Driver = Pin<Box<http1::Connection<Stream, Full<Bytes>>>>;

/// Why a request has no response.
pub(crate) enum SendError {
    NotSent(NotSent),
    /// The receiver may have processed the request.
    Failed(hyper::Error),
}

impl HttpConnection {
    /// Starts HTTP on a connected stream.
    pub(crate) async fn new(stream: Stream) -> hyper::Result<HttpConnection> {
        let control = stream.control();
        let (sender, driver) = http1::Builder::new().max_buf_size(HEAD_BYTES_MAX).handshake(stream).await?;
        Ok(HttpConnection { sender, driver: Some(Box::pin(driver)), control, is_used: false })
    }

    /// Sends the request and returns the response's status and headers. Its body is read with [`HttpConnection::frame`].
    pub(crate) async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
        permit: Option<Arc<dyn Permit>>,
    ) -> Result<Response<Incoming>, SendError> {
        let HttpConnection { sender, driver, control, is_used } = self;
        let is_reused = std::mem::replace(is_used, true);
        control.prepare_request(permit, is_reused, HEAD_BYTES_MAX);
        let mut response = pin!(sender.send_request(request));
        let response = poll_fn(|cx| {
            drive(driver, cx);
            response.as_mut().poll(cx)
        })
        .await;
        control.permit_bytes(TRANSFERRED_BODY_BYTES_MAX);
        response.map_err(|error| match control.not_sent() {
            Some(reason) => SendError::NotSent(reason),
            None => SendError::Failed(error),
        })
    }

    /// Returns the next part of a response's body, or None at its end.
    pub(crate) async fn frame(&mut self, body: &mut Incoming) -> Option<hyper::Result<Frame<Bytes>>> {
        poll_fn(|cx| {
            drive(&mut self.driver, cx);
            Pin::new(&mut *body).poll_frame(cx)
        })
        .await
    }

    /// Polls the connection without waiting. Returns whether it can send another request.
    fn is_ready(&mut self) -> bool {
        drive(&mut self.driver, &mut Context::from_waker(Waker::noop()));
        self.driver.is_some() && self.sender.is_ready()
    }
}

/// Polls the connection. One that has ended is dropped, which fails the response that still waits for it.
fn drive(driver: &mut Option<Driver>, cx: &mut Context<'_>) {
    if driver.as_mut().is_some_and(|driver| driver.as_mut().poll(cx).is_ready()) {
        *driver = None;
    }
}

/// Idle connections by origin.
#[derive(Default)]
pub(crate) struct ConnectionPool(Mutex<Idle>);

#[derive(Default)]
struct Idle {
    /// Each with the time since when it is idle. The most recently used connection is reused first, so that surplus
    /// connections reach the idle limit.
    connections: HashMap<Arc<str>, Vec<(HttpConnection, Instant)>>,
    /// Whether the task that closes old connections is running.
    is_swept: bool,
}

impl ConnectionPool {
    /// Returns an idle connection. If the receiver has closed it since then, it refuses the request
    /// ([`NotSent::ConnectionUnusable`]), so that this costs no request.
    pub(crate) fn checkout(&self, origin: &str) -> Option<HttpConnection> {
        loop {
            let (connection, since) = self.lock().connections.get_mut(origin)?.pop()?;
            if since.elapsed() < IDLE_TIME_MAX {
                return Some(connection);
            }
        }
    }

    /// Stores a connection for reuse. It is closed instead if it cannot be reused, or if the origin has enough of them.
    pub(crate) fn check_in(self: &Arc<ConnectionPool>, origin: &Arc<str>, mut connection: HttpConnection) {
        if !connection.is_ready() {
            return;
        }
        let mut idle = self.lock();
        match idle.connections.get_mut(origin) {
            Some(connections) if connections.len() >= IDLE_PER_ORIGIN_MAX => return,
            Some(connections) => connections.push((connection, Instant::now())),
            None => drop(idle.connections.insert(Arc::clone(origin), vec![(connection, Instant::now())])),
        }
        if !std::mem::replace(&mut idle.is_swept, true) {
            tokio::spawn(ConnectionPool::sweep(Arc::clone(self)));
        }
    }

    /// Closes connections that were idle for too long. Ends when the pool is empty.
    async fn sweep(self: Arc<ConnectionPool>) {
        loop {
            sleep(SWEEP_PAUSE).await;
            let mut old = Vec::new(); // dropped after the lock: closing a connection takes time
            let mut idle = self.lock();
            idle.connections.retain(|_, connections| {
                old.extend(connections.extract_if(.., |(_, since)| since.elapsed() >= IDLE_TIME_MAX));
                !connections.is_empty()
            });
            if idle.connections.is_empty() {
                idle.is_swept = false;
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Idle> {
        // A panic while the lock is held leaves no partial change, so a poisoned lock is usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

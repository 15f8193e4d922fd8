//! HTTP/1 connections to subscribers, and the pool of idle ones.
//!
//! A connection has no task of its own: the caller that uses it also polls it. This saves a hand-over between tasks for
//! each request. A connection that is dropped, for example at the deadline, is closed together with the rest of its
//! response.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use tokio::time::{Instant, sleep};

use crate::send_permit::SendPermit;
use crate::stream::{Stream, StreamControl};

/// How long a connection may be idle before it is closed.
const IDLE_TIME_MAX: Duration = Duration::from_secs(30);
/// Idle connections per origin (scheme, host and port).
const IDLE_PER_ORIGIN_MAX: usize = 256;
/// The pause between two searches for connections that were idle for too long.
const SWEEP_PAUSE: Duration = Duration::from_secs(5);
/// The size of a response's status line and headers.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// A connection that speaks HTTP/1.
pub(crate) struct HttpConnection {
    sender: SendRequest<Full<Bytes>>,
    /// None once the connection has ended.
    driver: Option<Driver>,
    /// Shared with the [`Stream`], which hyper owns.
    control: Arc<StreamControl>,
}

type Driver = Pin<Box<http1::Connection<Stream, Full<Bytes>>>>;

impl HttpConnection {
    /// Starts HTTP on a connected stream.
    pub(crate) async fn new(stream: Stream) -> hyper::Result<HttpConnection> {
        let control = stream.control();
        let (sender, driver) = http1::Builder::new().max_buf_size(HEAD_BYTES_MAX).handshake(stream).await?;
        Ok(HttpConnection { sender, driver: Some(Box::pin(driver)), control })
    }

    /// Sends the request and returns the response's status and headers. Its body is read with
    /// [`HttpConnection::frame`]. Returns None if the permit has ended before the first bytes were written: nothing was
    /// sent then, and the connection has ended.
    pub(crate) async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
        permit: Option<SendPermit>,
    ) -> hyper::Result<Option<Response<Incoming>>> {
        let HttpConnection { sender, driver, control } = self;
        control.permit_next(permit);
        let mut response = pin!(sender.send_request(request));
        let response = poll_fn(|cx| {
            drive(driver, cx);
            response.as_mut().poll(cx)
        })
        .await;
        match response {
            Err(_) if control.was_refused() => Ok(None),
            response => response.map(Some),
        }
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

    /// Returns whether a connection that was idle can send another request. This looks at the socket itself: the runtime may not
    /// know yet that the receiver has closed it, or has sent something unexpected.
    fn is_ready_after_idle(&mut self) -> bool {
        self.control.ends_on_data.store(true, Ordering::Relaxed);
        let is_ready = self.is_ready();
        self.control.ends_on_data.store(false, Ordering::Relaxed);
        is_ready
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
    /// Returns an idle connection that is still open as far as this machine knows. A connection that the receiver
    /// closed while it was idle is skipped here, so it costs no delivery.
    pub(crate) fn checkout(&self, origin: &str) -> Option<HttpConnection> {
        loop {
            let (mut connection, since) = self.lock().connections.get_mut(origin)?.pop()?;
            if since.elapsed() < IDLE_TIME_MAX && connection.is_ready_after_idle() {
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

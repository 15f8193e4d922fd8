//! Connections that serve one request after the other, and rest in a pool in between.
//!
//! A connection has no task of its own: whoever uses it drives it. That saves a hand-over between tasks for every
//! request, and one that is dropped, at the deadline say, is closed with all that was still to come on it.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use tokio::time::{Instant, sleep};

use crate::dial::Stream;

const IDLE_TIME_MAX: Duration = Duration::from_secs(30);
const IDLE_PER_HOST_MAX: usize = 256;
const SWEEP_PAUSE: Duration = Duration::from_secs(5);
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// A connection with HTTP on it.
pub(crate) struct Wire {
    sender: SendRequest<Full<Bytes>>,
    /// None once it has ended.
    connection: Option<Connection>,
    is_resting: Arc<AtomicBool>,
}

type Connection = Pin<Box<http1::Connection<Stream, Full<Bytes>>>>;

impl Wire {
    pub(crate) async fn over(stream: Stream) -> hyper::Result<Wire> {
        let is_resting = stream.is_resting();
        let (sender, connection) = http1::Builder::new().max_buf_size(HEAD_BYTES_MAX).handshake(stream).await?;
        Ok(Wire { sender, connection: Some(Box::pin(connection)), is_resting })
    }

    pub(crate) async fn send(&mut self, request: Request<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
        let Wire { sender, connection, .. } = self;
        let mut answer = pin!(sender.send_request(request));
        poll_fn(|cx| {
            drive(connection, cx);
            answer.as_mut().poll(cx)
        })
        .await
    }

    pub(crate) async fn frame(&mut self, body: &mut Incoming) -> Option<hyper::Result<Frame<Bytes>>> {
        poll_fn(|cx| {
            drive(&mut self.connection, cx);
            Pin::new(&mut *body).poll_frame(cx)
        })
        .await
    }

    /// Is it open, and nothing on it that nobody asked for? Looked at without waiting.
    fn is_fit(&mut self) -> bool {
        drive(&mut self.connection, &mut Context::from_waker(Waker::noop()));
        self.connection.is_some() && self.sender.is_ready()
    }
}

/// A connection that has ended is dropped: that tells whoever still waits for something of it.
fn drive(connection: &mut Option<Connection>, cx: &mut Context<'_>) {
    if connection.as_mut().is_some_and(|connection| connection.as_mut().poll(cx).is_ready()) {
        *connection = None;
    }
}

/// Connections at rest, by scheme and authority.
#[derive(Default)]
pub(crate) struct Pool(Mutex<Resting>);

#[derive(Default)]
struct Resting {
    /// The one that came last is used first, so that those that are not needed grow old.
    wires: HashMap<Arc<str>, Vec<(Wire, Instant)>>,
    is_swept: bool,
}

impl Pool {
    /// A connection that is still open as far as this machine knows. So a request that is then lost with it may have
    /// been received; and one that a receiver closed meanwhile costs nothing.
    pub(crate) fn take(&self, key: &str) -> Option<Wire> {
        loop {
            let (mut wire, since) = self.lock().wires.get_mut(key)?.pop()?;
            if since.elapsed() < IDLE_TIME_MAX && wire.is_fit() {
                wire.is_resting.store(false, Ordering::Relaxed);
                return Some(wire);
            }
        }
    }

    pub(crate) fn put(self: &Arc<Pool>, key: &Arc<str>, mut wire: Wire) {
        wire.is_resting.store(true, Ordering::Relaxed);
        if !wire.is_fit() {
            return;
        }
        let mut resting = self.lock();
        match resting.wires.get_mut(key) {
            Some(wires) if wires.len() >= IDLE_PER_HOST_MAX => return,
            Some(wires) => wires.push((wire, Instant::now())),
            None => drop(resting.wires.insert(Arc::clone(key), vec![(wire, Instant::now())])),
        }
        if !std::mem::replace(&mut resting.is_swept, true) {
            tokio::spawn(Pool::sweep(Arc::clone(self)));
        }
    }

    /// Closes what has rested too long, until nothing is left.
    async fn sweep(self: Arc<Pool>) {
        loop {
            sleep(SWEEP_PAUSE).await;
            let mut old = Vec::new(); // dropped, and so closed, without the lock
            let mut resting = self.lock();
            resting.wires.retain(|_, wires| {
                old.extend(wires.extract_if(.., |(_, since)| since.elapsed() >= IDLE_TIME_MAX));
                !wires.is_empty()
            });
            if resting.wires.is_empty() {
                resting.is_swept = false;
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Resting> {
        // Nothing that holds the lock leaves it half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

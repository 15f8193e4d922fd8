//! A connection to a receiver as hyper reads and writes it, and what its owner controls while hyper has it.
//!
//! The checks are made at the socket, below TLS: they see each byte that arrives, and run immediately before the system call
//! that writes.

use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::permit::Permit;

/// What a receiver may send before its first response: a TLS handshake. A message of it has at most 64 KiB.
const HANDSHAKE_BYTES_MAX: usize = 128 * 1024;

/// A TCP or TLS connection.
pub(crate) enum Stream {
    Plain(TokioIo<Socket>),
    Tls(TokioIo<Box<TlsStream<Socket>>>),
}

/// The TCP connection below a [`Stream`].
pub(crate) struct Socket {
    tcp: TcpStream,
    control: Arc<StreamControl>,
}

/// The part of a stream that its owner shares with hyper.
pub(crate) struct StreamControl(Mutex<State>);

struct State {
    /// The request of which nothing is written yet. Until its first bytes are written, each read and write checks it.
    not_begun: Option<NotBegun>,
    /// How many bytes may still be read. Checked before each read, so that the last one may pass it.
    unread_bytes_max: usize,
}

struct NotBegun {
    /// None: the request is sent in any case.
    permit: Option<Arc<dyn Permit>>,
    has_permit_ended: bool,
    /// The connection has carried another request, and was idle since its response.
    is_reused: bool,
}

/// Why nothing of a request was sent. Its connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotSent {
    /// Its permit had ended.
    PermitEnded,
    /// The connection was idle, and the receiver has closed it or has sent something that no request asked for.
    ConnectionUnusable,
}

/// The receiver has sent more than it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the receiver sent too many bytes")]
pub(crate) struct TooManyBytes;

impl StreamControl {
    /// Prepares the next request. `permit` is checked immediately before its first bytes are written; None: it is sent in any
    /// case. Before its response has arrived, about `head_bytes_max` may be read.
    ///
    /// On a connection that is reused, the request is not sent if anything has arrived since the last response: a `408` for the
    /// idle time, the end of the connection, TLS's close notification, or a second response to the last request, which would
    /// be taken for the response to this one. Bytes that arrive after the first bytes of the request were written count as its
    /// response, although the receiver may not have read the request yet.
    pub(crate) fn prepare_request(&self, permit: Option<Arc<dyn Permit>>, is_reused: bool, head_bytes_max: usize) {
        let mut state = self.state();
        state.not_begun = Some(NotBegun { permit, has_permit_ended: false, is_reused });
        state.unread_bytes_max = head_bytes_max;
    }

    /// Permits to read about this many more bytes.
    pub(crate) fn permit_bytes(&self, bytes_max: usize) {
        self.state().unread_bytes_max = bytes_max;
    }

    /// After the request has failed: returns why nothing of it was sent. None: the failure has another cause.
    pub(crate) fn not_sent(&self) -> Option<NotSent> {
        match &self.state().not_begun {
            Some(NotBegun { has_permit_ended: true, .. }) => Some(NotSent::PermitEnded),
            Some(NotBegun { is_reused: true, .. }) => Some(NotSent::ConnectionUnusable),
            Some(_) | None => None,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock is held leaves no partial change, so a poisoned lock is usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Socket {
    pub(crate) fn new(tcp: TcpStream) -> Socket {
        let state = State { not_begun: None, unread_bytes_max: HANDSHAKE_BYTES_MAX };
        Socket { tcp, control: Arc::new(StreamControl(Mutex::new(state))) }
    }

    /// Runs a write, unless it would begin a request that may not be sent. A thread can still be interrupted between these
    /// checks and the system call, and nothing can be done about that.
    fn checked_write(
        &mut self,
        write: impl FnOnce(Pin<&mut TcpStream>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let mut state = self.control.state();
        if let Some(request) = &mut state.not_begun {
            if request.is_reused && has_unread_data(&self.tcp) {
                return Poll::Ready(Err(io::Error::other("the idle connection cannot be used")));
            }
            if request.permit.as_ref().is_some_and(|permit| !permit.is_valid()) {
                request.has_permit_ended = true;
                return Poll::Ready(Err(io::Error::other("the request may no longer be sent")));
            }
        }
        let written = write(Pin::new(&mut self.tcp));
        if written.is_ready() {
            state.not_begun = None;
        }
        written
    }
}

/// Whether data or the end of the connection has arrived. This looks at the socket itself: the runtime's readiness can be
/// stale, and without this check about one request in some dozens is written to a connection whose end has already arrived.
fn has_unread_data(tcp: &TcpStream) -> bool {
    let none = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];
    SockRef::from(tcp).peek(&mut [MaybeUninit::uninit()]).map_or_else(|error| !none.contains(&error.kind()), |_| true)
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Socket { tcp, control } = self.get_mut();
        let mut state = control.state();
        if state.unread_bytes_max == 0 {
            return Poll::Ready(Err(io::Error::other(TooManyBytes)));
        }
        let before = buf.filled().len();
        let read = Pin::new(tcp).poll_read(cx, buf);
        if read.is_ready() && state.not_begun.as_ref().is_some_and(|request| request.is_reused) {
            return Poll::Ready(Err(io::Error::other("the idle connection cannot be used")));
        }
        state.unread_bytes_max = state.unread_bytes_max.saturating_sub(buf.filled().len() - before);
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().checked_write(|tcp| tcp.poll_write(cx, buf))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().checked_write(|tcp| tcp.poll_write_vectored(cx, bufs))
    }
}

impl Stream {
    pub(crate) fn plain(socket: Socket) -> Stream {
        Stream::Plain(TokioIo::new(socket))
    }

    pub(crate) fn tls(tls: TlsStream<Socket>) -> Stream {
        Stream::Tls(TokioIo::new(Box::new(tls)))
    }

    pub(crate) fn control(&self) -> Arc<StreamControl> {
        let socket = match self {
            Stream::Plain(io) => io.inner(),
            Stream::Tls(io) => io.inner().get_ref().0,
        };
        Arc::clone(&socket.control)
    }
}

impl Read for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(io) => Pin::new(io).poll_read(cx, buf),
            Stream::Tls(io) => Pin::new(io).poll_read(cx, buf),
        }
    }
}

impl Write for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(io) => Pin::new(io).poll_write(cx, buf),
            Stream::Tls(io) => Pin::new(io).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(io) => Pin::new(io).poll_flush(cx),
            Stream::Tls(io) => Pin::new(io).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(io) => Pin::new(io).poll_shutdown(cx),
            Stream::Tls(io) => Pin::new(io).poll_shutdown(cx),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Stream::Plain(io) => io.is_write_vectored(),
            Stream::Tls(io) => io.is_write_vectored(),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(io) => Pin::new(io).poll_write_vectored(cx, bufs),
            Stream::Tls(io) => Pin::new(io).poll_write_vectored(cx, bufs),
        }
    }
}

#[cfg(test)]
mod tests;

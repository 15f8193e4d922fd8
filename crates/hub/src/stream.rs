//! A connection to a subscriber as hyper reads and writes it, and what its owner controls while hyper has it.

use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::send_permit::SendPermit;

/// A TCP or TLS connection.
pub(crate) struct Stream {
    io: Io,
    control: Arc<StreamControl>,
}

enum Io {
    Plain(TokioIo<TcpStream>),
    Tls(TokioIo<Box<TlsStream<TcpStream>>>),
}

/// The part of a stream that its owner shares with hyper.
#[derive(Default)]
pub(crate) struct StreamControl {
    /// The connection was idle and is checked before its reuse: any data ends it.
    pub(crate) ends_on_data: AtomicBool,
    /// The permit of a request of which nothing is written yet. Until the first bytes are written, each write checks it.
    not_begun: Mutex<Option<SendPermit>>,
    was_refused: AtomicBool,
}

impl StreamControl {
    /// Sets the permit of the next request; None: it is sent in any case.
    pub(crate) fn permit_next(&self, permit: Option<SendPermit>) {
        *self.not_begun() = permit;
    }

    /// Whether a request was not sent, not even in part, because its permit had ended. The connection has ended then.
    pub(crate) fn was_refused(&self) -> bool {
        self.was_refused.load(Ordering::Relaxed)
    }

    /// Runs a write, unless the request may no longer be sent. A thread can still be interrupted between this check and the
    /// system call, and nothing can be done about that.
    fn write(&self, write: impl FnOnce() -> Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        let mut not_begun = self.not_begun();
        if not_begun.as_ref().is_some_and(|permit| !permit.is_valid()) {
            self.was_refused.store(true, Ordering::Relaxed);
            return Poll::Ready(Err(io::Error::other("the request may no longer be sent")));
        }
        let written = write();
        if written.is_ready() {
            *not_begun = None;
        }
        written
    }

    fn not_begun(&self) -> MutexGuard<'_, Option<SendPermit>> {
        // A panic while the lock is held leaves no partial change, so a poisoned lock is usable.
        self.not_begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stream {
    pub(crate) fn plain(tcp: TokioIo<TcpStream>) -> Stream {
        Stream { io: Io::Plain(tcp), control: Arc::default() }
    }

    pub(crate) fn tls(tls: TlsStream<TcpStream>) -> Stream {
        Stream { io: Io::Tls(TokioIo::new(Box::new(tls))), control: Arc::default() }
    }

    pub(crate) fn control(&self) -> Arc<StreamControl> {
        Arc::clone(&self.control)
    }

    /// Checks the socket itself for data or its end. The runtime's readiness can be stale: without this check before
    /// each reuse, about one request in some dozens is written to a connection whose end has already arrived.
    fn has_ended(&self) -> bool {
        let tcp = match &self.io {
            Io::Plain(io) => io.inner(),
            Io::Tls(io) => io.inner().get_ref().0,
        };
        // Data also ends an idle connection: it is a `408` for the idle time, or TLS's close notification.
        let pending = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];
        SockRef::from(tcp)
            .peek(&mut [MaybeUninit::uninit()])
            .map_or_else(|error| !pending.contains(&error.kind()), |_| true)
    }
}

impl Read for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let stream = self.get_mut();
        let read = match &mut stream.io {
            Io::Plain(io) => Pin::new(io).poll_read(cx, buf),
            Io::Tls(io) => Pin::new(io).poll_read(cx, buf),
        };
        if read.is_pending() && stream.control.ends_on_data.load(Ordering::Relaxed) && stream.has_ended() {
            return Poll::Ready(Ok(())); // zero bytes mean end of stream
        }
        read
    }
}

impl Write for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let Stream { io, control } = self.get_mut();
        control.write(|| match io {
            Io::Plain(io) => Pin::new(io).poll_write(cx, buf),
            Io::Tls(io) => Pin::new(io).poll_write(cx, buf),
        })
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(io) => Pin::new(io).poll_flush(cx),
            Io::Tls(io) => Pin::new(io).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(io) => Pin::new(io).poll_shutdown(cx),
            Io::Tls(io) => Pin::new(io).poll_shutdown(cx),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(io) => io.is_write_vectored(),
            Io::Tls(io) => io.is_write_vectored(),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let Stream { io, control } = self.get_mut();
        control.write(|| match io {
            Io::Plain(io) => Pin::new(io).poll_write_vectored(cx, bufs),
            Io::Tls(io) => Pin::new(io).poll_write_vectored(cx, bufs),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::IoSlice;

    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    use super::*;
    use crate::send_permit::fixtures::revocable_permit;

    async fn pair() -> (Stream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        (Stream::plain(TokioIo::new(client.unwrap())), accepted.unwrap().0)
    }

    #[tokio::test]
    async fn the_first_bytes_of_a_request_are_written_only_while_its_permit_is_valid() {
        let (mut stream, mut receiver) = pair().await;
        let control = stream.control();
        let (permit, queue_exists) = revocable_permit();
        control.permit_next(Some(permit.clone()));
        let first = poll_fn(|cx| Pin::new(&mut stream).poll_write(cx, b"first ")).await;
        queue_exists.store(false, Ordering::SeqCst);
        let rest = poll_fn(|cx| Pin::new(&mut stream).poll_write(cx, b"rest")).await;
        assert_eq!((first.unwrap(), rest.unwrap()), (6, 4), "a request that has begun is completed");

        control.permit_next(Some(permit));
        for vectored in [false, true] {
            let refused = poll_fn(|cx| match vectored {
                false => Pin::new(&mut stream).poll_write(cx, b"late"),
                true => Pin::new(&mut stream).poll_write_vectored(cx, &[IoSlice::new(b"late")]),
            });
            assert!(refused.await.is_err() && control.was_refused());
        }
        drop(stream);
        let mut received = String::new();
        receiver.read_to_string(&mut received).await.unwrap();
        assert_eq!(received, "first rest");
    }
}

//! The stream under hyper: replaces hyper's own error responses with problems, and limits how long a write may stall.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

use crate::problem::{CONTENT_TYPE, Problem};

/// A stream that replaces hyper's own error responses, which have no body, with problems.
///
/// Every 4xx response of the application has a content type. A 4xx without one is from hyper, which could not parse
/// the head of the request and closes the connection.
pub(super) struct ProblemStream {
    stream: TcpStream,
    /// The response that replaces hyper's, and the number of its bytes already written.
    replacement: Option<(Vec<u8>, usize)>,
    write_time_max: Duration,
    /// Some while data waits for the client.
    stalled: Option<Stalled>,
}

/// A client that reads more slowly than data is written.
struct Stalled {
    /// When it must have accepted [`PROGRESS_BYTES_MIN`].
    timeout: Pin<Box<Sleep>>,
    accepted_bytes: usize,
}

/// What a client must accept of a response within `write_time_max`, if it is not yet complete. A client that reads a byte now and
/// then would otherwise occupy its connection, and its share of the memory for responses, for as long as it likes.
const PROGRESS_BYTES_MIN: usize = 64 * 1024;

impl ProblemStream {
    pub(super) fn new(stream: TcpStream, write_time_max: Duration) -> ProblemStream {
        ProblemStream { stream, replacement: None, write_time_max, stalled: None }
    }

    pub(super) fn into_inner(self) -> TcpStream {
        self.stream
    }

    /// Passes on the result of a write of this many bytes, or ends the connection if there was too little progress for
    /// `write_time_max`.
    fn with_write_timeout(
        &mut self,
        cx: &mut Context<'_>,
        bytes: usize,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let accepted_bytes = match &written {
            Poll::Ready(Ok(accepted)) if *accepted < bytes => *accepted,
            Poll::Ready(_) => {
                self.stalled = None;
                return written;
            }
            Poll::Pending => 0,
        };
        let time_max = self.write_time_max;
        let stalled = self
            .stalled
            .get_or_insert_with(|| Stalled { timeout: Box::pin(tokio::time::sleep(time_max)), accepted_bytes: 0 });
        stalled.accepted_bytes += accepted_bytes;
        if stalled.accepted_bytes >= PROGRESS_BYTES_MIN {
            self.stalled = None;
            return written;
        }
        match stalled.timeout.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => written,
        }
    }

    fn poll_replacement(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some((response, written)) = self.replacement.take() {
            let progress = Pin::new(&mut self.stream).poll_write(cx, &response[written..]);
            match self.with_write_timeout(cx, response.len() - written, progress) {
                Poll::Ready(Ok(count)) if written + count < response.len() => {
                    self.replacement = Some((response, written + count))
                }
                Poll::Ready(Ok(_)) => break,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    self.replacement = Some((response, written));
                    return Poll::Pending;
                }
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Returns the problem response for one of hyper's own error responses; None for all other data.
fn problem_response(head: &[u8]) -> Option<Vec<u8>> {
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
            "the headers of the request are too large or too many",
        ),
        "414" => Problem::new(StatusCode::URI_TOO_LONG, "address-too-long", "the URI of the request is too long"),
        _ => Problem::bad_request("malformed-request", "this is not a well-formed HTTP/1.1 request"),
    };
    Some(raw_response(&problem))
}

impl AsyncRead for ProblemStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for ProblemStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.replacement.is_none() {
            this.replacement = problem_response(buf).map(|response| (response, 0));
        }
        if this.replacement.is_some() {
            ready!(this.poll_replacement(cx))?;
            return Poll::Ready(Ok(buf.len()));
        }
        let written = Pin::new(&mut this.stream).poll_write(cx, buf);
        this.with_write_timeout(cx, buf.len(), written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if bufs.len() == 1 || self.replacement.is_some() {
            let first = bufs.first().map_or(&[][..], |buf| buf);
            return self.poll_write(cx, first);
        }
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, bufs);
        this.with_write_timeout(cx, bufs.iter().map(|buf| buf.len()).sum(), written)
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

/// Returns a problem as the bytes of a complete HTTP/1.1 response that closes the connection.
pub(super) fn raw_response(problem: &Problem) -> Vec<u8> {
    let body = problem.to_json();
    let status = problem.status();
    let reason = status.canonical_reason().unwrap_or("Error");
    let mut response = format!(
        "HTTP/1.1 {} {reason}\r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        status.as_u16(),
        body.len()
    )
    .into_bytes();
    response.extend(body);
    response
}

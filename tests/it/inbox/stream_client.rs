//! A client of server-sent events over a plain TCP connection, which a test cuts.

use serde_json::Value;
use testkit::Client;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// One event.
#[derive(Debug)]
pub(super) struct Event {
    /// The number in the id.
    pub(super) id: i64,
    /// The id as the client repeats it.
    pub(super) position: String,
    pub(super) data: Value,
}

pub(super) struct StreamClient {
    lines: BufReader<TcpStream>,
}

impl StreamClient {
    /// Connects and reads the head of the response.
    pub(super) async fn connect(client: &Client, query: &str, last_event_id: Option<&str>) -> StreamClient {
        let address = client.base().trim_start_matches("http://");
        let mut stream = TcpStream::connect(address).await.unwrap();
        let last = last_event_id.map(|id| format!("last-event-id: {id}\r\n")).unwrap_or_default();
        let head = format!(
            "GET /notify/v1/inbox/events{query} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n{last}\r\n",
            client.credential()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut connected = StreamClient { lines: BufReader::new(stream) };
        let status = connected.line().await.unwrap();
        assert!(status.contains("200"), "{status}");
        loop {
            let line = connected.line().await.unwrap();
            if line.is_empty() {
                return connected;
            }
        }
    }

    /// The next event. None if the connection ends. An event that did not arrive completely is none.
    pub(super) async fn next(&mut self) -> Option<Event> {
        let (mut position, mut data): (Option<String>, _) = (None, None);
        loop {
            let line = self.line().await?;
            // The last chunk: the stream has ended, and the connection may stay open.
            if line == "0" {
                return None;
            }
            // Sizes of chunks and other fields are ignored.
            if let Some(text) = line.strip_prefix("id: ") {
                position = Some(text.to_owned());
            } else if let Some(text) = line.strip_prefix("data: ") {
                data = serde_json::from_str(text).ok();
            } else if let (true, Some(position), Some(data)) = (line.is_empty(), &position, data.take()) {
                let id = position.split('-').next().and_then(|seq| seq.parse().ok())?;
                return Some(Event { id, position: position.clone(), data });
            }
        }
    }

    /// Resets the connection: what is on its way is lost.
    pub(super) fn cut(self) {
        self.lines.get_ref().set_zero_linger().unwrap();
    }

    async fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.lines.read_line(&mut line).await {
            Ok(0) | Err(_) => None,
            Ok(_) if !line.ends_with('\n') => None,
            Ok(_) => Some(line.trim_end_matches(['\r', '\n']).to_owned()),
        }
    }
}

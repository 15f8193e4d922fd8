//! Server-sent events of a project: its state now and every change, across reconnects.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::Client;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;

use crate::progress::fixture::{BOTH, Fixture, PROJECTS, change, create_with, mark, mark_numbers};
use crate::support::DEADLINE;

/// A client of a stream. Dropping it closes the connection.
struct Stream {
    lines: Lines<BufReader<TcpStream>>,
    status: u16,
}

#[derive(Debug, PartialEq)]
struct Event {
    id: String,
    name: String,
    data: Value,
}

impl Event {
    fn done(&self) -> i64 {
        self.data["done"].as_i64().unwrap()
    }
}

impl Stream {
    async fn open(client: &Client, id: &str, last_event_id: Option<&str>) -> Stream {
        let address = client.base().trim_start_matches("http://");
        let mut connection = TcpStream::connect(address).await.unwrap();
        let last = last_event_id.map(|id| format!("last-event-id: {id}\r\n")).unwrap_or_default();
        let request = format!(
            "GET {PROJECTS}/{id}/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n{last}connection: close\r\n\r\n",
            client.credential()
        );
        connection.write_all(request.as_bytes()).await.unwrap();
        let mut lines = BufReader::new(connection).lines();
        let status = lines.next_line().await.unwrap().unwrap();
        Stream { lines, status: status[9..12].parse().unwrap() }
    }

    /// The next event; None at the end of the stream.
    async fn next(&mut self) -> Option<Event> {
        let (mut id, mut name) = (String::new(), String::new());
        let reading = async {
            while let Some(line) = self.lines.next_line().await.unwrap() {
                match line.split_once(": ") {
                    Some(("id", value)) => id = value.to_owned(),
                    Some(("event", value)) => name = value.to_owned(),
                    Some(("data", value)) => {
                        let data = serde_json::from_str(value).unwrap();
                        return Some(Event { id: id.clone(), name: name.clone(), data });
                    }
                    // Headers, the sizes of chunks, comments.
                    _ => {}
                }
            }
            None
        };
        tokio::time::timeout(DEADLINE, reading).await.expect("an event, or the end")
    }

    /// Whether nothing arrives for a while.
    async fn is_silent(&mut self) -> bool {
        tokio::time::timeout(Duration::from_millis(700), self.next()).await.is_err()
    }
}

#[tokio::test]
async fn a_stream_shows_every_state_that_lasts_and_continues_after_a_reconnect() {
    for backend in BOTH {
        let fixture = Fixture::start(backend).await;
        let client = &fixture.client;
        let id = create_with(client, 4).await;
        let mut stream = Stream::open(client, &id, None).await;
        let first = stream.next().await.unwrap();
        assert_eq!((stream.status, first.name.as_str(), first.done()), (200, "progress", 0), "{backend:?}");
        mark(client, &id, &["item-0"]).await;
        let second = stream.next().await.unwrap();
        assert_eq!(second.done(), 1);
        assert_ne!(first.id, second.id);
        drop(stream);

        // Nothing was missed: the stream waits for the next change.
        let mut stream = Stream::open(client, &id, Some(&second.id)).await;
        assert!(stream.is_silent().await, "{backend:?}");
        drop(stream);
        // Two changes were missed: the newest state, once.
        mark_numbers(client, &id, 2).await;
        mark_numbers(client, &id, 3).await;
        let mut stream = Stream::open(client, &id, Some(&second.id)).await;
        let third = stream.next().await.unwrap();
        assert_eq!(third.done(), 3, "{backend:?}");

        // The final state ends the stream, and a client that has it gets no other one.
        let mut other = Stream::open(client, &id, None).await;
        assert_eq!(other.next().await.unwrap().id, third.id);
        mark_numbers(client, &id, 4).await;
        for stream in [&mut stream, &mut other] {
            let last = stream.next().await.unwrap();
            assert_eq!((&last.data["status"], last.done()), (&json!("DONE"), 4), "{backend:?}");
            assert!(last.data["finished_at"].is_string(), "{last:?}");
            assert_eq!(stream.next().await, None, "the stream has ended");
        }
        let mut late = Stream::open(client, &id, Some(&third.id)).await;
        let last = late.next().await.unwrap();
        assert_eq!((last.done(), late.next().await), (4, None));
        assert_eq!(Stream::open(client, &id, Some(&last.id)).await.status, 204, "{backend:?}");
        fixture.app.stop().await;
    }
}

#[tokio::test]
async fn a_stream_ends_when_the_counts_are_lost() {
    let fixture = Fixture::start(BOTH[0]).await;
    let client = &fixture.client;
    let id = create_with(client, 4).await;
    let mut stream = Stream::open(client, &id, None).await;
    assert_eq!(stream.next().await.unwrap().done(), 0);
    let () = redis::cmd("DEL").arg(fixture.key(&id)).query_async(&mut fixture.redis().await).await.unwrap();
    let lost = stream.next().await.unwrap();
    assert_eq!((lost.name.as_str(), stream.next().await), ("progress-lost", None));
    assert!(lost.data["detail"].as_str().unwrap().contains("/restart"), "{lost:?}");
    assert_eq!(change(client, &id, json!({"total": 1})).await.status, 409);
    fixture.app.stop().await;
}

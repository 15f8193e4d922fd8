//! Server-sent events: a response that stays open and sends events as they happen.
//!
//! A client that loses the connection repeats the request with the id of the last event that it has got
//! (`Last-Event-ID`). A stream ends by itself after some minutes, so that the caller is authenticated again; and it ends when
//! the process stops, so that it does not delay the stop. Streams occupy connections, so their number is limited, for each
//! caller and in total: other requests must not wait for them.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::FromRequestParts;
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream::{self, Stream, StreamExt};
use http::request::Parts;
use http::{HeaderName, HeaderValue, StatusCode, header};
use rand::Rng;
use tokio_util::sync::CancellationToken;

use crate::auth::{Caller, Principal};
use crate::extract::single_header;
use crate::problem::Problem;

/// After this time without an event a comment is sent, so that neither the client nor a proxy takes the connection for dead.
const COMMENT_PAUSE: Duration = Duration::from_secs(15);
/// A stream ends after this time. A session that has ended gets no more events then: no longer than an access token is valid.
const STREAM_TIME_MAX: Duration = Duration::from_secs(300);
/// How long a client waits before it connects again, in milliseconds.
const RETRY_MS: u32 = 1_000;
/// The longest id of an event, in bytes.
const ID_BYTES_MAX: usize = 200;
/// The largest number of open streams of a caller in one process.
const STREAMS_PER_CALLER: usize = 100;

static LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// The open streams of a server. The server adds it to the extensions of every request.
#[derive(Debug, Clone)]
pub(crate) struct OpenStreams {
    /// None: a request without a caller.
    counts: Arc<Mutex<HashMap<Option<Principal>, usize>>>,
    total_max: usize,
    /// Cancelled when the server stops.
    stop: CancellationToken,
}

/// One open stream. Dropping it makes space for another one.
#[derive(Debug)]
struct OpenStream {
    streams: OpenStreams,
    caller: Option<Principal>,
}

impl OpenStreams {
    /// Streams may occupy half of the connections.
    pub(crate) fn new(connections_max: usize, stop: CancellationToken) -> OpenStreams {
        OpenStreams { counts: Arc::default(), total_max: connections_max.div_ceil(2), stop }
    }

    fn open(&self, caller: Option<Principal>) -> Result<OpenStream, Problem> {
        let mut counts = self.counts();
        if counts.values().sum::<usize>() >= self.total_max {
            let detail = "this process has as many open streams as it accepts";
            return Err(Problem::overloaded(detail, Duration::from_secs(10)));
        }
        let count = counts.entry(caller).or_default();
        if *count >= STREAMS_PER_CALLER {
            let detail = format!("a caller may have {STREAMS_PER_CALLER} open streams: close one first");
            let problem = Problem::new(StatusCode::TOO_MANY_REQUESTS, "too-many-streams", detail);
            return Err(problem.retry_after(Duration::from_secs(10)));
        }
        *count += 1;
        drop(counts);
        Ok(OpenStream { streams: self.clone(), caller })
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<Option<Principal>, usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        let mut counts = self.streams.counts();
        if let Some(count) = counts.get_mut(&self.caller) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.caller);
            }
        }
    }
}

/// One event of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamEvent {
    /// Identifies the position in the stream; the client repeats it to continue there. One line.
    pub id: String,
    /// The name that clients listen for.
    pub name: &'static str,
    /// JSON on one line.
    pub data: String,
}

/// Extractor of a request for a stream.
#[derive(Debug)]
pub struct EventStream {
    /// The id of the last event that the client has got.
    pub last_event_id: Option<String>,
    open: OpenStream,
    comment_pause: Duration,
    time_max: Duration,
}

impl<S: Send + Sync> FromRequestParts<S> for EventStream {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<EventStream, Problem> {
        let last_event_id = single_header(&parts.headers, &LAST_EVENT_ID)?.map(str::trim).filter(|id| !id.is_empty());
        if last_event_id.is_some_and(|id| id.len() > ID_BYTES_MAX) {
            let detail = format!("last-event-id: must have at most {ID_BYTES_MAX} characters");
            return Err(Problem::bad_request("malformed-header", detail));
        }
        let last_event_id = last_event_id.map(str::to_owned);
        let caller = parts.extensions.get::<Caller>().map(|caller| caller.principal);
        let streams = parts.extensions.get::<OpenStreams>().ok_or_else(|| Problem::internal(&"no OpenStreams"))?;
        let open = streams.open(caller)?;
        // Streams that were opened together, such as after a restart, do not all end together.
        let time_max = STREAM_TIME_MAX.mul_f64(rand::rng().random_range(0.8..1.0));
        Ok(EventStream { last_event_id, open, comment_pause: COMMENT_PAUSE, time_max })
    }
}

impl EventStream {
    /// The response: the events, and comments while there are none. The stream ends with `events`, when the process stops,
    /// or after some minutes.
    pub fn respond(self, events: impl Stream<Item = StreamEvent> + Send + 'static) -> Response {
        let EventStream { open, comment_pause, time_max, .. } = self;
        let stop = open.streams.stop.clone();
        let ends = Box::pin(async move {
            tokio::select! {
                () = stop.cancelled_owned() => {}
                () = tokio::time::sleep(time_max) => {}
            }
        });
        let opening = format!("retry: {RETRY_MS}\n\n");
        let body = stream::once(async move { Bytes::from(opening) })
            .chain(with_comments(events.boxed(), comment_pause))
            .take_until(ends)
            .map(move |bytes| {
                // The stream is open as long as its body exists.
                let _ = &open;
                Ok::<Bytes, Infallible>(bytes)
            });
        let mut response = Response::new(Body::from_stream(body));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        // Proxies such as nginx would collect events otherwise.
        headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
        response
    }
}

/// Encodes the events, and adds a comment whenever there was none for a while.
fn with_comments(
    events: impl Stream<Item = StreamEvent> + Send + Unpin + 'static,
    pause: Duration,
) -> impl Stream<Item = Bytes> + Send + 'static {
    stream::unfold(events, move |mut events| async move {
        match tokio::time::timeout(pause, events.next()).await {
            Ok(Some(event)) => Some((encode(&event), events)),
            Ok(None) => None,
            Err(_) => Some((Bytes::from_static(b":\n\n"), events)),
        }
    })
}

fn encode(event: &StreamEvent) -> Bytes {
    let mut text = String::with_capacity(event.data.len() + 64);
    // A line break would end the field. Ids and data contain none; a faulty one must not forge another field.
    let one_line = |text: &str| text.replace(['\r', '\n'], " ");
    // Writing to a String does not fail.
    let _ = write!(text, "id: {}\nevent: {}\ndata: {}\n\n", one_line(&event.id), event.name, one_line(&event.data));
    Bytes::from(text)
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    fn event(id: &str, data: &str) -> StreamEvent {
        StreamEvent { id: id.to_owned(), name: "changed", data: data.to_owned() }
    }

    fn opened(stop: &CancellationToken) -> EventStream {
        let (comment_pause, time_max) = (Duration::from_millis(10), Duration::from_millis(200));
        let open = OpenStreams::new(10, stop.clone()).open(None).unwrap();
        EventStream { last_event_id: None, open, comment_pause, time_max }
    }

    async fn text_of(response: Response) -> String {
        String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
    }

    #[tokio::test]
    async fn events_are_sent_as_lines_and_a_line_break_forges_no_field() {
        let events = [event("1", r#"{"a":1}"#), event("2\nevent: forged", "x\r\nid: 9")];
        let response = opened(&CancellationToken::new()).respond(stream::iter(events));
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        let expected = "retry: 1000\n\nid: 1\nevent: changed\ndata: {\"a\":1}\n\n\
                        id: 2 event: forged\nevent: changed\ndata: x  id: 9\n\n";
        assert_eq!(text_of(response).await, expected);
    }

    #[tokio::test]
    async fn an_idle_stream_sends_comments_and_ends_after_its_time() {
        let text = text_of(opened(&CancellationToken::new()).respond(stream::pending())).await;
        let comments = text.matches(":\n\n").count();
        assert!((2..=20).contains(&comments), "{comments}");
    }

    #[tokio::test]
    async fn the_streams_of_a_caller_and_of_all_are_limited_and_a_closed_one_makes_space() {
        let streams = OpenStreams::new(2 * STREAMS_PER_CALLER + 20, CancellationToken::new());
        let caller = |number: u128| Some(Principal::User(uuid::Uuid::from_u128(number)));
        let mut open: Vec<OpenStream> = (0..STREAMS_PER_CALLER).map(|_| streams.open(caller(1)).unwrap()).collect();
        assert_eq!(streams.open(caller(1)).unwrap_err().status(), StatusCode::TOO_MANY_REQUESTS);
        open.extend((0..10).map(|number| streams.open(caller(100 + number)).unwrap()));
        assert_eq!(streams.open(caller(2)).unwrap_err().status(), StatusCode::SERVICE_UNAVAILABLE);
        let stream = EventStream {
            last_event_id: None,
            open: open.remove(0),
            comment_pause: Duration::from_secs(1),
            time_max: Duration::from_secs(60),
        };
        let response = stream.respond(stream::pending());
        assert!(streams.open(caller(2)).is_err(), "the body is the open stream");
        drop(response);
        let _other = streams.open(caller(1)).unwrap();
        drop(open);
        assert_eq!(streams.counts().len(), 1);
    }

    #[tokio::test]
    async fn a_stream_ends_when_the_server_stops() {
        let stop = CancellationToken::new();
        let mut stream = opened(&stop);
        stream.time_max = Duration::from_secs(3_600);
        let response = stream.respond(stream::pending());
        let ended = tokio::spawn(text_of(response));
        stop.cancel();
        tokio::time::timeout(Duration::from_secs(10), ended).await.unwrap().unwrap();
    }
}

//! Server-sent events: a response that stays open and sends events as they happen.
//!
//! A client that loses the connection repeats the request with the id of the last event that it has got
//! (`Last-Event-ID`). A stream ends by itself after some minutes, so that the caller is authenticated again; and it ends when
//! the process stops, so that it does not delay the stop. Streams occupy connections, so their number is limited, for each
//! caller, for each network and in total: other requests must not wait for them. A stream makes its next events when the client has
//! read the previous ones, so a client that reads nothing occupies the memory of one batch, until it is disconnected.

use std::convert::Infallible;
use std::fmt::Write;
use std::sync::Arc;
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

use crate::admission::caller_id::CallerId;
use crate::admission::fair_budget::{FairBudget, FairLimits, Reservation};
use crate::caller::Caller;
use crate::client_address::ClientAddress;
use crate::header::single_header;
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
const STREAMS_PER_CALLER: usize = 20;
/// The streams of one network are at most this part of all: it may have many users, but also one person with many accounts.
const NETWORK_PART: usize = 4;
/// When a client that is refused may try again.
const RETRY_AFTER: Duration = Duration::from_secs(10);

static LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// The open streams of a server. The server adds it to the extensions of every request.
#[derive(Debug, Clone)]
pub(crate) struct OpenStreams {
    of_caller: Arc<FairBudget>,
    of_network: Arc<FairBudget>,
    /// Cancelled when the server stops.
    stop: CancellationToken,
}

/// One open stream. Dropping it makes space for another one.
#[derive(Debug)]
struct OpenStream {
    _places: [Reservation; 2],
    stop: CancellationToken,
}

impl OpenStreams {
    /// Streams may occupy half of the connections.
    pub(crate) fn new(connections_max: usize, stop: CancellationToken) -> OpenStreams {
        let total = connections_max.div_ceil(2);
        let places = |caller_max| FairBudget::new(FairLimits { total, caller_min: 1, caller_max });
        let of_network = places(total.div_ceil(NETWORK_PART));
        OpenStreams { of_caller: places(STREAMS_PER_CALLER), of_network, stop }
    }

    fn open(&self, caller: CallerId, network: CallerId) -> Result<OpenStream, Problem> {
        let refused = |detail: &str| {
            let problem = Problem::new(StatusCode::TOO_MANY_REQUESTS, "too-many-open-streams", detail);
            problem.retry_after(RETRY_AFTER)
        };
        let of_caller = self.of_caller.reserve(caller, 1);
        let of_network = self.of_network.reserve(network, 1);
        let (Some(of_caller), Some(of_network)) = (of_caller, of_network) else {
            let detail = format!(
                "too many streams are open: one user or tenant may have {STREAMS_PER_CALLER}, and one network a part of those \
                 that this process accepts; close one, or try again later"
            );
            return Err(refused(&detail));
        };
        Ok(OpenStream { _places: [of_caller, of_network], stop: self.stop.clone() })
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
        let extensions = &parts.extensions;
        let client = extensions.get::<ClientAddress>().copied();
        let caller = CallerId::of(extensions.get::<Caller>(), client);
        let streams = extensions.get::<OpenStreams>().ok_or_else(|| Problem::internal(&"no OpenStreams"))?;
        let open = streams.open(caller, CallerId::of_network(client))?;
        // Streams that were opened together, such as after a restart, do not all end together.
        let time_max = STREAM_TIME_MAX.mul_f64(rand::rng().random_range(0.8..1.0));
        Ok(EventStream { last_event_id, open, comment_pause: COMMENT_PAUSE, time_max })
    }
}

impl EventStream {
    /// The response: the events in batches, each of which is sent at once, and comments while there are none. The stream ends with
    /// `batches`, when the process stops, or after some minutes.
    pub fn respond(self, batches: impl Stream<Item = Vec<StreamEvent>> + Send + 'static) -> Response {
        let EventStream { open, comment_pause, time_max, .. } = self;
        let stop = open.stop.clone();
        let ends = Box::pin(async move {
            tokio::select! {
                () = stop.cancelled_owned() => {}
                () = tokio::time::sleep(time_max) => {}
            }
        });
        let opening = format!("retry: {RETRY_MS}\n\n");
        let body = stream::once(async move { Bytes::from(opening) })
            .chain(with_comments(batches.boxed(), comment_pause))
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

/// Encodes the batches, and adds a comment whenever there was none for a while.
fn with_comments(
    batches: impl Stream<Item = Vec<StreamEvent>> + Send + Unpin + 'static,
    pause: Duration,
) -> impl Stream<Item = Bytes> + Send + 'static {
    stream::unfold(batches, move |mut batches| async move {
        match tokio::time::timeout(pause, batches.next()).await {
            Ok(Some(events)) => Some((encode(&events), batches)),
            Ok(None) => None,
            Err(_) => Some((Bytes::from_static(b":\n\n"), batches)),
        }
    })
}

fn encode(events: &[StreamEvent]) -> Bytes {
    let mut text = String::with_capacity(events.iter().map(|event| event.data.len() + 64).sum());
    // A line break would end the field. Ids and data contain none; a faulty one must not forge another field.
    let one_line = |text: &str| text.replace(['\r', '\n'], " ");
    for StreamEvent { id, name, data } in events {
        // Writing to a String does not fail.
        let _ = write!(text, "id: {}\nevent: {name}\ndata: {}\n\n", one_line(id), one_line(data));
    }
    Bytes::from(text)
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    fn event(id: &str, data: &str) -> StreamEvent {
        StreamEvent { id: id.to_owned(), name: "changed", data: data.to_owned() }
    }

    fn network(address: &str) -> CallerId {
        CallerId::of_network(Some(ClientAddress(address.parse().unwrap())))
    }

    fn user(number: u128) -> CallerId {
        CallerId::of_principal(crate::caller::Principal::User(uuid::Uuid::from_u128(number)))
    }

    fn opened(stop: &CancellationToken) -> EventStream {
        let (comment_pause, time_max) = (Duration::from_millis(10), Duration::from_millis(200));
        let open = OpenStreams::new(10, stop.clone()).open(network("192.0.2.1"), network("192.0.2.1")).unwrap();
        EventStream { last_event_id: None, open, comment_pause, time_max }
    }

    async fn text_of(response: Response) -> String {
        String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
    }

    #[tokio::test]
    async fn events_are_sent_as_lines_and_a_line_break_forges_no_field() {
        let events = [event("1", r#"{"a":1}"#), event("2\nevent: forged", "x\r\nid: 9")];
        let response = opened(&CancellationToken::new()).respond(stream::iter([events.to_vec()]));
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
    async fn the_streams_of_a_caller_and_of_a_network_are_limited_and_a_closed_one_makes_space() {
        let streams = OpenStreams::new(8 * STREAMS_PER_CALLER, CancellationToken::new());
        let (office, home) = (network("192.0.2.1"), network("192.0.2.2"));
        let mut open: Vec<OpenStream> =
            (0..STREAMS_PER_CALLER).map(|_| streams.open(user(1), office).unwrap()).collect();
        let refused = |caller, network| streams.open(caller, network).unwrap_err().status();
        assert_eq!(refused(user(1), home), StatusCode::TOO_MANY_REQUESTS, "of the caller");
        assert_eq!(refused(user(2), office), StatusCode::TOO_MANY_REQUESTS, "a quarter of all is of the network");
        let _home = streams.open(user(2), home).unwrap();
        let stream = EventStream {
            last_event_id: None,
            open: open.remove(0),
            comment_pause: Duration::from_secs(1),
            time_max: Duration::from_secs(60),
        };
        let response = stream.respond(stream::pending());
        assert!(streams.open(user(2), office).is_err(), "the body is the open stream");
        drop(response);
        assert!(streams.open(user(2), office).is_ok());
    }

    #[tokio::test]
    async fn many_accounts_of_one_network_do_not_open_all_streams() {
        let streams = OpenStreams::new(10_000, CancellationToken::new());
        let attack = network("192.0.2.1");
        let accounts = (0..500).flat_map(|account| (0..100).map(move |_| user(account)));
        let open: Vec<OpenStream> = accounts.filter_map(|account| streams.open(account, attack).ok()).collect();
        assert_eq!(open.len(), 1_250);
        assert!(streams.open(user(1_000), network("192.0.2.2")).is_ok());
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

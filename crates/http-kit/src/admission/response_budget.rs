//! The memory that responses occupy until their clients have read them: bounded for all responses together, and for each caller.
//!
//! A client that reads slowly, or nothing, keeps the bytes of its response in the process. One layer around all routes
//! ([`crate::web`]) reserves them when the response is ready, or as a stream produces them. They are released when the last of them is
//! handed to the kernel, or the connection ends: the reservation is a part of the buffer, wherever that is passed on to. A
//! response that finds no room becomes a 503, and a stream ends. The bytes are a [`FairBudget`], of which each caller may have some
//! pages, each network a quarter, because one person can have many accounts, and each caller half of that, because many people can
//! be behind one address.
//!
//! The budget bounds what waits, and not what a handler needs to make a response: so a page ends at a number of bytes
//! ([`crate::page::PAGE_BYTES_MAX`]), and what can be larger is a stream.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};

use crate::admission::caller_id::CallerId;
use crate::admission::fair_budget::{FairBudget, FairLimits, Reservation};
use crate::problem::Problem;

const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A response of a known size up to this is not counted: it fits into the send buffer of its socket, and a connection has one
/// response at a time.
const UNCOUNTED_BYTES_MAX: u64 = 8 * 1024;
/// What each caller may have even if others occupy most of the budget, as long as there is room at all: more than one page.
const CALLER_BYTES_MIN: usize = 2 * 1024 * 1024;

/// A network may have this part of all bytes: it may have many users, but also one person with many accounts.
const NETWORK_PART: usize = 4;

/// An extension of a response whose body is a copy of a buffer that exists once for all of them, such as a file in the binary: it
/// needs no further memory, and is not counted.
#[derive(Debug, Clone, Copy)]
pub struct SharedBody;

/// The budget of one process.
#[derive(Debug, Clone)]
pub(crate) struct ResponseBudget {
    of_caller: Arc<FairBudget>,
    of_network: Arc<FairBudget>,
}

/// The callers that a response counts for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recipient {
    pub(crate) caller: CallerId,
    pub(crate) network: CallerId,
}

/// The bytes that a response has reserved.
struct ReservedBytes {
    of_caller: Reservation,
    of_network: Reservation,
}

impl ResponseBudget {
    pub(crate) fn new(bytes_total_max: usize) -> ResponseBudget {
        let network_max = (bytes_total_max / NETWORK_PART).max(CALLER_BYTES_MIN);
        let caller_max = (network_max / 2).max(CALLER_BYTES_MIN);
        ResponseBudget::with(bytes_total_max, CALLER_BYTES_MIN, caller_max, network_max)
    }

    fn with(total: usize, caller_min: usize, caller_max: usize, network_max: usize) -> ResponseBudget {
        let budget = |caller_max| FairBudget::new(FairLimits { total, caller_min, caller_max });
        ResponseBudget { of_caller: budget(caller_max), of_network: budget(network_max) }
    }

    fn reserve(&self, recipient: Recipient, bytes: usize) -> Option<ReservedBytes> {
        let of_caller = self.of_caller.reserve(recipient.caller, bytes)?;
        Some(ReservedBytes { of_caller, of_network: self.of_network.reserve(recipient.network, bytes)? })
    }

    /// Returns the response with a body that occupies the budget of the caller, or a problem if there is no room for it.
    pub(crate) fn apply(&self, recipient: Recipient, response: Response) -> Response {
        if response.extensions().get::<SharedBody>().is_some() {
            return response;
        }
        let reserved = match response.body().size_hint().exact() {
            Some(..=UNCOUNTED_BYTES_MAX) => return response,
            Some(bytes) => self.reserve(recipient, usize::try_from(bytes).unwrap_or(usize::MAX)),
            // Its chunks are counted as they are made.
            None => self.reserve(recipient, 0),
        };
        match reserved {
            Some(reserved) => response.map(|body| Body::new(CountedBody { body, reserved })),
            None => budget_exhausted().into_response(),
        }
    }
}

impl ReservedBytes {
    fn bytes(&self) -> usize {
        self.of_caller.units()
    }

    /// Adds bytes. Returns false if there is no room for them.
    fn grow(&mut self, bytes: usize) -> bool {
        self.of_caller.grow(bytes) && self.of_network.grow(bytes)
    }

    fn split(&mut self, bytes: usize) -> ReservedBytes {
        ReservedBytes { of_caller: self.of_caller.split(bytes), of_network: self.of_network.split(bytes) }
    }
}

fn budget_exhausted() -> Problem {
    let detail = "responses that their clients have yet to read occupy the memory for responses \
                  (`response_bytes_total_max`), of which one network may use a quarter and one user or tenant half of that; read \
                  them faster, send fewer requests at the same time, or repeat this one later, with the same Idempotency-Key if it has one";
    Problem::overloaded(detail, RETRY_AFTER)
}

/// A body whose chunks occupy the budget until they are dropped.
struct CountedBody {
    body: Body,
    /// The bytes that are reserved, but not made yet.
    reserved: ReservedBytes,
}

/// The client has to repeat its request: there is no room for the next chunk of a stream.
#[derive(Debug, thiserror::Error)]
#[error("a stream ends: responses that their clients have yet to read occupy `response_bytes_total_max`")]
struct StreamEnded;

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let Some(frame) = ready!(Pin::new(&mut this.body).poll_frame(cx)?) else { return Poll::Ready(None) };
        let data = match frame.into_data() {
            Ok(data) => data,
            Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
        };
        let missing = data.len().saturating_sub(this.reserved.bytes());
        if missing > 0 && !this.reserved.grow(missing) {
            return Poll::Ready(Some(Err(axum::Error::new(StreamEnded))));
        }
        let reserved = this.reserved.split(data.len());
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(CountedBytes { data, _reserved: reserved })))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A chunk and its reservation. All copies of the buffer share it.
struct CountedBytes {
    data: Bytes,
    _reserved: ReservedBytes,
}

impl AsRef<[u8]> for CountedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;
    use http_body_util::BodyExt;

    const LARGE: usize = 100_000;

    fn network(address: &str) -> CallerId {
        CallerId::of_network(Some(crate::client_address::ClientAddress(address.parse().unwrap())))
    }

    /// A caller without credentials.
    fn stranger(address: &str) -> Recipient {
        Recipient { caller: network(address), network: network(address) }
    }

    fn response(bytes: usize) -> Response {
        Response::new(Body::from(vec![b'x'; bytes]))
    }

    fn chunks(count: usize, bytes: usize) -> Response {
        let chunk = move |_| Ok::<_, std::convert::Infallible>(Bytes::from(vec![b'x'; bytes]));
        Response::new(Body::from_stream(stream::iter((0..count).map(chunk))))
    }

    /// A budget of which a caller gets four large responses and another one gets two.
    fn budget() -> ResponseBudget {
        ResponseBudget::with(8 * LARGE, 0, usize::MAX, usize::MAX)
    }

    #[tokio::test]
    async fn a_response_occupies_the_budget_until_its_last_byte_is_dropped() {
        let (budget, caller) = (budget(), stranger("192.0.2.1"));
        let mut open: Vec<Response> = (0..4).map(|_| budget.apply(caller, response(LARGE))).collect();
        assert!(open.iter().all(|response| response.status() == 200));
        let refused = budget.apply(caller, response(LARGE));
        assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (503, &"1".parse().unwrap()));
        assert_eq!(budget.apply(stranger("192.0.2.2"), response(LARGE)).status(), 200, "of another caller");
        let bytes = open.pop().unwrap().into_body().collect().await.unwrap().to_bytes();
        assert_eq!(bytes.len(), LARGE);
        let rest = bytes.slice(LARGE - 1..);
        drop(bytes);
        assert_eq!(budget.apply(caller, response(LARGE)).status(), 503, "a byte of it is still buffered");
        drop(rest);
        assert_eq!(budget.apply(caller, response(LARGE)).status(), 200);
    }

    #[tokio::test]
    async fn a_stream_occupies_what_is_buffered_and_ends_if_it_does_not_fit() {
        let (budget, caller) = (budget(), stranger("192.0.2.1"));
        let mut reading = budget.apply(caller, chunks(100, LARGE)).into_body();
        for _ in 0..50 {
            drop(reading.frame().await.unwrap().unwrap());
        }
        let mut unread = Vec::new();
        let mut stalled = budget.apply(caller, chunks(100, LARGE)).into_body();
        let error = loop {
            match stalled.frame().await.unwrap() {
                Ok(chunk) => unread.push(chunk),
                Err(error) => break error,
            }
        };
        assert_eq!(unread.len(), 4, "half of the budget");
        assert!(error.to_string().contains("response_bytes_total_max"), "{error}");
        drop((stalled, unread));
        assert!(reading.frame().await.unwrap().is_ok());
    }

    #[test]
    fn many_accounts_of_one_network_get_the_share_of_a_network() {
        let budget = ResponseBudget::with(8 * LARGE, LARGE, usize::MAX, 2 * LARGE);
        let account = |number: u8, address: &str| Recipient {
            caller: network(&format!("198.51.100.{number}")),
            network: network(address),
        };
        let open: Vec<Response> =
            (0..6).map(|number| budget.apply(account(number, "192.0.2.1"), response(LARGE))).collect();
        assert_eq!(open.iter().filter(|response| response.status() == 200).count(), 2);
        assert_eq!(budget.apply(account(6, "192.0.2.2"), response(LARGE)).status(), 200);
        assert!(
            budget.of_caller.reserve(network("198.51.100.7"), 2 * LARGE).is_some(),
            "the refused ones are released"
        );
    }

    #[tokio::test]
    async fn a_caller_that_reads_nothing_does_not_stop_others_behind_the_same_address() {
        const TOTAL: usize = 64 * 1024 * 1024;
        let budget = ResponseBudget::new(TOTAL);
        let account =
            |number: u8| Recipient { caller: network(&format!("198.51.100.{number}")), network: network("192.0.2.1") };
        let page = || response(1024 * 1024);
        let open: Vec<Response> = (0..64).map(|_| budget.apply(account(1), page())).collect();
        assert_eq!(open.iter().filter(|response| response.status() == 200).count(), 8);
        assert_eq!(budget.apply(account(2), page()).status(), 200);
    }

    #[test]
    fn small_and_shared_responses_are_sent_whatever_others_occupy() {
        let budget = budget();
        let _open: Vec<Response> =
            (1..=8).map(|n| budget.apply(stranger(&format!("192.0.2.{n}")), response(LARGE))).collect();
        let caller = stranger("192.0.2.9");
        assert_eq!(budget.apply(caller, response(UNCOUNTED_BYTES_MAX as usize)).status(), 200);
        let mut shared = response(LARGE);
        shared.extensions_mut().insert(SharedBody);
        assert_eq!(budget.apply(caller, shared).status(), 200);
    }
}

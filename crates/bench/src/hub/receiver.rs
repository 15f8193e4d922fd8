//! A webhook receiver that counts requests and records their arrival times. It does little, because it shares the cores
//! with the measured processes.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::Outcome;

/// Paths that are counted: `/0`, `/1` and so on.
const ENDPOINTS: usize = 32;
/// The number of messages whose arrival time is recorded.
const NOTED_MAX: usize = 1 << 18;

/// An endpoint that always fails, and one that never responds.
pub(super) const FAILING: &str = "/failing";
pub(super) const SILENT: &str = "/silent";

/// Dropping it stops the server.
pub(crate) struct Receiver {
    pub(crate) address: String,
    arrivals: Arc<Arrivals>,
    serving: JoinHandle<()>,
}

struct Arrivals {
    since: Instant,
    counts: [AtomicU64; ENDPOINTS],
    /// Arrival times in nanoseconds by number. 0 means not received yet.
    arrivals: Vec<AtomicU64>,
}

impl Receiver {
    pub(crate) async fn start() -> Outcome<Receiver> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let arrivals = Arc::new(Arrivals {
            since: Instant::now(),
            counts: Default::default(),
            arrivals: (0..NOTED_MAX).map(|_| AtomicU64::new(0)).collect(),
        });
        let hearing = arrivals.clone();
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                let arrivals = hearing.clone();
                tokio::spawn(async move {
                    let answer = service_fn(|request| respond(request, &arrivals));
                    // This fails when a client disconnects, which is normal.
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
                });
            }
        });
        Ok(Receiver { address, arrivals, serving })
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The number of requests to these endpoints.
    pub(super) fn count(&self, endpoints: Range<usize>) -> u64 {
        self.arrivals.counts[endpoints].iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// The arrival time of the message with this number.
    pub(crate) fn arrival(&self, number: u64) -> Option<Instant> {
        let nanos = self.arrivals.arrivals.get(number as usize)?.load(Ordering::Relaxed);
        (nanos > 0).then(|| self.arrivals.since + Duration::from_nanos(nanos))
    }

    /// Clears the arrival times, for a run with new numbers.
    pub(super) fn clear_arrivals(&self) {
        self.arrivals.arrivals.iter().for_each(|arrival| arrival.store(0, Ordering::Relaxed));
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn respond(request: Request<Incoming>, arrivals: &Arrivals) -> Result<Response<Empty<Bytes>>, Infallible> {
    let (parts, mut body) = request.into_parts();
    let mut beginning = None;
    while let Some(Ok(frame)) = body.frame().await {
        beginning = beginning.or(frame.into_data().ok());
    }
    let path = parts.uri.path();
    let mut response = Response::new(Empty::new());
    match path {
        FAILING => *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR,
        SILENT => std::future::pending().await,
        _ => {
            if let Some(arrival) = beginning.and_then(|body| arrivals.arrivals.get(number_in(&body)?)) {
                arrival.store(arrivals.since.elapsed().as_nanos() as u64, Ordering::Relaxed);
            }
            if let Some(count) = path[1..].parse().ok().and_then(|at: usize| arrivals.counts.get(at)) {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    Ok(response)
}

/// The number at the start of a payload.
fn number_in(body: &[u8]) -> Option<usize> {
    let digits = body.strip_prefix(br#"{"n":"#)?;
    let end = digits.iter().position(|byte| !byte.is_ascii_digit())?;
    std::str::from_utf8(&digits[..end]).ok()?.parse().ok()
}

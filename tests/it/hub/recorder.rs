//! An endpoint that records requests with numbered events, and checks the order of their lanes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use testkit::{Receiver, Reply, eventually};

use crate::support::text;

/// A request with a numbered event.
#[derive(Debug, Clone)]
pub(crate) struct RecordedRequest {
    pub(crate) path: String,
    pub(crate) lane: String,
    pub(crate) n: u64,
    pub(crate) at: Instant,
    /// When the endpoint responded. `status` is the response.
    pub(crate) answered_at: Instant,
    pub(crate) status: u16,
}

/// An endpoint that records the requests with numbered events. Its response may depend on the number of earlier requests
/// with the same event.
pub(crate) struct RequestRecorder {
    receiver: Receiver,
    requests: Arc<Mutex<Vec<RecordedRequest>>>,
}

impl RequestRecorder {
    pub(crate) async fn start(
        mut answer: impl FnMut(&str, &str, u64, usize) -> (u16, Duration) + Send + 'static,
    ) -> RequestRecorder {
        let requests = Arc::<Mutex<Vec<RecordedRequest>>>::default();
        let (recorded, mut seen) = (requests.clone(), HashMap::<(String, String, u64), usize>::new());
        let receiver = Receiver::with_reply(move |received| {
            let payload = received.json();
            let (path, lane) = (received.path.clone(), text(&payload["lane"]).to_owned());
            let n = payload["n"].as_u64().unwrap();
            let times = seen.entry((path.clone(), lane.clone(), n)).or_default();
            let (status, after) = answer(&path, &lane, n, *times);
            *times += 1;
            let (at, answered_at) = (received.at, received.at + after);
            recorded.lock().unwrap().push(RecordedRequest { path, lane, n, at, answered_at, status });
            Reply { status, delay: after, ..Reply::default() }
        })
        .await;
        RequestRecorder { receiver, requests }
    }

    /// A separate URL for each name.
    pub(crate) fn url(&self, name: &str) -> String {
        format!("{}/{name}", self.receiver.url())
    }

    pub(crate) fn requests(&self) -> Vec<RecordedRequest> {
        self.requests.lock().unwrap().clone()
    }

    /// The number of distinct events with response 200, over all URLs.
    pub(crate) fn accepted_count(&self) -> usize {
        let requests = self.requests.lock().unwrap();
        let accepted = requests.iter().filter(|request| request.status == 200);
        accepted
            .map(|request| (&request.path, &request.lane, request.n))
            .collect::<std::collections::HashSet<_>>()
            .len()
    }

    pub(crate) async fn wait_until_accepted(&self, count: usize, within: Duration) {
        eventually(&format!("{count} events are accepted"), within, async || match self.accepted_count() {
            accepted if accepted >= count => Ok(()),
            other => Err(other),
        })
        .await;
    }

    /// Fails unless each lane at each URL was received as 1, 2, 3 and so on, each for the first time only after the previous
    /// one was answered with 200. Returns the number of redeliveries of accepted events.
    pub(crate) fn check_lane_order(&self) -> usize {
        // The highest number of each lane, and when it was first answered with 200.
        let mut heads: HashMap<(String, String), (u64, Option<Instant>)> = HashMap::new();
        let mut repeats = 0;
        for request in self.requests() {
            let head = heads.entry((request.path.clone(), request.lane.clone())).or_default();
            let done_at = (request.status == 200).then_some(request.answered_at);
            if request.n <= head.0 {
                repeats += usize::from(request.n < head.0 || head.1.is_some_and(|at| at <= request.at));
                if request.n == head.0 {
                    head.1 = [head.1, done_at].into_iter().flatten().min();
                }
                continue;
            }
            assert_eq!(request.n, head.0 + 1, "the next one of its lane: {request:?}");
            let is_previous_done = request.n == 1 || head.1.is_some_and(|at| at <= request.at);
            assert!(is_previous_done, "the previous one is answered first, at {:?}: {request:?}", head.1);
            *head = (request.n, done_at);
        }
        repeats
    }
}

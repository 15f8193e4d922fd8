//! What the hub's proofs stand on: a hub with its callers, and an endpoint that writes down what it sees, and when.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mailbox::database::migrations;
use pillarbox::settings::Settings;
use serde_json::{Value, json};
use testkit::{Client, Receiver, Reply, TestApp, TestDatabase, drain};

use crate::hub_delivery::{PATIENCE, caller};

/// Larger under a soak.
pub(crate) fn sized(small: usize, soaked: usize) -> usize {
    if std::env::var_os("PBX_SOAK").is_some() { soaked } else { small }
}

/// A hub, and who manages the tenant `acme` there.
pub(crate) struct World {
    pub(crate) database: TestDatabase,
    pub(crate) app: TestApp,
    pub(crate) manager: Client,
}

impl World {
    pub(crate) async fn start() -> World {
        World::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(&mut Settings)) -> World {
        let database = TestDatabase::new(&migrations()).await;
        let app = TestApp::start_with(&database, change).await;
        let manager = caller(&app, "manage", "acme").await;
        World { database, app, manager }
    }
}

pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

/// What became of an event for a subscriber, once it has this outcome.
pub(crate) async fn until_outcome(manager: &Client, event_id: &str, subscriber: &Value, wanted: &str) -> Value {
    drain(&format!("{event_id} is {wanted}"), PATIENCE, async || {
        let event = manager.get(&format!("/hub/v1/events/{event_id}")).await.json();
        let outcomes = event["outcomes"].as_array().cloned().unwrap_or_default();
        let found = outcomes.into_iter().find(|outcome| outcome["subscriber_id"] == subscriber["id"]);
        match found {
            Some(outcome) if outcome["outcome"] == wanted => Ok(outcome),
            other => Err(other),
        }
    })
    .await
}

/// The attempts of a message: status and outcome of each, in their order.
pub(crate) async fn attempts(manager: &Client, outcome: &Value) -> Vec<(Option<u64>, String)> {
    let path = format!("/hub/v1/messages/{}/attempts", text(&outcome["message_id"]));
    let items = manager.get(&path).await.json()["items"].as_array().unwrap().clone();
    items.iter().map(|item| (item["status"].as_u64(), text(&item["outcome"]).to_owned())).collect()
}

/// The dead letters of a subscriber, oldest first.
pub(crate) async fn dead_letters(manager: &Client, subscriber: &Value) -> Vec<Value> {
    let path = format!("/hub/v1/dead-letters?limit=100&subscriber_id={}", text(&subscriber["id"]));
    let mut items = manager.get(&path).await.json()["items"].as_array().unwrap().clone();
    items.reverse();
    items
}

pub(crate) async fn until_dead(manager: &Client, subscriber: &Value, count: usize) -> Vec<Value> {
    drain(&format!("{count} dead letters"), PATIENCE, async || match dead_letters(manager, subscriber).await {
        dead if dead.len() == count => Ok(dead),
        other => Err(other.len()),
    })
    .await
}

/// Numbered events of these lanes, one of each lane after the other: `{"lane": .., "n": ..}`.
pub(crate) fn numbered(lanes: usize, numbers: impl IntoIterator<Item = usize>) -> Vec<Value> {
    let event = |lane: usize, n: usize| {
        let lane = format!("lane-{lane}");
        json!({"event_type": "test.numbered", "ordering_key": lane, "payload": {"lane": lane, "n": n}})
    };
    numbers.into_iter().flat_map(|n| (0..lanes).map(move |lane| event(lane, n))).collect()
}

pub(crate) async fn post_batch(producer: &Client, events: Vec<Value>) -> Vec<String> {
    let posted = producer.post("/hub/v1/events/batch", json!({ "events": events })).await;
    assert_eq!(posted.status, 202, "{posted:?}");
    posted.json()["event_ids"].as_array().unwrap().iter().map(|id| text(id).to_owned()).collect()
}

/// A numbered event that came.
#[derive(Debug, Clone)]
pub(crate) struct Sight {
    pub(crate) path: String,
    pub(crate) lane: String,
    pub(crate) n: u64,
    pub(crate) at: Instant,
    /// When it was answered, and what.
    pub(crate) answered_at: Instant,
    pub(crate) status: u16,
}

/// An endpoint for numbered events that keeps what it saw. What it answers may depend on how often it saw the same before.
pub(crate) struct Notebook {
    receiver: Receiver,
    sights: Arc<Mutex<Vec<Sight>>>,
}

impl Notebook {
    pub(crate) async fn start(
        mut answer: impl FnMut(&str, &str, u64, usize) -> (u16, Duration) + Send + 'static,
    ) -> Notebook {
        let sights = Arc::<Mutex<Vec<Sight>>>::default();
        let (kept, mut seen) = (sights.clone(), HashMap::<(String, String, u64), usize>::new());
        let receiver = Receiver::replying(move |received| {
            let payload = received.json();
            let (path, lane) = (received.path.clone(), text(&payload["lane"]).to_owned());
            let n = payload["n"].as_u64().unwrap();
            let times = seen.entry((path.clone(), lane.clone(), n)).or_default();
            let (status, after) = answer(&path, &lane, n, *times);
            *times += 1;
            let (at, answered_at) = (received.at, received.at + after);
            kept.lock().unwrap().push(Sight { path, lane, n, at, answered_at, status });
            Reply { status, after, ..Reply::default() }
        })
        .await;
        Notebook { receiver, sights }
    }

    /// An address of its own for each name.
    pub(crate) fn url(&self, name: &str) -> String {
        format!("{}/{name}", self.receiver.url())
    }

    pub(crate) fn sights(&self) -> Vec<Sight> {
        self.sights.lock().unwrap().clone()
    }

    /// How many different events were taken, over all addresses.
    pub(crate) fn taken(&self) -> usize {
        let sights = self.sights.lock().unwrap();
        let taken = sights.iter().filter(|sight| sight.status == 200);
        taken.map(|sight| (&sight.path, &sight.lane, sight.n)).collect::<std::collections::HashSet<_>>().len()
    }

    pub(crate) async fn until_taken(&self, count: usize, within: Duration) {
        drain(&format!("{count} are taken"), within, async || match self.taken() {
            taken if taken >= count => Ok(()),
            other => Err(other),
        })
        .await;
    }

    /// Each lane at each address was seen as 1, 2, 3 and so on, each for the first time only when the one before had been
    /// answered with 200. Returns how often something came again that had been taken.
    pub(crate) fn check_order(&self) -> usize {
        // The highest number of each lane, and when it was first answered well.
        let mut heads: HashMap<(String, String), (u64, Option<Instant>)> = HashMap::new();
        let mut repeats = 0;
        for sight in self.sights() {
            let head = heads.entry((sight.path.clone(), sight.lane.clone())).or_default();
            let done_at = (sight.status == 200).then_some(sight.answered_at);
            if sight.n <= head.0 {
                repeats += usize::from(sight.n < head.0 || head.1.is_some_and(|at| at <= sight.at));
                if sight.n == head.0 {
                    head.1 = [head.1, done_at].into_iter().flatten().min();
                }
                continue;
            }
            assert_eq!(sight.n, head.0 + 1, "the next of its lane: {sight:?}");
            let before_is_done = sight.n == 1 || head.1.is_some_and(|at| at <= sight.at);
            assert!(before_is_done, "the one before it is answered, at {:?}: {sight:?}", head.1);
            *head = (sight.n, done_at);
        }
        repeats
    }
}

//! Helpers of the tests of streams: a reader, and a checker of what readers have seen that knows nothing of the server.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::{Value, json};
use testkit::{Client, Response, eventually};

use crate::support::{DEADLINE, text};

/// Creates the stream `orders` of all types, with these fields added or replaced.
pub(crate) async fn create_stream(manager: &Client, fields: Value) -> Value {
    let mut body = json!({"name": "orders", "event_types": ["*"]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let made = manager.post("/hub/v1/streams", body).await;
    assert_eq!(made.status, 201, "{made:?}");
    made.json()
}

/// Sends a request to a route of the stream `orders`.
pub(crate) async fn send(client: &Client, route: &str, body: Value) -> Response {
    client.post(&format!("/hub/v1/streams/orders/{route}"), body).await
}

pub(crate) async fn pull(client: &Client, body: Value) -> Value {
    let pulled = send(client, "pull", body).await;
    assert_eq!(pulled.status, 200, "{pulled:?}");
    pulled.json()
}

pub(crate) async fn acknowledge(client: &Client, reader: &str, pulled: &Value) {
    let answer = send(client, "acknowledge", json!({"reader": reader, "cursor": pulled["cursor"]})).await;
    assert_eq!(answer.status, 204, "{answer:?}");
}

pub(crate) async fn seek(client: &Client, body: Value) -> Value {
    let moved = send(client, "seek", body).await;
    assert_eq!(moved.status, 200, "{moved:?}");
    moved.json()
}

/// The items of a pull.
pub(crate) fn items(pulled: &Value) -> Vec<Value> {
    pulled["items"].as_array().unwrap().clone()
}

/// The numbers in the payloads of the items.
pub(crate) fn numbers(pulled: &Value) -> Vec<u64> {
    items(pulled).iter().map(|item| item["payload"]["n"].as_u64().unwrap()).collect()
}

/// Pulls until the reader has got this number of items, without an acknowledgement. Returns the last response.
pub(crate) async fn pull_count(client: &Client, reader: &str, count: usize) -> Value {
    eventually(&format!("{count} items"), DEADLINE, async || {
        let pulled = pull(client, json!({"reader": reader, "max": 1000})).await;
        if items(&pulled).len() == count { Ok(pulled) } else { Err(items(&pulled).len()) }
    })
    .await
}

/// What a reader has had of a lane: from the response of a pull until it sent the acknowledgement, its lease ended, or the reader
/// ended.
#[derive(Debug, Clone)]
struct Possession {
    reader: String,
    /// The lowest number.
    first: u64,
    from: Instant,
    to: Instant,
}

/// An acknowledgement that succeeded although the lease of the reader had ended.
#[derive(Debug)]
struct LateSuccess {
    reader: String,
    /// The lanes, each with its highest number.
    lanes: Vec<(String, u64)>,
    lease_ended: Instant,
    answered: Instant,
}

/// What all readers have seen, with the payloads `{"lane": .., "n": ..}`, where n counts from 1 in each lane.
#[derive(Default)]
pub(crate) struct Seen {
    lanes: BTreeMap<String, Vec<u64>>,
    possessions: BTreeMap<String, Vec<Possession>>,
    /// The highest number of each lane whose acknowledgement was answered with success.
    acknowledged: BTreeMap<String, u64>,
    late: Vec<LateSuccess>,
    /// Acknowledgements that were refused, because another reader had the messages.
    pub(crate) refused: usize,
}

pub(crate) type SharedSeen = Arc<Mutex<Seen>>;

impl Seen {
    /// The number of different messages that were seen.
    pub(crate) fn count(&self) -> usize {
        let newest = |numbers: &Vec<u64>| numbers.iter().copied().max().unwrap_or(0) as usize;
        self.lanes.values().map(newest).sum()
    }

    /// Fails unless every lane was seen completely and in order. A message may come again, with all that follow it.
    pub(crate) fn assert_complete(&self, lanes: usize, messages: u64) {
        assert_eq!(self.lanes.len(), lanes);
        for (lane, numbers) in &self.lanes {
            let mut newest = 0;
            for number in numbers {
                assert!(*number <= newest + 1, "{lane}: {number} after {newest} in {numbers:?}");
                newest = newest.max(*number);
            }
            assert_eq!(newest, messages, "{lane}");
        }
    }

    /// Fails if two readers have had messages of one lane at the same time.
    pub(crate) fn assert_exclusive(&self) {
        let mut handovers = 0;
        for (lane, possessions) in &self.possessions {
            let mut sorted = possessions.clone();
            sorted.sort_by_key(|possession| possession.from);
            for (index, one) in sorted.iter().enumerate() {
                for other in sorted[index + 1..].iter().filter(|other| other.reader != one.reader) {
                    assert!(other.from >= one.to, "{lane} is at two readers: {one:?} and {other:?}");
                    handovers += 1;
                }
            }
        }
        assert!(handovers > 0, "no lane ever moved to another reader");
        for late in &self.late {
            for (lane, last) in &late.lanes {
                let others = self.possessions.get(lane).into_iter().flatten();
                // It has pulled the same messages, so before the acknowledgement, and has not acknowledged them yet.
                let has_same = |other: &&Possession| other.first <= *last && other.to > late.answered;
                let during = |other: &&Possession| late.lease_ended < other.from && other.from < late.answered;
                let other =
                    others.filter(|other| other.reader != late.reader).find(|other| has_same(other) && during(other));
                assert!(other.is_none(), "{lane}: {late:?} succeeded while another had the messages: {other:?}");
            }
        }
    }

    /// `acknowledged_before`: what was acknowledged before the pull was sent. It must not come again.
    fn record(&mut self, items: &[Value], acknowledged_before: &BTreeMap<String, u64>) {
        for item in items {
            let (lane, n) = lane_and_number(item);
            assert_eq!((text(&item["lane"]), item["seq"].as_u64()), (lane, Some(n)));
            let acknowledged = acknowledged_before.get(lane).copied().unwrap_or(0);
            assert!(n > acknowledged, "{lane}: {n} comes again, although {acknowledged} is acknowledged");
            self.lanes.entry(lane.to_owned()).or_default().push(n);
        }
    }

    fn acknowledge(&mut self, items: &[Value]) {
        for (lane, n) in items.iter().map(lane_and_number) {
            let newest = self.acknowledged.entry(lane.to_owned()).or_default();
            *newest = n.max(*newest);
        }
    }
}

fn lane_and_number(item: &Value) -> (&str, u64) {
    (text(&item["payload"]["lane"]), item["payload"]["n"].as_u64().unwrap())
}

/// The lanes of the items, each with the number that `choose` selects of two.
fn lanes_of(items: &[Value], choose: fn(u64, u64) -> u64) -> Vec<(String, u64)> {
    let mut lanes: BTreeMap<String, u64> = BTreeMap::new();
    for (lane, n) in items.iter().map(lane_and_number) {
        lanes.entry(lane.to_owned()).and_modify(|chosen| *chosen = choose(*chosen, n)).or_insert(n);
    }
    lanes.into_iter().collect()
}

/// Records when its reader loses the messages, also if the task of the reader is aborted.
struct Holding {
    seen: SharedSeen,
    reader: String,
    /// The lanes, each with its lowest number.
    lanes: Vec<(String, u64)>,
    from: Instant,
}

impl Drop for Holding {
    fn drop(&mut self) {
        let to = Instant::now();
        // Also while the task of the reader panics: a second panic would abort the process.
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        for (lane, first) in self.lanes.drain(..) {
            let possession = Possession { reader: self.reader.clone(), first, from: self.from, to };
            seen.possessions.entry(lane).or_default().push(possession);
        }
    }
}

/// Reads the stream `orders` until the task is aborted: pulls, works for some milliseconds, acknowledges. A request that is
/// not answered is repeated with the next client.
pub(crate) async fn read_on(clients: Vec<Client>, reader: String, seen: SharedSeen) {
    for (round, client) in clients.iter().cycle().enumerate() {
        let body = json!({"reader": reader, "max": 1 + round * 7 % 40, "wait_ms": 200, "lease_seconds": 30});
        let acknowledged_before = seen.lock().unwrap().acknowledged.clone();
        let Ok(pulled) = client.try_send(Method::POST, "/hub/v1/streams/orders/pull", Some(body)).await else {
            continue;
        };
        assert_eq!(pulled.status, 200, "{pulled:?}");
        let (pulled, from) = (pulled.json(), Instant::now());
        let items = items(&pulled);
        let holding = Holding { seen: seen.clone(), reader: reader.clone(), lanes: lanes_of(&items, u64::min), from };
        seen.lock().unwrap().record(&items, &acknowledged_before);
        tokio::time::sleep(Duration::from_millis(round as u64 * 3 % 20)).await;
        drop(holding);
        let body = json!({"reader": reader, "cursor": pulled["cursor"]});
        let sent = client.try_send(Method::POST, "/hub/v1/streams/orders/acknowledge", Some(body)).await;
        if let Ok(answer) = sent {
            assert_eq!(answer.status, 204, "{answer:?}");
            seen.lock().unwrap().acknowledge(&items);
        }
    }
}

/// Like [`read_on`], but the reader pauses with some of the messages until its lease has ended, and then acknowledges them; and it
/// releases its parts now and then.
pub(crate) async fn read_with_pauses(client: Client, reader: String, seen: SharedSeen, db: sqlx::PgPool) {
    loop {
        let max = 1 + uuid::Uuid::new_v4().as_u128() as usize % 40;
        let acknowledged_before = seen.lock().unwrap().acknowledged.clone();
        let pulled = pull(&client, json!({"reader": reader, "max": max, "wait_ms": 300})).await;
        let (items, from) = (items(&pulled), Instant::now());
        if items.is_empty() {
            continue;
        }
        let holding = Holding { seen: seen.clone(), reader: reader.clone(), lanes: lanes_of(&items, u64::min), from };
        seen.lock().unwrap().record(&items, &acknowledged_before);
        tokio::time::sleep(Duration::from_millis(max as u64 % 20)).await;
        drop(holding);
        let lease_ended = max.is_multiple_of(3).then(Instant::now);
        if lease_ended.is_some() {
            end_lease(&db, &reader).await;
            tokio::time::sleep(Duration::from_millis(max as u64 * 3)).await;
        }
        let answer = send(&client, "acknowledge", json!({"reader": reader, "cursor": pulled["cursor"]})).await;
        let answered = Instant::now();
        match (answer.status, lease_ended) {
            (204, None) => seen.lock().unwrap().acknowledge(&items),
            (204, Some(lease_ended)) => {
                let late =
                    LateSuccess { reader: reader.clone(), lanes: lanes_of(&items, u64::max), lease_ended, answered };
                seen.lock().unwrap().late.push(late);
                seen.lock().unwrap().acknowledge(&items);
            }
            (409, Some(_)) => seen.lock().unwrap().refused += 1,
            _ => panic!("{answer:?}"),
        }
        if max.is_multiple_of(13) {
            assert_eq!(send(&client, "release", json!({ "reader": reader })).await.status, 204);
        }
    }
}

/// Ends the lease of a reader, as time does.
pub(crate) async fn end_lease(db: &sqlx::PgPool, reader: &str) {
    let query = "update pillarbox_hub.stream_reader set lease_until = clock_timestamp() where reader = $1";
    sqlx::query(query).bind(reader).execute(db).await.unwrap();
}

//! A consumer of webhooks that finds a gap in `webhook-seq` reads the missing events from a stream.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use testkit::{Client, Receiver, Reply};

use crate::hub::fixture::{Fixture, numbered_events, post_batch, subscribe, wait_for_dead_letters, wait_for_webhooks};
use crate::hub::stream_fixture::{acknowledge, create_stream, items, pull, seek};
use crate::support::text;

/// What a consumer has processed of a lane: the id and the number of each event, as the webhooks came.
type Processed = BTreeMap<String, Vec<(String, u64)>>;

/// The gaps in `webhook-seq`: the lane, the last event before the gap and the first one after it.
fn gaps(receiver: &Receiver) -> Vec<(String, String, String)> {
    let mut last: BTreeMap<String, (u64, String)> = BTreeMap::new();
    let mut gaps = Vec::new();
    for received in receiver.received().iter().filter(|received| received.status == 200) {
        let seq: u64 = received.header("webhook-seq").parse().unwrap();
        let (lane, id) = (received.header("webhook-lane").to_owned(), received.header("webhook-id").to_owned());
        if let Some((before, before_id)) = last.insert(lane.clone(), (seq, id.clone()))
            && seq != before + 1
        {
            gaps.push((lane, before_id, id));
        }
    }
    gaps
}

/// Reads the stream from the event before the gap until the event after it has come. Returns the events of the lane between.
async fn read_gap(manager: &Client, (lane, before, after): (&str, &str, &str)) -> Vec<(String, u64)> {
    seek(manager, json!({"event_id": before, "force": true})).await;
    let mut missing = Vec::new();
    loop {
        let pulled = pull(manager, json!({"reader": "repair", "max": 10, "wait_ms": 10_000})).await;
        for item in items(&pulled).iter().filter(|item| item["lane"] == lane) {
            if text(&item["event_id"]) == after {
                return missing;
            }
            missing.push((text(&item["event_id"]).to_owned(), item["payload"]["n"].as_u64().unwrap()));
        }
        assert!(!items(&pulled).is_empty(), "the event after the gap has not come");
        acknowledge(manager, "repair", &pulled).await;
    }
}

#[tokio::test]
async fn a_consumer_closes_with_a_stream_the_gap_that_webhook_seq_shows() {
    const LANES: usize = 6;
    const MESSAGES: usize = 12;
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let selection = json!({"event_types": ["test.*"], "ordering_key": "/lane"});
    // The consumer refuses the messages 4 and 5 of one lane and 9 of another: dead letters, after which the lanes continue.
    let is_lost = |payload: &Value| match (text(&payload["lane"]), payload["n"].as_u64().unwrap()) {
        ("lane-2", 4 | 5) | ("lane-4", 9) => true,
        (_, _) => false,
    };
    let receiver =
        Receiver::with_reply(move |request| Reply::status(if is_lost(&request.json()) { 400 } else { 200 })).await;
    let subscriber = subscribe(&manager, &receiver.url(), selection.clone()).await;
    create_stream(&manager, selection).await;
    post_batch(&manager, numbered_events(LANES, 1..=MESSAGES)).await;
    wait_for_webhooks(&receiver, LANES * MESSAGES).await;
    wait_for_dead_letters(&manager, &subscriber, 3).await;
    let mut processed = Processed::new();
    for received in receiver.received().iter().filter(|received| received.status == 200) {
        let number = received.json()["n"].as_u64().unwrap();
        let of_lane = processed.entry(received.header("webhook-lane").to_owned()).or_default();
        of_lane.push((received.header("webhook-id").to_owned(), number));
    }

    let gaps = gaps(&receiver);
    assert_eq!(gaps.len(), 2, "{gaps:?}");
    for (lane, before, after) in &gaps {
        let missing = read_gap(&manager, (lane, before, after)).await;
        let of_lane = processed.get_mut(lane).unwrap();
        let at = of_lane.iter().position(|(id, _)| id == after).unwrap();
        of_lane.splice(at..at, missing);
    }
    for (lane, of_lane) in &processed {
        let numbers: Vec<u64> = of_lane.iter().map(|(_, number)| *number).collect();
        assert_eq!(numbers, (1..=MESSAGES as u64).collect::<Vec<_>>(), "{lane} has no gap and nothing twice");
    }
    assert_eq!(processed.len(), LANES);
    app.stop().await;
}

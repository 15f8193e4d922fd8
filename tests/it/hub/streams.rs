//! Reading a stream: in order per key, by one reader or several, that stop at any time.

use std::time::Duration;

use serde_json::json;
use testkit::eventually;

use crate::hub::fixture::{Fixture, numbered_events, post, post_batch, replay_fanout, test_size};
use crate::hub::stream_fixture::{
    SharedSeen, acknowledge, create_stream, end_lease, items, numbers, pull, pull_count, read_on, read_with_pauses,
    send,
};
use crate::support::{DEADLINE, caller, text};

/// A number that is different in each run.
fn random(below: usize) -> usize {
    uuid::Uuid::new_v4().as_u128() as usize % below
}

#[tokio::test]
async fn a_stream_contains_the_events_that_match_it_in_the_order_of_their_keys() {
    const LANES: usize = 40;
    let Fixture { database, app, manager } = Fixture::start().await;
    let early = post(&manager, "test.numbered", json!({"lane": "lane-0", "n": 0}), Some("lane-0")).await;
    eventually("the early event is fanned out", DEADLINE, async || {
        manager.get(&format!("/hub/v1/events/{early}")).await.json()["status"] == "completed"
    })
    .await;
    let filter = json!([{"pointer": "/n", "op": "ne", "value": 3}]);
    create_stream(&manager, json!({"event_types": ["test.*"], "filter": filter})).await;
    let other = caller(&app, "manage", "other").await;
    create_stream(&other, json!({})).await;
    post(&manager, "other.type", json!({"n": 1}), None).await;
    for n in 1..=5 {
        post_batch(&manager, numbered_events(LANES, [n])).await;
    }
    let unkeyed = post(&manager, "test.unkeyed", json!({"n": 1}), None).await;
    let pulled = pull_count(&manager, "a", LANES * 4 + 1).await;
    for lane in 0..LANES {
        let lane = format!("lane-{lane}");
        let of_lane: Vec<_> = items(&pulled).into_iter().filter(|item| item["lane"] == lane.as_str()).collect();
        let numbers: Vec<_> = of_lane.iter().map(|item| item["payload"]["n"].as_u64().unwrap()).collect();
        let sequence: Vec<_> = of_lane.iter().map(|item| item["seq"].as_u64().unwrap()).collect();
        assert_eq!((numbers, sequence), (vec![1, 2, 4, 5], vec![1, 2, 3, 4]), "{lane}");
    }
    let last = items(&pulled).pop().unwrap();
    assert_eq!((text(&last["event_id"]), &last["source"]), (unkeyed.as_str(), &json!("hub")));
    assert!(last.get("lane").is_none() && last.get("seq").is_none() && last.get("ordering_key").is_none());
    // Without an acknowledgement, everything comes again; a repair of fan-out adds nothing.
    // Except an event from within the allowed difference of clocks before the creation.
    let early = "delete from pillarbox.log where source = 'hub' and payload->>'n' = '0'";
    sqlx::query(early).execute(database.pool()).await.unwrap();
    replay_fanout(database.pool(), false).await;
    pull_count(&manager, "a", LANES * 4 + 1).await;
    acknowledge(&manager, "a", &pulled).await;
    acknowledge(&manager, "a", &pulled).await;
    assert_eq!(items(&pull(&manager, json!({"reader": "a"})).await).len(), 0);
    assert_eq!(items(&pull(&other, json!({"reader": "a"})).await).len(), 0, "nothing of another tenant");
    let messages = "select count(*) from pillarbox_hub.message";
    let messages: i64 = sqlx::query_scalar(messages).fetch_one(database.pool()).await.unwrap();
    assert_eq!(messages, 0, "dispatchers see nothing of streams");
    // A pointer into the payload names the lanes.
    let change = json!({"ordering_key": "/customer", "filter": null});
    let changed = manager.send(hyper::Method::PATCH, "/hub/v1/streams/orders", Some(change)).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    for n in 1..=3 {
        post(&manager, "test.numbered", json!({"customer": 7, "n": n}), Some(&format!("key-{n}"))).await;
    }
    let pulled = pull_count(&manager, "a", 3).await;
    assert_eq!(numbers(&pulled), [1, 2, 3]);
    assert!(items(&pulled).iter().all(|item| item["lane"] == "7"));
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_is_killed_at_random_misses_nothing_and_gets_nothing_acknowledged_again() {
    const LANES: usize = 24;
    let (messages, kills) = (test_size(40, 400), test_size(30, 300));
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    create_stream(&manager, json!({})).await;
    let seen = SharedSeen::default();
    let producer = tokio::spawn({
        let manager = manager.clone();
        async move {
            for n in 1..=messages {
                post_batch(&manager, numbered_events(LANES, [n])).await;
            }
        }
    });
    for _ in 0..kills {
        let reader = tokio::spawn(read_on(vec![manager.clone()], "reader".to_owned(), seen.clone()));
        tokio::time::sleep(Duration::from_millis(random(60) as u64)).await;
        reader.abort();
        assert!(reader.await.unwrap_err().is_cancelled(), "the reader failed");
    }
    producer.await.unwrap();
    let reader = tokio::spawn(read_on(vec![manager.clone()], "reader".to_owned(), seen.clone()));
    eventually("everything is read", DEADLINE, async || seen.lock().unwrap().count() == LANES * messages).await;
    reader.abort();
    assert!(reader.await.unwrap_err().is_cancelled(), "the reader failed");
    seen.lock().unwrap().assert_complete(LANES, messages as u64);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_that_join_and_stop_never_have_one_key_at_once() {
    const LANES: usize = 24;
    let (messages, changes) = (test_size(60, 600), test_size(16, 200));
    let Fixture { database, app, manager } = Fixture::start().await;
    create_stream(&manager, json!({})).await;
    let seen = SharedSeen::default();
    let start = |name: &str| tokio::spawn(read_on(vec![manager.clone()], name.to_owned(), seen.clone()));
    let producer = tokio::spawn({
        let manager = manager.clone();
        async move {
            for n in 1..=messages {
                post_batch(&manager, numbered_events(LANES, [n])).await;
                tokio::time::sleep(Duration::from_millis(15)).await;
            }
        }
    });
    let mut readers = vec![("a".to_owned(), start("a")), ("b".to_owned(), start("b"))];
    for change in 0..changes {
        tokio::time::sleep(Duration::from_millis(random(80) as u64)).await;
        if readers.len() < 3 {
            // A process that starts again has another name.
            let name = format!("reader-{change}");
            let reader = start(&name);
            readers.push((name, reader));
            continue;
        }
        let (name, reader) = readers.swap_remove(random(readers.len()));
        reader.abort();
        assert!(reader.await.unwrap_err().is_cancelled(), "the reader failed");
        if change % 2 == 0 {
            assert_eq!(send(&manager, "release", json!({ "reader": name })).await.status, 204);
        } else {
            end_lease(database.pool(), &name).await;
        }
    }
    producer.await.unwrap();
    // The last pull of a reader that was stopped may arrive after its release, and then has its parts for a lease of 30 s.
    let all_read = async || seen.lock().unwrap().count() == LANES * messages;
    eventually("everything is read", 3 * DEADLINE, all_read).await;
    let live: Vec<&str> = readers.iter().map(|(name, _)| name.as_str()).collect();
    eventually("every part has a reader", 3 * DEADLINE, async || {
        let state = manager.get("/hub/v1/streams/orders").await.json();
        let mut parts = state["parts"].as_array().unwrap().iter();
        if parts.all(|part| live.iter().any(|name| part["reader"] == *name)) { Ok(()) } else { Err(state) }
    })
    .await;
    for (_, reader) in readers {
        reader.abort();
        assert!(reader.await.unwrap_err().is_cancelled(), "the reader failed");
    }
    seen.lock().unwrap().assert_complete(LANES, messages as u64);
    seen.lock().unwrap().assert_exclusive();
    app.stop().await;
}

/// More readers than parts. Each of them pauses beyond its lease now and then, and acknowledges too late.
#[tokio::test(flavor = "multi_thread")]
async fn twenty_readers_that_pause_beyond_their_leases_never_have_one_key_at_once() {
    const LANES: usize = 32;
    let messages = test_size(40, 1_000);
    let Fixture { database, app, manager } = Fixture::start().await;
    create_stream(&manager, json!({})).await;
    let seen = SharedSeen::default();
    let reader = |number: usize| {
        let (client, db) = (manager.clone(), database.pool().clone());
        tokio::spawn(read_with_pauses(client, format!("reader-{number:02}"), seen.clone(), db))
    };
    let readers: Vec<_> = (0..20).map(reader).collect();
    for n in 1..=messages {
        post_batch(&manager, numbered_events(LANES, [n])).await;
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    eventually("everything is read", DEADLINE, async || seen.lock().unwrap().count() == LANES * messages).await;
    for reader in readers {
        assert!(!reader.is_finished(), "{:?}", reader.await);
        reader.abort();
        assert!(reader.await.unwrap_err().is_cancelled(), "the reader failed");
    }
    seen.lock().unwrap().assert_complete(LANES, messages as u64);
    seen.lock().unwrap().assert_exclusive();
    assert!(seen.lock().unwrap().refused > 0, "no reader ever lost its lease");
    app.stop().await;
}

#[tokio::test]
async fn a_large_backlog_is_returned_in_responses_of_a_bounded_size() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    create_stream(&manager, json!({})).await;
    let text = "x".repeat(250 * 1024);
    for n in 1..=30 {
        post(&manager, "test.large", json!({"n": n, "text": text}), Some("key")).await;
    }
    let mut seen = Vec::new();
    while seen.len() < 30 {
        let pulled = send(&manager, "pull", json!({"reader": "a", "max": 1000, "wait_ms": 5000})).await;
        assert!(pulled.status == 200 && pulled.text.len() < 2 * 1024 * 1024, "{} bytes", pulled.text.len());
        let pulled = pulled.json();
        seen.extend(numbers(&pulled));
        acknowledge(&manager, "a", &pulled).await;
    }
    assert_eq!(seen, (1..=30).collect::<Vec<u64>>());
    app.stop().await;
}

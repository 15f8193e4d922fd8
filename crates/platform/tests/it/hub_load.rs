//! The loads that the hub is made for.

use std::time::{Duration, Instant};

use serde_json::json;
use testkit::Client;

use crate::hub_delivery::{PATIENCE, subscribe};
use crate::hub_world::{Notebook, Sight, World, numbered, post_batch, sized};

/// Each event is for two, and every other one for a third: two and a half.
async fn two_and_a_half(manager: &Client, notebook: &Notebook) {
    let odd = json!([{"pointer": "/odd", "op": "eq", "value": true}]);
    for (name, filter) in [("a", json!(null)), ("b", json!(null)), ("c", odd)] {
        subscribe(manager, &notebook.url(name), json!({"filter": filter})).await;
    }
}

/// The median, and what 99 of 100 stay below.
fn percentiles(mut times: Vec<Duration>) -> (Duration, Duration) {
    times.sort_unstable();
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_a_second_for_two_and_a_half_each_come_once_and_soon() {
    const PER_SECOND: usize = 200;
    const LANES: usize = 200;
    let seconds = sized(5, 60);
    let world = World::start_with(|settings| settings.pool_max = 10).await;
    let notebook = Notebook::start(|_, _, _, _| (200, Duration::ZERO)).await;
    two_and_a_half(&world.manager, &notebook).await;
    let (began, mut posting) = (Instant::now(), Vec::new());
    for number in 0..PER_SECOND * seconds {
        let due = Duration::from_secs_f64(number as f64 / PER_SECOND as f64);
        tokio::time::sleep_until((began + due).into()).await;
        let (lane, n, client) = (format!("lane-{}", number % LANES), number / LANES + 1, world.manager.clone());
        posting.push(tokio::spawn(async move {
            let payload = json!({"lane": lane, "n": n, "odd": number % 2 == 1});
            let event = json!({"event_type": "test.load", "payload": payload, "ordering_key": lane});
            // As a client should: again, under the same key, when the answer says later.
            let client = client.with_header("idempotency-key", &format!("event-{number}"));
            while client.post("/hub/v1/events", event.clone()).await.status != 202 {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            ((lane, n as u64), began + due, Instant::now())
        }));
    }
    let (mut accepted, mut waits) = (std::collections::HashMap::new(), Vec::new());
    for posted in posting {
        let (event, due_at, at) = posted.await.unwrap();
        accepted.insert(event, at);
        waits.push(at - due_at);
    }
    let all = PER_SECOND * seconds * 5 / 2;
    notebook.until_taken(all, PATIENCE).await;
    world.app.stop().await;
    assert_eq!((notebook.check_order(), notebook.sights().len()), (0, all), "each once, in order");
    let sights = notebook.sights();
    let since = |sight: &Sight| sight.at.saturating_duration_since(accepted[&(sight.lane.clone(), sight.n)]);
    // Without the first second, in which the subscribers are looked up and connected to.
    let later = sights.iter().filter(|sight| sight.n > 1);
    let (taken_in, (half, p99)) = (percentiles(waits).1, percentiles(later.map(since).collect()));
    println!("taken in {taken_in:?}; from there to received: half within {half:?}, 99 % within {p99:?}");
    // A machine that is too busy to take events in time is too busy to deliver them; and a build for tests is slow.
    let soon = Duration::from_secs(sized(5, 1) as u64);
    assert!(p99 < soon.max(taken_in * 4), "99 % within {p99:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_two_thousand_is_taken_and_delivered_once() {
    const BURST: usize = 2_000;
    let world = World::start().await;
    let notebook = Notebook::start(|_, _, _, _| (200, Duration::ZERO)).await;
    subscribe(&world.manager, &notebook.url("a"), json!({})).await;
    subscribe(&world.manager, &notebook.url("b"), json!({})).await;
    let posting = numbered(50, 1..=BURST / 50).chunks(500).map(<[_]>::to_vec).collect::<Vec<_>>();
    for batch in posting {
        post_batch(&world.manager, batch).await;
    }
    notebook.until_taken(2 * BURST, PATIENCE * 2).await;
    world.app.stop().await;
    assert_eq!((notebook.check_order(), notebook.sights().len()), (0, 2 * BURST), "each once, in order");
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_lanes_of_a_hundred_keep_their_order_through_random_failures() {
    const LANES: usize = 20;
    let per_lane = sized(100, 1_000);
    let world = World::start().await;
    let mut failed = 0;
    let notebook = Notebook::start(move |_, _, _, times| {
        // Two of each lane, or so, and one of those twice.
        let fails = uuid::Uuid::new_v4().as_u128() % 50 < 1 && times < 2;
        failed += u32::from(fails);
        (if fails { [500, 503, 429][failed as usize % 3] } else { 200 }, Duration::ZERO)
    })
    .await;
    subscribe(&world.manager, &notebook.url("a"), json!({"retry_backoff_seconds": [1, 1, 1]})).await;
    for from in (1..=per_lane).step_by(25) {
        post_batch(&world.manager, numbered(LANES, from..from + 25)).await;
    }
    notebook.until_taken(LANES * per_lane, PATIENCE * 3).await;
    world.app.stop().await;
    assert_eq!(notebook.check_order(), 0);
    let failures = notebook.sights().iter().filter(|sight| sight.status != 200).count();
    assert!(failures > 10, "{failures}");
    assert_eq!(notebook.sights().len() - failures, LANES * per_lane, "each once");
}

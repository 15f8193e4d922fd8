//! One subscriber's trouble is its own.

use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::json;
use testkit::{Receiver, Reply, drain};

use crate::hub_delivery::{PATIENCE, subscribe, until_received};
use crate::hub_world::{Notebook, World, numbered, post_batch, text, until_outcome};

#[tokio::test(flavor = "multi_thread")]
async fn one_that_never_answers_and_one_that_always_fails_delay_no_other() {
    const EVENTS: usize = 200;
    let world = World::start().await;
    let manager = &world.manager;
    let silent = Receiver::replying(|_| Reply { after: Duration::from_secs(60), ..Reply::status(200) }).await;
    let failing = Receiver::replying(|_| Reply::status(500)).await;
    let good = Notebook::start(|_, _, _, _| (200, Duration::ZERO)).await;
    // Its timeout is longer than all others may take.
    subscribe(manager, &silent.url(), json!({"timeout_ms": 30_000, "max_in_flight": 1_000})).await;
    subscribe(manager, &failing.url(), json!({"max_in_flight": 1_000})).await;
    for number in 0..8 {
        subscribe(manager, &good.url(&format!("s-{number}")), json!({})).await;
    }
    let began = Instant::now();
    post_batch(manager, numbered(EVENTS, [1])).await;
    good.until_taken(8 * EVENTS, Duration::from_secs(15)).await;
    let took = began.elapsed();
    println!("the eight had theirs in {took:?}");
    assert_eq!((good.check_order(), good.sights().len()), (0, 8 * EVENTS));
    assert!(silent.count() >= 50 && failing.count() >= 20, "{} {}", silent.count(), failing.count());
    world.app.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_down_is_tried_now_and_then_and_gets_everything_when_it_is_up() {
    const EVENTS: usize = 200;
    let world = World::start().await;
    let receiver = Receiver::replying(|_| Reply::status(500)).await;
    let fields = json!({"max_in_flight": 10, "retry_backoff_seconds": [1, 1, 1, 1, 1]});
    subscribe(&world.manager, &receiver.url(), fields).await;
    post_batch(&world.manager, numbered(EVENTS, [1])).await;
    // Twenty failures in a row, nine more that were under way by then, and from there on one each half second.
    until_received(&receiver, 36).await;
    let at: Vec<Instant> = receiver.received().iter().map(|received| received.at).collect();
    assert!(at[35] - at[29] > Duration::from_secs(2), "six tries in {:?}", at[35] - at[29]);
    receiver.reply(|_| Reply::status(200));
    let taken = || receiver.received().iter().filter(|received| received.status == 200).count();
    drain("all are delivered", PATIENCE, async || if taken() == EVENTS { Ok(()) } else { Err(taken()) }).await;
    world.app.stop().await;
    assert_eq!(taken(), EVENTS, "each once");
}

#[tokio::test]
async fn a_paused_subscriber_gets_nothing_and_then_everything_in_order() {
    const LANES: usize = 3;
    let world = World::start().await;
    let manager = &world.manager;
    let (paused, other) = (
        Notebook::start(|_, _, _, _| (200, Duration::ZERO)).await,
        Notebook::start(|_, _, _, _| (200, Duration::ZERO)).await,
    );
    let subscriber = subscribe(manager, &paused.url("paused"), json!({})).await;
    subscribe(manager, &other.url("other"), json!({})).await;
    let path = format!("/hub/v1/subscribers/{}", text(&subscriber["id"]));
    post_batch(manager, numbered(LANES, [1])).await;
    paused.until_taken(LANES, PATIENCE).await;
    assert_eq!(manager.send(Method::POST, &format!("{path}/pause"), None).await.status, 200);
    // It is heard of within a moment; what was made in that moment may still be sent.
    let first = post_batch(manager, numbered(LANES, 2..=50)).await;
    other.until_taken(50 * LANES, PATIENCE).await;
    until_outcome(manager, &first[first.len() - 1], &subscriber, "pending").await;
    let so_far = paused.sights().len();
    post_batch(manager, numbered(LANES, 51..=100)).await;
    other.until_taken(100 * LANES, PATIENCE).await;
    assert_eq!(paused.sights().len(), so_far, "nothing while it is paused");
    assert_eq!(manager.send(Method::POST, &format!("{path}/resume"), None).await.status, 200);
    paused.until_taken(100 * LANES, PATIENCE).await;
    world.app.stop().await;
    assert_eq!((paused.check_order(), paused.sights().len()), (0, 100 * LANES));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_limit_is_kept() {
    const RATE: usize = 20;
    const EVENTS: usize = 60;
    let world = World::start().await;
    let receiver = Receiver::start().await;
    subscribe(&world.manager, &receiver.url(), json!({"rate_limit_per_second": RATE})).await;
    post_batch(&world.manager, numbered(EVENTS, [1])).await;
    until_received(&receiver, EVENTS).await;
    world.app.stop().await;
    let at: Vec<Instant> = receiver.received().iter().map(|received| received.at).collect();
    let took = at[EVENTS - 1] - at[0];
    // What a tenth of a second allows may come at once, at the beginning.
    assert!(took >= Duration::from_millis(2_700), "{EVENTS} in {took:?}");
    // A busy machine may hand over late what was sent in time.
    for window in at.windows(RATE + 10) {
        let took = window[window.len() - 1] - window[0];
        assert!(took >= Duration::from_millis(900), "{} in {took:?}", window.len());
    }
}

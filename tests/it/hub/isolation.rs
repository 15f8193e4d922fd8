//! Subscribers are isolated from each other: failures, circuit breaker, pause and rate limit.

use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::json;
use testkit::{Receiver, Reply, eventually};

use crate::hub::fixture::{
    Fixture, numbered_events, post_batch, subscribe, subscriber_path, wait_for_outcome, wait_for_webhooks,
};
use crate::hub::recorder::RequestRecorder;
use crate::support::DEADLINE;

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_and_a_failing_subscriber_delay_no_other() {
    const EVENTS: usize = 200;
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let silent = Receiver::with_reply(|_| Reply { delay: Duration::from_secs(60), ..Reply::status(200) }).await;
    let failing = Receiver::with_reply(|_| Reply::status(500)).await;
    let good = RequestRecorder::start(|_, _, _, _| (200, Duration::ZERO)).await;
    for number in 0..8 {
        subscribe(manager, &good.url(&format!("s-{number}")), json!({})).await;
    }
    let deliver = async |n: usize| {
        let began = Instant::now();
        post_batch(manager, numbered_events(EVENTS, [n])).await;
        good.wait_until_accepted(n * 8 * EVENTS, DEADLINE).await;
        began.elapsed()
    };
    deliver(1).await; // The first messages wait for connections.
    let undisturbed = deliver(2).await;
    subscribe(manager, &silent.url(), json!({"timeout_ms": 30_000, "max_in_flight": 1_000})).await;
    subscribe(manager, &failing.url(), json!({"max_in_flight": 1_000})).await;
    let disturbed = deliver(3).await;
    // The two subscribers add a quarter of the work. If the others waited for them, it would take 30 s.
    assert!(disturbed < undisturbed * 3 + Duration::from_secs(1), "{disturbed:?}, {undisturbed:?} without them");
    assert_eq!((good.check_lane_order(), good.requests().len()), (0, 3 * 8 * EVENTS));
    assert!(silent.count() >= 50 && failing.count() >= 20, "{} {}", silent.count(), failing.count());
    fixture.app.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unavailable_subscriber_is_probed_and_catches_up_when_it_recovers() {
    const EVENTS: usize = 200;
    let fixture = Fixture::start().await;
    let receiver = Receiver::with_reply(|_| Reply::status(500)).await;
    let fields = json!({"max_in_flight": 10, "retry_backoff_seconds": [1, 1, 1, 1, 1]});
    subscribe(&fixture.manager, &receiver.url(), fields).await;
    post_batch(&fixture.manager, numbered_events(EVENTS, [1])).await;
    // Twenty consecutive failures open the circuit breaker; nine more are in flight by then. From there on the dispatcher
    // sends one probe every half second.
    wait_for_webhooks(&receiver, 36).await;
    let at: Vec<Instant> = receiver.received().iter().map(|received| received.at).collect();
    assert!(at[35] - at[29] > Duration::from_secs(2), "six probes in {:?}", at[35] - at[29]);
    receiver.set_reply(|_| Reply::status(200));
    let accepted = || receiver.received().iter().filter(|received| received.status == 200).count();
    eventually("all are delivered", DEADLINE, async || if accepted() == EVENTS { Ok(()) } else { Err(accepted()) })
        .await;
    fixture.app.stop().await;
    assert_eq!(accepted(), EVENTS, "each exactly once");
}

#[tokio::test]
async fn a_paused_subscriber_receives_nothing_and_after_resume_all_in_order() {
    const LANES: usize = 3;
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let (paused, other) = (
        RequestRecorder::start(|_, _, _, _| (200, Duration::ZERO)).await,
        RequestRecorder::start(|_, _, _, _| (200, Duration::ZERO)).await,
    );
    let subscriber = subscribe(manager, &paused.url("paused"), json!({})).await;
    subscribe(manager, &other.url("other"), json!({})).await;
    let path = subscriber_path(&subscriber);
    post_batch(manager, numbered_events(LANES, [1])).await;
    paused.wait_until_accepted(LANES, DEADLINE).await;
    assert_eq!(manager.send(Method::POST, &format!("{path}/pause"), None).await.status, 200);
    // The dispatcher learns of the pause with a short delay; messages created before that may still be sent.
    let first = post_batch(manager, numbered_events(LANES, 2..=50)).await;
    other.wait_until_accepted(50 * LANES, DEADLINE).await;
    wait_for_outcome(manager, &first[first.len() - 1], &subscriber, "pending").await;
    let so_far = paused.requests().len();
    post_batch(manager, numbered_events(LANES, 51..=100)).await;
    other.wait_until_accepted(100 * LANES, DEADLINE).await;
    assert_eq!(paused.requests().len(), so_far, "nothing is sent while it is paused");
    assert_eq!(manager.send(Method::POST, &format!("{path}/resume"), None).await.status, 200);
    paused.wait_until_accepted(100 * LANES, DEADLINE).await;
    fixture.app.stop().await;
    assert_eq!((paused.check_lane_order(), paused.requests().len()), (0, 100 * LANES));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rate_limit_is_respected() {
    const RATE: usize = 20;
    const EVENTS: usize = 60;
    let fixture = Fixture::start().await;
    let receiver = Receiver::start().await;
    subscribe(&fixture.manager, &receiver.url(), json!({"rate_limit_per_second": RATE})).await;
    post_batch(&fixture.manager, numbered_events(EVENTS, [1])).await;
    wait_for_webhooks(&receiver, EVENTS).await;
    fixture.app.stop().await;
    let at: Vec<Instant> = receiver.received().iter().map(|received| received.at).collect();
    let took = at[EVENTS - 1] - at[0];
    // The budget of a tenth of a second may be spent in one burst at the beginning.
    assert!(took >= Duration::from_millis(2_700), "{EVENTS} in {took:?}");
    // The margin allows for requests that a busy machine delivers late.
    for window in at.windows(RATE + 10) {
        let took = window[window.len() - 1] - window[0];
        assert!(took >= Duration::from_millis(900), "{} in {took:?}", window.len());
    }
}

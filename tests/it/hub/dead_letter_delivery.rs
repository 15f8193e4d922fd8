//! Dead letters from the failed attempt to the manual retry: retries by filter, blocked lanes and manual dead-lettering.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hyper::Method;
use serde_json::{Value, json};
use server::settings::Role;
use testkit::{Client, Receiver, Reply, TestApp, eventually};

use crate::hub::fixture::{
    Fixture, attempts, post, received_numbers, subscribe, subscriber_path, wait_for_dead_letters, wait_for_outcome,
    wait_for_webhooks,
};
use crate::support::{DEADLINE, caller, text};

async fn wait_for_numbers(receiver: &Receiver, expected: &[u64]) {
    eventually(&format!("the endpoint received {expected:?}"), DEADLINE, async || match received_numbers(receiver) {
        numbers if numbers == expected => Ok(()),
        other => Err(other),
    })
    .await;
}

async fn post_numbers(manager: &Client, lane: &str, numbers: impl IntoIterator<Item = u64>) -> Vec<String> {
    let mut posted = Vec::new();
    for n in numbers {
        posted.push(post(manager, "test.numbered", json!({ "n": n }), Some(lane)).await);
    }
    posted
}

/// An endpoint that responds to these numbers with `status` and to all others with 200.
async fn refusing(refused: &'static [u64], status: u16) -> Receiver {
    Receiver::with_reply(move |received| {
        let n = received.json()["n"].as_u64().unwrap();
        Reply::status(if refused.contains(&n) { status } else { 200 })
    })
    .await
}

#[tokio::test]
async fn a_retried_dead_letter_is_appended_to_its_lane() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver = refusing(&[1], 503).await;
    let fields = json!({"name": "then", "retry_backoff_seconds": [1], "headers": {"authorization": "Bearer hush"}});
    let subscriber = subscribe(manager, &receiver.url(), fields).await;
    let posted = post_numbers(manager, "lane", 1..=2).await;
    let dead = wait_for_dead_letters(manager, &subscriber, 1).await.remove(0);
    wait_for_numbers(&receiver, &[1, 1, 2]).await;
    let change = json!({"name": "now", "max_in_flight": 1});
    let path = subscriber_path(&subscriber);
    assert_eq!(manager.send(Method::PATCH, &path, Some(change)).await.status, 200);

    let path = format!("/hub/v1/dead-letters/{}", text(&dead["id"]));
    let shown = manager.get(&path).await;
    assert!(!shown.text.contains("hush"), "{shown:?}");
    let shown = shown.json();
    assert_eq!((&shown["reason"], &shown["attempts"]), (&json!("exhausted"), &json!(2)), "{shown}");
    assert_eq!((&shown["event_id"], &shown["lane"]), (&json!(posted[0]), &json!("lane")));
    assert_eq!(
        (&shown["event"]["payload"], &shown["event"]["event_type"]),
        (&json!({"n": 1}), &json!("test.numbered"))
    );
    assert_eq!((&shown["subscriber"]["name"], &shown["subscriber"]["url"]), (&json!("then"), &json!(receiver.url())));
    assert!(text(&shown["detail"]).contains("503"), "{shown}");
    // The event has the same fields wherever it is shown.
    let event = manager.get(&format!("/hub/v1/events/{}", posted[0])).await.json();
    let message = manager.get(&format!("/hub/v1/messages/{}", text(&shown["message_id"]))).await.json();
    let list = format!("/hub/v1/messages?outcome=dead&subscriber_id={}", text(&subscriber["id"]));
    let listed = manager.get(&list).await.json()["items"][0].clone();
    for field in ["event_id", "event_type", "ordering_key", "received_at"] {
        let expected = &event[field];
        assert!(expected.is_string(), "{field} of {event}");
        for (place, found) in [
            ("dead letter", &shown[field]),
            ("event of a dead letter", &shown["event"][field]),
            ("listed dead letter", &dead[field]),
            ("message", &message[field]),
            ("listed message", &listed[field]),
        ] {
            assert_eq!(found, expected, "{field} of a {place}");
        }
    }
    assert_eq!((&shown["event"]["source"], &shown["event"]["payload"]), (&event["source"], &event["payload"]));

    receiver.set_reply(|_| Reply::status(200));
    // Pause the subscriber, so that the lane certainly has waiting messages when the retry is requested.
    let lifecycle = async |verb: &str| {
        let path = format!("/hub/v1/subscribers/{}/{verb}", text(&subscriber["id"]));
        assert_eq!(manager.send(Method::POST, &path, None).await.status, 200);
    };
    lifecycle("pause").await;
    post_numbers(manager, "lane", 3..=4).await;
    assert_eq!(manager.send(Method::POST, &format!("{path}/retry"), None).await.status, 202);
    // Fan-out assigns the position of the retry: events posted from now on are behind it.
    let outcome = wait_for_outcome(manager, &posted[0], &subscriber, "pending").await;
    assert_eq!(outcome["attempts"], 2, "the retry has not begun: {outcome}");
    post_numbers(manager, "lane", [5]).await;
    lifecycle("resume").await;
    wait_for_numbers(&receiver, &[1, 1, 2, 3, 4, 1, 5]).await;
    let received = receiver.received();
    let ids: Vec<&str> = [0, 1, 5].map(|at| received[at].header("webhook-id")).to_vec();
    assert_eq!(ids, [&posted[0]; 3]);
    let seqs: Vec<&str> = received.iter().map(|received| received.header("webhook-seq")).collect();
    assert_eq!(seqs, ["1", "1", "2", "3", "4", "5", "6"], "a retried message gets a new sequence number");
    let outcome = wait_for_outcome(manager, &posted[0], &subscriber, "delivered").await;
    let tried = attempts(manager, &outcome).await;
    let tried: Vec<&str> = tried.iter().map(|(_, outcome)| &outcome[..]).collect();
    assert_eq!(tried, ["failed", "dead", "delivered"]);
    assert_eq!(outcome["attempts"], 3, "the attempts of a retry follow the earlier ones: {outcome}");
    let again = manager.send(Method::POST, &format!("{path}/retry"), None).await;
    again.assert_problem(409, "already-retried");
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_retry_by_filter_resends_only_matching_dead_letters() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver = Receiver::with_reply(|_| Reply::status(400)).await;
    let subscriber = subscribe(manager, &receiver.url(), json!({})).await;
    let other = subscribe(manager, &receiver.url(), json!({"event_types": ["other.*"]})).await;
    for n in 1..=12 {
        post(manager, if n % 2 == 0 { "order.paid" } else { "other.paid" }, json!({ "n": n }), Some("lane")).await;
    }
    wait_for_dead_letters(manager, &subscriber, 12).await;
    wait_for_dead_letters(manager, &other, 6).await;
    receiver.set_reply(|_| Reply::status(200));
    let before = receiver.count();
    let body = json!({"subscriber_id": subscriber["id"], "event_type": "order"});
    let retried = manager.post("/hub/v1/dead-letters/retry", body).await;
    assert_eq!(retried.json(), json!({"retried": 6, "more": false}));
    wait_for_webhooks(&receiver, before + 6).await;
    fixture.app.stop().await;
    assert_eq!(received_numbers(&receiver)[before..], [2, 4, 6, 8, 10, 12], "only the matching ones, in their order");
}

#[tokio::test]
async fn a_blocked_lane_resumes_in_order_when_its_head_is_retried() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver = refusing(&[2], 503).await;
    let fields = json!({"retry_backoff_seconds": [1], "on_exhausted": "block"});
    let subscriber = subscribe(manager, &receiver.url(), fields).await;
    let posted = post_numbers(manager, "blocked", 1..=4).await;
    let dead = wait_for_dead_letters(manager, &subscriber, 1).await.remove(0);
    assert_eq!(dead["event_id"], posted[1]);
    let free = post_numbers(manager, "free", 101..=103).await;
    wait_for_outcome(manager, &free[2], &subscriber, "delivered").await;
    assert_eq!(received_numbers(&receiver), [1, 2, 2, 101, 102, 103]);
    wait_for_outcome(manager, &posted[2], &subscriber, "pending").await;
    // The lane stays blocked when another process becomes the owner of the subscriber.
    let Fixture { database, app, manager } = fixture;
    app.stop().await;
    let app = testkit::TestApp::start(&database).await;
    let manager = app.anonymous().bearer(manager.credential());
    let free = post_numbers(&manager, "free", [104]).await;
    wait_for_outcome(&manager, &free[0], &subscriber, "delivered").await;
    receiver.set_reply(|_| Reply::status(200));
    let retry = format!("/hub/v1/dead-letters/{}/retry", text(&dead["id"]));
    assert_eq!(manager.send(Method::POST, &retry, None).await.status, 202);
    wait_for_numbers(&receiver, &[1, 2, 2, 101, 102, 103, 104, 2, 3, 4]).await;
    wait_for_outcome(&manager, &posted[3], &subscriber, "delivered").await;
    let received = receiver.received();
    assert_eq!((received[7].header("webhook-id"), received[7].header("webhook-seq")), (&posted[1][..], "2"));
    app.stop().await;
}

#[tokio::test]
async fn a_waiting_message_can_be_dead_lettered_and_its_lane_continues() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver = refusing(&[1], 503).await;
    let subscriber = subscribe(manager, &receiver.url(), json!({"retry_backoff_seconds": [3600]})).await;
    let posted = post_numbers(manager, "lane", 1..=3).await;
    let waiting = wait_for_outcome(manager, &posted[0], &subscriber, "failed").await;
    dead_letter(manager, &waiting).await;
    wait_for_numbers(&receiver, &[1, 2, 3]).await;
    let dead = wait_for_dead_letters(manager, &subscriber, 1).await.remove(0);
    assert_eq!((&dead["event_id"], &dead["reason"]), (&json!(posted[0]), &json!("manual")));
    wait_for_outcome(manager, &posted[2], &subscriber, "delivered").await;
    assert_message_is_complete(manager, &waiting).await;
    fixture.app.stop().await;
}

/// The circuit breaker is open: the dispatcher reads no messages for the subscriber, but it still executes commands.
#[tokio::test]
async fn a_message_can_be_dead_lettered_while_the_circuit_breaker_is_open() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver = Receiver::with_reply(|_| Reply::status(503)).await;
    let subscriber = subscribe(manager, &receiver.url(), json!({"retry_backoff_seconds": [3600]})).await;
    let mut posted = Vec::new();
    for n in 0..30 {
        posted.push(post(manager, "test.numbered", json!({ "n": n }), Some(&format!("lane-{n}"))).await);
    }
    wait_for_webhooks(&receiver, 30).await;
    let waiting = wait_for_outcome(manager, &posted[7], &subscriber, "failed").await;
    dead_letter(manager, &waiting).await;
    let dead = wait_for_dead_letters(manager, &subscriber, 1).await.remove(0);
    assert_eq!((&dead["event_id"], &dead["reason"]), (&json!(posted[7]), &json!("manual")));
    fixture.app.stop().await;
    assert_eq!(receiver.count(), 30, "dead-lettering sends nothing");
}

async fn dead_letter(manager: &Client, outcome: &Value) {
    let path = format!("/hub/v1/messages/{}/dead-letter", text(&outcome["message_id"]));
    let accepted = manager.send(Method::POST, &path, None).await;
    assert_eq!(accepted.status, 202, "{accepted:?}");
}

async fn assert_message_is_complete(manager: &Client, outcome: &Value) {
    let path = format!("/hub/v1/messages/{}/dead-letter", text(&outcome["message_id"]));
    manager.send(Method::POST, &path, None).await.assert_problem(409, "message-settled");
}

/// Dead-lettering the head of one lane must not unblock the lane whose message has the next number.
#[tokio::test]
async fn of_two_blocked_lanes_each_can_be_resolved_across_a_restart() {
    let fixture = Fixture::start().await;
    let well = Arc::new(AtomicBool::new(false));
    let is_well = well.clone();
    let receiver =
        Receiver::with_reply(move |_| Reply::status(if is_well.load(Ordering::Relaxed) { 200 } else { 400 })).await;
    let subscriber = subscribe(&fixture.manager, &receiver.url(), json!({"on_exhausted": "block"})).await;
    for (n, lane) in [(1, "x"), (2, "y"), (3, "x"), (4, "y")] {
        post(&fixture.manager, "test.posted", json!({ "n": n }), Some(lane)).await;
    }
    let dead = wait_for_dead_letters(&fixture.manager, &subscriber, 2).await;
    well.store(true, Ordering::Relaxed);
    let dead_letter_path = format!("/hub/v1/messages/{}/dead-letter", text(&dead[0]["message_id"]));
    assert_eq!(fixture.manager.post(&dead_letter_path, json!({})).await.status, 202);
    wait_for_webhooks(&receiver, 3).await;
    let Fixture { database, app, .. } = fixture;
    app.stop().await;
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    let retry = format!("/hub/v1/dead-letters/{}/retry", text(&dead[1]["id"]));
    assert_eq!(manager.post(&retry, json!({})).await.status, 202);
    wait_for_webhooks(&receiver, 5).await;
    // Every message has its outcome, and no lane is left.
    let waiting = "select count(*) from pillarbox_hub.lane";
    eventually("no lane is left", DEADLINE, async || {
        sqlx::query_scalar::<_, i64>(waiting).fetch_one(database.pool()).await.unwrap() == 0
    })
    .await;
    app.stop().await;
    assert_eq!(received_numbers(&receiver), [1, 2, 3, 2, 4]);
}

#[tokio::test]
async fn a_retry_right_after_dead_lettering_is_reported_as_not_done() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let receiver = refusing(&[1], 400).await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({"on_exhausted": "block"})).await;
    let posted = post_numbers(&manager, "lane", 1..=2).await;
    let dead = wait_for_dead_letters(&manager, &subscriber, 1).await.remove(0);
    app.stop().await;
    // Both commands are requested before a dispatcher sees either of them.
    let without_dispatcher =
        TestApp::start_with(&database, |settings| settings.roles = vec![Role::Api, Role::Fanout]).await;
    let manager = without_dispatcher.anonymous().bearer(manager.credential());
    let dead_letter_path = format!("/hub/v1/messages/{}/dead-letter", text(&dead["message_id"]));
    let path = format!("/hub/v1/dead-letters/{}", text(&dead["id"]));
    for requested in [dead_letter_path, format!("{path}/retry")] {
        assert_eq!(manager.send(Method::POST, &requested, None).await.status, 202, "{requested}");
    }
    let commands = "select array_agg(action order by id) from pillarbox_hub.command";
    eventually("both commands are recorded", DEADLINE, async || {
        let found: Option<Vec<String>> = sqlx::query_scalar(commands).fetch_one(database.pool()).await.unwrap();
        if found.as_ref().is_some_and(|found| found == &["dead_letter", "retry"]) { Ok(()) } else { Err(found) }
    })
    .await;
    assert!(manager.get(&path).await.json()["manual_retry_at"].is_string());
    without_dispatcher.stop().await;
    let app = TestApp::start(&database).await;
    let manager = app.anonymous().bearer(manager.credential());
    wait_for_outcome(&manager, &posted[1], &subscriber, "delivered").await;
    eventually("the retry is reported as not done", DEADLINE, async || {
        manager.get(&path).await.json()["manual_retry_at"].is_null()
    })
    .await;
    assert_eq!(received_numbers(&receiver), [1, 2]);
    // A new retry is accepted; it is appended to the lane.
    receiver.set_reply(|_| Reply::status(200));
    assert_eq!(manager.send(Method::POST, &format!("{path}/retry"), None).await.status, 202);
    wait_for_numbers(&receiver, &[1, 2, 1]).await;
    app.stop().await;
}

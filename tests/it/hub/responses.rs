//! The response of an endpoint decides the outcome of a hub message: delivered, retried, dead or subscriber switched off.

use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::{Value, json};
use testkit::{Receiver, Reply, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::hub::fixture::{
    Fixture, attempts, dead_letters, post, received_numbers, subscribe, subscriber_path, wait_for_outcome,
    wait_for_webhooks,
};
use crate::support::{DEADLINE, text};

#[tokio::test]
async fn each_response_status_leads_to_its_documented_outcome() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    // Each event type has its own subscriber, and the last path segment is the status that the endpoint responds with.
    let receiver = Receiver::with_reply(|received| {
        let status = received.path.rsplit('/').next().unwrap().parse().unwrap();
        match status {
            599 => Reply { status: 200, delay: Duration::from_secs(30), ..Reply::default() },
            302 => Reply { headers: vec![("location", "/elsewhere".to_owned())], ..Reply::status(302) },
            status => Reply::status(status),
        }
    })
    .await;
    let closed_port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut cases: Vec<(String, Value, &str, usize)> = Vec::new();
    for (status, outcome, tries) in [
        (200, "delivered", 1),
        (204, "delivered", 1),
        (302, "dead", 1),
        (400, "dead", 1),
        (404, "dead", 1),
        (408, "dead", 1),
        (410, "dead", 1),
        (429, "dead", 4),
        (430, "dead", 1),
        (500, "dead", 4),
        (503, "dead", 4),
        (599, "dead", 4), // the endpoint does not respond in time
    ] {
        let url = receiver.url().replace("hook", &status.to_string());
        let (event_type, fields) = (format!("test.s{status}"), json!({"timeout_ms": 200}));
        cases.push((
            event_type.clone(),
            subscribe_with_short_retries(manager, &url, &event_type, fields).await,
            outcome,
            tries,
        ));
    }
    let refusing =
        subscribe_with_short_retries(manager, &format!("http://{closed_port}/"), "test.refused", json!({})).await;
    cases.push(("test.refused".to_owned(), refusing, "dead", 4));
    let conflicting = receiver.url().replace("hook", "409");
    let extra =
        subscribe_with_short_retries(manager, &conflicting, "test.s409", json!({"retry_rules": {"409": "retry"}}))
            .await;
    cases.push(("test.s409".to_owned(), extra, "dead", 4));

    let mut posted = Vec::new();
    for (event_type, ..) in &cases {
        posted.push(post(manager, event_type, json!({}), None).await);
    }
    for ((event_type, subscriber, expected, tries), event_id) in cases.iter().zip(&posted) {
        let outcome = wait_for_outcome(manager, event_id, subscriber, expected).await;
        assert_eq!(outcome["attempts"], *tries, "{event_type}: {outcome}");
        let made = attempts(manager, &outcome).await;
        let (last, before) = made.split_last().unwrap();
        assert!(before.iter().all(|(_, outcome)| outcome == "failed"), "{event_type}: {made:?}");
        assert_eq!((&last.1[..], made.len()), (*expected, *tries), "{event_type}: {made:?}");
        let answered = event_type.strip_prefix("test.s").and_then(|status| status.parse().ok());
        assert_eq!(last.0, answered.filter(|status| *status != 599), "{event_type}");
        if let Some(status) = last.0.filter(|_| *expected == "dead") {
            assert_eq!(outcome["last_error"], format!("answered {status}"), "{event_type}");
        }
        let dead = dead_letters(manager, subscriber).await;
        let reason = match (*expected, *tries, &event_type[..]) {
            ("delivered", ..) => None,
            (_, _, "test.s410") => Some("gone"),
            (_, 4, _) => Some("exhausted"),
            _ => Some("refused"),
        };
        assert_eq!(dead.first().map(|dead| text(&dead["reason"])), reason, "{event_type}: {dead:?}");
    }
    let elsewhere = receiver.received().iter().filter(|received| received.path == "/elsewhere").count();
    assert_eq!(elsewhere, 0, "redirects are not followed");
    fixture.app.stop().await;
}

async fn subscribe_with_short_retries(manager: &testkit::Client, url: &str, event_type: &str, fields: Value) -> Value {
    let mut all = json!({"event_types": [event_type], "retry_backoff_seconds": [1, 1, 1]});
    all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    subscribe(manager, url, all).await
}

#[tokio::test]
async fn a_410_switches_a_subscriber_off_until_it_is_activated_again() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver = Receiver::with_reply(|_| Reply::status(410)).await;
    let subscriber = subscribe(manager, &receiver.url(), json!({})).await;
    let path = subscriber_path(&subscriber);
    let first = post(manager, "test.a", json!({"n": 1}), Some("lane")).await;
    wait_for_outcome(manager, &first, &subscriber, "dead").await;
    let shown = manager.get(&path).await.json();
    assert_eq!(shown["is_active"], false, "{shown}");
    assert!(text(&shown["inactive_reason"]).contains("410"), "{shown}");
    let second = post(manager, "test.a", json!({"n": 2}), Some("lane")).await;
    wait_for_outcome(manager, &second, &subscriber, "inactive").await;
    receiver.set_reply(|_| Reply::status(200));
    let on = manager.send(Method::PATCH, &path, Some(json!({"is_active": true}))).await;
    assert_eq!(on.status, 200, "{on:?}");
    let third = post(manager, "test.a", json!({"n": 3}), Some("lane")).await;
    wait_for_outcome(manager, &third, &subscriber, "delivered").await;
    fixture.app.stop().await;
    let numbers = received_numbers(&receiver);
    assert_eq!(numbers, [1, 3], "no hub message was created while the subscriber was inactive");
}

#[tokio::test]
async fn retry_after_pauses_the_whole_subscriber() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let mut was_called = false;
    let receiver = Receiver::with_reply(move |_| match std::mem::replace(&mut was_called, true) {
        false => Reply { headers: vec![("retry-after", "3".to_owned())], ..Reply::status(503) },
        true => Reply::status(200),
    })
    .await;
    subscribe(manager, &receiver.url(), json!({"retry_backoff_seconds": [1, 1, 1]})).await;
    post(manager, "test.a", json!({"n": 1}), Some("one")).await;
    wait_for_webhooks(&receiver, 1).await;
    // This event is in another lane than the message that failed; it must wait as well.
    post(manager, "test.a", json!({"n": 2}), Some("two")).await;
    wait_for_webhooks(&receiver, 3).await;
    fixture.app.stop().await;
    let at: Vec<Instant> = receiver.received().iter().map(|received| received.at).collect();
    assert!(at[1] - at[0] >= Duration::from_millis(2_900), "{:?}", at[1] - at[0]);
}

/// An endpoint that accepts one request and responds with 410 once the test signals it. Returns its URL, a channel that
/// reports the arrival of the request, and the channel that releases the response.
async fn endpoint_with_delayed_410() -> (String, oneshot::Receiver<()>, oneshot::Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let ((requested_tx, requested), (respond, respond_rx)) = (oneshot::channel(), oneshot::channel());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
        requested_tx.send(()).unwrap();
        respond_rx.await.unwrap();
        stream.write_all(b"HTTP/1.1 410 Gone\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    });
    (url, requested, respond)
}

#[tokio::test]
async fn a_410_from_the_previous_url_does_not_switch_the_subscriber_off() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let ((old, requested, respond), new) = (endpoint_with_delayed_410().await, Receiver::start().await);
    let fields = json!({"retry_backoff_seconds": [1, 1, 1], "timeout_ms": 30_000});
    let subscriber = subscribe(manager, &old, fields).await;
    let path = subscriber_path(&subscriber);
    let first = post(manager, "test.a", json!({"n": 1}), Some("one")).await;
    requested.await.unwrap();
    let changed = manager.send(Method::PATCH, &path, Some(json!({"url": new.url()}))).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    // The dispatcher learns of the change with a short delay. Events posted before that hang at the old URL; each is in its
    // own lane, so none blocks another.
    eventually("the dispatcher uses the new url", DEADLINE, async || {
        post(manager, "test.a", json!({"n": 2}), None).await;
        new.count() > 0
    })
    .await;
    respond.send(()).unwrap();
    let outcome = wait_for_outcome(manager, &first, &subscriber, "delivered").await;
    let tried = [(Some(410), "failed".to_owned()), (Some(200), "delivered".to_owned())];
    assert_eq!(attempts(manager, &outcome).await, tried);
    assert_eq!(manager.get(&path).await.json()["is_active"], true);
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_dispatcher_with_the_previous_url_does_not_switch_the_subscriber_off() {
    let fixture = Fixture::start().await;
    let (manager, db) = (&fixture.manager, fixture.database.pool());
    let ((old, requested, respond), new) = (endpoint_with_delayed_410().await, Receiver::start().await);
    let subscriber = subscribe(manager, &old, json!({})).await;
    let path = subscriber_path(&subscriber);
    // The dispatcher has loaded the subscriber when this is answered, and has no reason to load it again.
    let renamed = manager.send(Method::PATCH, &path, Some(json!({"name": "renamed"}))).await;
    assert_eq!(renamed.status, 200, "{renamed:?}");
    let first = post(manager, "test.a", json!({"n": 1}), Some("one")).await;
    requested.await.unwrap();
    // No dispatcher is notified of the change.
    sqlx::raw_sql("alter table pillarbox_hub.subscriber disable trigger user").execute(db).await.unwrap();
    let changed = manager.send(Method::PATCH, &path, Some(json!({"url": new.url()}))).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    respond.send(()).unwrap();
    wait_for_outcome(manager, &first, &subscriber, "dead").await;
    assert_eq!(manager.get(&path).await.json()["is_active"], true);
    sqlx::raw_sql("alter table pillarbox_hub.subscriber enable trigger user").execute(db).await.unwrap();
    let changed = manager.send(Method::PATCH, &path, Some(json!({"name": "moved"}))).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    let second = post(manager, "test.a", json!({"n": 2}), Some("one")).await;
    wait_for_outcome(manager, &second, &subscriber, "delivered").await;
    fixture.app.stop().await;
    assert_eq!(new.count(), 1);
}

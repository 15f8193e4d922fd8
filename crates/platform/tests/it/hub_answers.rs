//! What an answer leads to: the decision matrix, from the endpoint to what people see of it.

use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::{Value, json};
use testkit::{Receiver, Reply, drain};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::hub_delivery::{PATIENCE, post, subscribe, until_received};
use crate::hub_world::{World, attempts, dead_letters, text, until_outcome};

#[tokio::test]
async fn each_answer_leads_to_what_the_matrix_says() {
    let world = World::start().await;
    let manager = &world.manager;
    // Each type has a subscriber of its own, and answers with its own status.
    let receiver = Receiver::replying(|received| {
        let status = received.path.rsplit('/').next().unwrap().parse().unwrap();
        match status {
            599 => Reply { status: 200, after: Duration::from_secs(30), ..Reply::default() },
            302 => Reply { headers: vec![("location", "/elsewhere".to_owned())], ..Reply::status(302) },
            status => Reply::status(status),
        }
    })
    .await;
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
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
        (599, "dead", 4), // it does not answer in time
    ] {
        let url = receiver.url().replace("hook", &status.to_string());
        let (event_type, fields) = (format!("test.s{status}"), json!({"timeout_ms": 200}));
        cases.push((event_type.clone(), made(manager, &url, &event_type, fields).await, outcome, tries));
    }
    let refusing = made(manager, &format!("http://{nobody}/"), "test.refused", json!({})).await;
    cases.push(("test.refused".to_owned(), refusing, "dead", 4));
    let conflicting = receiver.url().replace("hook", "409");
    let extra = made(manager, &conflicting, "test.s409", json!({"retry_statuses": [409]})).await;
    cases.push(("test.s409".to_owned(), extra, "dead", 4));

    let mut posted = Vec::new();
    for (event_type, ..) in &cases {
        posted.push(post(manager, event_type, json!({}), None).await);
    }
    for ((event_type, subscriber, expected, tries), event_id) in cases.iter().zip(&posted) {
        let outcome = until_outcome(manager, event_id, subscriber, expected).await;
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
    assert_eq!(elsewhere, 0, "no redirect is followed");
    world.app.stop().await;
}

async fn made(manager: &testkit::Client, url: &str, event_type: &str, fields: Value) -> Value {
    let mut all = json!({"event_types": [event_type], "retry_backoff_seconds": [1, 1, 1]});
    all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    subscribe(manager, url, all).await
}

#[tokio::test]
async fn a_subscriber_that_is_gone_is_switched_off_and_gets_what_waited_when_it_is_switched_on() {
    let world = World::start().await;
    let manager = &world.manager;
    let receiver = Receiver::replying(|_| Reply::status(410)).await;
    let subscriber = subscribe(manager, &receiver.url(), json!({})).await;
    let path = format!("/hub/v1/subscribers/{}", text(&subscriber["id"]));
    let first = post(manager, "test.a", json!({"n": 1}), Some("lane")).await;
    until_outcome(manager, &first, &subscriber, "dead").await;
    let shown = manager.get(&path).await.json();
    assert_eq!(shown["is_active"], false, "{shown}");
    assert!(text(&shown["inactive_reason"]).contains("410"), "{shown}");
    let second = post(manager, "test.a", json!({"n": 2}), Some("lane")).await;
    until_outcome(manager, &second, &subscriber, "inactive").await;
    receiver.reply(|_| Reply::status(200));
    let on = manager.send(Method::PATCH, &path, Some(json!({"is_active": true}))).await;
    assert_eq!(on.status, 200, "{on:?}");
    let third = post(manager, "test.a", json!({"n": 3}), Some("lane")).await;
    until_outcome(manager, &third, &subscriber, "delivered").await;
    world.app.stop().await;
    let numbers: Vec<_> = receiver.received().iter().map(|received| received.json()["n"].clone()).collect();
    assert_eq!(numbers, [1, 3], "none was made while it was off");
}

#[tokio::test]
async fn who_asks_to_be_left_alone_is() {
    let world = World::start().await;
    let manager = &world.manager;
    let mut asked = false;
    let receiver = Receiver::replying(move |_| match std::mem::replace(&mut asked, true) {
        false => Reply { headers: vec![("retry-after", "3".to_owned())], ..Reply::status(503) },
        true => Reply::status(200),
    })
    .await;
    subscribe(manager, &receiver.url(), json!({"retry_backoff_seconds": [1, 1, 1]})).await;
    post(manager, "test.a", json!({"n": 1}), Some("one")).await;
    until_received(&receiver, 1).await;
    // Also what has nothing to do with the message that failed.
    post(manager, "test.a", json!({"n": 2}), Some("two")).await;
    until_received(&receiver, 3).await;
    world.app.stop().await;
    let at: Vec<Instant> = receiver.received().iter().map(|received| received.at).collect();
    assert!(at[1] - at[0] >= Duration::from_millis(2_900), "{:?}", at[1] - at[0]);
}

/// An endpoint that answers one request, with 410, when it is told to: its address, when it was asked, and what tells it.
async fn gone_when_told() -> (String, oneshot::Receiver<()>, oneshot::Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let ((asking, asked), (tell, told)) = (oneshot::channel(), oneshot::channel());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
        asking.send(()).unwrap();
        told.await.unwrap();
        stream.write_all(b"HTTP/1.1 410 Gone\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    });
    (url, asked, tell)
}

#[tokio::test]
async fn an_old_address_that_is_gone_switches_nobody_off_who_has_a_new_one() {
    let world = World::start().await;
    let manager = &world.manager;
    let ((old, asked, tell), new) = (gone_when_told().await, Receiver::start().await);
    let fields = json!({"retry_backoff_seconds": [1, 1, 1], "timeout_ms": 30_000});
    let subscriber = subscribe(manager, &old, fields).await;
    let path = format!("/hub/v1/subscribers/{}", text(&subscriber["id"]));
    let first = post(manager, "test.a", json!({"n": 1}), Some("one")).await;
    asked.await.unwrap();
    let changed = manager.send(Method::PATCH, &path, Some(json!({"url": new.url()}))).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    // Who sends knows of it after a moment; what is sent before that waits at the old address, each in its own lane.
    drain("the new address is known", PATIENCE, async || {
        post(manager, "test.a", json!({"n": 2}), None).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        new.count() > 0
    })
    .await;
    tell.send(()).unwrap();
    let outcome = until_outcome(manager, &first, &subscriber, "delivered").await;
    let tried = [(Some(410), "failed".to_owned()), (Some(200), "delivered".to_owned())];
    assert_eq!(attempts(manager, &outcome).await, tried);
    assert_eq!(manager.get(&path).await.json()["is_active"], true);
    world.app.stop().await;
}

#[tokio::test]
async fn who_has_got_a_new_address_is_not_switched_off_by_who_does_not_know_it_yet() {
    let world = World::start().await;
    let (manager, db) = (&world.manager, world.database.pool());
    let ((old, asked, tell), new) = (gone_when_told().await, Receiver::start().await);
    let subscriber = subscribe(manager, &old, json!({})).await;
    let path = format!("/hub/v1/subscribers/{}", text(&subscriber["id"]));
    let first = post(manager, "test.a", json!({"n": 1}), Some("one")).await;
    asked.await.unwrap();
    // Nobody hears of the change.
    sqlx::raw_sql("alter table pillarbox_hub.subscriber disable trigger user").execute(db).await.unwrap();
    let changed = manager.send(Method::PATCH, &path, Some(json!({"url": new.url()}))).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    tell.send(()).unwrap();
    until_outcome(manager, &first, &subscriber, "dead").await;
    assert_eq!(manager.get(&path).await.json()["is_active"], true);
    sqlx::raw_sql("alter table pillarbox_hub.subscriber enable trigger user").execute(db).await.unwrap();
    let changed = manager.send(Method::PATCH, &path, Some(json!({"name": "moved"}))).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    let second = post(manager, "test.a", json!({"n": 2}), Some("one")).await;
    until_outcome(manager, &second, &subscriber, "delivered").await;
    world.app.stop().await;
    assert_eq!(new.count(), 1);
}

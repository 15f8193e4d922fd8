//! Several processes on one database: kill -9, graceful shutdown and moving subscribers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, Receiver, Reply, TestApp, TestDatabase, eventually};
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::hub::fixture::{
    assert_accepted, numbered_events, post, subscribe, test_size, wait_for_outcome, wait_for_webhooks,
};
use crate::hub::process::Replica;
use crate::hub::recorder::RequestRecorder;
use crate::support::{DEADLINE, caller};

/// Posts a batch to random replicas until one accepts it. A replica that was killed does not answer; one that runs must not
/// fail, because the database is up all the time.
async fn post_somewhere(clients: &Mutex<Vec<Client>>, name: &str, events: Vec<Value>) {
    let body = json!({ "events": events });
    eventually("the batch is accepted", DEADLINE, async || {
        let client = {
            let clients = clients.lock().unwrap();
            clients[Uuid::new_v4().as_u128() as usize % clients.len()].with_header("idempotency-key", name)
        };
        let posted = client.try_send(Method::POST, "/hub/v1/events/batch", Some(body.clone())).await;
        match posted {
            Ok(answer) => {
                assert_accepted(&answer);
                Ok(())
            }
            Err(no_answer) => Err(no_answer),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lanes_stay_in_order_and_complete_while_processes_are_killed() {
    const SUBSCRIBERS: usize = 6;
    const LANES: usize = 6;
    const IN_FLIGHT: usize = 6;
    let (rounds, kills) = (test_size(40, 400), test_size(3, 40));
    let database = TestDatabase::new(&migrations()).await;
    let mut replicas: Vec<Replica> = (0..3).map(|_| Replica::start(&database.url())).collect();
    // Half of the subscribers fail occasionally, sometimes twice in a row; some responses are slow.
    let recorder = RequestRecorder::start(|path, lane, n, times| {
        let chance = (path.bytes().chain(lane.bytes()).map(u64::from).sum::<u64>() + n * 13) % 50;
        let is_good = path.ends_with(['0', '2', '4']);
        let fails = !is_good && ((chance % 8 == 0 && times == 0) || (chance == 0 && times == 1));
        let after = if chance == 1 { 700 } else { chance % 10 };
        (if fails { 503 } else { 200 }, Duration::from_millis(after))
    })
    .await;
    let mut clients = Vec::new();
    for replica in &replicas {
        clients.push(replica.admin().await);
    }
    for number in 0..SUBSCRIBERS {
        let fields = json!({"max_in_flight": IN_FLIGHT, "retry_backoff_seconds": [1, 1, 1, 1]});
        subscribe(&clients[0], &recorder.url(&format!("s-{number}")), fields).await;
    }
    let clients = Mutex::new(clients);
    let posting = async {
        for round in 1..=rounds {
            post_somewhere(&clients, &format!("round-{round}"), numbered_events(LANES, [round])).await;
        }
    };
    let all = SUBSCRIBERS * LANES * rounds;
    let killing = async {
        for kill in 0..kills {
            recorder.wait_until_accepted(all * (kill + 1) / (kills + 2), DEADLINE * 2).await;
            let victim = Uuid::new_v4().as_u128() as usize % replicas.len();
            replicas[victim].process.kill9();
            replicas[victim] = Replica::start(&database.url());
            let client = replicas[victim].admin().await;
            clients.lock().unwrap()[victim] = client;
        }
    };
    tokio::join!(posting, killing);
    recorder.wait_until_accepted(all, DEADLINE * 2).await;
    let repeats = recorder.check_lane_order();
    println!("{repeats} of {all} were redelivered after {kills} kills");
    // Redelivered are messages in flight and messages with an unsaved outcome: those of the killed process, and those of
    // subscribers that moved when it returned.
    assert!(repeats <= kills * 4 * SUBSCRIBERS * IN_FLIGHT, "{repeats} of {all} were redelivered");
    for replica in &mut replicas {
        assert!(replica.process.terminate().await.success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_graceful_shutdown_saves_attempts_in_flight_and_repeats_none() {
    const EVENTS: usize = 30;
    let database = TestDatabase::new(&migrations()).await;
    let mut first = Replica::start(&database.url());
    let admin = first.admin().await;
    let receiver = Receiver::with_reply(|_| Reply { delay: Duration::from_millis(700), ..Reply::status(200) }).await;
    let subscriber = subscribe(&admin, &receiver.url(), json!({"max_in_flight": 10})).await;
    let mut posted = Vec::new();
    for n in 0..EVENTS {
        posted.push(post(&admin, "test.numbered", json!({ "n": n }), None).await);
    }
    wait_for_webhooks(&receiver, 15).await;
    assert!(first.process.terminate().await.success(), "{}", first.process.logs());
    let before = receiver.count();
    assert!(before < EVENTS, "some events are not sent yet");
    let mut second = Replica::start(&database.url());
    let admin = second.admin().await;
    wait_for_webhooks(&receiver, EVENTS).await;
    for event_id in &posted {
        let outcome = wait_for_outcome(&admin, event_id, &subscriber, "delivered").await;
        assert_eq!(outcome["attempts"], 1, "{outcome}");
    }
    assert!(second.process.terminate().await.success());
    let mut times: HashMap<String, u32> = HashMap::new();
    for received in receiver.received() {
        *times.entry(received.header("webhook-id").to_owned()).or_default() += 1;
    }
    assert!(times.len() == EVENTS && times.values().all(|times| *times == 1), "{times:?}");
}

/// The response to an attempt from before the subscriber moved to another process and back must be ignored.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_response_is_ignored_after_a_subscriber_moved_away_and_back() {
    const SUBSCRIBERS: usize = 8;
    let database = TestDatabase::new(&migrations()).await;
    let start = async || TestApp::start_with(&database, |settings| settings.lease_ms = 1_000).await;
    let app = start().await;
    let manager = caller(&app, "manage", "acme").await;
    // The first request for 1 waits for `early`, the second one fails at once, later ones wait for `late`.
    let gate = || Arc::new(Semaphore::new(0));
    let (early, late) = (gate(), gate());
    let seen = Arc::<Mutex<Vec<(String, u64)>>>::default();
    let address = serve_gated(early.clone(), late.clone(), seen.clone()).await;
    let times = |path: usize, n: u64| {
        let path = format!("/{path}");
        seen.lock().unwrap().iter().filter(|(to, number)| *to == path && *number == n).count()
    };
    for number in 0..SUBSCRIBERS {
        let fields = json!({"event_types": [format!("test.s{number}")], "retry_backoff_seconds": [1, 1, 1]});
        subscribe(&manager, &format!("{address}/{number}"), fields).await;
        for n in 1..=2 {
            post(&manager, &format!("test.s{number}"), json!({ "n": n }), Some("lane")).await;
        }
    }
    let each = async || (0..SUBSCRIBERS).all(|number| times(number, 1) >= 1);
    eventually("every subscriber received its first message", DEADLINE, each).await;
    let other = start().await;
    eventually("some subscribers moved, and the attempt failed there", DEADLINE, async || {
        (0..SUBSCRIBERS).filter(|number| times(*number, 1) >= 2).count() >= 2
    })
    .await;
    let moved: Vec<usize> = (0..SUBSCRIBERS).filter(|number| times(*number, 1) >= 2).collect();
    other.stop().await;
    let back = async || moved.iter().all(|number| times(*number, 1) >= 3);
    eventually("the subscribers moved back, and the message is sent again", DEADLINE, back).await;
    early.add_permits(SUBSCRIBERS);
    // Once later messages are received, the dispatcher has processed the early responses.
    for number in &moved {
        post(&manager, &format!("test.s{number}"), json!({ "n": 3 }), Some("another lane")).await;
    }
    eventually("other lanes continue", DEADLINE, async || moved.iter().all(|number| times(*number, 3) == 1)).await;
    for number in &moved {
        assert_eq!(times(*number, 2), 0, "1 is in flight to {number}, so 2 waits");
    }
    late.add_permits(100);
    eventually("all messages are received", DEADLINE, async || (0..SUBSCRIBERS).all(|number| times(number, 2) == 1))
        .await;
    app.stop().await;
}

async fn serve_gated(early: Arc<Semaphore>, late: Arc<Semaphore>, seen: Arc<Mutex<Vec<(String, u64)>>>) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let answer = move |uri: axum::http::Uri, axum::Json(body): axum::Json<Value>| {
        let (early, late, seen) = (early.clone(), late.clone(), seen.clone());
        async move {
            let one = (uri.path().to_owned(), body["n"].as_u64().unwrap());
            let times = {
                let mut seen = seen.lock().unwrap();
                seen.push(one.clone());
                seen.iter().filter(|other| **other == one).count()
            };
            match (one.1, times) {
                (1, 1) => early.acquire().await.unwrap().forget(),
                (1, 2) => return axum::http::StatusCode::SERVICE_UNAVAILABLE,
                (1, _) => late.acquire().await.unwrap().forget(),
                _ => {}
            }
            axum::http::StatusCode::OK
        }
    };
    let router = axum::Router::new().fallback(answer);
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

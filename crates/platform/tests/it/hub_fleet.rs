//! Several processes on one database, which are killed and told to end.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper::Method;
use mailbox::database::migrations;
use serde_json::{Value, json};
use testkit::{Client, Pillarbox, Receiver, Reply, TestApp, TestDatabase, drain};
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::hub_delivery::{PATIENCE, caller, post, subscribe, until_received};
use crate::hub_world::{Notebook, numbered, sized, until_outcome};
use crate::instance::{ADMIN_KEY, BINARY, DataFolder};

/// 32 bytes: replicas share it.
const SECRET_KEY: &str = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";

/// A `pillarbox serve` that may send webhooks to this machine.
pub(crate) struct Replica {
    pub(crate) process: Pillarbox,
    _folder: DataFolder,
}

impl Replica {
    pub(crate) fn start(database_url: &str) -> Replica {
        Replica::start_as(database_url, "api,relay,consume,fanout,dispatch,maintain")
    }

    /// One with these roles alone.
    pub(crate) fn start_as(database_url: &str, roles: &str) -> Replica {
        let folder = DataFolder::new();
        let serve = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text()];
        let args = [&serve[..], &["--database-url", database_url, "--roles", roles]].concat();
        let env = [
            ("PILLARBOX_ADMIN_KEY", ADMIN_KEY),
            ("PILLARBOX_SECRET_KEY", SECRET_KEY),
            ("PILLARBOX_LEASE_MS", "1000"),
            ("PILLARBOX_POOL_MIN", "0"),
            ("PILLARBOX_POOL_MAX", "5"),
            ("PILLARBOX_HUB__ALLOWED_NETWORKS", "127.0.0.0/8"),
        ];
        Replica { process: Pillarbox::start(BINARY, &args, &env), _folder: folder }
    }

    /// Calls it as an operator, of the tenant `main`.
    pub(crate) async fn admin(&self) -> Client {
        Client::new(&self.process.base_url().await).bearer(ADMIN_KEY)
    }
}

/// Posts a batch until somebody has accepted it.
async fn post_somewhere(clients: &Mutex<Vec<Client>>, name: &str, events: Vec<Value>) {
    let body = json!({ "events": events });
    drain("the batch is accepted", PATIENCE, async || {
        let client = {
            let clients = clients.lock().unwrap();
            clients[Uuid::new_v4().as_u128() as usize % clients.len()].with_header("idempotency-key", name)
        };
        let posted = client.try_send(Method::POST, "/hub/v1/events/batch", Some(body.clone())).await;
        match posted {
            Ok(answer) if answer.status == 202 => Ok(()),
            other => Err(other),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lanes_keep_their_order_and_lose_nothing_while_processes_are_killed() {
    const SUBSCRIBERS: usize = 6;
    const LANES: usize = 6;
    const IN_FLIGHT: usize = 6;
    let (rounds, kills) = (sized(40, 400), sized(3, 40));
    let database = TestDatabase::new(&migrations()).await;
    let mut replicas: Vec<Replica> = (0..3).map(|_| Replica::start(&database.url())).collect();
    // Half of the subscribers fail now and then, at times twice; some answers take long.
    let notebook = Notebook::start(|path, lane, n, times| {
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
        subscribe(&clients[0], &notebook.url(&format!("s-{number}")), fields).await;
    }
    let clients = Mutex::new(clients);
    let posting = async {
        for round in 1..=rounds {
            post_somewhere(&clients, &format!("round-{round}"), numbered(LANES, [round])).await;
        }
    };
    let all = SUBSCRIBERS * LANES * rounds;
    let killing = async {
        for kill in 0..kills {
            notebook.until_taken(all * (kill + 1) / (kills + 2), PATIENCE * 2).await;
            let victim = Uuid::new_v4().as_u128() as usize % replicas.len();
            replicas[victim].process.kill9();
            replicas[victim] = Replica::start(&database.url());
            let client = replicas[victim].admin().await;
            clients.lock().unwrap()[victim] = client;
        }
    };
    tokio::join!(posting, killing);
    notebook.until_taken(all, PATIENCE * 2).await;
    let repeats = notebook.check_order();
    println!("{repeats} of {all} came again after {kills} kills");
    // Those under way and those whose outcome was not kept yet, of who was killed and of what moved when it came back.
    assert!(repeats <= kills * 4 * SUBSCRIBERS * IN_FLIGHT, "{repeats} of {all} came again");
    for replica in &mut replicas {
        assert!(replica.process.terminate().await.success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_told_to_end_keeps_what_is_under_way_and_nothing_is_sent_twice() {
    const EVENTS: usize = 30;
    let database = TestDatabase::new(&migrations()).await;
    let mut first = Replica::start(&database.url());
    let admin = first.admin().await;
    let receiver = Receiver::replying(|_| Reply { after: Duration::from_millis(700), ..Reply::status(200) }).await;
    let subscriber = subscribe(&admin, &receiver.url(), json!({"max_in_flight": 10})).await;
    let mut posted = Vec::new();
    for n in 0..EVENTS {
        posted.push(post(&admin, "test.numbered", json!({ "n": n }), None).await);
    }
    until_received(&receiver, 15).await;
    assert!(first.process.terminate().await.success(), "{}", first.process.logs());
    let before = receiver.count();
    assert!(before < EVENTS, "some were still to be sent");
    let mut second = Replica::start(&database.url());
    let admin = second.admin().await;
    until_received(&receiver, EVENTS).await;
    for event_id in &posted {
        let outcome = until_outcome(&admin, event_id, &subscriber, "delivered").await;
        assert_eq!(outcome["attempts"], 1, "{outcome}");
    }
    assert!(second.process.terminate().await.success());
    let mut times: HashMap<String, u32> = HashMap::new();
    for received in receiver.received() {
        *times.entry(received.header("webhook-id").to_owned()).or_default() += 1;
    }
    assert!(times.len() == EVENTS && times.values().all(|times| *times == 1), "{times:?}");
}

/// An answer to what was sent before a subscriber went to another process and came back is nobody's any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_answer_settles_nothing_after_a_subscriber_has_moved_away_and_back() {
    const SUBSCRIBERS: usize = 8;
    let database = TestDatabase::new(&migrations()).await;
    let start = async || TestApp::start_with(&database, |settings| settings.lease_ms = 1_000).await;
    let app = start().await;
    let manager = caller(&app, "manage", "acme").await;
    // The first sight of 1 is answered when `early` opens, the second fails at once, later ones wait for `late`.
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
    drain("each was sent its first", PATIENCE, each).await;
    let other = start().await;
    drain("some have moved, and failed there", PATIENCE, async || {
        (0..SUBSCRIBERS).filter(|number| times(*number, 1) >= 2).count() >= 2
    })
    .await;
    let moved: Vec<usize> = (0..SUBSCRIBERS).filter(|number| times(*number, 1) >= 2).collect();
    other.stop().await;
    let back = async || moved.iter().all(|number| times(*number, 1) >= 3);
    drain("they are back, and are sent theirs again", PATIENCE, back).await;
    early.add_permits(SUBSCRIBERS);
    // What is sent later has come; by then the early answers were heard.
    for number in &moved {
        post(&manager, &format!("test.s{number}"), json!({ "n": 3 }), Some("another lane")).await;
    }
    drain("others go on", PATIENCE, async || moved.iter().all(|number| times(*number, 3) == 1)).await;
    for number in &moved {
        assert_eq!(times(*number, 2), 0, "1 is under way to {number}, so 2 waits");
    }
    late.add_permits(100);
    drain("all come", PATIENCE, async || (0..SUBSCRIBERS).all(|number| times(number, 2) == 1)).await;
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

//! The short form of the soak run: a storm of kills and an outage of the database at the same time, under load. `make test`
//! runs it with small sizes; `make soak` runs it, and every other test that reads `PBX_SOAK`, with large ones.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper::Method;
use serde_json::json;
use sqlx::Connection;
use sqlx::postgres::PgConnectOptions;
use testkit::{Client, PrivateServers, Server, eventually};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::hub::fixture::{numbered_events, subscribe, test_size};
use crate::hub::process::Replica;
use crate::hub::recorder::RequestRecorder;

const PROCESSES: usize = 3;
const LANES: usize = 5;
const SUBSCRIBERS: usize = 2;
/// The pause after each round. Without it, a faster machine would have more retries to wait for.
const ROUND_PAUSE: Duration = Duration::from_millis(10);
/// Every message with a multiple of this number fails once. Each failure stops its lane for a second, so they must be rarer
/// than once in a second.
const FAILS_EVERY: u64 = 150;

/// Posts one round after the other to random processes. A round without an acknowledgement, because its process was killed
/// or the database is down, is posted again with the same key. Any answer but 202 and 503 is a failure.
async fn post_rounds(clients: Arc<Mutex<Vec<Client>>>, acknowledged: Arc<AtomicUsize>, stop: CancellationToken) {
    while !stop.is_cancelled() {
        let round = acknowledged.load(Ordering::SeqCst) + 1;
        let client = {
            let clients = clients.lock().unwrap();
            clients[random(clients.len())].with_header("idempotency-key", &format!("round-{round}"))
        };
        let body = json!({"events": numbered_events(LANES, [round])});
        match client.try_send(Method::POST, "/hub/v1/events/batch", Some(body)).await {
            Ok(answer) if answer.status == 202 => {
                acknowledged.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(ROUND_PAUSE).await;
            }
            Ok(answer) if answer.status == 503 => {}
            Ok(answer) => panic!("{answer:?}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await, // the process was killed
        }
    }
}

fn random(below: usize) -> usize {
    Uuid::new_v4().as_u128() as usize % below
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_reordered_in_a_storm_of_kills_and_an_outage() {
    let (kills, outage) = (test_size(4, 100), Duration::from_secs(test_size(3, 30) as u64));
    let kill_pause = Duration::from_millis(test_size(700, 2_000) as u64);
    let servers = PrivateServers::start(&[Server::Postgres]).await;
    let options: PgConnectOptions = servers.postgres_url().parse().unwrap();
    pillarbox::database::migrate_all(&options, &server::migrations()).await.unwrap();
    let mut replicas: Vec<Replica> = (0..PROCESSES).map(|_| Replica::start(servers.postgres_url())).collect();
    let mut clients = Vec::new();
    for replica in &replicas {
        clients.push(replica.admin().await);
    }
    let recorder = RequestRecorder::start(|_, _, n, times| {
        let fails = n % FAILS_EVERY == 0 && times == 0;
        (if fails { 500 } else { 200 }, Duration::from_millis(n % 3))
    })
    .await;
    for number in 0..SUBSCRIBERS {
        let fields = json!({"retry_backoff_seconds": [1, 1, 1, 1]});
        subscribe(&clients[0], &recorder.url(&format!("s-{number}")), fields).await;
    }
    let (clients, acknowledged) = (Arc::new(Mutex::new(clients)), Arc::<AtomicUsize>::default());
    let stop = CancellationToken::new();
    let posting = tokio::spawn(post_rounds(clients.clone(), acknowledged.clone(), stop.clone()));
    let until_acknowledged = async |count: usize| {
        eventually("rounds are acknowledged", Duration::from_secs(60), async || {
            match acknowledged.load(Ordering::SeqCst) {
                rounds if rounds >= count => Ok(()),
                other => Err(other),
            }
        })
        .await;
    };
    until_acknowledged(10).await;

    // One process is killed before the outage, one during it, and the rest of them after it.
    let kill = async |replicas: &mut Vec<Replica>, victim: usize| {
        replicas[victim].process.kill9();
        replicas[victim] = Replica::start(servers.postgres_url());
    };
    kill(&mut replicas, 0).await;
    clients.lock().unwrap()[0] = replicas[0].admin().await;
    replicas[1].process.kill9();
    servers.while_postgres_is_down(tokio::time::sleep(outage)).await; // the length of the outage
    // A process that finds no database at its start exits, and its supervisor starts it again.
    eventually("PostgreSQL has recovered", Duration::from_secs(60), async || {
        sqlx::PgConnection::connect_with(&options).await.is_ok()
    })
    .await;
    replicas[1] = Replica::start(servers.postgres_url());
    clients.lock().unwrap()[1] = replicas[1].admin().await;
    for _ in 2..kills {
        tokio::time::sleep(kill_pause).await; // the interval between two kills
        let victim = random(PROCESSES);
        kill(&mut replicas, victim).await;
        clients.lock().unwrap()[victim] = replicas[victim].admin().await;
    }
    let before = acknowledged.load(Ordering::SeqCst);
    until_acknowledged(before + 10).await;
    stop.cancel();
    posting.await.unwrap();

    let all = acknowledged.load(Ordering::SeqCst) * LANES * SUBSCRIBERS;
    recorder.wait_until_accepted(all, Duration::from_secs(60)).await;
    let repeats = recorder.check_lane_order();
    println!("{repeats} of {all} were redelivered after {kills} kills and an outage of {outage:?}");
    for mut replica in replicas {
        assert!(replica.process.terminate().await.success(), "{}", replica.process.logs());
    }
}

//! PostgreSQL crashes while events are posted and delivered.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::json;
use sqlx::postgres::PgConnectOptions;
use testkit::{PrivateServers, Server, eventually};

use crate::hub::fixture::{numbered_events, subscribe, test_size};
use crate::hub::process::Replica;
use crate::hub::recorder::{RecordedRequest, RequestRecorder};

#[tokio::test(flavor = "multi_thread")]
async fn accepted_events_are_delivered_in_order_when_postgresql_is_killed() {
    const LANES: usize = 10;
    const SUBSCRIBERS: usize = 2;
    let outage = Duration::from_secs(test_size(1, 30) as u64);
    let servers = PrivateServers::start(&[Server::Postgres]).await;
    let options: PgConnectOptions = servers.postgres_url().parse().unwrap();
    pillarbox::database::migrate_all(&options, &server::migrations()).await.unwrap();
    let mut replica = Replica::start(servers.postgres_url());
    let admin = replica.admin().await;
    let recorder = RequestRecorder::start(|_, _, n, times| {
        let fails = n % 9 == 0 && times == 0;
        (if fails { 500 } else { 200 }, Duration::from_millis(n % 5))
    })
    .await;
    for number in 0..SUBSCRIBERS {
        let fields = json!({"retry_backoff_seconds": [1, 1, 1]});
        subscribe(&admin, &recorder.url(&format!("s-{number}")), fields).await;
    }
    let (accepted, unavailable) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let stop = tokio_util::sync::CancellationToken::new();
    let posting = {
        let (admin, accepted, unavailable, stop) = (admin.clone(), accepted.clone(), unavailable.clone(), stop.clone());
        tokio::spawn(async move {
            while !stop.is_cancelled() {
                let round = accepted.load(Ordering::SeqCst) + 1;
                let client = admin.with_header("idempotency-key", &format!("round-{round}"));
                let body = json!({"events": numbered_events(LANES, [round])});
                let answer = client.send(Method::POST, "/hub/v1/events/batch", Some(body)).await;
                match answer.status {
                    202 => accepted.fetch_add(1, Ordering::SeqCst),
                    // The test causes an outage. Any other error is a fault.
                    503 if answer.headers.contains_key("retry-after") => unavailable.fetch_add(1, Ordering::SeqCst),
                    _ => panic!("{answer:?}"),
                };
            }
        })
    };
    let until_accepted = async |least: usize| {
        let enough = async || match accepted.load(Ordering::SeqCst) {
            rounds if rounds >= least => Ok(()),
            other => Err(other),
        };
        eventually("events are accepted", Duration::from_secs(60), enough).await;
    };
    let mut crashes = Vec::new();
    for crash in 1..=test_size(1, 3) {
        let before = accepted.load(Ordering::SeqCst);
        until_accepted(before + 15).await;
        crashes.push(Instant::now());
        servers
            .while_postgres_is_down(async {
                let is_reported = async || unavailable.load(Ordering::SeqCst) >= crash;
                eventually("callers receive 503", Duration::from_secs(40), is_reported).await;
                tokio::time::sleep(outage).await; // the length of the outage
            })
            .await;
    }
    let before = accepted.load(Ordering::SeqCst);
    until_accepted(before + 5).await;
    stop.cancel();
    posting.await.unwrap();
    let all = accepted.load(Ordering::SeqCst) * LANES * SUBSCRIBERS;
    recorder.wait_until_accepted(all, Duration::from_secs(60)).await;
    let repeats = recorder.check_lane_order();
    println!("{repeats} of {all} were redelivered");
    check_redeliveries(&recorder.requests(), &crashes);
    assert!(replica.process.terminate().await.success(), "{}", replica.process.logs());
}

/// Fails if an accepted event was redelivered although it was accepted long before a crash. Outcomes are saved with
/// asynchronous commits, so a crash loses the outcomes of the last moments before it, and of the attempts in flight.
fn check_redeliveries(requests: &[RecordedRequest], crashes: &[Instant]) {
    const LOST_OUTCOMES_MAX: Duration = Duration::from_secs(3);
    let mut accepted_at = HashMap::new();
    for request in requests {
        let event = (&request.path, &request.lane, request.n);
        if let Some(accepted_at) = accepted_at.get(&event) {
            let is_lost = |crash: &&Instant| **crash <= request.at && *accepted_at + LOST_OUTCOMES_MAX >= **crash;
            assert!(crashes.iter().any(|crash| is_lost(&crash)), "accepted at {accepted_at:?}, again: {request:?}");
        } else if request.status == 200 {
            accepted_at.insert(event, request.answered_at);
        }
    }
}

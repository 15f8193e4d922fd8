//! PostgreSQL is gone while events come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hyper::Method;
use serde_json::json;
use sqlx::postgres::PgConnectOptions;
use testkit::{OwnServers, drain};

use crate::hub_delivery::subscribe;
use crate::hub_fleet::Replica;
use crate::hub_world::{Notebook, numbered, sized};

#[tokio::test(flavor = "multi_thread")]
async fn what_was_accepted_is_delivered_in_order_though_postgresql_is_killed_under_load() {
    const LANES: usize = 10;
    const SUBSCRIBERS: usize = 2;
    let outage = Duration::from_secs(sized(1, 30) as u64);
    let servers = OwnServers::start().await;
    let options: PgConnectOptions = servers.postgres_url().parse().unwrap();
    mailbox::database::migrate(&options).await.unwrap();
    let mut replica = Replica::start(servers.postgres_url());
    let admin = replica.admin().await;
    let notebook = Notebook::start(|_, _, n, times| {
        let fails = n % 9 == 0 && times == 0;
        (if fails { 500 } else { 200 }, Duration::from_millis(n % 5))
    })
    .await;
    for number in 0..SUBSCRIBERS {
        let fields = json!({"retry_backoff_seconds": [1, 1, 1]});
        subscribe(&admin, &notebook.url(&format!("s-{number}")), fields).await;
    }
    let (accepted, unavailable) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let stop = tokio_util::sync::CancellationToken::new();
    let posting = {
        let (admin, accepted, unavailable, stop) = (admin.clone(), accepted.clone(), unavailable.clone(), stop.clone());
        tokio::spawn(async move {
            while !stop.is_cancelled() {
                let round = accepted.load(Ordering::SeqCst) + 1;
                let client = admin.with_header("idempotency-key", &format!("round-{round}"));
                let body = json!({"events": numbered(LANES, [round])});
                match client.send(Method::POST, "/hub/v1/events/batch", Some(body)).await.status {
                    202 => accepted.fetch_add(1, Ordering::SeqCst),
                    503 => unavailable.fetch_add(1, Ordering::SeqCst),
                    other => panic!("answered {other}"),
                };
            }
        })
    };
    let until_accepted = async |least: usize| {
        let enough = async || match accepted.load(Ordering::SeqCst) {
            rounds if rounds >= least => Ok(()),
            other => Err(other),
        };
        drain("events are accepted", Duration::from_secs(60), enough).await;
    };
    for crash in 1..=sized(1, 3) {
        let before = accepted.load(Ordering::SeqCst);
        until_accepted(before + 15).await;
        servers
            .without_postgres(async {
                let told = async || unavailable.load(Ordering::SeqCst) >= crash;
                drain("callers are told", Duration::from_secs(40), told).await;
                tokio::time::sleep(outage).await; // how long it is away
            })
            .await;
    }
    let before = accepted.load(Ordering::SeqCst);
    until_accepted(before + 5).await;
    stop.cancel();
    posting.await.unwrap();
    let all = accepted.load(Ordering::SeqCst) * LANES * SUBSCRIBERS;
    notebook.until_taken(all, Duration::from_secs(60)).await;
    let repeats = notebook.check_order();
    println!("{repeats} of {all} came again");
    // What was under way or not kept yet, at each of the crashes: outcomes do not wait for the disk.
    assert!(repeats <= all / 5, "{repeats} of {all} came again");
    assert!(replica.process.terminate().await.success(), "{}", replica.process.logs());
}

//! Events that were accepted after a failover are delivered, also if the watcher is the last to notice it.

use std::collections::{BTreeSet, HashSet};
use std::time::{Duration, Instant};

use serde_json::json;
use testkit::{Client, Receiver, eventually};

use super::fixture::{Cluster, post_again};
use crate::hub::fixture::{post, received_numbers, subscribe, test_size, wait_for_webhooks};
use crate::support::DEADLINE;

/// The numbers of the events that are posted after the failover.
const AFTER: u64 = 1_000;

/// The number of messages that fan-out has not read, as operators see it.
async fn unread(admin: &Client) -> u64 {
    let consumers = admin.get("/admin/v1/consumers").await.json();
    let fan_out = consumers["items"].as_array().unwrap().iter().find(|item| item["consumer"] == "hub.fanout").cloned();
    fan_out.unwrap()["lag_messages"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn events_accepted_after_a_failover_are_delivered_although_the_watcher_notices_it_last() {
    const LOST: u64 = 150;
    const LATER: u64 = 250;
    let silence = Duration::from_secs(test_size(2, 20) as u64);
    let cluster = Cluster::start().await;
    let app = cluster.start_app(|_| {}).await;
    let (admin, receiver) = (app.admin(), Receiver::start().await);
    subscribe(&admin, &receiver.url(), json!({})).await;
    post(&admin, "test.numbered", json!({"n": 0}), None).await;
    wait_for_webhooks(&receiver, 1).await;

    cluster.cut_replication().await;
    for n in 1..=LOST {
        post(&admin, "test.numbered", json!({ "n": n }), None).await;
    }
    // The watcher has a snapshot with all of them.
    wait_for_webhooks(&receiver, 1 + LOST as usize).await;
    let (silent, last_xid) = (cluster.vital_ports().await, cluster.last_xid().await);
    cluster.fail_over(&silent).await;

    let failed_over = Instant::now();
    for n in AFTER..AFTER + LATER {
        post_again(&admin, json!({"event_type": "test.numbered", "payload": {"n": n}})).await;
    }
    // From here on, PostgreSQL accepts a position with the watcher's snapshot: its transaction ids exist again.
    cluster.wait_until_assigned_again(last_xid + 100).await;
    tokio::time::sleep(silence.saturating_sub(failed_over.elapsed())).await; // how long the watcher notices nothing
    let delivered = || received_numbers(&receiver).into_iter().filter(|n| *n >= AFTER).collect::<BTreeSet<_>>();
    let (unread, delivered_so_far) = (unread(&admin).await, delivered().len() as u64);
    assert!(unread + delivered_so_far >= LATER, "lag is hidden: {unread} unread, {delivered_so_far} delivered");
    cluster.proxy.end_silence();

    eventually("every accepted event is delivered", DEADLINE, async || match delivered().len() as u64 {
        LATER => Ok(()),
        other => Err(other),
    })
    .await;
    let lost: HashSet<u64> = received_numbers(&receiver).into_iter().filter(|n| *n < AFTER).collect();
    assert_eq!(lost.len() as u64, 1 + LOST);
    app.stop().await;
}

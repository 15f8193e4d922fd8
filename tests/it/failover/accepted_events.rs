//! Events that were accepted after a failover are delivered, also if the watcher is the last to notice it.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;
use testkit::{Client, LeftBehind, Receiver, Reply, eventually};

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
    fail_over_while_posting(LeftBehind::Silent).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_accepted_after_a_failover_are_delivered_although_the_watcher_still_reads_the_old_primary() {
    fail_over_while_posting(LeftBehind::Alive).await;
}

/// Fails over from a primary with many events to a standby without them, while the connections of the watcher and of the
/// heartbeat are left behind. Fails unless every event that is accepted afterwards is delivered.
async fn fail_over_while_posting(left_behind: LeftBehind) {
    const LOST: u64 = 150;
    const IN_FLIGHT: u64 = 10;
    const LATER: u64 = 250;
    let unnoticed = Duration::from_secs(test_size(3, 20) as u64);
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
    let vital = cluster.vital_ports().await;
    // Their outcomes are saved after the failover, for numbers that belong to other messages by then.
    receiver.set_reply(|_| Reply { delay: Duration::from_secs(1), ..Reply::status(200) });
    for n in LOST + 1..=LOST + IN_FLIGHT {
        post(&admin, "test.numbered", json!({ "n": n }), None).await;
    }
    wait_for_webhooks(&receiver, (1 + LOST + IN_FLIGHT) as usize).await;
    receiver.set_reply(|_| Reply::status(200));
    let last_xid = cluster.last_xid().await;
    cluster.fail_over_except(&vital, left_behind).await;

    // From here on, PostgreSQL accepts a position with the watcher's snapshot: its transaction ids exist again.
    cluster.assign_again_up_to(last_xid + 100).await;
    let numbers: Vec<u64> = (AFTER..AFTER + LATER).collect();
    for numbers in numbers.chunks(LATER as usize / 2) {
        for n in numbers {
            post_again(&admin, json!({"event_type": "test.numbered", "payload": {"n": n}})).await;
        }
        tokio::time::sleep(unnoticed / 2).await; // how long the failover remains unnoticed by the watcher
    }
    let delivered = || received_numbers(&receiver).into_iter().filter(|n| *n >= AFTER).collect::<BTreeSet<_>>();
    let (unread, delivered_so_far) = (unread(&admin).await, delivered().len() as u64);
    assert!(unread + delivered_so_far >= LATER, "lag is hidden: {unread} unread, {delivered_so_far} delivered");
    cluster.proxy.end_failover();

    eventually("every accepted event is delivered", DEADLINE, async || match delivered().len() as u64 {
        LATER => Ok(()),
        other => Err(other),
    })
    .await;
    app.stop().await;
}

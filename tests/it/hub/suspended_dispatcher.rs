//! A dispatcher whose process is suspended for longer than its lease, under load: when it resumes, it sends nothing that its
//! successor has already sent, and saves nothing.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::json;
use server::migrations;
use testkit::{Received, Receiver, Reply, TestDatabase, eventually};

use crate::hub::fixture::{numbered_events, post_batch, subscribe, test_size};
use crate::hub::process::Replica;
use crate::support::DEADLINE;

const SUBSCRIBERS: usize = 5;
const LANES: usize = 12;
/// A thread can be stopped between the check of the lease and the system call that writes, whatever the process does. The
/// check is so close to it that this happens to hardly one request in a thousand suspensions.
const LATE_MAX: usize = 1;

/// The subscriber, lane and number of a request, read from the request itself.
fn parse(received: &Received) -> ((String, String), u64) {
    let body = received.json();
    ((received.path.clone(), body["lane"].as_str().unwrap().to_owned()), body["n"].as_u64().unwrap())
}

/// Returns the requests from the one with index `from` that came after a later one of their lane.
fn overtaken(all: &[Received], from: usize) -> Vec<((String, String), u64)> {
    let mut highest = HashMap::<(String, String), u64>::new();
    let mut found = Vec::new();
    for (at, (lane, n)) in all.iter().map(parse).enumerate() {
        let highest = highest.entry(lane.clone()).or_default();
        if at >= from && n < *highest {
            found.push((lane, n));
        }
        *highest = n.max(*highest);
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dispatcher_that_resumes_after_its_lease_sends_nothing_out_of_order() {
    let events = test_size(50, 400);
    let all = SUBSCRIBERS * LANES * events;
    let database = TestDatabase::new(&migrations()).await;
    let front = Replica::start_as(&database.url(), "api,fanout");
    let suspended = Replica::start_with(&database.url(), "dispatch", &[("TOKIO_WORKER_THREADS", "2")]);
    let receiver = Receiver::with_reply(|_| Reply { delay: Duration::from_millis(10), ..Reply::status(200) }).await;
    let admin = front.admin().await;
    for number in 0..SUBSCRIBERS {
        subscribe(&admin, &format!("{}/{number}", receiver.url()), json!({"max_in_flight": LANES})).await;
    }
    for chunk in (1..=events).collect::<Vec<_>>().chunks(20) {
        post_batch(&admin, numbered_events(LANES, chunk.iter().copied())).await;
    }
    eventually("some are sent", DEADLINE, async || receiver.count() > all / 20).await;

    suspended.process.suspend();
    let successor = Replica::start_as(&database.url(), "dispatch");
    // Far more than was in flight, so every lane has moved on.
    let resumed_after = receiver.count() + all / 2;
    eventually("the successor sends", DEADLINE * 2, async || receiver.count() >= resumed_after).await;
    let resumed_at = receiver.count();
    let taken_over = |line: &str| line.contains("WARN") && line.contains("the lease of another process expired");
    successor.process.wait_for_line(taken_over, DEADLINE).await;
    assert!(resumed_at < all, "the load has ended before the process resumes");
    suspended.process.resume();
    suspended.process.wait_for_line(|line| line.contains("WARN") && line.contains("lost the lease"), DEADLINE).await;
    let accepted = async || {
        let distinct: std::collections::HashSet<_> = receiver.received().iter().map(parse).collect();
        if distinct.len() == all { Ok(()) } else { Err(distinct.len()) }
    };
    eventually("all events are received", DEADLINE * 3, accepted).await;

    let overtaken = overtaken(&receiver.received(), resumed_at);
    // All lanes have messages in the memory of the process that resumes; without the check it sends the next one of each.
    println!("{} requests were sent late", overtaken.len());
    assert!(overtaken.len() <= LATE_MAX, "sent after a later one of their lane: {overtaken:?}");
    // An outcome that the suspended process had not saved belongs to its successor, which has sent the message again.
    let saved_twice = "select count(*) from (select from pillarbox_hub.attempt where outcome = 'delivered'
                       group by subscriber, n having count(*) > 1) as twice";
    let delivered = "select count(*) from pillarbox_hub.attempt where outcome = 'delivered'";
    eventually("all outcomes are saved", DEADLINE, async || {
        let saved: i64 = sqlx::query_scalar(delivered).fetch_one(database.pool()).await.unwrap();
        if saved == all as i64 { Ok(()) } else { Err(saved) }
    })
    .await;
    let twice: i64 = sqlx::query_scalar(saved_twice).fetch_one(database.pool()).await.unwrap();
    assert_eq!(twice, 0, "outcomes saved by two processes");
    for mut replica in [front, suspended, successor] {
        assert!(replica.process.terminate().await.success(), "{}", replica.process.logs());
    }
}

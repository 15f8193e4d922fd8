//! One tenant does not delay the webhooks of another, whatever its subscribers do.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::json;
use sqlx::PgPool;
use testkit::{Client, Receiver, Reply, eventually};
use uuid::Uuid;

use crate::hub::fixture::{Fixture, assert_accepted, post, post_batch, subscribe, subscriber_path, test_size};
use crate::hub::recorder::RequestRecorder;
use crate::support::{DEADLINE, caller, uuid_of};

/// Events per second of the tenant that is measured.
const PER_SECOND: usize = 50;

/// Inserts copies of a subscriber, without its secrets.
async fn copy_subscriber(db: &PgPool, id: Uuid, copies: usize) {
    sqlx::query(
        "insert into pillarbox_hub.subscriber
         select (jsonb_populate_record(one, jsonb_build_object('id', gen_random_uuid()))).*
         from pillarbox_hub.subscriber as one cross join generate_series(1, $2) where id = $1",
    )
    .bind(id)
    .bind(copies as i32)
    .execute(db)
    .await
    .unwrap();
}

/// Posts events at a fixed rate and waits for their webhooks. Returns the times from the request to the webhook, sorted.
async fn measure(producer: &Client, recorder: &RequestRecorder, phase: &str, seconds: usize) -> Vec<Duration> {
    let (began, count) = (Instant::now(), PER_SECOND * seconds);
    let before = recorder.accepted_count();
    let posting: Vec<_> = (0..count)
        .map(|n| {
            let (producer, lane) = (producer.clone(), phase.to_owned());
            tokio::spawn(async move {
                tokio::time::sleep_until((began + Duration::from_secs(1) * n as u32 / PER_SECOND as u32).into()).await;
                let sent_at = Instant::now();
                let event = json!({"event_type": "test.other", "payload": {"lane": lane, "n": n}});
                assert_accepted(&producer.post("/hub/v1/events", event).await);
                (n as u64, sent_at)
            })
        })
        .collect();
    let mut sent_at = HashMap::new();
    for posted in posting {
        let (n, at) = posted.await.unwrap();
        sent_at.insert(n, at);
    }
    recorder.wait_until_accepted(before + count, DEADLINE).await;
    let requests = recorder.requests();
    let of_phase = requests.iter().filter(|request| request.lane == phase);
    let mut times: Vec<(Duration, u64)> =
        of_phase.map(|request| (request.at.saturating_duration_since(sent_at[&request.n]), request.n)).collect();
    assert_eq!(times.len(), count, "each exactly once");
    times.sort_unstable();
    println!("{phase}: the slowest, with their numbers: {:?}", &times[count - 12..]);
    times.into_iter().map(|(time, _)| time).collect()
}

/// The median and the 99th percentile of sorted times.
fn percentiles(times: &[Duration]) -> (Duration, Duration) {
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

/// Posts one event for all silent subscribers, then events for the paused ones: a batch every second.
async fn attack(attacker: Client, (batches, batch): (usize, usize)) {
    post(&attacker, "attack.silent", json!({}), None).await;
    for _ in 0..batches {
        let next = tokio::time::sleep(Duration::from_secs(1));
        let event = json!({"event_type": "attack.paused", "payload": {}});
        post_batch(&attacker, vec![event; batch]).await;
        next.await;
    }
}

/// A tenant with an event for more silent subscribers than there are slots, and with events for many paused ones.
#[tokio::test(flavor = "multi_thread")]
async fn an_attack_of_one_tenant_does_not_double_the_p99_of_another() {
    let slots = test_size(256, 4_096);
    let (silent, paused) = (test_size(300, 4_300), test_size(200, 500));
    // In the long form all 2,000 events are posted at the beginning.
    let (batches, batch, seconds) = (test_size(5, 2), test_size(60, 1_000), test_size(6, 40));
    let fixture = Fixture::start_with(|settings| {
        (settings.pool_max, settings.hub.in_flight_max) = (10, slots as u32);
    })
    .await;
    let (attacker, other) = (&fixture.manager, caller(&fixture.app, "manage", "other").await);
    let tarpit = Receiver::with_reply(|_| Reply { delay: Duration::from_secs(120), ..Reply::status(200) }).await;
    let recorder = RequestRecorder::start(|_, _, _, _| (200, Duration::ZERO)).await;
    let fields = json!({"event_types": ["attack.silent"], "timeout_ms": 60_000});
    let template = subscribe(attacker, &tarpit.url(), fields).await;
    copy_subscriber(fixture.database.pool(), uuid_of(&template["id"]), silent - 1).await;
    let template = subscribe(attacker, &tarpit.url(), json!({"event_types": ["attack.paused"]})).await;
    let pause = format!("{}/pause", subscriber_path(&template));
    assert_eq!(attacker.send(Method::POST, &pause, None).await.status, 200);
    copy_subscriber(fixture.database.pool(), uuid_of(&template["id"]), paused - 1).await;
    subscribe(&other, &recorder.url("other"), json!({})).await;

    measure(&other, &recorder, "warm-up", 2).await;
    let undisturbed = percentiles(&measure(&other, &recorder, "undisturbed", seconds).await);
    let attack = tokio::spawn(attack(attacker.clone(), (batches, batch)));
    eventually("the silent subscribers are called", DEADLINE, async || tarpit.count() > 0).await;
    let attacked = percentiles(&measure(&other, &recorder, "attacked", seconds).await);
    attack.await.unwrap();
    println!("median and p99 undisturbed: {undisturbed:?}, while another tenant attacks: {attacked:?}");
    let expected = (batches * batch * paused) as i64;
    eventually("the attacker's messages are created, too", DEADLINE * test_size(1, 10) as u32, async || {
        let made: i64 = sqlx::query_scalar("select count(*) from pillarbox_hub.message as m join pillarbox_hub.subscriber as s on s.id = m.subscriber where s.paused_at is not null")
            .fetch_one(fixture.database.pool())
            .await
            .unwrap();
        if made == expected { Ok(()) } else { Err(made) }
    })
    .await;
    assert!(tarpit.count() <= slots / 5, "{} slots of {slots} for silent subscribers", tarpit.count());
    assert!(attacked.1 < undisturbed.1 * 2, "p99 {:?}, undisturbed {:?}", attacked.1, undisturbed.1);
    // The attempts in flight last for a minute.
    drop(fixture);
}

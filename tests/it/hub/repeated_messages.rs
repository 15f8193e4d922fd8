//! Messages that were sent several times: lists show them once, and their dead letters are closed.

use std::collections::HashSet;

use hyper::Method;
use serde_json::{Value, json};
use testkit::{Client, Receiver, Reply, eventually};

use crate::hub::fixture::{Fixture, post, subscribe, wait_for_dead_letters, wait_for_outcome};
use crate::hub::rows::{create_subscriber, start_api_only};
use crate::support::{DEADLINE, caller, collect_pages, text};

const PATH: &str = "/hub/v1/messages";

/// The only message of a list.
async fn only_message(manager: &Client, query: &str) -> Value {
    let listed = collect_pages(manager, &format!("{PATH}?{query}")).await;
    assert_eq!(listed.len(), 1, "{query}: {listed:?}");
    listed.into_iter().next().unwrap()
}

async fn open_dead_letters(manager: &Client) -> Vec<Value> {
    collect_pages(manager, "/hub/v1/dead-letters?retried=false").await
}

#[tokio::test]
async fn a_message_that_is_sent_again_is_listed_once_with_its_latest_outcome() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver = Receiver::with_reply(|_| Reply::status(400)).await;
    let subscriber = subscribe(manager, &receiver.url(), json!({})).await;
    let event = post(manager, "order.paid", json!({"n": 1}), Some("lane")).await;
    let dead = wait_for_dead_letters(manager, &subscriber, 1).await.remove(0);
    let of_subscriber = format!("subscriber_id={}", text(&subscriber["id"]));
    let listed = only_message(manager, &of_subscriber).await;
    assert_eq!((&listed["outcome"], &listed["kind"]), (&json!("dead"), &json!("original")));
    assert_eq!(listed["dead_letter_id"], dead["id"]);
    assert_eq!(wait_for_outcome(manager, &event, &subscriber, "dead").await["dead_letter_id"], dead["id"]);

    receiver.set_reply(|_| Reply::status(200));
    let retry = format!("/hub/v1/dead-letters/{}/retry", text(&dead["id"]));
    assert_eq!(manager.send(Method::POST, &retry, None).await.status, 202);
    wait_for_outcome(manager, &event, &subscriber, "delivered").await;
    for query in [of_subscriber.as_str(), "", "outcome=delivered"] {
        let listed = only_message(manager, query).await;
        assert_eq!(
            (&listed["outcome"], &listed["kind"], &listed["attempts"]),
            (&json!("delivered"), &json!("retry"), &json!(2))
        );
        assert_eq!((&listed["retry_of"], listed.get("dead_letter_id")), (&dead["id"], None));
    }
    assert_eq!(collect_pages(manager, &format!("{PATH}?outcome=dead")).await, [json!(null); 0]);

    let id = text(&listed["id"]);
    let replay = manager.post(&format!("{PATH}/{id}/resend"), json!({})).await.json();
    eventually("the message is delivered by the replay", DEADLINE, async || match only_message(manager, "").await {
        listed if listed["kind"] == "replay" && listed["outcome"] == "delivered" => Ok(()),
        listed => Err(listed),
    })
    .await;
    let attempts = manager.get(&format!("{PATH}/{id}/attempts")).await.json()["items"].as_array().unwrap().clone();
    let shown = attempts.iter().map(|attempt| {
        let fields = ["attempt", "outcome", "kind", "retry_of", "replay_id"];
        fields.map(|field| attempt.get(field).cloned().unwrap_or_default())
    });
    assert_eq!(
        shown.collect::<Vec<_>>(),
        [
            [json!(1), json!("dead"), json!("original"), json!(null), json!(null)],
            [json!(2), json!("delivered"), json!("retry"), dead["id"].clone(), json!(null)],
            [json!(1), json!("delivered"), json!("replay"), json!(null), replay["id"].clone()],
        ]
    );
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_replay_closes_the_dead_letter_of_its_message_unless_it_blocks_its_lane() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver = Receiver::with_reply(|_| Reply::status(400)).await;
    let skipping = subscribe(manager, &receiver.url(), json!({"name": "skipping"})).await;
    let blocking = subscribe(manager, &receiver.url(), json!({"name": "blocking", "on_exhausted": "block"})).await;
    let event = post(manager, "order.paid", json!({"n": 1}), Some("lane")).await;
    let first = wait_for_dead_letters(manager, &skipping, 1).await.remove(0);
    let blocks = wait_for_dead_letters(manager, &blocking, 1).await.remove(0);

    // It dies again: the new dead letter replaces the former one.
    let resend = format!("{PATH}/{}/resend", text(&first["message_id"]));
    assert_eq!(manager.post(&resend, json!({})).await.status, 202);
    wait_for_dead_letters(manager, &skipping, 2).await;
    let open: Vec<Value> = open_dead_letters(manager).await.into_iter().map(|dead| dead["id"].clone()).collect();
    assert_eq!(open.len(), 2, "{open:?}");
    assert!(open.contains(&blocks["id"]) && !open.contains(&first["id"]), "{open:?}");

    receiver.set_reply(|_| Reply::status(200));
    let replayed = manager.post("/hub/v1/replays", json!({"event_ids": [event]})).await;
    assert_eq!(replayed.status, 202, "{replayed:?}");
    for subscriber in [&skipping, &blocking] {
        wait_for_outcome(manager, &event, subscriber, "delivered").await;
    }
    eventually("the dead letters are closed", DEADLINE, async || match open_dead_letters(manager).await {
        open if open.len() == 1 => Ok(()),
        other => Err(other),
    })
    .await;
    let open = open_dead_letters(manager).await;
    assert_eq!(open[0]["id"], blocks["id"], "its lane waits for an operator");
    let closed = manager.get(&format!("/hub/v1/dead-letters/{}", text(&first["id"]))).await.json();
    assert!(text(&closed["manual_retry_by"]).starts_with("key"), "{closed}");
    let retry = format!("/hub/v1/dead-letters/{}/retry", text(&blocks["id"]));
    assert_eq!(manager.send(Method::POST, &retry, None).await.status, 202);
    fixture.app.stop().await;
}

#[tokio::test]
async fn pages_are_full_after_all_messages_were_replayed() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let subscriber = create_subscriber(&acme, "replayed").await;
    // 400 messages, of which the newer 300 were replayed twice.
    for (numbers, is_replay) in [((1, 400), false), ((401, 700), true), ((701, 1_000), true)] {
        sqlx::query(
            "insert into pillarbox_hub.message (n, at, subscriber, lane, seq, log_shard, log_id, log_at, replay)
             select n, now(), $1, 'k', n, 0, 100 + (n - 101) % 300 + case when n <= 100 then 1000 else 1 end, now(),
                    case when $4 then gen_random_uuid() end
             from generate_series($2::bigint, $3::bigint) as n",
        )
        .bind(subscriber)
        .bind(numbers.0)
        .bind(numbers.1)
        .bind(is_replay)
        .execute(db)
        .await
        .unwrap();
    }
    for query in [format!("subscriber_id={subscriber}"), "a=".to_owned()] {
        let query = query.trim_start_matches("a=");
        let (mut pages, mut cursor, mut seen) = (0, String::new(), HashSet::new());
        loop {
            let page = acme.get(&format!("{PATH}?limit=50&{query}{cursor}")).await.json();
            let items = page["items"].as_array().unwrap();
            pages += 1;
            for item in items {
                assert!(seen.insert(item["seq"].as_i64().unwrap()), "listed twice: {item}");
            }
            let Some(next) = page["next_cursor"].as_str() else { break };
            assert!(items.len() == 50 || pages > 6, "page {pages} has {} items", items.len());
            cursor = format!("&cursor={next}");
        }
        let expected: HashSet<i64> = (1..=100).chain(701..=1_000).collect();
        assert_eq!(seen, expected, "{query}");
        assert!(pages <= 10, "{pages} pages");
    }
    app.stop().await;
}

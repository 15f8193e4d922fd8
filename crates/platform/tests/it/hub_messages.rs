//! Events and messages by HTTP: what became of each, for whom, and asking for one to be given up.

use hyper::Method;
use serde_json::{Value, json};
use testkit::TestDatabase;
use uuid::Uuid;

use crate::hub_delivery::caller;
use crate::hub_people::{Posted, attempt, commands, id_of, make_message, post_event, start, subscriber, walk};

async fn wait_in_lane(database: &TestDatabase, subscriber: Uuid, n: i64) {
    sqlx::query(
        "insert into pillarbox_hub.lane (subscriber, head, lane, attempts, next_at, again)
         values ($1, $2, 'k', 1, '2100-01-01T00:00:00Z', false)",
    )
    .bind(subscriber)
    .bind(n)
    .execute(database.pool())
    .await
    .unwrap();
}

/// Its head has died; `again` once somebody has asked for it to be sent all the same.
async fn block_lane(database: &TestDatabase, subscriber: Uuid, n: i64, again: bool) {
    sqlx::query(
        "insert into pillarbox_hub.lane (subscriber, head, lane, attempts, next_at, again)
         values ($1, $2, 'k', 0, case when $3 then timestamptz '2100-01-01T00:00:00Z' end, $3)
         on conflict (subscriber, head) do update set next_at = excluded.next_at, again = excluded.again",
    )
    .bind(subscriber)
    .bind(n)
    .bind(again)
    .execute(database.pool())
    .await
    .unwrap();
}

async fn leave_unsent(database: &TestDatabase, event: Posted, filtered: &[Uuid], inactive: &[Uuid]) {
    sqlx::query(
        "insert into pillarbox_hub.unsent (log_id, at, filtered, inactive)
         select id, clock_timestamp(), $2, $3 from pillarbox.log where message_id = $1",
    )
    .bind(event.id)
    .bind(filtered)
    .bind(inactive)
    .execute(database.pool())
    .await
    .unwrap();
}

#[tokio::test]
async fn an_event_is_shown_with_what_became_of_it_for_everyone() {
    let (database, app) = start().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let mut ids = Vec::new();
    for name in ["delivered", "pending", "failed", "dead", "filtered", "inactive", "revived"] {
        ids.push(subscriber(&acme, name).await);
    }
    let rival = subscriber(&caller(&app, "manage", "rival").await, "rival").await;
    let event = post_event(db, "acme", "order.paid", r#"{"amount": 1.50}"#).await;
    let (before, after) =
        (post_event(db, "acme", "order.paid", "{}").await, post_event(db, "rival", "order.paid", "{}").await);
    for (at, id) in ids[..4].iter().enumerate() {
        make_message(db, 10 + at as i64, *id, before).await;
        make_message(db, 20 + at as i64, *id, event).await;
    }
    attempt(db, ids[0], 10, 1, "dead", 400).await;
    attempt(db, ids[0], 20, 1, "failed", 503).await;
    attempt(db, ids[0], 20, 2, "delivered", 204).await;
    attempt(db, ids[2], 22, 1, "failed", 500).await;
    wait_in_lane(&database, ids[2], 22).await;
    attempt(db, ids[3], 23, 1, "dead", 404).await;
    // Dead at first; then it was retried, and that has not been tried yet.
    make_message(db, 30, ids[6], event).await;
    attempt(db, ids[6], 30, 1, "dead", 400).await;
    make_message(db, 31, ids[6], event).await;
    make_message(db, 40, rival, event).await;
    leave_unsent(&database, event, &[ids[4], rival], &[ids[5]]).await;
    leave_unsent(&database, after, &[ids[0]], &[]).await;

    for name in [event.id.to_string(), format!("evt_{}", event.id)] {
        let shown = acme.get(&format!("/hub/v1/events/{name}")).await;
        assert!(shown.text.contains(r#""payload":{"amount": 1.50}"#), "as it was posted: {shown:?}");
        let shown = shown.json();
        assert_eq!((&shown["event_type"], &shown["ordering_key"]), (&json!("order.paid"), &json!("k")));
        let of = |id: Uuid| {
            let outcomes = shown["outcomes"].as_array().unwrap();
            outcomes.iter().find(|one| id_of(&one["subscriber_id"]) == id).cloned().unwrap_or_default()
        };
        let expected = [
            ("delivered", 2, json!(204)),
            ("pending", 0, Value::Null),
            ("failed", 1, json!(500)),
            ("dead", 1, json!(404)),
            ("filtered", 0, Value::Null),
            ("inactive", 0, Value::Null),
            ("pending", 0, Value::Null),
        ];
        for (id, (outcome, attempts, status)) in ids.iter().zip(expected) {
            let found = of(*id);
            assert_eq!((&found["outcome"], &found["attempts"]), (&json!(outcome), &json!(attempts)), "{found}");
            assert_eq!(found["last_status"], status, "{found}");
            let has_message = !["filtered", "inactive"].contains(&outcome);
            let message_id = if has_message { json!(format!("{}.{id}", event.id)) } else { Value::Null };
            assert_eq!(found["message_id"], message_id);
        }
        assert_eq!(of(ids[2])["next_attempt_at"], "2100-01-01T00:00:00Z");
        assert_eq!(of(ids[3])["last_error"], "said so");
        assert_eq!(shown["outcomes"].as_array().unwrap().len(), 7, "nobody of another tenant: {shown}");
    }
    acme.get(&format!("/hub/v1/events/{}", after.id)).await.assert_problem(404, "event-not-found");
    acme.get("/hub/v1/events/17").await.assert_problem(400, "malformed-path");
    app.stop().await;
}

#[tokio::test]
async fn events_are_listed_newest_first_of_one_tenant_and_only_the_hubs() {
    let (database, app) = start().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let mut ids = Vec::new();
    for number in 0..7 {
        let event_type = if number < 4 { "order.paid" } else { "user.created" };
        ids.push(format!("evt_{}", post_event(db, "acme", event_type, "{}").await.id));
    }
    post_event(db, "rival", "order.paid", "{}").await;
    sqlx::query("select pillarbox.post('order.paid', '{}', tenant => 'acme')").execute(db).await.unwrap();
    ids.reverse();
    let all = walk(&acme, "/hub/v1/events?limit=2").await;
    assert_eq!(all.iter().map(|event| event["event_id"].as_str().unwrap()).collect::<Vec<_>>(), ids);
    assert!(all[0]["payload"].is_null(), "lists are brief");
    for (filter, expected) in [
        ("event_type=order", 4),
        ("event_type=order.*", 4),
        ("event_type=order.paid", 4),
        ("event_type=ord", 0),
        ("from=2020-01-01T00:00:00Z", 7),
        ("to=2020-01-01T00:00:00Z", 0),
    ] {
        assert_eq!(walk(&acme, &format!("/hub/v1/events?{filter}")).await.len(), expected, "{filter}");
    }
    acme.get("/hub/v1/events?colour=red").await.assert_problem(400, "malformed-query");
    app.stop().await;
}

#[tokio::test]
async fn a_subscribers_messages_are_walked_and_found_by_their_outcome_however_far_down() {
    let (database, app) = start().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let (id, other) = (subscriber(&acme, "a").await, subscriber(&acme, "b").await);
    let event = post_event(db, "acme", "order.paid", "{}").await;
    for n in 1..=9 {
        make_message(db, n, if n == 5 { other } else { id }, event).await;
    }
    attempt(db, id, 2, 1, "dead", 400).await;
    attempt(db, id, 3, 1, "failed", 500).await;
    attempt(db, id, 3, 2, "delivered", 200).await;
    let list = async |query: &str| walk(&acme, &format!("/hub/v1/messages?subscriber_id={id}{query}")).await;
    let seqs = |items: Vec<Value>| items.iter().map(|item| item["seq"].as_i64().unwrap()).collect::<Vec<_>>();
    assert_eq!(seqs(list("&limit=3").await), [9, 8, 7, 6, 4, 3, 2, 1]);
    let first = &list("").await[0];
    assert_eq!(first["id"], format!("{}.{id}", event.id));
    assert_eq!((&first["event_type"], &first["lane"]), (&json!("order.paid"), &json!("k")));
    assert_eq!(seqs(list("&limit=2&outcome=pending").await), [9, 8, 7, 6, 4, 1]);
    assert_eq!(seqs(list("&outcome=delivered").await), [3]);
    assert_eq!(seqs(list("&outcome=failed").await), [0; 0]);
    // The one that is dead lies below more messages than a page looks through.
    sqlx::query(
        "insert into pillarbox_hub.message (n, at, subscriber, log_shard, log_id, log_at)
         select n, clock_timestamp(), $1, 0, 0, clock_timestamp() from generate_series(100, 4200) n",
    )
    .bind(id)
    .execute(db)
    .await
    .unwrap();
    let page = acme.get(&format!("/hub/v1/messages?subscriber_id={id}&outcome=dead")).await.json();
    assert!(page["items"].as_array().unwrap().is_empty() && page["next_cursor"].is_string(), "{page}");
    assert_eq!(seqs(list("&outcome=dead").await), [2]);
    acme.get("/hub/v1/messages").await.assert_problem(400, "malformed-query");
    acme.get(&format!("/hub/v1/messages?subscriber_id={id}&outcome=filtered"))
        .await
        .assert_problem(400, "malformed-query");
    app.stop().await;
}

#[tokio::test]
async fn a_message_is_shown_with_every_attempt_also_of_those_before_it_was_retried() {
    let (database, app) = start().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let (id, other) = (subscriber(&acme, "a").await, subscriber(&acme, "b").await);
    let event = post_event(db, "acme", "order.paid", "{}").await;
    make_message(db, 1, id, event).await;
    make_message(db, 2, other, event).await;
    attempt(db, id, 1, 1, "failed", 500).await;
    attempt(db, id, 1, 2, "dead", 400).await;
    attempt(db, other, 2, 1, "delivered", 200).await;
    make_message(db, 3, id, event).await;
    attempt(db, id, 3, 1, "delivered", 201).await;
    let path = format!("/hub/v1/messages/{}.{id}", event.id);
    let shown = acme.get(&path).await.json();
    assert_eq!((&shown["outcome"], &shown["seq"], &shown["attempts"]), (&json!("delivered"), &json!(3), &json!(1)));
    let attempts = acme.get(&format!("{path}/attempts")).await.json();
    let statuses: Vec<_> = attempts["items"].as_array().unwrap().iter().map(|one| one["status"].clone()).collect();
    assert_eq!(statuses, [500, 400, 201]);
    assert_eq!((&attempts["items"][0]["latency_ms"], &attempts["items"][0]["detail"]), (&json!(7), &json!("said so")));
    for bad in ["17", "a.b", &event.id.to_string()] {
        acme.get(&format!("/hub/v1/messages/{bad}")).await.assert_problem(400, "malformed-path");
    }
    let unknown = format!("/hub/v1/messages/{}.{}", event.id, Uuid::now_v7());
    acme.get(&unknown).await.assert_problem(404, "message-not-found");
    acme.get(&format!("{unknown}/attempts")).await.assert_problem(404, "message-not-found");
    app.stop().await;
}

#[tokio::test]
async fn a_message_that_blocks_its_lane_can_be_given_up_and_waits_once_it_is_retried() {
    let (database, app) = start().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let id = subscriber(&acme, "a").await;
    let event = post_event(db, "acme", "order.paid", "{}").await;
    make_message(db, 7, id, event).await;
    attempt(db, id, 7, 1, "failed", 500).await;
    attempt(db, id, 7, 2, "dead", 400).await;
    let path = format!("/hub/v1/messages/{}.{id}", event.id);
    let give_up = async || acme.send(Method::POST, &format!("{path}/dead-letter"), None).await;
    give_up().await.assert_problem(409, "message-settled");
    block_lane(&database, id, 7, false).await;
    let shown = acme.get(&path).await.json();
    assert_eq!((&shown["outcome"], &shown["blocks_lane"]), (&json!("dead"), &json!(true)));
    assert_eq!(give_up().await.status, 202);
    block_lane(&database, id, 7, true).await;
    let shown = acme.get(&path).await.json();
    assert_eq!((&shown["outcome"], &shown["next_attempt_at"]), (&json!("pending"), &json!("2100-01-01T00:00:00Z")));
    assert_eq!(walk(&acme, &format!("/hub/v1/messages?subscriber_id={id}&outcome=pending")).await.len(), 1);
    // Attempts count from 1 again: the latest is not the one with the highest number.
    attempt(db, id, 7, 1, "failed", 503).await;
    let shown = acme.get(&path).await.json();
    assert_eq!((&shown["outcome"], &shown["last_status"]), (&json!("failed"), &json!(503)));
    let attempts = acme.get(&format!("{path}/attempts")).await.json();
    let statuses: Vec<_> = attempts["items"].as_array().unwrap().iter().map(|one| one["status"].clone()).collect();
    assert_eq!(statuses, [500, 400, 503]);
    app.stop().await;
}

#[tokio::test]
async fn giving_a_message_up_is_asked_of_its_owner_once_and_not_of_what_is_settled() {
    let (database, app) = start().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let id = subscriber(&acme, "a").await;
    let (waiting, settled) =
        (post_event(db, "acme", "order.paid", "{}").await, post_event(db, "acme", "order.paid", "{}").await);
    make_message(db, 7, id, waiting).await;
    make_message(db, 8, id, settled).await;
    attempt(db, id, 7, 1, "failed", 500).await;
    attempt(db, id, 8, 1, "delivered", 200).await;
    let ask = async |event: Posted| {
        let path = format!("/hub/v1/messages/{}.{id}/dead-letter", event.id);
        acme.with_header("idempotency-key", &event.id.to_string()).send(Method::POST, &path, None).await
    };
    assert_eq!(ask(waiting).await.status, 202);
    assert_eq!(ask(waiting).await.header("idempotent-replayed"), "true");
    ask(settled).await.assert_problem(409, "message-settled");
    let asked = commands(db).await;
    assert_eq!(asked.len(), 1);
    let (topic, key, payload) = &asked[0];
    assert_eq!((topic.as_str(), key), ("hub.message.dead_letter", &id.to_string()));
    assert_eq!((&payload["subscriber"], &payload["n"]), (&json!(id), &json!(7)));
    assert!(payload["by"].as_str().unwrap().starts_with("key:"));
    app.stop().await;
}

//! The HTTP API of hub events and hub messages: outcomes, attempts and manual dead-lettering.

use hyper::Method;
use serde_json::{Value, json};
use testkit::TestDatabase;
use uuid::Uuid;

use crate::hub::rows::{
    LoggedEvent, create_subscriber, insert_attempt, insert_event, insert_message, logged_commands, start_api_only,
};
use crate::support::{caller, collect_pages, uuid_of};

/// A detached lane whose head failed once and waits for its retry.
async fn insert_waiting_lane(database: &TestDatabase, subscriber: Uuid, n: i64) {
    sqlx::query(
        "insert into pillarbox_hub.lane (subscriber, head, lane, attempts, next_at, manual_retry)
         values ($1, $2, 'k', 1, '2100-01-01T00:00:00Z', false)",
    )
    .bind(subscriber)
    .bind(n)
    .execute(database.pool())
    .await
    .unwrap();
}

/// A lane that its dead head blocks; with `manual_retry`, an operator has requested a retry of the head.
async fn insert_blocked_lane(database: &TestDatabase, subscriber: Uuid, n: i64, manual_retry: bool) {
    sqlx::query(
        "insert into pillarbox_hub.lane (subscriber, head, lane, attempts, next_at, manual_retry)
         values ($1, $2, 'k', 0, case when $3 then timestamptz '2100-01-01T00:00:00Z' end, $3)
         on conflict (subscriber, head) do update set next_at = excluded.next_at, manual_retry = excluded.manual_retry",
    )
    .bind(subscriber)
    .bind(n)
    .bind(manual_retry)
    .execute(database.pool())
    .await
    .unwrap();
}

async fn insert_skipped(database: &TestDatabase, event: LoggedEvent, filtered: &[Uuid], inactive: &[Uuid]) {
    sqlx::query(
        "insert into pillarbox_hub.skipped (log_id, at, filtered, inactive)
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
async fn an_event_is_shown_with_its_outcome_for_every_subscriber() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let mut ids = Vec::new();
    for name in ["delivered", "pending", "failed", "dead", "filtered", "inactive", "revived"] {
        ids.push(create_subscriber(&acme, name).await);
    }
    let rival = create_subscriber(&caller(&app, "manage", "rival").await, "rival").await;
    let event = insert_event(db, "acme", "order.paid", r#"{"amount": 1.50}"#).await;
    let (before, after) =
        (insert_event(db, "acme", "order.paid", "{}").await, insert_event(db, "rival", "order.paid", "{}").await);
    for (at, id) in ids[..4].iter().enumerate() {
        insert_message(db, 10 + at as i64, *id, before).await;
        insert_message(db, 20 + at as i64, *id, event).await;
    }
    insert_attempt(db, ids[0], 10, 1, "dead", 400).await;
    insert_attempt(db, ids[0], 20, 1, "failed", 503).await;
    insert_attempt(db, ids[0], 20, 2, "delivered", 204).await;
    insert_attempt(db, ids[2], 22, 1, "failed", 500).await;
    insert_waiting_lane(&database, ids[2], 22).await;
    insert_attempt(db, ids[3], 23, 1, "dead", 404).await;
    // The message was dead, then retried, and the retry has no attempt yet.
    insert_message(db, 30, ids[6], event).await;
    insert_attempt(db, ids[6], 30, 1, "dead", 400).await;
    insert_message(db, 31, ids[6], event).await;
    insert_message(db, 40, rival, event).await;
    insert_skipped(&database, event, &[ids[4], rival], &[ids[5]]).await;
    insert_skipped(&database, after, &[ids[0]], &[]).await;

    for name in [event.id.to_string(), format!("evt_{}", event.id)] {
        let shown = acme.get(&format!("/hub/v1/events/{name}")).await;
        assert!(shown.text.contains(r#""payload":{"amount": 1.50}"#), "the payload is unchanged: {shown:?}");
        let shown = shown.json();
        assert_eq!((&shown["event_type"], &shown["ordering_key"]), (&json!("order.paid"), &json!("k")));
        let of = |id: Uuid| {
            let outcomes = shown["outcomes"].as_array().unwrap();
            outcomes.iter().find(|one| uuid_of(&one["subscriber_id"]) == id).cloned().unwrap_or_default()
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
        assert_eq!(of(ids[3])["last_error"], "test detail");
        assert_eq!(shown["outcomes"].as_array().unwrap().len(), 7, "no subscriber of another tenant: {shown}");
    }
    acme.get(&format!("/hub/v1/events/{}", after.id)).await.assert_problem(404, "event-not-found");
    acme.get("/hub/v1/events/17").await.assert_problem(400, "malformed-path");
    app.stop().await;
}

#[tokio::test]
async fn the_list_shows_only_hub_events_of_the_tenant_newest_first() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let mut ids = Vec::new();
    for number in 0..7 {
        let event_type = if number < 4 { "order.paid" } else { "user.created" };
        ids.push(format!("evt_{}", insert_event(db, "acme", event_type, "{}").await.id));
    }
    insert_event(db, "rival", "order.paid", "{}").await;
    sqlx::query("select pillarbox.post('email.sent', '{}', tenant => 'acme')").execute(db).await.unwrap();
    ids.reverse();
    let all = collect_pages(&acme, "/hub/v1/events?limit=2").await;
    assert_eq!(all.iter().map(|event| event["event_id"].as_str().unwrap()).collect::<Vec<_>>(), ids);
    assert!(all[0]["payload"].is_null(), "lists omit the payload");
    for (filter, expected) in [
        ("event_type=order", 4),
        ("event_type=order.*", 4),
        ("event_type=order.paid", 4),
        ("event_type=ord", 0),
        ("from=2020-01-01T00:00:00Z", 7),
        ("to=2020-01-01T00:00:00Z", 0),
    ] {
        assert_eq!(collect_pages(&acme, &format!("/hub/v1/events?{filter}")).await.len(), expected, "{filter}");
    }
    acme.get("/hub/v1/events?colour=red").await.assert_problem(400, "malformed-query");
    app.stop().await;
}

#[tokio::test]
async fn messages_of_a_subscriber_are_paged_and_found_by_outcome() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let (id, other) = (create_subscriber(&acme, "a").await, create_subscriber(&acme, "b").await);
    let event = insert_event(db, "acme", "order.paid", "{}").await;
    for n in 1..=9 {
        insert_message(db, n, if n == 5 { other } else { id }, event).await;
    }
    insert_attempt(db, id, 2, 1, "dead", 400).await;
    insert_attempt(db, id, 3, 1, "failed", 500).await;
    insert_attempt(db, id, 3, 2, "delivered", 200).await;
    let list = async |query: &str| collect_pages(&acme, &format!("/hub/v1/messages?subscriber_id={id}{query}")).await;
    let seqs = |items: Vec<Value>| items.iter().map(|item| item["seq"].as_i64().unwrap()).collect::<Vec<_>>();
    assert_eq!(seqs(list("&limit=3").await), [9, 8, 7, 6, 4, 3, 2, 1]);
    let first = &list("").await[0];
    assert_eq!(first["id"], format!("{}.{id}", event.id));
    assert_eq!((&first["event_type"], &first["lane"]), (&json!("order.paid"), &json!("k")));
    assert_eq!(seqs(list("&limit=2&outcome=pending").await), [9, 8, 7, 6, 4, 1]);
    assert_eq!(seqs(list("&outcome=delivered").await), [3]);
    assert_eq!(seqs(list("&outcome=failed").await), [0; 0]);
    // The dead message is older than the messages that one page examines.
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
    acme.get(&format!("/hub/v1/messages?subscriber_id={id}&outcome=filtered"))
        .await
        .assert_problem(400, "malformed-query");
    app.stop().await;
}

#[tokio::test]
async fn a_message_is_shown_with_all_attempts_including_those_before_a_retry() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let (id, other) = (create_subscriber(&acme, "a").await, create_subscriber(&acme, "b").await);
    let event = insert_event(db, "acme", "order.paid", "{}").await;
    insert_message(db, 1, id, event).await;
    insert_message(db, 2, other, event).await;
    insert_attempt(db, id, 1, 1, "failed", 500).await;
    insert_attempt(db, id, 1, 2, "dead", 400).await;
    insert_attempt(db, other, 2, 1, "delivered", 200).await;
    insert_message(db, 3, id, event).await;
    insert_attempt(db, id, 3, 1, "delivered", 201).await;
    let path = format!("/hub/v1/messages/{}.{id}", event.id);
    let shown = acme.get(&path).await.json();
    assert_eq!((&shown["outcome"], &shown["seq"], &shown["attempts"]), (&json!("delivered"), &json!(3), &json!(1)));
    let attempts = acme.get(&format!("{path}/attempts")).await.json();
    let statuses: Vec<_> = attempts["items"].as_array().unwrap().iter().map(|one| one["status"].clone()).collect();
    assert_eq!(statuses, [500, 400, 201]);
    assert_eq!(
        (&attempts["items"][0]["latency_ms"], &attempts["items"][0]["detail"]),
        (&json!(7), &json!("test detail"))
    );
    for bad in ["17", "a.b", &event.id.to_string()] {
        acme.get(&format!("/hub/v1/messages/{bad}")).await.assert_problem(400, "malformed-path");
    }
    let unknown = format!("/hub/v1/messages/{}.{}", event.id, Uuid::now_v7());
    acme.get(&unknown).await.assert_problem(404, "message-not-found");
    acme.get(&format!("{unknown}/attempts")).await.assert_problem(404, "message-not-found");
    app.stop().await;
}

#[tokio::test]
async fn a_dead_message_that_blocks_its_lane_can_be_dead_lettered_or_retried() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let id = create_subscriber(&acme, "a").await;
    let event = insert_event(db, "acme", "order.paid", "{}").await;
    insert_message(db, 7, id, event).await;
    insert_attempt(db, id, 7, 1, "failed", 500).await;
    insert_attempt(db, id, 7, 2, "dead", 400).await;
    let path = format!("/hub/v1/messages/{}.{id}", event.id);
    let dead_letter = async || acme.send(Method::POST, &format!("{path}/dead-letter"), None).await;
    dead_letter().await.assert_problem(409, "message-settled");
    insert_blocked_lane(&database, id, 7, false).await;
    let shown = acme.get(&path).await.json();
    assert_eq!((&shown["outcome"], &shown["blocks_lane"]), (&json!("dead"), &json!(true)));
    assert_eq!(dead_letter().await.status, 202);
    insert_blocked_lane(&database, id, 7, true).await;
    let shown = acme.get(&path).await.json();
    assert_eq!((&shown["outcome"], &shown["next_attempt_at"]), (&json!("pending"), &json!("2100-01-01T00:00:00Z")));
    assert_eq!(collect_pages(&acme, &format!("/hub/v1/messages?subscriber_id={id}&outcome=pending")).await.len(), 1);
    insert_attempt(db, id, 7, 3, "failed", 503).await;
    let shown = acme.get(&path).await.json();
    assert_eq!((&shown["outcome"], &shown["last_status"]), (&json!("failed"), &json!(503)));
    let attempts = acme.get(&format!("{path}/attempts")).await.json();
    let statuses: Vec<_> = attempts["items"].as_array().unwrap().iter().map(|one| one["status"].clone()).collect();
    assert_eq!(statuses, [500, 400, 503]);
    app.stop().await;
}

#[tokio::test]
async fn dead_lettering_is_requested_once_and_only_for_pending_messages() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let id = create_subscriber(&acme, "a").await;
    let (waiting, delivered) =
        (insert_event(db, "acme", "order.paid", "{}").await, insert_event(db, "acme", "order.paid", "{}").await);
    insert_message(db, 7, id, waiting).await;
    insert_message(db, 8, id, delivered).await;
    insert_attempt(db, id, 7, 1, "failed", 500).await;
    insert_attempt(db, id, 8, 1, "delivered", 200).await;
    let request = async |event: LoggedEvent| {
        let path = format!("/hub/v1/messages/{}.{id}/dead-letter", event.id);
        acme.with_header("idempotency-key", &event.id.to_string()).send(Method::POST, &path, None).await
    };
    assert_eq!(request(waiting).await.status, 202);
    assert_eq!(request(waiting).await.header("idempotent-replayed"), "true");
    request(delivered).await.assert_problem(409, "message-settled");
    let logged = logged_commands(db).await;
    assert_eq!(logged.len(), 1);
    let (topic, key, payload) = &logged[0];
    assert_eq!((topic.as_str(), key), ("hub.message.dead_letter", &id.to_string()));
    assert_eq!((&payload["subscriber"], &payload["n"]), (&json!(id), &json!(7)));
    assert!(payload["by"].as_str().unwrap().starts_with("key:"));
    app.stop().await;
}

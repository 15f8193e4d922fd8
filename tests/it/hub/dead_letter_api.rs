//! The HTTP API of dead letters: listing, details, and retries that are accepted once.

use std::time::Duration;

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Receiver, TestApp, TestDatabase, eventually};
use uuid::Uuid;
use webhook_client::AllowedNetworks;

use crate::hub::fixture::error_pointers;
use crate::hub::rows::{
    create_subscriber, insert_dead_letter, insert_event, logged_commands, race_for_row, reply_with, start_api_only,
};
use crate::support::{caller, collect_pages, uuid_of};

const PATH: &str = "/hub/v1/dead-letters";

#[tokio::test]
async fn dead_letters_are_paged_filtered_and_shown_with_their_snapshots() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let (one, two) = (create_subscriber(&acme, "one").await, create_subscriber(&acme, "two").await);
    let event = insert_event(db, "acme", "order.paid", "{}").await;
    let mut ids = Vec::new();
    for n in 0..6 {
        let (id, reason) = if n < 4 { (one, "exhausted") } else { (two, "refused") };
        ids.push(
            insert_dead_letter(db, "acme", id, n, (event, if n == 0 { "user.created" } else { "order.paid" }), reason)
                .await,
        );
    }
    insert_dead_letter(db, "rival", Uuid::now_v7(), 1, (event, "order.paid"), "gone").await;
    ids.reverse();
    let all = collect_pages(&acme, &format!("{PATH}?limit=4")).await;
    assert_eq!(all.iter().map(|dead| uuid_of(&dead["id"])).collect::<Vec<_>>(), ids);
    assert!(all[0]["event"].is_null(), "lists omit the event");
    assert_eq!(acme.send(Method::POST, &format!("{PATH}/{}/retry", ids[0]), None).await.status, 202);
    for (filter, expected) in [
        (format!("subscriber_id={one}"), 4),
        ("event_type=order".to_owned(), 5),
        ("event_type=order.*&reason=refused".to_owned(), 2),
        ("reason=gone".to_owned(), 0),
        ("from=2020-01-01T00:00:00Z".to_owned(), 6),
        ("to=2020-01-01T00:00:00Z".to_owned(), 0),
        ("retried=true".to_owned(), 1),
        ("retried=false".to_owned(), 5),
    ] {
        assert_eq!(collect_pages(&acme, &format!("{PATH}?limit=2&{filter}")).await.len(), expected, "{filter}");
    }
    acme.get(&format!("{PATH}?reason=bored")).await.assert_problem(400, "malformed-query");
    let shown = acme.get(&format!("{PATH}/{}", ids[0])).await;
    assert!(shown.text.contains(r#""payload":{"amount": 1.50}"#), "the payload is unchanged: {shown:?}");
    let shown = shown.json();
    assert_eq!((&shown["subscriber"]["name"], &shown["reason"]), (&json!("then"), &json!("refused")));
    assert_eq!(shown["message_id"], format!("{}.{two}", event.id));
    acme.get(&format!("{PATH}/{}", Uuid::now_v7())).await.assert_problem(404, "dead-letter-not-found");
    app.stop().await;
}

#[tokio::test]
async fn twenty_concurrent_retries_of_one_dead_letter_resend_it_once() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let id = create_subscriber(&acme, "a").await;
    let event = insert_event(db, "acme", "order.paid", "{}").await;
    let dead = insert_dead_letter(db, "acme", id, 1, (event, "order.paid"), "exhausted").await;
    let path = format!("{PATH}/{dead}/retry");
    let client = acme.clone();
    let row = ("select from pillarbox_hub.dead_letter where id = $1 for update", dead);
    let answers = race_for_row(db, row, async move |_| client.send(Method::POST, &path, None).await).await;
    let (accepted, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 202);
    refused.iter().for_each(|answer| answer.assert_problem(409, "already-retried"));
    assert_eq!(accepted.len(), 1);
    assert_eq!(
        logged_commands(db).await,
        [("hub.dead_letter.retry".to_owned(), id.to_string(), json!({"dead_letter": dead}))]
    );
    let shown = acme.get(&format!("{PATH}/{dead}")).await.json();
    assert!(shown["manual_retry_by"].as_str().unwrap().starts_with("key:") && shown["manual_retry_at"].is_string());
    let shards: (i16, i16) = sqlx::query_as(
        "select log.shard, subscriber.shard from pillarbox.log, pillarbox_hub.subscriber where source = 'hub.control'",
    )
    .fetch_one(db)
    .await
    .unwrap();
    assert_eq!(shards.0, shards.1, "the command is in the shard of the subscriber");
    app.stop().await;
}

#[tokio::test]
async fn a_dead_letter_of_a_deleted_subscriber_cannot_be_retried() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let id = create_subscriber(&acme, "a").await;
    let event = insert_event(db, "acme", "order.paid", "{}").await;
    let dead = insert_dead_letter(db, "acme", id, 1, (event, "order.paid"), "exhausted").await;
    assert_eq!(acme.delete(&format!("/hub/v1/subscribers/{id}")).await.status, 204);
    let answer = acme.send(Method::POST, &format!("{PATH}/{dead}/retry"), None).await;
    answer.assert_problem(409, "subscriber-gone");
    assert_eq!(acme.post(&format!("{PATH}/retry"), json!({"all": true})).await.json()["retried"], 0);
    assert!(acme.get(&format!("{PATH}/{dead}")).await.json()["manual_retry_at"].is_null());
    assert!(logged_commands(db).await.is_empty());
    app.stop().await;
}

#[tokio::test]
async fn a_dead_letter_whose_event_expired_is_shown_but_cannot_be_retried() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let id = create_subscriber(&acme, "a").await;
    let event = insert_event(db, "acme", "order.paid", "{}").await;
    let dead = insert_dead_letter(db, "acme", id, 1, (event, "order.paid"), "expired").await;
    sqlx::query("update pillarbox_hub.dead_letter set event_id = null, event_type = null, event_snapshot = null")
        .execute(db)
        .await
        .unwrap();
    let shown = acme.get(&format!("{PATH}/{dead}")).await.json();
    assert_eq!((&shown["event"], &shown["message_id"]), (&Value::Null, &Value::Null));
    assert_eq!(collect_pages(&acme, PATH).await.len(), 1);
    acme.send(Method::POST, &format!("{PATH}/{dead}/retry"), None).await.assert_problem(409, "event-gone");
    assert_eq!(acme.post(&format!("{PATH}/retry"), json!({"all": true})).await.json()["retried"], 0);
    app.stop().await;
}

#[tokio::test]
async fn a_bulk_retry_runs_in_batches_and_retries_each_once() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let (one, two) = (create_subscriber(&acme, "one").await, create_subscriber(&acme, "two").await);
    let event = insert_event(db, "acme", "order.paid", "{}").await;
    let first = insert_dead_letter(db, "acme", one, 1, (event, "order.paid"), "exhausted").await;
    for n in 2..=5 {
        insert_dead_letter(db, "acme", two, n, (event, "order.paid"), "refused").await;
    }
    let rival = create_subscriber(&caller(&app, "manage", "rival").await, "rival").await;
    insert_dead_letter(db, "rival", rival, 1, (event, "order.paid"), "refused").await;
    // More than fit into one batch.
    sqlx::query(
        "insert into pillarbox_hub.dead_letter
         select gen_random_uuid(), tenant, subscriber, other.n, lane, event_id, 'user.created', log_shard, log_id, log_at,
             event_snapshot, subscriber_snapshot, 'expired', detail, attempts, moved_to_dlq_at
         from pillarbox_hub.dead_letter, generate_series(1001, 3300) as other (n) where id = $1",
    )
    .bind(first)
    .execute(db)
    .await
    .unwrap();
    let retry = async |body: Value| acme.post(&format!("{PATH}/retry"), body).await;
    assert_eq!(error_pointers(&retry(json!({})).await), [""]);
    assert_eq!(error_pointers(&retry(json!({"all": true, "reason": "gone"})).await), ["/all"]);
    retry(json!({"colour": "red"})).await.assert_problem(422, "validation-failed");
    assert_eq!(retry(json!({"subscriber_id": two, "to": "2020-01-01T00:00:00Z"})).await.json()["retried"], 0);
    assert_eq!(retry(json!({"reason": "refused"})).await.json(), json!({"retried": 4, "more": false}));
    assert_eq!(retry(json!({"reason": "refused"})).await.json(), json!({"retried": 0, "more": false}));
    for limit in [json!(0), json!(100_001)] {
        assert_eq!(error_pointers(&retry(json!({"event_type": "user", "limit": limit})).await), ["/limit"]);
    }
    // A limit is rounded up to batches. A client that shows its progress repeats the request until there are no more.
    let limited = json!({"event_type": "user", "limit": 1_001});
    assert_eq!(retry(limited.clone()).await.json(), json!({"retried": 2_000, "more": true}));
    assert_eq!(retry(limited).await.json(), json!({"retried": 300, "more": false}));
    assert_eq!(retry(json!({"all": true})).await.json()["retried"], 1);
    let logged = logged_commands(db).await;
    let distinct: std::collections::HashSet<String> =
        logged.iter().map(|(_, _, payload)| payload.to_string()).collect();
    assert_eq!((logged.len(), distinct.len()), (2305, 2305));
    assert!(
        logged.iter().all(|(_, key, _)| *key != rival.to_string()),
        "dead letters of another tenant are not retried"
    );
    app.stop().await;
}

/// Fan-out and dispatch run here: a retry accepted by the HTTP API is executed.
#[tokio::test]
async fn a_dead_letter_can_be_retried_again_when_the_retry_fails() {
    let database = TestDatabase::new(&migrations()).await;
    let app =
        TestApp::start_with(&database, |settings| settings.hub.allowed_networks = Some(AllowedNetworks::loopback()))
            .await;
    let acme = caller(&app, "manage", "acme").await;
    let (bad, good) = (Receiver::with_reply(reply_with(400, "no")).await, Receiver::start().await);
    for on_exhausted in ["skip", "block"] {
        let fields =
            json!({"name": on_exhausted, "url": bad.url(), "event_types": ["order.*"], "on_exhausted": on_exhausted});
        let id = uuid_of(&acme.post("/hub/v1/subscribers", fields).await.json()["id"]);
        let event = json!({"event_type": "order.paid", "payload": {"n": 1}, "ordering_key": "k"});
        let event = acme.post("/hub/v1/events", event).await.json()["event_id"].as_str().unwrap().to_owned();
        let waiting = format!("{PATH}?subscriber_id={id}&retried=false");
        let mut seen = 0;
        for round in 0..2 {
            let died = async || bad.count() > seen && collect_pages(&acme, &waiting).await.len() == 1;
            eventually("the message is dead", Duration::from_secs(10), died).await;
            seen = bad.count();
            if round == 1 {
                let better = json!({"url": good.url()});
                acme.send(Method::PATCH, &format!("/hub/v1/subscribers/{id}"), Some(better)).await;
            }
            let dead = uuid_of(&collect_pages(&acme, &waiting).await[0]["id"]);
            assert_eq!(acme.send(Method::POST, &format!("{PATH}/{dead}/retry"), None).await.status, 202);
        }
        let delivered = async || {
            let shown = acme.get(&format!("/hub/v1/events/{event}")).await.json();
            let outcomes = shown["outcomes"].as_array().unwrap().clone();
            outcomes.iter().any(|one| uuid_of(&one["subscriber_id"]) == id && one["outcome"] == "delivered")
        };
        eventually("the message is delivered", Duration::from_secs(10), delivered).await;
        let (_, event_id) = event.split_once('_').unwrap();
        let path = format!("/hub/v1/messages/{event_id}.{id}");
        let attempts = acme.get(&format!("{path}/attempts")).await.json();
        let numbers: Vec<_> =
            attempts["items"].as_array().unwrap().iter().filter_map(|one| one["attempt"].as_i64()).collect();
        assert_eq!(numbers, [1, 2, 3], "{on_exhausted}: the attempts of a retry follow the earlier ones");
        assert_eq!(acme.get(&path).await.json()["attempts"], 3);
        let mut given_up = collect_pages(&acme, &format!("{PATH}?subscriber_id={id}")).await;
        given_up.sort_by_key(|dead| dead["attempts"].as_i64());
        let given_up: Vec<_> = given_up.iter().filter_map(|dead| dead["attempts"].as_i64()).collect();
        // The dead letter of a blocked lane is the same one again.
        assert_eq!(given_up, if on_exhausted == "skip" { vec![1, 2] } else { vec![2] }, "{on_exhausted}");
        assert!(collect_pages(&acme, &waiting).await.is_empty());
        assert_eq!(acme.delete(&format!("/hub/v1/subscribers/{id}")).await.status, 204);
    }
    app.stop().await;
}

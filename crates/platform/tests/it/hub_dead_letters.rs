//! Dead letters by HTTP: what is kept of them, and sending them again, once.

use std::time::Duration;

use hub::address::Allowed;
use hyper::Method;
use mailbox::database::migrations;
use serde_json::{Value, json};
use testkit::{Receiver, TestApp, TestDatabase, drain};
use uuid::Uuid;

use crate::hub_delivery::caller;
use crate::hub_people::{always, bury, commands, id_of, pointers, post_event, race, start, subscriber, walk};

const PATH: &str = "/hub/v1/dead-letters";

#[tokio::test]
async fn dead_letters_are_walked_filtered_and_shown_with_their_snapshots() {
    let (database, app) = start().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let (one, two) = (subscriber(&acme, "one").await, subscriber(&acme, "two").await);
    let event = post_event(db, "acme", "order.paid", "{}").await;
    let mut ids = Vec::new();
    for n in 0..6 {
        let (id, reason) = if n < 4 { (one, "exhausted") } else { (two, "refused") };
        ids.push(bury(db, "acme", id, n, (event, if n == 0 { "user.created" } else { "order.paid" }), reason).await);
    }
    bury(db, "rival", Uuid::now_v7(), 1, (event, "order.paid"), "gone").await;
    ids.reverse();
    let all = walk(&acme, &format!("{PATH}?limit=4")).await;
    assert_eq!(all.iter().map(|dead| id_of(&dead["id"])).collect::<Vec<_>>(), ids);
    assert!(all[0]["event"].is_null(), "lists are brief");
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
        assert_eq!(walk(&acme, &format!("{PATH}?limit=2&{filter}")).await.len(), expected, "{filter}");
    }
    acme.get(&format!("{PATH}?reason=bored")).await.assert_problem(400, "malformed-query");
    let shown = acme.get(&format!("{PATH}/{}", ids[0])).await;
    assert!(shown.text.contains(r#""event":{"amount": 1.50}"#), "as it was: {shown:?}");
    let shown = shown.json();
    assert_eq!((&shown["subscriber"]["name"], &shown["reason"]), (&json!("then"), &json!("refused")));
    assert_eq!(shown["message_id"], format!("{}.{two}", event.id));
    acme.get(&format!("{PATH}/{}", Uuid::now_v7())).await.assert_problem(404, "dead-letter-not-found");
    app.stop().await;
}

#[tokio::test]
async fn twenty_who_retry_one_dead_letter_have_it_sent_again_once() {
    let (database, app) = start().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let id = subscriber(&acme, "a").await;
    let event = post_event(db, "acme", "order.paid", "{}").await;
    let dead = bury(db, "acme", id, 1, (event, "order.paid"), "exhausted").await;
    let path = format!("{PATH}/{dead}/retry");
    let client = acme.clone();
    let row = ("select from pillarbox_hub.dead_letter where id = $1 for update", dead);
    let answers = race(db, row, async move |_| client.send(Method::POST, &path, None).await).await;
    let (accepted, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 202);
    refused.iter().for_each(|answer| answer.assert_problem(409, "already-retried"));
    assert_eq!(accepted.len(), 1);
    assert_eq!(
        commands(db).await,
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
    assert_eq!(shards.0, shards.1, "it comes to who owns the subscriber");
    app.stop().await;
}

#[tokio::test]
async fn a_dead_letter_whose_subscriber_is_gone_stays_one() {
    let (database, app) = start().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let id = subscriber(&acme, "a").await;
    let event = post_event(db, "acme", "order.paid", "{}").await;
    let dead = bury(db, "acme", id, 1, (event, "order.paid"), "exhausted").await;
    assert_eq!(acme.delete(&format!("/hub/v1/subscribers/{id}")).await.status, 204);
    let answer = acme.send(Method::POST, &format!("{PATH}/{dead}/retry"), None).await;
    answer.assert_problem(409, "subscriber-gone");
    assert_eq!(acme.post(&format!("{PATH}/retry"), json!({"all": true})).await.json()["retried"], 0);
    assert!(acme.get(&format!("{PATH}/{dead}")).await.json()["manual_retry_at"].is_null());
    assert!(commands(db).await.is_empty());
    app.stop().await;
}

#[tokio::test]
async fn a_dead_letter_whose_event_was_gone_is_shown_and_not_sent_again() {
    let (database, app) = start().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let id = subscriber(&acme, "a").await;
    let event = post_event(db, "acme", "order.paid", "{}").await;
    let dead = bury(db, "acme", id, 1, (event, "order.paid"), "expired").await;
    sqlx::query("update pillarbox_hub.dead_letter set event_id = null, event_type = null, event_snapshot = null")
        .execute(db)
        .await
        .unwrap();
    let shown = acme.get(&format!("{PATH}/{dead}")).await.json();
    assert_eq!((&shown["event"], &shown["message_id"]), (&Value::Null, &Value::Null));
    assert_eq!(walk(&acme, PATH).await.len(), 1);
    acme.send(Method::POST, &format!("{PATH}/{dead}/retry"), None).await.assert_problem(409, "event-gone");
    assert_eq!(acme.post(&format!("{PATH}/retry"), json!({"all": true})).await.json()["retried"], 0);
    app.stop().await;
}

#[tokio::test]
async fn many_are_retried_by_filter_in_steps_and_each_once() {
    let (database, app) = start().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let (one, two) = (subscriber(&acme, "one").await, subscriber(&acme, "two").await);
    let event = post_event(db, "acme", "order.paid", "{}").await;
    let first = bury(db, "acme", one, 1, (event, "order.paid"), "exhausted").await;
    for n in 2..=5 {
        bury(db, "acme", two, n, (event, "order.paid"), "refused").await;
    }
    let rival = subscriber(&caller(&app, "manage", "rival").await, "rival").await;
    bury(db, "rival", rival, 1, (event, "order.paid"), "refused").await;
    // More than one step of them.
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
    assert_eq!(pointers(&retry(json!({})).await), [""]);
    assert_eq!(pointers(&retry(json!({"all": true, "reason": "gone"})).await), ["/all"]);
    retry(json!({"colour": "red"})).await.assert_problem(422, "validation-failed");
    assert_eq!(retry(json!({"subscriber_id": two, "to": "2020-01-01T00:00:00Z"})).await.json()["retried"], 0);
    assert_eq!(retry(json!({"reason": "refused"})).await.json(), json!({"retried": 4, "more": false}));
    assert_eq!(retry(json!({"reason": "refused"})).await.json(), json!({"retried": 0, "more": false}));
    assert_eq!(retry(json!({"event_type": "user"})).await.json()["retried"], 2300);
    assert_eq!(retry(json!({"all": true})).await.json()["retried"], 1);
    let asked = commands(db).await;
    let distinct: std::collections::HashSet<String> = asked.iter().map(|(_, _, payload)| payload.to_string()).collect();
    assert_eq!((asked.len(), distinct.len()), (2305, 2305));
    assert!(asked.iter().all(|(_, key, _)| *key != rival.to_string()), "another tenant's stays");
    app.stop().await;
}

/// With fan-out and dispatch at work: what is asked for by HTTP is done.
#[tokio::test]
async fn a_retried_dead_letter_is_sent_again_and_one_that_dies_again_can_be_retried_again() {
    let database = TestDatabase::new(&migrations()).await;
    let app =
        TestApp::start_with(&database, |settings| settings.hub.allowed_networks = Some(Allowed::loopback())).await;
    let acme = caller(&app, "manage", "acme").await;
    let (bad, good) = (Receiver::replying(always(400, "no")).await, Receiver::start().await);
    for on_exhausted in ["skip", "block"] {
        let fields =
            json!({"name": on_exhausted, "url": bad.url(), "event_types": ["order.*"], "on_exhausted": on_exhausted});
        let id = id_of(&acme.post("/hub/v1/subscribers", fields).await.json()["id"]);
        let event = json!({"event_type": "order.paid", "payload": {"n": 1}, "ordering_key": "k"});
        let event = acme.post("/hub/v1/events", event).await.json()["event_id"].as_str().unwrap().to_owned();
        let waiting = format!("{PATH}?subscriber_id={id}&retried=false");
        let mut seen = 0;
        for round in 0..2 {
            let died = async || bad.count() > seen && walk(&acme, &waiting).await.len() == 1;
            drain("it is dead", Duration::from_secs(10), died).await;
            seen = bad.count();
            if round == 1 {
                let better = json!({"url": good.url()});
                acme.send(Method::PATCH, &format!("/hub/v1/subscribers/{id}"), Some(better)).await;
            }
            let dead = id_of(&walk(&acme, &waiting).await[0]["id"]);
            assert_eq!(acme.send(Method::POST, &format!("{PATH}/{dead}/retry"), None).await.status, 202);
        }
        let delivered = async || {
            let shown = acme.get(&format!("/hub/v1/events/{event}")).await.json();
            let outcomes = shown["outcomes"].as_array().unwrap().clone();
            outcomes.iter().any(|one| id_of(&one["subscriber_id"]) == id && one["outcome"] == "delivered")
        };
        drain("it is delivered", Duration::from_secs(10), delivered).await;
        assert!(walk(&acme, &waiting).await.is_empty());
        assert_eq!(acme.delete(&format!("/hub/v1/subscribers/{id}")).await.status, 204);
    }
    app.stop().await;
}

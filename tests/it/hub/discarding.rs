//! Discarding dead letters: they are gone for good, and lanes that they block continue.

use hyper::Method;
use serde_json::json;
use testkit::{Receiver, Reply, eventually};
use uuid::Uuid;

use crate::hub::fixture::{
    Fixture, error_pointers, post, received_numbers, subscribe, wait_for_dead_letters, wait_for_outcome,
};
use crate::hub::rows::{
    create_subscriber, insert_dead_letter, insert_event, logged_commands, race_for_row, start_api_only,
};
use crate::support::{DEADLINE, caller, collect_pages, text};

const PATH: &str = "/hub/v1/dead-letters";

#[tokio::test]
async fn a_blocked_lane_continues_when_its_dead_letter_is_discarded() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver = Receiver::with_reply(|received| {
        Reply::status(if [1, 3].contains(&received.json()["n"].as_u64().unwrap()) { 400 } else { 200 })
    })
    .await;
    let subscriber = subscribe(manager, &receiver.url(), json!({"on_exhausted": "block"})).await;
    let mut posted = Vec::new();
    for n in 1..=4 {
        posted.push(post(manager, "test.numbered", json!({ "n": n }), Some("lane")).await);
    }
    let dead = wait_for_dead_letters(manager, &subscriber, 1).await.remove(0);
    assert_eq!(received_numbers(&receiver), [1], "the lane waits");
    let path = format!("{PATH}/{}", text(&dead["id"]));
    let keyed = manager.with_header("idempotency-key", "once");
    for _ in 0..2 {
        assert_eq!(keyed.send(Method::POST, &format!("{path}/discard"), None).await.status, 204);
    }
    manager.get(&path).await.assert_problem(404, "dead-letter-not-found");
    manager.send(Method::POST, &format!("{path}/discard"), None).await.assert_problem(404, "dead-letter-not-found");
    wait_for_outcome(manager, &posted[1], &subscriber, "delivered").await;
    // The third message blocks the lane again; now the filter discards it.
    let again = wait_for_dead_letters(manager, &subscriber, 1).await.remove(0);
    assert_eq!(again["event_id"], posted[2]);
    let selected = json!({"subscriber_id": subscriber["id"], "reason": "refused"});
    let answer = manager.post(&format!("{PATH}/discard"), selected).await;
    assert_eq!(answer.json(), json!({"discarded": 1, "more": false}));
    eventually("the lane continues", DEADLINE, async || match received_numbers(&receiver) {
        numbers if numbers == [1, 2, 3, 4] => Ok(()),
        other => Err(other),
    })
    .await;
    let outcome = wait_for_outcome(manager, &posted[0], &subscriber, "dead").await;
    assert!(!outcome["blocks_lane"].as_bool().unwrap_or_default(), "{outcome}");
    assert_eq!(collect_pages(manager, PATH).await, [json!(null); 0]);
    fixture.app.stop().await;
}

#[tokio::test]
async fn only_the_tenant_discards_and_a_retried_dead_letter_stays() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let rival = caller(&app, "manage", "rival").await;
    let id = create_subscriber(&acme, "a").await;
    let event = insert_event(db, "acme", "order.paid", "{}").await;
    let mut dead = Vec::new();
    for n in 0..4 {
        let of = (event, if n == 0 { "user.created" } else { "order.paid" });
        dead.push(insert_dead_letter(db, "acme", id, n, of, "exhausted").await);
    }
    let discard = |dead: Uuid| format!("{PATH}/{dead}/discard");
    rival.send(Method::POST, &discard(dead[0]), None).await.assert_problem(404, "dead-letter-not-found");
    assert_eq!(rival.post(&format!("{PATH}/discard"), json!({"all": true})).await.json()["discarded"], 0);
    caller(&app, "ingest", "acme")
        .await
        .send(Method::POST, &discard(dead[0]), None)
        .await
        .assert_problem(403, "forbidden");
    assert_eq!(error_pointers(&acme.post(&format!("{PATH}/discard"), json!({})).await), [""]);
    assert_eq!(collect_pages(&acme, PATH).await.len(), 4);

    assert_eq!(acme.send(Method::POST, &format!("{PATH}/{}/retry", dead[3]), None).await.status, 202);
    acme.send(Method::POST, &discard(dead[3]), None).await.assert_problem(409, "already-retried");
    let answer = acme.post(&format!("{PATH}/discard"), json!({"event_type": "order"})).await;
    assert_eq!(answer.json(), json!({"discarded": 2, "more": false}), "not the retried one, not of another type");
    let left: Vec<_> = collect_pages(&acme, PATH).await.iter().map(|dead| text(&dead["id"]).to_owned()).collect();
    assert_eq!(left, [dead[3].to_string(), dead[0].to_string()]);
    // They block no lane, so no dispatcher has to act.
    assert_eq!(logged_commands(db).await.len(), 1, "the retry");
    assert_eq!(acme.delete(&format!("/hub/v1/subscribers/{id}")).await.status, 204);
    assert_eq!(acme.send(Method::POST, &discard(dead[0]), None).await.status, 204, "its subscriber is deleted");
    app.stop().await;
}

#[tokio::test]
async fn of_twenty_retries_and_discards_of_one_dead_letter_the_first_wins() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let id = create_subscriber(&acme, "a").await;
    let event = insert_event(db, "acme", "order.paid", "{}").await;
    for (n, first, won, lost) in [(1, "retry", 202, 409), (2, "discard", 204, 404)] {
        let dead = insert_dead_letter(db, "acme", id, n, (event, "order.paid"), "exhausted").await;
        let commands_before = logged_commands(db).await.len();
        let client = acme.clone();
        let row = ("select from pillarbox_hub.dead_letter where id = $1 for update", dead);
        let answers = race_for_row(db, row, async move |number| {
            let other = if number % 2 == 0 { "retry" } else { "discard" };
            let verb = if number == 0 { first } else { other };
            client.send(Method::POST, &format!("{PATH}/{dead}/{verb}"), None).await
        })
        .await;
        let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
        assert_eq!((statuses[0], &statuses[1..]), (won, &[lost; 19][..]), "the first is a {first}");
        let shown = acme.get(&format!("{PATH}/{dead}")).await;
        match first {
            "retry" => assert!(shown.json()["manual_retry_at"].is_string(), "a retried dead letter stays: {shown:?}"),
            _ => shown.assert_problem(404, "dead-letter-not-found"),
        }
        assert_eq!(logged_commands(db).await.len() - commands_before, usize::from(first == "retry"));
    }
    app.stop().await;
}

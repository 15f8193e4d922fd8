//! What is given up, and what becomes of it then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hyper::Method;
use pillarbox::settings::Role;
use serde_json::{Value, json};
use testkit::{Client, Receiver, Reply, TestApp, drain};

use crate::hub_delivery::{PATIENCE, caller, post, subscribe, until_received};
use crate::hub_world::{World, attempts, text, until_dead, until_outcome};

fn numbers(receiver: &Receiver) -> Vec<u64> {
    receiver.received().iter().map(|received| received.json()["n"].as_u64().unwrap()).collect()
}

async fn until_numbers(receiver: &Receiver, expected: &[u64]) {
    drain(&format!("{expected:?} have come"), PATIENCE, async || match numbers(receiver) {
        numbers if numbers == expected => Ok(()),
        other => Err(other),
    })
    .await;
}

async fn post_numbers(manager: &Client, lane: &str, numbers: impl IntoIterator<Item = u64>) -> Vec<String> {
    let mut posted = Vec::new();
    for n in numbers {
        posted.push(post(manager, "test.numbered", json!({ "n": n }), Some(lane)).await);
    }
    posted
}

/// Refuses these numbers until it is told otherwise.
async fn refusing(refused: &'static [u64], status: u16) -> Receiver {
    Receiver::replying(move |received| {
        let n = received.json()["n"].as_u64().unwrap();
        Reply::status(if refused.contains(&n) { status } else { 200 })
    })
    .await
}

#[tokio::test]
async fn a_dead_letter_has_all_that_was_known_and_a_retry_joins_the_tail_of_its_lane() {
    let world = World::start().await;
    let manager = &world.manager;
    let receiver = refusing(&[1], 503).await;
    let fields = json!({"name": "then", "retry_backoff_seconds": [1], "headers": {"authorization": "Bearer hush"}});
    let subscriber = subscribe(manager, &receiver.url(), fields).await;
    let posted = post_numbers(manager, "lane", 1..=2).await;
    let dead = until_dead(manager, &subscriber, 1).await.remove(0);
    until_numbers(&receiver, &[1, 1, 2]).await;
    let change = json!({"name": "now", "max_in_flight": 1});
    let path = format!("/hub/v1/subscribers/{}", text(&subscriber["id"]));
    assert_eq!(manager.send(Method::PATCH, &path, Some(change)).await.status, 200);

    let path = format!("/hub/v1/dead-letters/{}", text(&dead["id"]));
    let shown = manager.get(&path).await;
    assert!(!shown.text.contains("hush"), "{shown:?}");
    let shown = shown.json();
    assert_eq!((&shown["reason"], &shown["attempts"]), (&json!("exhausted"), &json!(2)), "{shown}");
    assert_eq!((&shown["event_id"], &shown["lane"]), (&json!(posted[0]), &json!("lane")));
    assert_eq!(
        (&shown["event"]["payload"], &shown["event"]["event_type"]),
        (&json!({"n": 1}), &json!("test.numbered"))
    );
    assert_eq!((&shown["subscriber"]["name"], &shown["subscriber"]["url"]), (&json!("then"), &json!(receiver.url())));
    assert!(text(&shown["detail"]).contains("503"), "{shown}");

    receiver.reply(|_| Reply::status(200));
    // The lane has more by then: it is paused, so that this is sure.
    let lifecycle = async |verb: &str| {
        let path = format!("/hub/v1/subscribers/{}/{verb}", text(&subscriber["id"]));
        assert_eq!(manager.send(Method::POST, &path, None).await.status, 200);
    };
    lifecycle("pause").await;
    post_numbers(manager, "lane", 3..=4).await;
    assert_eq!(manager.send(Method::POST, &format!("{path}/retry"), None).await.status, 202);
    // Its place is taken when fan-out sees it: what is posted from then on is behind it.
    until_outcome(manager, &posted[0], &subscriber, "pending").await;
    post_numbers(manager, "lane", [5]).await;
    lifecycle("resume").await;
    until_numbers(&receiver, &[1, 1, 2, 3, 4, 1, 5]).await;
    let received = receiver.received();
    let ids: Vec<&str> = [0, 1, 5].map(|at| received[at].header("webhook-id")).to_vec();
    assert_eq!(ids, [&posted[0]; 3]);
    let seqs: Vec<&str> = received.iter().map(|received| received.header("webhook-seq")).collect();
    assert_eq!(seqs, ["1", "1", "2", "3", "4", "5", "6"], "what is sent again has a new place");
    let outcome = until_outcome(manager, &posted[0], &subscriber, "delivered").await;
    let tried = attempts(manager, &outcome).await;
    let tried: Vec<&str> = tried.iter().map(|(_, outcome)| &outcome[..]).collect();
    assert_eq!(tried, ["failed", "dead", "delivered"]);
    let again = manager.send(Method::POST, &format!("{path}/retry"), None).await;
    again.assert_problem(409, "already-retried");
    world.app.stop().await;
}

#[tokio::test]
async fn many_dead_letters_are_sent_again_by_filter_and_no_others() {
    let world = World::start().await;
    let manager = &world.manager;
    let receiver = Receiver::replying(|_| Reply::status(400)).await;
    let subscriber = subscribe(manager, &receiver.url(), json!({})).await;
    let other = subscribe(manager, &receiver.url(), json!({"event_types": ["other.*"]})).await;
    for n in 1..=12 {
        post(manager, if n % 2 == 0 { "order.paid" } else { "other.paid" }, json!({ "n": n }), Some("lane")).await;
    }
    until_dead(manager, &subscriber, 12).await;
    until_dead(manager, &other, 6).await;
    receiver.reply(|_| Reply::status(200));
    let before = receiver.count();
    let body = json!({"subscriber_id": subscriber["id"], "event_type": "order"});
    let retried = manager.post("/hub/v1/dead-letters/retry", body).await;
    assert_eq!(retried.json(), json!({"retried": 6, "more": false}));
    until_received(&receiver, before + 6).await;
    world.app.stop().await;
    assert_eq!(numbers(&receiver)[before..], [2, 4, 6, 8, 10, 12], "in their order, and nothing else");
}

#[tokio::test]
async fn a_lane_that_blocks_waits_alone_and_goes_on_in_order_when_its_head_is_retried() {
    let world = World::start().await;
    let manager = &world.manager;
    let receiver = refusing(&[2], 503).await;
    let fields = json!({"retry_backoff_seconds": [1], "on_exhausted": "block"});
    let subscriber = subscribe(manager, &receiver.url(), fields).await;
    let posted = post_numbers(manager, "blocked", 1..=4).await;
    let dead = until_dead(manager, &subscriber, 1).await.remove(0);
    assert_eq!(dead["event_id"], posted[1]);
    let free = post_numbers(manager, "free", 101..=103).await;
    until_outcome(manager, &free[2], &subscriber, "delivered").await;
    assert_eq!(numbers(&receiver), [1, 2, 2, 101, 102, 103]);
    until_outcome(manager, &posted[2], &subscriber, "pending").await;
    // It stays so when another process goes on with it.
    let World { database, app, manager } = world;
    app.stop().await;
    let app = testkit::TestApp::start(&database).await;
    let manager = app.anyone().bearer(manager.credential());
    let free = post_numbers(&manager, "free", [104]).await;
    until_outcome(&manager, &free[0], &subscriber, "delivered").await;
    receiver.reply(|_| Reply::status(200));
    let retry = format!("/hub/v1/dead-letters/{}/retry", text(&dead["id"]));
    assert_eq!(manager.send(Method::POST, &retry, None).await.status, 202);
    until_numbers(&receiver, &[1, 2, 2, 101, 102, 103, 104, 2, 3, 4]).await;
    until_outcome(&manager, &posted[3], &subscriber, "delivered").await;
    let received = receiver.received();
    assert_eq!((received[7].header("webhook-id"), received[7].header("webhook-seq")), (&posted[1][..], "2"));
    app.stop().await;
}

#[tokio::test]
async fn a_message_that_waits_can_be_given_up_by_hand_and_its_lane_goes_on() {
    let world = World::start().await;
    let manager = &world.manager;
    let receiver = refusing(&[1], 503).await;
    let subscriber = subscribe(manager, &receiver.url(), json!({"retry_backoff_seconds": [3600]})).await;
    let posted = post_numbers(manager, "lane", 1..=3).await;
    let waiting = until_outcome(manager, &posted[0], &subscriber, "failed").await;
    give_up(manager, &waiting).await;
    until_numbers(&receiver, &[1, 2, 3]).await;
    let dead = until_dead(manager, &subscriber, 1).await.remove(0);
    assert_eq!((&dead["event_id"], &dead["reason"]), (&json!(posted[0]), &json!("manual")));
    until_outcome(manager, &posted[2], &subscriber, "delivered").await;
    give_up_too_late(manager, &waiting).await;
    world.app.stop().await;
}

/// The breaker is open: nothing is read for who does not answer, but what people want is.
#[tokio::test]
async fn a_message_for_who_never_answers_can_be_given_up_by_hand() {
    let world = World::start().await;
    let manager = &world.manager;
    let receiver = Receiver::replying(|_| Reply::status(503)).await;
    let subscriber = subscribe(manager, &receiver.url(), json!({"retry_backoff_seconds": [3600]})).await;
    let mut posted = Vec::new();
    for n in 0..30 {
        posted.push(post(manager, "test.numbered", json!({ "n": n }), Some(&format!("lane-{n}"))).await);
    }
    until_received(&receiver, 30).await;
    let waiting = until_outcome(manager, &posted[7], &subscriber, "failed").await;
    give_up(manager, &waiting).await;
    let dead = until_dead(manager, &subscriber, 1).await.remove(0);
    assert_eq!((&dead["event_id"], &dead["reason"]), (&json!(posted[7]), &json!("manual")));
    world.app.stop().await;
    assert_eq!(receiver.count(), 30, "it is not sent for that");
}

async fn give_up(manager: &Client, outcome: &Value) {
    let path = format!("/hub/v1/messages/{}/dead-letter", text(&outcome["message_id"]));
    let asked = manager.send(Method::POST, &path, None).await;
    assert_eq!(asked.status, 202, "{asked:?}");
}

async fn give_up_too_late(manager: &Client, outcome: &Value) {
    let path = format!("/hub/v1/messages/{}/dead-letter", text(&outcome["message_id"]));
    manager.send(Method::POST, &path, None).await.assert_problem(409, "message-settled");
}

/// The lane that is given up must not take the place of the one whose message comes next.
#[tokio::test]
async fn of_two_lanes_that_block_one_can_be_given_up_and_the_other_retried_after_a_restart() {
    let world = World::start().await;
    let well = Arc::new(AtomicBool::new(false));
    let is_well = well.clone();
    let receiver =
        Receiver::replying(move |_| Reply::status(if is_well.load(Ordering::Relaxed) { 200 } else { 400 })).await;
    let subscriber = subscribe(&world.manager, &receiver.url(), json!({"on_exhausted": "block"})).await;
    for (n, lane) in [(1, "x"), (2, "y"), (3, "x"), (4, "y")] {
        post(&world.manager, "test.posted", json!({ "n": n }), Some(lane)).await;
    }
    let dead = until_dead(&world.manager, &subscriber, 2).await;
    well.store(true, Ordering::Relaxed);
    let give_up = format!("/hub/v1/messages/{}/dead-letter", text(&dead[0]["message_id"]));
    assert_eq!(world.manager.post(&give_up, json!({})).await.status, 202);
    until_received(&receiver, 3).await;
    let World { database, app, .. } = world;
    app.stop().await;
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    let retry = format!("/hub/v1/dead-letters/{}/retry", text(&dead[1]["id"]));
    assert_eq!(manager.post(&retry, json!({})).await.status, 202);
    until_received(&receiver, 5).await;
    // Everything has its outcome, and nothing is left to be done.
    let waiting = "select count(*) from pillarbox_hub.lane";
    drain("no lane waits", PATIENCE, async || {
        sqlx::query_scalar::<_, i64>(waiting).fetch_one(database.pool()).await.unwrap() == 0
    })
    .await;
    app.stop().await;
    assert_eq!(numbers(&receiver), [1, 2, 3, 2, 4]);
}

#[tokio::test]
async fn who_retries_what_was_given_up_a_moment_before_is_told_that_it_was_not() {
    let World { database, app, manager } = World::start().await;
    let receiver = refusing(&[1], 400).await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({"on_exhausted": "block"})).await;
    let posted = post_numbers(&manager, "lane", 1..=2).await;
    let dead = until_dead(&manager, &subscriber, 1).await.remove(0);
    app.stop().await;
    // Both are asked for before anybody hears of either.
    let asking = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Api, Role::Fanout]).await;
    let manager = asking.anyone().bearer(manager.credential());
    let give_up = format!("/hub/v1/messages/{}/dead-letter", text(&dead["message_id"]));
    let path = format!("/hub/v1/dead-letters/{}", text(&dead["id"]));
    for asked in [give_up, format!("{path}/retry")] {
        assert_eq!(manager.send(Method::POST, &asked, None).await.status, 202, "{asked}");
    }
    let commands = "select array_agg(what order by id) from pillarbox_hub.command";
    drain("both are asked for", PATIENCE, async || {
        let found: Option<Vec<String>> = sqlx::query_scalar(commands).fetch_one(database.pool()).await.unwrap();
        if found.as_ref().is_some_and(|found| found == &["dead_letter", "retry"]) { Ok(()) } else { Err(found) }
    })
    .await;
    assert!(manager.get(&path).await.json()["manual_retry_at"].is_string());
    asking.stop().await;
    let app = TestApp::start(&database).await;
    let manager = app.anyone().bearer(manager.credential());
    until_outcome(&manager, &posted[1], &subscriber, "delivered").await;
    drain("it was not retried", PATIENCE, async || manager.get(&path).await.json()["manual_retry_at"].is_null()).await;
    assert_eq!(numbers(&receiver), [1, 2]);
    // So it can be, now at the tail of its lane.
    receiver.reply(|_| Reply::status(200));
    assert_eq!(manager.send(Method::POST, &format!("{path}/retry"), None).await.status, 202);
    until_numbers(&receiver, &[1, 2, 1]).await;
    app.stop().await;
}

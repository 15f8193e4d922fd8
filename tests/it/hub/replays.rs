//! Replays: what they send again, in which order, and that they neither delay live messages nor outlive their control.

use std::collections::HashMap;
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use serde_json::{Value, json};
use sqlx::PgPool;
use testkit::{Client, Received, Receiver, Reply, eventually};
use uuid::Uuid;

use crate::hub::fixture::{
    Fixture, error_pointers, numbered_events, post, post_batch, subscribe, subscriber_path, wait_for_webhooks,
};
use crate::support::{DEADLINE, caller, text};

/// Requests a replay. Returns its representation.
pub(crate) async fn request_replay(manager: &Client, body: Value) -> Value {
    let created = manager.post("/hub/v1/replays", body).await;
    assert_eq!(created.status, 202, "{created:?}");
    created.json()
}

pub(crate) async fn show_replay(manager: &Client, replay: &Value) -> Value {
    manager.get(&format!("/hub/v1/replays/{}", text(&replay["id"]))).await.json()
}

/// Waits until the replay meets the condition. Returns its representation.
pub(crate) async fn wait_for_replay(
    manager: &Client,
    replay: &Value,
    what: &str,
    is_met: impl Fn(&Value) -> bool,
) -> Value {
    eventually(what, DEADLINE, async || match show_replay(manager, replay).await {
        shown if is_met(&shown) => Ok(shown),
        other => Err(other),
    })
    .await
}

pub(crate) fn is_delivered(replay: &Value) -> bool {
    replay["state"] == "finished" && replay["waiting"] == 0
}

/// An hour ago, as the start of a range.
pub(crate) fn hour_ago() -> String {
    (Utc::now() - TimeDelta::hours(1)).to_rfc3339()
}

/// The numbers of each lane in the requests of a replay (or of none), in the order of their arrival.
pub(crate) fn lanes_of(received: &[Received], replay: Option<&str>) -> HashMap<String, Vec<u64>> {
    let mut lanes: HashMap<String, Vec<u64>> = HashMap::new();
    for request in received {
        let of = request.headers.get("webhook-replay").map(|value| value.to_str().unwrap().to_owned());
        if of.as_deref() == replay {
            let payload = request.json();
            lanes.entry(text(&payload["lane"]).to_owned()).or_default().push(payload["n"].as_u64().unwrap());
        }
    }
    lanes
}

async fn change(manager: &Client, replay: &Value, action: &str) -> testkit::Response {
    manager.post(&format!("/hub/v1/replays/{}/{action}", text(&replay["id"])), json!({})).await
}

#[tokio::test]
async fn a_replay_sends_what_was_chosen_again_in_order_and_says_so() {
    let Fixture { app, manager, database } = Fixture::start().await;
    let receiver = Receiver::start().await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({"event_types": ["test.*"]})).await;
    let ids = post_batch(&manager, numbered_events(3, 1..=20)).await;
    post(&manager, "other.posted", json!({"lane": "x", "n": 1}), None).await;
    wait_for_webhooks(&receiver, 60).await;
    let count = async |more: Value| {
        let mut body = json!({"subscriber_id": subscriber["id"], "from": hour_ago(), "dry_run": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let counted = manager.post("/hub/v1/replays", body).await;
        assert_eq!((counted.status, &counted.json()["is_exact"]), (200, &json!(true)), "{counted:?}");
        counted.json()["matched"].as_u64().unwrap()
    };
    let of_lane = json!([{"pointer": "/lane", "op": "eq", "value": "lane-1"}]);
    assert_eq!(count(json!({})).await, 60);
    assert_eq!(count(json!({"event_types": ["other.*"]})).await, 0, "the subscriber's own types apply, too");
    assert_eq!(count(json!({"filter": of_lane})).await, 20);
    assert_eq!(count(json!({"mode": "missed"})).await, 0, "it has a message of each");
    let later = (Utc::now() - TimeDelta::minutes(59)).to_rfc3339();
    assert_eq!(count(json!({"to": later})).await, 0);
    assert_eq!(manager.get("/hub/v1/replays").await.json()["items"], json!([]), "a dry run creates nothing");

    let replay = request_replay(&manager, json!({"from": hour_ago(), "filter": of_lane})).await;
    let shown = wait_for_replay(&manager, &replay, "the lane is sent again", is_delivered).await;
    assert_eq!(
        ["matched", "created", "delivered", "dead"].map(|name| shown[name].clone()),
        [20, 20, 20, 0].map(Value::from)
    );
    assert_eq!(shown["done"], 1.0);
    let of_replay = lanes_of(&receiver.received(), replay["id"].as_str());
    assert_eq!(of_replay, HashMap::from([("lane-1".to_owned(), (1..=20).collect::<Vec<u64>>())]));
    for request in receiver.received().iter().skip(60) {
        let header = |name: &str| request.headers.get(name).map(|value| value.to_str().unwrap().to_owned());
        let at = (request.json()["n"].as_u64().unwrap() as usize - 1) * 3 + 1;
        assert_eq!(header("webhook-id").as_deref(), Some(ids[at].as_str()), "the id of the event");
        assert_eq!((header("webhook-lane").as_deref(), header("webhook-seq")), (Some("lane-1"), None));
    }
    let next = post_batch(&manager, numbered_events(3, [21])).await;
    wait_for_webhooks(&receiver, 83).await;
    let live = receiver.received().into_iter().find(|request| request.header("webhook-id") == next[1]).unwrap();
    assert_eq!(live.header("webhook-seq"), "21", "the numbers of a live lane have no gap");

    let message = format!("{}.{}", ids[0].trim_start_matches("evt_"), text(&subscriber["id"]));
    let resent = manager.post(&format!("/hub/v1/messages/{message}/resend"), json!({})).await;
    assert_eq!(resent.status, 202, "{resent:?}");
    wait_for_replay(&manager, &resent.json(), "a delivered message is sent again", is_delivered).await;
    assert_eq!(manager.get(&format!("/hub/v1/messages/{message}")).await.json()["replay_id"], resent.json()["id"]);
    let named = request_replay(&manager, json!({"event_ids": [ids[5], ids[3]]})).await;
    let named = wait_for_replay(&manager, &named, "the named events are sent again", is_delivered).await;
    assert_eq!((&named["events"], &named["created"]), (&json!(2), &json!(2)));
    let sent = lanes_of(&receiver.received(), named["id"].as_str());
    assert_eq!(sent, HashMap::from([("lane-0".to_owned(), vec![2]), ("lane-2".to_owned(), vec![2])]));
    assert_eq!(manager.get("/hub/v1/replays?limit=2").await.json()["items"][0]["id"], named["id"], "newest first");
    app.stop().await;
    drop(database);
}

#[tokio::test]
async fn a_replay_belongs_to_its_tenant_and_its_managers() {
    let Fixture { app, manager, database } = Fixture::start().await;
    let receiver = Receiver::start().await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({})).await;
    post_batch(&manager, numbered_events(1, 1..=5)).await;
    wait_for_webhooks(&receiver, 5).await;
    let body = json!({"subscriber_id": subscriber["id"], "from": hour_ago(), "rate_per_second": 1});
    let replay = request_replay(&manager, body.clone()).await;
    let path = format!("/hub/v1/replays/{}", text(&replay["id"]));
    let (stranger, producer) = (caller(&app, "manage", "zeta").await, caller(&app, "ingest", "acme").await);
    stranger.get(&path).await.assert_problem(404, "replay-not-found");
    stranger.post("/hub/v1/replays", body.clone()).await.assert_problem(404, "subscriber-not-found");
    assert_eq!(stranger.get("/hub/v1/replays").await.json()["items"], json!([]));
    for action in ["pause", "resume", "cancel"] {
        change(&stranger, &replay, action).await.assert_problem(404, "replay-not-found");
        assert_eq!(change(&producer, &replay, action).await.status, 403);
    }
    assert_eq!(producer.post("/hub/v1/replays", body.clone()).await.status, 403);
    let everything = json!({"from": hour_ago(), "dry_run": true});
    assert_eq!(stranger.post("/hub/v1/replays", everything).await.json()["matched"], 0);
    assert_eq!(error_pointers(&manager.post("/hub/v1/replays", json!({"to": hour_ago()})).await), ["", "/to"]);
    let keyed = manager.with_header("idempotency-key", "once");
    let (first, again) = (request_replay(&keyed, body.clone()).await, request_replay(&keyed, body.clone()).await);
    assert_eq!(first["id"], again["id"]);
    for _ in 0..8 {
        request_replay(&manager, body.clone()).await;
    }
    manager.post("/hub/v1/replays", body).await.assert_problem(409, "too-many-replays");
    assert_eq!(change(&manager, &replay, "cancel").await.json()["state"], "canceled");
    change(&manager, &replay, "resume").await.assert_problem(409, "replay-ended");
    app.stop().await;
    drop(database);
}

#[tokio::test]
async fn a_replay_that_fails_does_not_disturb_the_live_lane() {
    let Fixture { app, manager, database } = Fixture::start().await;
    // More failures in a row than open the breaker, and then a pause that would stop everything.
    let mut failures = 0;
    let receiver = Receiver::with_reply(move |request| {
        if !request.headers.contains_key("webhook-replay") {
            return Reply::status(200);
        }
        failures += 1;
        let headers = if failures > 40 { vec![("retry-after", "30".to_owned())] } else { Vec::new() };
        Reply { headers, ..Reply::status(503) }
    })
    .await;
    let fields = json!({"retry_backoff_seconds": [60], "max_in_flight": 4});
    let subscriber = subscribe(&manager, &receiver.url(), fields).await;
    post_batch(&manager, numbered_events(2, 1..=40)).await;
    let keyless = |n: usize| json!({"event_type": "test.single", "payload": {"lane": "-", "n": n}});
    post_batch(&manager, (0..60).map(keyless).collect()).await;
    wait_for_webhooks(&receiver, 140).await;
    let replay = request_replay(&manager, json!({"subscriber_id": subscriber["id"], "from": hour_ago()})).await;
    let failed = || lanes_of(&receiver.received(), replay["id"].as_str()).values().map(Vec::len).sum::<usize>();
    eventually("the replay fails and has to wait", DEADLINE, async || failed() > 40).await;
    for n in 41..=70 {
        post_batch(&manager, numbered_events(2, [n])).await;
    }
    let expected: Vec<u64> = (1..=70).collect();
    eventually("live messages arrive in order", Duration::from_secs(10), async || {
        let live = lanes_of(&receiver.received(), None);
        match live["lane-0"] == expected && live["lane-1"] == expected {
            true => Ok(()),
            false => Err(format!("{live:?}")),
        }
    })
    .await;
    eventually("the whole replay waits", DEADLINE, async || {
        let waiting = show_replay(&manager, &replay).await;
        let is_waiting = (&waiting["delivered"], &waiting["waiting"]) == (&json!(0), &json!(140));
        if is_waiting { Ok(()) } else { Err(waiting) }
    })
    .await;
    // And the other way round: what blocks live messages does not block the replay.
    receiver.set_reply(|request| Reply::status(if request.headers.contains_key("webhook-replay") { 200 } else { 503 }));
    post_batch(&manager, numbered_events(2, [71])).await;
    let message =
        &manager.get(&format!("/hub/v1/messages?subscriber_id={}", text(&subscriber["id"]))).await.json()["items"][0];
    let resent = manager.post(&format!("/hub/v1/messages/{}/resend", text(&message["id"])), json!({})).await.json();
    assert_eq!(manager.post(&format!("{}/pause", subscriber_path(&subscriber)), json!({})).await.status, 200);
    assert_eq!(manager.post(&format!("{}/resume", subscriber_path(&subscriber)), json!({})).await.status, 200);
    wait_for_replay(&manager, &resent, "the message is sent beside its live lane", is_delivered).await;
    app.stop().await;
    drop(database);
}

/// The counts of a replay leave no message out.
pub(crate) fn check_sum(shown: &Value) {
    let count = |name: &str| shown[name].as_i64().unwrap();
    let parts = ["delivered", "dead", "dropped", "waiting"].map(count);
    assert!(count("created") == parts.iter().sum::<i64>() && parts.iter().all(|part| *part >= 0), "{shown}");
}

/// The counts of a replay whose messages have their outcomes are those of the messages and their attempts.
async fn check_counts(db: &PgPool, shown: &Value) {
    check_sum(shown);
    let query = "select count(distinct message.n), count(*) filter (where outcome = 'delivered'),
                        count(*) filter (where outcome = 'dead')
                 from pillarbox_hub.message left join pillarbox_hub.attempt using (subscriber, n)
                 where replay = $1::text::uuid";
    let (messages, delivered, dead): (i64, i64, i64) =
        sqlx::query_as(query).bind(text(&shown["id"])).fetch_one(db).await.unwrap();
    let counts = ["created", "delivered", "dead"].map(|name| shown[name].as_i64().unwrap());
    assert_eq!(counts, [messages, delivered, dead], "{shown}");
}

/// Random numbers of created messages, ascending, at which a test does something.
fn steps(count: usize, events: u64) -> Vec<u64> {
    let mut steps: Vec<u64> = (0..count).map(|_| Uuid::new_v4().as_u128() as u64 % events).collect();
    steps.sort_unstable();
    steps
}

fn is_refused(n: u64) -> bool {
    n.is_multiple_of(7)
}

/// Refuses some messages of replays, which are dead then.
async fn refusing_receiver() -> Receiver {
    Receiver::with_reply(|request| {
        let is_refused = is_refused(request.json()["n"].as_u64().unwrap());
        Reply::status(if is_refused && request.headers.contains_key("webhook-replay") { 400 } else { 200 })
    })
    .await
}

#[tokio::test]
async fn a_replay_that_is_paused_or_canceled_at_any_step_creates_nothing_more() {
    const EVENTS: u64 = 3_200;
    let Fixture { app, manager, database } = Fixture::start().await;
    let receiver = refusing_receiver().await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({})).await;
    for first in (1..=EVENTS as usize / 4).step_by(100) {
        post_batch(&manager, numbered_events(4, first..first + 100)).await;
    }
    wait_for_webhooks(&receiver, EVENTS as usize).await;
    let body = json!({"subscriber_id": subscriber["id"], "from": hour_ago()});
    let paused = request_replay(&manager, body.clone()).await;
    let steps_paused = steps(5, EVENTS);
    // At once, and then at any step.
    for least in std::iter::once(0).chain(steps_paused.clone()) {
        let has_created = |shown: &Value| shown["created"].as_u64().unwrap() >= least || shown["state"] == "finished";
        check_sum(&wait_for_replay(&manager, &paused, "the next part", has_created).await);
        let answer = change(&manager, &paused, "pause").await;
        if answer.status == 409 {
            break;
        }
        check_sum(&answer.json());
        let created = answer.json()["created"].clone();
        let shown = wait_for_replay(&manager, &paused, "its messages are sent", |shown| shown["waiting"] == 0).await;
        check_counts(database.pool(), &shown).await;
        assert_eq!((&shown["state"], &shown["created"]), (&json!("paused"), &created), "steps {steps_paused:?}");
        assert_eq!(change(&manager, &paused, "resume").await.status, 200);
    }
    let shown = wait_for_replay(&manager, &paused, "the rest is sent", is_delivered).await;
    let refused = (1..=EVENTS / 4).filter(|n| is_refused(*n)).count() as u64 * 4;
    assert_eq!((&shown["created"], &shown["dead"]), (&json!(EVENTS), &json!(refused)));
    let lanes = lanes_of(&receiver.received(), paused["id"].as_str());
    assert!(lanes.len() == 4 && lanes.values().all(|lane| *lane == (1..=EVENTS / 4).collect::<Vec<_>>()), "{lanes:?}");

    for least in std::iter::once(0).chain(steps(3, EVENTS)) {
        let canceled = request_replay(&manager, body.clone()).await;
        let has_created = |shown: &Value| shown["created"].as_u64().unwrap() >= least;
        wait_for_replay(&manager, &canceled, "a part", has_created).await;
        let answer = change(&manager, &canceled, "cancel").await;
        let created = answer.json()["created"].as_u64().unwrap_or(EVENTS);
        let shown = wait_for_replay(&manager, &canceled, "what exists is sent", |shown| shown["waiting"] == 0).await;
        check_counts(database.pool(), &shown).await;
        assert_eq!(shown["created"], created, "{shown}");
        let sent = lanes_of(&receiver.received(), canceled["id"].as_str());
        assert_eq!(sent.values().map(Vec::len).sum::<usize>() as u64, created, "each once");
        let is_prefix = |lane: &Vec<u64>| *lane == (1..=lane.len() as u64).collect::<Vec<_>>();
        assert!(sent.values().all(is_prefix), "{sent:?}");
    }
    assert_eq!(manager.post(&format!("{}/pause", subscriber_path(&subscriber)), json!({})).await.status, 200);
    let waiting = request_replay(&manager, body).await;
    let waits = |shown: &Value| shown["waits_for"] == subscriber["id"];
    let shown = wait_for_replay(&manager, &waiting, "it waits for the subscriber", waits).await;
    assert!((1_152..=1_536).contains(&shown["created"].as_u64().unwrap()), "a bounded number waits: {shown}");
    app.stop().await;
    drop(database);
}

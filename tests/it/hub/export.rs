//! Messages of the services as webhooks of the tenant `main`: the setting `hub.export`.

use hyper::Method;
use pillarbox::log::Post;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use server::migrations;
use server::settings::{Role, Settings};
use sqlx::PgPool;
use testkit::{Client, Receiver, Reply, TestApp, TestDatabase, eventually};

use crate::events::fixture::{event_id, meetup, new_user, patch_event, post_action, post_messages, publish_event};
use crate::hub::fixture::{
    attempts, error_pointers, post, received_numbers, replay_fanout, subscribe, wait_for_dead_letters,
    wait_for_outcome, wait_for_webhooks,
};
use crate::joins::fixture::post_join_action;
use crate::support::{DEADLINE, caller, collect_pages, text};

fn exporting(topics: &[&str]) -> impl FnOnce(&mut Settings) {
    let topics = json!(topics);
    move |settings| settings.hub.export = serde_json::from_value(topics).unwrap()
}

/// The messages in the log with this key or topic: the event id of each, and its payload as it was posted.
async fn logged(db: &PgPool, key_or_topic: &str) -> Vec<(String, String)> {
    let query = "select 'evt_' || message_id, payload::text from pillarbox.log where $1 in (key, topic) order by id";
    sqlx::query_as(query).bind(key_or_topic).fetch_all(db).await.unwrap()
}

fn message(topic: &str, n: u64) -> Post {
    Post::new(topic, to_raw_value(&json!({ "n": n })).unwrap())
}

/// The types and sources of the listed events, without those of the hub itself.
async fn listed(manager: &Client) -> Vec<(String, String)> {
    let of = |event: &Value| (text(&event["event_type"]).to_owned(), text(&event["source"]).to_owned());
    let events = collect_pages(manager, "/hub/v1/events").await;
    events.iter().map(of).filter(|(_, source)| source != "hub.system").collect()
}

fn ids(receiver: &Receiver) -> Vec<String> {
    receiver.received().iter().map(|received| received.header("webhook-id").to_owned()).collect()
}

#[tokio::test]
async fn messages_of_the_events_service_are_sent_unchanged_signed_and_in_order() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, exporting(&["event.*"])).await;
    let manager = caller(&app, "manage", "main").await;
    let mut is_first = true;
    let receiver =
        Receiver::with_reply(move |_| Reply::status(if std::mem::take(&mut is_first) { 503 } else { 200 })).await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({"retry_backoff_seconds": [1]})).await;
    let owner = new_user(&app);
    let event = publish_event(&owner, meetup()).await;
    let known = format!("/join/v1/events/{}/stats", event_id(&event));
    eventually("the joins service knows the event", DEADLINE, async || app.admin().get(&known).await.status == 200)
        .await;
    assert_eq!(post_join_action(&new_user(&app), event_id(&event), "join").await.status, 201);
    assert_eq!(patch_event(&owner, &event, json!({"title": "Rüst meetup"})).await.status, 200);
    assert_eq!(post_action(&owner, &event, "cancel").await.status, 200);
    let own = post(&manager, "order.paid", json!({}), None).await;
    wait_for_webhooks(&receiver, 5).await;
    wait_for_outcome(&manager, &own, &subscriber, "delivered").await;

    let key = event_id(&event).to_string();
    let not_exported = logged(database.pool(), "join.confirmed").await.remove(0).0;
    let mut posted = logged(database.pool(), &key).await;
    posted.retain(|(_, payload)| !payload.contains("join_id"));
    let received: Vec<_> =
        receiver.received().into_iter().filter(|one| one.headers.contains_key("webhook-lane")).collect();
    let sent: Vec<(String, String)> = received
        .iter()
        .map(|one| (one.header("webhook-id").to_owned(), String::from_utf8(one.body.to_vec()).unwrap()))
        .collect();
    assert_eq!(sent, [&posted[..1], &posted[..]].concat(), "the first one twice, then the others, byte for byte");
    let statuses: Vec<Value> = received.iter().map(|one| one.json()["status"].clone()).collect();
    assert_eq!(statuses, ["published", "published", "published", "canceled"]);
    let webhook = standardwebhooks::Webhook::new(text(&subscriber["secret"])).unwrap();
    for (one, seq) in received.iter().zip(["1", "1", "2", "3"]) {
        webhook.verify(&one.body, &one.headers).unwrap();
        assert_eq!((one.header("webhook-lane"), one.header("webhook-seq")), (&key[..], seq));
    }

    let expected = [
        ("order.paid", "hub"),
        ("event.canceled", "events"),
        ("event.updated", "events"),
        ("event.published", "events"),
    ];
    assert_eq!(listed(&manager).await, expected.map(|(topic, source)| (topic.to_owned(), source.to_owned())));
    let shown = manager.get(&format!("/hub/v1/events/{}", posted[0].0)).await.json();
    assert_eq!((&shown["ordering_key"], &shown["source"]), (&json!(key), &json!("events")), "{shown}");
    assert_eq!(shown["payload"], serde_json::from_str::<Value>(&posted[0].1).unwrap());
    assert_eq!(shown["outcomes"][0]["outcome"], "delivered");
    assert_eq!(attempts(&manager, &shown["outcomes"][0]).await.len(), 2);
    manager.get(&format!("/hub/v1/events/{not_exported}")).await.assert_problem(404, "event-not-found");
    app.stop().await;
}

#[tokio::test]
async fn another_tenant_receives_and_sees_no_service_messages() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, exporting(&["event.*"])).await;
    let (main, acme) = (caller(&app, "manage", "main").await, caller(&app, "manage", "acme").await);
    let (mains, acmes) = (Receiver::start().await, Receiver::start().await);
    subscribe(&main, &mains.url(), json!({})).await;
    subscribe(&acme, &acmes.url(), json!({})).await;
    publish_event(&new_user(&app), meetup()).await;
    // No service posts for another tenant; such a message must not reach any subscriber.
    let wrong_tenant = Post { tenant: "acme".parse().unwrap(), ..message("event.published", 2) };
    post_messages(database.pool(), "events", &[wrong_tenant]).await;
    wait_for_webhooks(&mains, 1).await;
    let own = post(&acme, "event.published", json!({"n": 3}), None).await;
    wait_for_webhooks(&acmes, 1).await;
    let posted = logged(database.pool(), "event.published").await;
    assert_eq!((ids(&mains), ids(&acmes)), (vec![posted[0].0.clone()], vec![own.clone()]));
    assert_eq!(listed(&acme).await, [("event.published".to_owned(), "hub".to_owned())], "only its own event");
    assert_eq!(listed(&main).await, [("event.published".to_owned(), "events".to_owned())]);
    for (of_another, _) in &posted[..2] {
        acme.get(&format!("/hub/v1/events/{of_another}")).await.assert_problem(404, "event-not-found");
    }
    main.get(&format!("/hub/v1/events/{own}")).await.assert_problem(404, "event-not-found");
    app.stop().await;
}

#[tokio::test]
async fn service_messages_cannot_be_forged_and_private_topics_are_not_exported() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, exporting(&["event.*", "join.*"])).await;
    let db = database.pool();
    let (main, acme) = (caller(&app, "manage", "main").await, caller(&app, "ingest", "acme").await);
    let receiver = Receiver::start().await;
    subscribe(&main, &receiver.url(), json!({})).await;

    let forged = json!({"event_type": "event.published", "payload": {"n": 1}});
    let refused = main.post("/hub/v1/events", forged.clone()).await;
    assert_eq!(error_pointers(&refused), ["/event_type"]);
    assert!(refused.text.contains("hub.export"), "{refused:?}");
    // Topics that are never exported are rejected as well: a subscriber of `event.*` could not tell them apart.
    let stated = json!({"event_type": "event.restated", "payload": {}});
    let fine = json!({"event_type": "events.published", "payload": {"n": 2}});
    let refused = main.post("/hub/v1/events/batch", json!({"events": [fine, stated]})).await;
    assert_eq!(error_pointers(&refused), ["/events/1/event_type"]);
    assert_eq!(acme.post("/hub/v1/events", forged).await.status, 202, "another tenant may use the event type");

    let by_sql = "select pillarbox.post('event.published', '{\"n\": 3}'::json, key => 'k')";
    sqlx::query(by_sql).execute(db).await.unwrap();
    post_messages(db, "amqp:events", &[message("event.published", 4)]).await;
    post_messages(db, "pillarbox", &[message("event.published", 5)]).await;
    post_messages(db, "notify", &[message("email.verification", 6)]).await;
    post_messages(
        db,
        "events",
        &[message("event.versions", 7), message("event.restated", 7), message("mod.kicked", 8)],
    )
    .await;
    post_messages(
        db,
        "joins",
        &[message("join.counted", 9), message("join.recounted", 9), message("join.confirmed", 10)],
    )
    .await;
    wait_for_webhooks(&receiver, 1).await;
    post(&main, "last", json!({"n": 11}), None).await;
    wait_for_webhooks(&receiver, 2).await;
    let numbers = received_numbers(&receiver);
    assert_eq!(numbers, [10, 11]);
    let expected = [("last", "hub"), ("join.confirmed", "joins")];
    assert_eq!(listed(&main).await, expected.map(|(topic, source)| (topic.to_owned(), source.to_owned())));
    let private = ["event.versions", "event.restated", "join.counted", "join.recounted"];
    for topic in ["email.verification", "mod.kicked"].into_iter().chain(private) {
        let (private, _) = logged(db, topic).await.remove(0);
        main.get(&format!("/hub/v1/events/{private}")).await.assert_problem(404, "event-not-found");
    }
    app.stop().await;
}

#[tokio::test]
async fn a_process_without_export_shows_and_retries_exported_messages() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, exporting(&["event.published"])).await;
    let other = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Api]).await;
    let db = database.pool();
    let manager = caller(&other, "manage", "main").await;
    let receiver = Receiver::with_reply(|_| Reply::status(400)).await;
    let fields = json!({"on_exhausted": "block", "format": "cloudevents"});
    let subscriber = subscribe(&manager, &receiver.url(), fields).await;
    let only_big = json!([{"pointer": "/n", "op": "gt", "value": 100}]);
    let picky = subscribe(&manager, &receiver.url(), json!({"filter": only_big})).await;
    let in_lane = |n| message("event.published", n).with_key("k");
    post_messages(db, "events", &[in_lane(1), in_lane(2)]).await;
    let dead = wait_for_dead_letters(&manager, &subscriber, 1).await.remove(0);
    assert_eq!(dead["event_type"], "event.published");
    assert_eq!(listed(&manager).await, [], "the list follows the setting of the process that serves the request");
    let posted = logged(db, "k").await;

    // The first message is dead and blocks its lane, the second one waits behind it.
    let waiting = wait_for_outcome(&manager, &posted[1].0, &subscriber, "pending").await;
    let first = wait_for_outcome(&manager, &posted[0].0, &subscriber, "dead").await;
    wait_for_outcome(&manager, &posted[0].0, &picky, "filtered").await;
    assert_eq!(attempts(&manager, &first).await, [(Some(400), "dead".to_owned())]);
    let of_message = |message: &Value, what: &str| format!("/hub/v1/messages/{}{what}", text(&message["message_id"]));
    assert_eq!(manager.get(&of_message(&waiting, "")).await.json()["lane"], "k");
    let listing = format!("/hub/v1/messages?subscriber_id={}", text(&subscriber["id"]));
    let types: Vec<Value> =
        collect_pages(&manager, &listing).await.iter().map(|one| one["event_type"].clone()).collect();
    assert_eq!(types, ["event.published"; 2]);

    // Dead-lettering the first unblocks the second, which dies and is dead-lettered as well.
    for message in [&first, &waiting] {
        let accepted = manager.send(Method::POST, &of_message(message, "/dead-letter"), None).await;
        assert_eq!(accepted.status, 202, "{accepted:?}");
        wait_for_dead_letters(&manager, &subscriber, 2).await;
    }
    // The dead letter holds the content and the source, so a retry works after the log entry is deleted.
    let sent = receiver.received()[0].body.clone();
    sqlx::query("delete from pillarbox.log where key = 'k'").execute(db).await.unwrap();
    receiver.set_reply(|_| Reply::status(200));
    let before = receiver.count();
    let retry = format!("/hub/v1/dead-letters/{}/retry", text(&dead["id"]));
    assert_eq!(manager.send(Method::POST, &retry, None).await.status, 202);
    wait_for_webhooks(&receiver, before + 1).await;
    let again = &receiver.received()[before];
    assert_eq!(again.body, sent);
    assert_eq!((&again.json()["source"], &again.json()["data"]), (&json!("/pillarbox/events"), &json!({"n": 1})));
    other.stop().await;
    app.stop().await;
}

#[tokio::test]
async fn export_starts_with_the_setting_and_a_replay_covers_older_messages() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "main").await;
    let receiver = Receiver::start().await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({"event_types": ["event.*", "order.*"]})).await;
    // While nothing is exported, the event type is not reserved.
    post(&manager, "event.published", json!({"n": 0}), None).await;
    post_messages(db, "events", &[message("event.published", 1)]).await;
    let behind = post(&manager, "order.paid", json!({"n": 2}), None).await;
    wait_for_outcome(&manager, &behind, &subscriber, "delivered").await;
    app.stop().await;

    let app = TestApp::start_with(&database, exporting(&["event.published"])).await;
    post_messages(db, "events", &[message("event.published", 3)]).await;
    let numbers = || receiver.received().iter().map(|one| one.json()["n"].as_u64().unwrap()).collect::<Vec<_>>();
    wait_for_webhooks(&receiver, 3).await;
    assert_eq!(numbers()[2], 3, "older messages are not exported without a replay");
    replay_fanout(db, false).await;
    wait_for_webhooks(&receiver, 4).await;
    assert_eq!(numbers()[3], 1);
    app.stop().await;

    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "main").await;
    post_messages(db, "events", &[message("event.published", 4)]).await;
    let last = post(&manager, "order.paid", json!({"n": 5}), None).await;
    wait_for_outcome(&manager, &last, &subscriber, "delivered").await;
    assert_eq!(numbers().last(), Some(&5));
    assert_eq!(receiver.count(), 5);
    app.stop().await;
}

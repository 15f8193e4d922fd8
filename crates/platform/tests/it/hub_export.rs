//! What the services say, as webhooks of the tenant `main`: `hub.export`.

use hyper::Method;
use mailbox::database::migrations;
use mailbox::post::Post;
use pillarbox::settings::{Role, Settings};
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use sqlx::PgPool;
use testkit::{Client, Receiver, Reply, TestApp, TestDatabase, drain};

use crate::events_world::{act, id, meetup, patch, published, say, someone};
use crate::hub_delivery::{PATIENCE, caller, post, subscribe, until_received};
use crate::hub_fanout::replay;
use crate::hub_people::{pointers, walk};
use crate::hub_world::{attempts, text, until_dead, until_outcome};
use crate::joins_world;

fn exporting(topics: &[&str]) -> impl FnOnce(&mut Settings) {
    let topics = json!(topics);
    move |settings| settings.hub.export = serde_json::from_value(topics).unwrap()
}

/// What the log has under this key or topic: ids of events, and payloads as they were posted.
async fn logged(db: &PgPool, key_or_topic: &str) -> Vec<(String, String)> {
    let query = "select 'evt_' || message_id, payload::text from pillarbox.log where $1 in (key, topic) order by id";
    sqlx::query_as(query).bind(key_or_topic).fetch_all(db).await.unwrap()
}

fn saying(topic: &str, n: u64) -> Post {
    Post::new(topic, to_raw_value(&json!({ "n": n })).unwrap())
}

async fn listed(manager: &Client) -> Vec<(String, String)> {
    let of = |event: &Value| (text(&event["event_type"]).to_owned(), text(&event["source"]).to_owned());
    walk(manager, "/hub/v1/events").await.iter().map(of).collect()
}

fn ids(receiver: &Receiver) -> Vec<String> {
    receiver.received().iter().map(|received| received.header("webhook-id").to_owned()).collect()
}

#[tokio::test]
async fn what_the_events_service_says_is_sent_as_it_was_said_signed_and_in_order() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, exporting(&["event.*"])).await;
    let manager = caller(&app, "manage", "main").await;
    let mut is_first = true;
    let receiver =
        Receiver::replying(move |_| Reply::status(if std::mem::take(&mut is_first) { 503 } else { 200 })).await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({"retry_backoff_seconds": [1]})).await;
    let owner = someone(&app);
    let event = published(&owner, meetup()).await;
    let known = format!("/join/v1/events/{}/stats", id(&event));
    drain("joins know the event", PATIENCE, async || app.admin().get(&known).await.status == 200).await;
    assert_eq!(joins_world::act(&someone(&app), id(&event), "join").await.status, 201);
    assert_eq!(patch(&owner, &event, json!({"title": "Rüst meetup"})).await.status, 200);
    assert_eq!(act(&owner, &event, "cancel").await.status, 200);
    let own = post(&manager, "order.paid", json!({}), None).await;
    until_received(&receiver, 5).await;
    until_outcome(&manager, &own, &subscriber, "delivered").await;

    let key = id(&event).to_string();
    let not_exported = logged(database.pool(), "join.confirmed").await.remove(0).0;
    let mut said = logged(database.pool(), &key).await;
    said.retain(|(_, payload)| !payload.contains("join_id"));
    let came: Vec<_> = receiver.received().into_iter().filter(|one| one.headers.contains_key("webhook-lane")).collect();
    let came_as: Vec<(String, String)> = came
        .iter()
        .map(|one| (one.header("webhook-id").to_owned(), String::from_utf8(one.body.to_vec()).unwrap()))
        .collect();
    assert_eq!(came_as, [&said[..1], &said[..]].concat(), "the first again, then the others, byte for byte");
    let statuses: Vec<Value> = came.iter().map(|one| one.json()["status"].clone()).collect();
    assert_eq!(statuses, ["published", "published", "published", "canceled"]);
    let webhook = standardwebhooks::Webhook::new(text(&subscriber["secret"])).unwrap();
    for (one, seq) in came.iter().zip(["1", "1", "2", "3"]) {
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
    let shown = manager.get(&format!("/hub/v1/events/{}", said[0].0)).await.json();
    assert_eq!((&shown["ordering_key"], &shown["source"]), (&json!(key), &json!("events")), "{shown}");
    assert_eq!(shown["payload"], serde_json::from_str::<Value>(&said[0].1).unwrap());
    assert_eq!(shown["outcomes"][0]["outcome"], "delivered");
    assert_eq!(attempts(&manager, &shown["outcomes"][0]).await.len(), 2);
    manager.get(&format!("/hub/v1/events/{not_exported}")).await.assert_problem(404, "event-not-found");
    app.stop().await;
}

#[tokio::test]
async fn another_tenant_gets_and_sees_nothing_of_what_services_say() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, exporting(&["event.*"])).await;
    let (main, acme) = (caller(&app, "manage", "main").await, caller(&app, "manage", "acme").await);
    let (mains, acmes) = (Receiver::start().await, Receiver::start().await);
    subscribe(&main, &mains.url(), json!({})).await;
    subscribe(&acme, &acmes.url(), json!({})).await;
    published(&someone(&app), meetup()).await;
    // No service does this; if one did, it would be for nobody.
    let strayed = Post { tenant: "acme".parse().unwrap(), ..saying("event.published", 2) };
    say(database.pool(), "events", &[strayed]).await;
    until_received(&mains, 1).await;
    let own = post(&acme, "event.published", json!({"n": 3}), None).await;
    until_received(&acmes, 1).await;
    let said = logged(database.pool(), "event.published").await;
    assert_eq!((ids(&mains), ids(&acmes)), (vec![said[0].0.clone()], vec![own.clone()]));
    assert_eq!(listed(&acme).await, [("event.published".to_owned(), "hub".to_owned())], "its own alone");
    assert_eq!(listed(&main).await, [("event.published".to_owned(), "events".to_owned())]);
    for (of_another, _) in &said[..2] {
        acme.get(&format!("/hub/v1/events/{of_another}")).await.assert_problem(404, "event-not-found");
    }
    main.get(&format!("/hub/v1/events/{own}")).await.assert_problem(404, "event-not-found");
    app.stop().await;
}

#[tokio::test]
async fn nobody_speaks_for_a_service_and_what_is_private_stays_so() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, exporting(&["event.*", "join.*"])).await;
    let db = database.pool();
    let (main, acme) = (caller(&app, "manage", "main").await, caller(&app, "ingest", "acme").await);
    let receiver = Receiver::start().await;
    subscribe(&main, &receiver.url(), json!({})).await;

    let forged = json!({"event_type": "event.published", "payload": {"n": 1}});
    let refused = main.post("/hub/v1/events", forged.clone()).await;
    assert_eq!(pointers(&refused), ["/event_type"]);
    assert!(refused.text.contains("hub.export"), "{refused:?}");
    // Not one that is never sent either: who takes `event.*` could not tell.
    let stated = json!({"event_type": "event.stated", "payload": {}});
    let fine = json!({"event_type": "events.published", "payload": {"n": 2}});
    let refused = main.post("/hub/v1/events/batch", json!({"events": [fine, stated]})).await;
    assert_eq!(pointers(&refused), ["/events/1/event_type"]);
    assert_eq!(acme.post("/hub/v1/events", forged).await.status, 202, "elsewhere it is a type like any other");

    let by_sql = "select pillarbox.post('event.published', '{\"n\": 3}'::json, key => 'k')";
    sqlx::query(by_sql).execute(db).await.unwrap();
    say(db, "amqp:events", &[saying("event.published", 4)]).await;
    say(db, "mailbox", &[saying("event.published", 5)]).await;
    say(db, "notify", &[saying("email.verification", 6)]).await;
    say(db, "events", &[saying("event.stated", 7), saying("mod.kicked", 8)]).await;
    say(db, "joins", &[saying("join.counted", 9), saying("join.confirmed", 10)]).await;
    until_received(&receiver, 1).await;
    post(&main, "last", json!({"n": 11}), None).await;
    until_received(&receiver, 2).await;
    let numbers: Vec<Value> = receiver.received().iter().map(|received| received.json()["n"].clone()).collect();
    assert_eq!(numbers, [10, 11]);
    let expected = [("last", "hub"), ("join.confirmed", "joins")];
    assert_eq!(listed(&main).await, expected.map(|(topic, source)| (topic.to_owned(), source.to_owned())));
    for topic in ["email.verification", "event.stated", "join.counted", "mod.kicked"] {
        let (private, _) = logged(db, topic).await.remove(0);
        main.get(&format!("/hub/v1/events/{private}")).await.assert_problem(404, "event-not-found");
    }
    app.stop().await;
}

#[tokio::test]
async fn what_was_exported_is_looked_at_retried_and_given_up_also_where_nothing_is_exported() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, exporting(&["event.published"])).await;
    let other = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Api]).await;
    let db = database.pool();
    let manager = caller(&other, "manage", "main").await;
    let receiver = Receiver::replying(|_| Reply::status(400)).await;
    let fields = json!({"on_exhausted": "block", "format": "cloudevents"});
    let subscriber = subscribe(&manager, &receiver.url(), fields).await;
    let only_big = json!([{"pointer": "/n", "op": "gt", "value": 100}]);
    let picky = subscribe(&manager, &receiver.url(), json!({"filter": only_big})).await;
    let in_lane = |n| saying("event.published", n).with_key("k");
    say(db, "events", &[in_lane(1), in_lane(2)]).await;
    let dead = until_dead(&manager, &subscriber, 1).await.remove(0);
    assert_eq!(dead["event_type"], "event.published");
    assert_eq!(listed(&manager).await, [], "by the setting of who is asked");
    let said = logged(db, "k").await;

    // Both are there: the first has died and blocks its lane, the second waits.
    let waiting = until_outcome(&manager, &said[1].0, &subscriber, "pending").await;
    let first = until_outcome(&manager, &said[0].0, &subscriber, "dead").await;
    until_outcome(&manager, &said[0].0, &picky, "filtered").await;
    assert_eq!(attempts(&manager, &first).await, [(Some(400), "dead".to_owned())]);
    let of_message = |message: &Value, what: &str| format!("/hub/v1/messages/{}{what}", text(&message["message_id"]));
    assert_eq!(manager.get(&of_message(&waiting, "")).await.json()["lane"], "k");
    let listing = format!("/hub/v1/messages?subscriber_id={}", text(&subscriber["id"]));
    let types: Vec<Value> = walk(&manager, &listing).await.iter().map(|one| one["event_type"].clone()).collect();
    assert_eq!(types, ["event.published"; 2]);

    // Given up, the first lets the second go, which dies and is given up, too.
    for message in [&first, &waiting] {
        let asked = manager.send(Method::POST, &of_message(message, "/dead-letter"), None).await;
        assert_eq!(asked.status, 202, "{asked:?}");
        until_dead(&manager, &subscriber, 2).await;
    }
    // Its content is in the dead letter, with who said it, when the log is gone.
    let sent = receiver.received()[0].body.clone();
    sqlx::query("delete from pillarbox.log where key = 'k'").execute(db).await.unwrap();
    receiver.reply(|_| Reply::status(200));
    let before = receiver.count();
    let retry = format!("/hub/v1/dead-letters/{}/retry", text(&dead["id"]));
    assert_eq!(manager.send(Method::POST, &retry, None).await.status, 202);
    until_received(&receiver, before + 1).await;
    let again = &receiver.received()[before];
    assert_eq!(again.body, sent);
    assert_eq!((&again.json()["source"], &again.json()["data"]), (&json!("/pillarbox/events"), &json!({"n": 1})));
    other.stop().await;
    app.stop().await;
}

#[tokio::test]
async fn the_setting_holds_from_then_on_and_a_replay_makes_up_for_what_was_before() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "main").await;
    let receiver = Receiver::start().await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({"event_types": ["event.*", "order.*"]})).await;
    // While nothing is exported it is a type like any other.
    post(&manager, "event.published", json!({"n": 0}), None).await;
    say(db, "events", &[saying("event.published", 1)]).await;
    let behind = post(&manager, "order.paid", json!({"n": 2}), None).await;
    until_outcome(&manager, &behind, &subscriber, "delivered").await;
    app.stop().await;

    let app = TestApp::start_with(&database, exporting(&["event.published"])).await;
    say(db, "events", &[saying("event.published", 3)]).await;
    let numbers = || receiver.received().iter().map(|one| one.json()["n"].as_u64().unwrap()).collect::<Vec<_>>();
    until_received(&receiver, 3).await;
    assert_eq!(numbers()[2], 3, "what was passed stays so");
    replay(db, false).await;
    until_received(&receiver, 4).await;
    assert_eq!(numbers()[3], 1);
    app.stop().await;

    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "main").await;
    say(db, "events", &[saying("event.published", 4)]).await;
    let last = post(&manager, "order.paid", json!({"n": 5}), None).await;
    until_outcome(&manager, &last, &subscriber, "delivered").await;
    assert_eq!(numbers().last(), Some(&5));
    assert_eq!(receiver.count(), 5);
    app.stop().await;
}

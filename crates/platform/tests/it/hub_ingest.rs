//! Taking events: once for each key, all of a batch or nothing, and a refusal that names the field.

use hyper::Method;
use mailbox::cursor::Start;
use mailbox::filter::Matching;
use mailbox::runtime::Subscription;
use serde_json::{Value, json};
use sqlx::PgPool;
use testkit::{Answer, Receiver, TestApp, TestDatabase};

use crate::consuming::{Process, database, effects, quick, recorder, until_effects};
use crate::hub_delivery::{caller, post, subscribe, until_received};
use crate::hub_people::pointers;
use crate::hub_world::{World, text};

async fn logged(db: &PgPool) -> i64 {
    sqlx::query_scalar("select count(*) from pillarbox.log where source = 'hub'").fetch_one(db).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_at_once_with_one_key_are_one_event_and_get_one_answer() {
    let world = World::start().await;
    let receiver = Receiver::start().await;
    subscribe(&world.manager, &receiver.url(), json!({})).await;
    let mut posted = 0;
    for (path, header) in [("/hub/v1/events", "idempotency-key"), ("/events", "x-idempotency-key")] {
        let client = world.manager.with_header(header, path.trim_matches('/'));
        let event = json!({"event_type": "order.paid", "payload": {"path": path}});
        let racing = (0..50).map(|_| {
            let (client, event) = (client.clone(), event.clone());
            tokio::spawn(async move { client.post(path, event).await })
        });
        let mut answers: Vec<Answer> = Vec::new();
        for racer in racing.collect::<Vec<_>>() {
            answers.push(racer.await.unwrap());
        }
        assert!(
            answers.iter().all(|answer| (answer.status, &answer.text) == (202, &answers[0].text)),
            "{:?}",
            answers[0]
        );
        let other = json!({"event_type": "order.paid", "payload": {"path": "another"}});
        client.post(path, other).await.assert_problem(422, "idempotency-key-reused");
        posted += 1;
        until_received(&receiver, posted).await;
        assert_eq!(receiver.received().last().unwrap().header("webhook-id"), text(&answers[0].json()["event_id"]));
    }
    assert_eq!(logged(world.database.pool()).await, 2);
    world.app.stop().await;
    assert_eq!(receiver.count(), 2);
}

#[tokio::test]
async fn a_batch_is_taken_whole_or_not_at_all_and_what_is_wrong_is_named() {
    let world = World::start().await;
    let client = &world.manager;
    let good = json!({"event_type": "order.paid", "payload": {}});
    let large = "x".repeat(257 * 1024);
    let bad: Vec<(Value, &str)> = vec![
        (json!({"event_type": "order paid", "payload": {}}), "/event_type"),
        (json!({"event_type": "", "payload": {}}), "/event_type"),
        (json!({"event_type": "order..paid", "payload": {}}), "/event_type"),
        (json!({"event_type": "x".repeat(201), "payload": {}}), "/event_type"),
        (json!({"event_type": "order.paid", "payload": large}), "/payload"),
        (json!({"event_type": "order.paid", "payload": {}, "ordering_key": ""}), "/ordering_key"),
        (json!({"event_type": "order.paid", "payload": {}, "ordering_key": "k".repeat(256)}), "/ordering_key"),
    ];
    for (event, pointer) in &bad {
        assert_eq!(pointers(&client.post("/hub/v1/events", event.clone()).await), [*pointer]);
        assert_eq!(pointers(&client.post("/events", event.clone()).await), [*pointer]);
        let batch = json!({"events": [good, event, good]});
        assert_eq!(pointers(&client.post("/hub/v1/events/batch", batch).await), [format!("/events/1{pointer}")]);
    }
    for (body, missing) in [(json!({"event_type": "order.paid"}), "payload"), (json!({"payload": {}}), "event_type")] {
        let refused = client.post("/hub/v1/events", body).await;
        assert!(refused.status == 422 && refused.text.contains(missing), "{refused:?}");
    }
    for (count, refused) in [(0, true), (1_001, true), (1_000, false)] {
        let answer = client.post("/hub/v1/events/batch", json!({"events": vec![&good; count]})).await;
        match refused {
            true => assert_eq!(pointers(&answer), ["/events"]),
            false => assert_eq!(answer.json()["event_ids"].as_array().unwrap().len(), count),
        }
    }
    assert_eq!(logged(world.database.pool()).await, 1_000, "nothing of what was refused");
    let event = async |client: &testkit::Client| client.post("/hub/v1/events", good.clone()).await;
    assert_eq!(event(&world.app.anyone()).await.status, 401);
    assert_eq!(event(&world.app.anyone().bearer("pbx_nobody_knows_this_key_12345")).await.status, 401);
    let user = world.app.user(uuid::Uuid::now_v7(), None);
    assert_eq!(event(&user).await.status, 403);
    assert_eq!(event(&caller(&world.app, "ingest", "acme").await).await.status, 202);
    world.app.stop().await;
}

#[tokio::test]
async fn nothing_of_one_tenant_reaches_another() {
    let world = World::start().await;
    let rival = caller(&world.app, "manage", "rival").await;
    let (ours, theirs) = (Receiver::start().await, Receiver::start().await);
    subscribe(&world.manager, &ours.url(), json!({})).await;
    subscribe(&rival, &theirs.url(), json!({})).await;
    let mut posted = Vec::new();
    for n in 0..20 {
        let client = if n % 2 == 0 { &world.manager } else { &rival };
        posted.push(post(client, "order.paid", json!({ "n": n }), Some("the same key")).await);
    }
    until_received(&ours, 10).await;
    until_received(&theirs, 10).await;
    world.manager.get(&format!("/hub/v1/events/{}", posted[1])).await.assert_problem(404, "event-not-found");
    world.app.stop().await;
    for (receiver, first) in [(&ours, 0), (&theirs, 1)] {
        let numbers: Vec<u64> = receiver.received().iter().map(|one| one.json()["n"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (first..20).step_by(2).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn who_may_only_post_to_the_hub_moves_nothing_outside_of_it() {
    let database: TestDatabase = database().await;
    let db = database.pool();
    let app = TestApp::start(&database).await;
    let ingest = caller(&app, "ingest", "main").await;
    // Who handles joins and mail trusts those who post them: here a service called `test`.
    let process = Process::idle(db);
    let matching = Matching {
        sources: vec!["test".to_owned()],
        topics: vec!["join.#".to_owned(), "email.#".to_owned(), "test.#".to_owned()],
        ..Matching::default()
    };
    let subscription = Subscription { consumer: "effects", matching, start: Start::Beginning, handler: recorder() };
    process.runtime.subscribe(&subscription, quick());
    for topic in ["join.confirmed", "email.verification.requested", "hub.dead_letter.retry"] {
        post(&ingest, topic, json!(1), Some("k")).await;
    }
    crate::consuming::post_numbers(db, Some("k"), [2]).await;
    until_effects(db, 1).await;
    process.stop().await;
    assert_eq!(effects(db).await, [(Some("k".to_owned()), 2)], "what it was told by who it trusts");
    let sources: Vec<String> =
        sqlx::query_scalar("select source from pillarbox.log order by id").fetch_all(db).await.unwrap();
    assert_eq!(sources, ["hub", "hub", "hub", "test"]);
    let commands: i64 = sqlx::query_scalar("select count(*) from pillarbox_hub.command").fetch_one(db).await.unwrap();
    assert_eq!(commands, 0, "a topic commands nothing");
    let receiver = Receiver::start().await;
    let fields = json!({"event_types": ["order.*"]});
    subscribe(&caller(&app, "manage", "main").await, &receiver.url(), fields).await;
    post(&ingest, "order.paid", json!({}), None).await;
    until_received(&receiver, 1).await;
    app.stop().await;
    assert_eq!(receiver.count(), 1, "the hub goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_postgresql_cannot_keep_is_refused_alone() {
    let world = World::start().await;
    // Deeper than PostgreSQL's stack, and no deeper than a payload may be.
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let unfit = format!(r#"{{"event_type":"order.paid","payload":{deep}}}"#);
    let mut wanted = 0;
    for keyed in [0, 2] {
        let racing = (0..60).map(|number| {
            let key = format!("{keyed} {number}");
            let client = match number % 4 < keyed {
                true => world.manager.with_header("idempotency-key", &key),
                false => world.manager.clone(),
            };
            let event = json!({"event_type": "order.paid", "payload": {"number": number}}).to_string();
            let event = if number == 30 { unfit.clone() } else { event };
            tokio::spawn(async move { (number, client.send_text(Method::POST, "/hub/v1/events", &event).await) })
        });
        for racer in racing.collect::<Vec<_>>() {
            match racer.await.unwrap() {
                (30, answer) => answer.assert_problem(400, "unfit-event"),
                (_, answer) => assert_eq!(answer.status, 202, "{answer:?}"),
            };
        }
        wanted += 59;
        assert_eq!(logged(world.database.pool()).await, wanted, "each once");
    }
    world.app.stop().await;
}

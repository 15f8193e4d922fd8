//! Ingesting events: idempotency keys, atomic batches, validation, tenants and permissions.

use hyper::Method;
use pillarbox::consumers::{StartAt, Subscription};
use pillarbox::log::MessagePattern;
use serde_json::{Value, json};
use sqlx::PgPool;
use testkit::{Receiver, Response, TestApp, TestDatabase};

use crate::consumers::support::{Process, database, effects, fast_options, recorder, wait_for_effects};
use crate::hub::fixture::{Fixture, error_pointers, post, subscribe, wait_for_webhooks};
use crate::support::{caller, text};

async fn logged(db: &PgPool) -> i64 {
    sqlx::query_scalar("select count(*) from pillarbox.log where source = 'hub'").fetch_one(db).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_concurrent_posts_with_one_key_create_one_event() {
    let fixture = Fixture::start().await;
    let receiver = Receiver::start().await;
    subscribe(&fixture.manager, &receiver.url(), json!({})).await;
    let mut posted = 0;
    for (path, header) in [("/hub/v1/events", "idempotency-key"), ("/events", "x-idempotency-key")] {
        let client = fixture.manager.with_header(header, path.trim_matches('/'));
        let event = json!({"event_type": "order.paid", "payload": {"path": path}});
        let racing = (0..50).map(|_| {
            let (client, event) = (client.clone(), event.clone());
            tokio::spawn(async move { client.post(path, event).await })
        });
        let mut answers: Vec<Response> = Vec::new();
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
        wait_for_webhooks(&receiver, posted).await;
        assert_eq!(receiver.received().last().unwrap().header("webhook-id"), text(&answers[0].json()["event_id"]));
    }
    assert_eq!(logged(fixture.database.pool()).await, 2);
    fixture.app.stop().await;
    assert_eq!(receiver.count(), 2);
}

#[tokio::test]
async fn a_batch_is_accepted_as_a_whole_and_errors_name_the_field() {
    let fixture = Fixture::start().await;
    let client = &fixture.manager;
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
        assert_eq!(error_pointers(&client.post("/hub/v1/events", event.clone()).await), [*pointer]);
        assert_eq!(error_pointers(&client.post("/events", event.clone()).await), [*pointer]);
        let batch = json!({"events": [good, event, good]});
        assert_eq!(error_pointers(&client.post("/hub/v1/events/batch", batch).await), [format!("/events/1{pointer}")]);
    }
    for (body, missing) in [(json!({"event_type": "order.paid"}), "payload"), (json!({"payload": {}}), "event_type")] {
        let refused = client.post("/hub/v1/events", body).await;
        assert!(refused.status == 422 && refused.text.contains(missing), "{refused:?}");
    }
    for (count, refused) in [(0, true), (1_001, true), (1_000, false)] {
        let answer = client.post("/hub/v1/events/batch", json!({"events": vec![&good; count]})).await;
        match refused {
            true => assert_eq!(error_pointers(&answer), ["/events"]),
            false => assert_eq!(answer.json()["event_ids"].as_array().unwrap().len(), count),
        }
    }
    assert_eq!(logged(fixture.database.pool()).await, 1_000, "rejected requests leave nothing in the log");
    let event = async |client: &testkit::Client| client.post("/hub/v1/events", good.clone()).await;
    assert_eq!(event(&fixture.app.anonymous()).await.status, 401);
    assert_eq!(event(&fixture.app.anonymous().bearer("pbx_this_key_is_unknown_1234567")).await.status, 401);
    let user = fixture.app.user(uuid::Uuid::now_v7(), None);
    assert_eq!(event(&user).await.status, 403);
    assert_eq!(event(&caller(&fixture.app, "ingest", "acme").await).await.status, 202);
    fixture.app.stop().await;
}

#[tokio::test]
async fn events_of_one_tenant_never_reach_another() {
    let fixture = Fixture::start().await;
    let rival = caller(&fixture.app, "manage", "rival").await;
    let (ours, theirs) = (Receiver::start().await, Receiver::start().await);
    subscribe(&fixture.manager, &ours.url(), json!({})).await;
    subscribe(&rival, &theirs.url(), json!({})).await;
    let mut posted = Vec::new();
    for n in 0..20 {
        let client = if n % 2 == 0 { &fixture.manager } else { &rival };
        posted.push(post(client, "order.paid", json!({ "n": n }), Some("the same key")).await);
    }
    wait_for_webhooks(&ours, 10).await;
    wait_for_webhooks(&theirs, 10).await;
    fixture.manager.get(&format!("/hub/v1/events/{}", posted[1])).await.assert_problem(404, "event-not-found");
    fixture.app.stop().await;
    for (receiver, first) in [(&ours, 0), (&theirs, 1)] {
        let numbers: Vec<u64> = receiver.received().iter().map(|one| one.json()["n"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (first..20).step_by(2).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn an_ingest_key_cannot_trigger_service_handlers_or_commands() {
    let database: TestDatabase = database().await;
    let db = database.pool();
    let app = TestApp::start(&database).await;
    let ingest = caller(&app, "ingest", "main").await;
    // Handlers of join and email topics accept only the source that posts them, here a service called `test`.
    let process = Process::idle(db);
    let matching = MessagePattern {
        sources: vec!["test".to_owned()],
        topics: vec!["join.#".to_owned(), "email.#".to_owned(), "test.#".to_owned()],
        ..MessagePattern::default()
    };
    let subscription = Subscription {
        consumer: "effects".into(),
        matching,
        start: StartAt::Beginning,
        handler: recorder(),
        options: fast_options(),
    };
    process.runtime.subscribe(&subscription);
    for topic in ["join.confirmed", "email.verification.requested"] {
        post(&ingest, topic, json!(1), Some("k")).await;
    }
    let command = json!({"event_type": "hub.dead_letter.retry", "payload": 1});
    assert_eq!(error_pointers(&ingest.post("/hub/v1/events", command).await), ["/event_type"]);
    crate::consumers::support::post_numbers(db, Some("k"), [2]).await;
    wait_for_effects(db, 1).await;
    process.stop().await;
    assert_eq!(effects(db).await, [(Some("k".to_owned()), 2)], "only the message of the trusted source is handled");
    let sources: Vec<String> =
        sqlx::query_scalar("select source from pillarbox.log order by id").fetch_all(db).await.unwrap();
    assert_eq!(sources, ["hub", "hub", "test"]);
    let commands: i64 = sqlx::query_scalar("select count(*) from pillarbox_hub.command").fetch_one(db).await.unwrap();
    assert_eq!(commands, 0);
    let receiver = Receiver::start().await;
    let fields = json!({"event_types": ["order.*"]});
    subscribe(&caller(&app, "manage", "main").await, &receiver.url(), fields).await;
    post(&ingest, "order.paid", json!({}), None).await;
    wait_for_webhooks(&receiver, 1).await;
    app.stop().await;
    assert_eq!(receiver.count(), 1, "the hub continues");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_postgresql_rejects_fails_alone() {
    let fixture = Fixture::start().await;
    let rejects = "alter table pillarbox.log add constraint test check (payload::text not like '%unfit%')";
    sqlx::query(rejects).execute(fixture.database.pool()).await.unwrap();
    let unfit = json!({"event_type": "order.paid", "payload": "unfit"}).to_string();
    let mut wanted = 0;
    for keyed in [0, 2] {
        let racing = (0..60).map(|number| {
            let key = format!("{keyed} {number}");
            let client = match number % 4 < keyed {
                true => fixture.manager.with_header("idempotency-key", &key),
                false => fixture.manager.clone(),
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
        assert_eq!(logged(fixture.database.pool()).await, wanted, "each exactly once");
    }
    fixture.app.stop().await;
}

//! Items: each counts once, and the state in Redis is readable by other programs.

use std::collections::HashMap;

use redis::AsyncCommands;
use runtime::secret::Secret;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, TestApp, TestDatabase, TestRedis};
use uuid::Uuid;

use crate::progress::fixture::{
    BOTH, Backend, Fixture, PROJECTS, change, completed, counts, create, create_with, mark, mark_all, show,
};

#[tokio::test]
async fn an_item_counts_once_however_often_it_is_marked() {
    for backend in BOTH {
        let fixture = Fixture::start(backend).await;
        let (client, db) = (&fixture.client, fixture.db());
        let id = create_with(client, 5).await;
        let marked =
            mark_all(client, &id, vec![json!({"id": "a"}), json!({"id": "a"}), json!({"id": "b", "error": true})]);
        let marked = marked.await;
        assert_eq!(marked.json()["counted"], 2, "{backend:?}: within one request");
        assert_eq!(counts(&marked), ("PROCESSING".to_owned(), 5, 2, 1));
        // What was counted as a success does not become an error, and the other way round.
        let marked = mark_all(client, &id, vec![json!({"id": "a", "error": true}), json!({"id": "b"})]).await;
        assert_eq!(marked.json()["counted"], 0, "{backend:?}: in another request");
        assert_eq!(counts(&marked), ("PROCESSING".to_owned(), 5, 2, 1));
        let one = client.post(&format!("{PROJECTS}/{id}/items"), json!({"id": "c", "error": true})).await;
        assert_eq!((counts(&one), &one.json()["counted"]), (("PROCESSING".to_owned(), 5, 3, 2), &json!(1)));

        // At the same time, too: 20 requests with the same items.
        let requests = (0..20).map(|_| mark(client, &id, &["d", "c", "b"]));
        let answers = futures_util::future::join_all(requests).await;
        let counted: i64 = answers.iter().map(|answer| answer.json()["counted"].as_i64().unwrap()).sum();
        assert_eq!(counted, 1, "{backend:?}: {answers:?}");
        assert_eq!(completed(db).await, [Value::Null; 0]);

        let last = mark(client, &id, &["e"]).await;
        assert_eq!(counts(&last), ("DONE".to_owned(), 5, 5, 2));
        // Items of a finished project have no effect, so that a worker whose message is delivered again does not fail.
        let late = mark(client, &id, &["f", "a"]).await;
        assert_eq!((counts(&late), &late.json()["counted"]), (("DONE".to_owned(), 5, 5, 2), &json!(0)));
        let messages = completed(db).await;
        assert_eq!(messages.len(), 1, "{messages:?}");
        assert_eq!((&messages[0]["project_id"], &messages[0]["errors"]), (&json!(id), &json!(2)));
        fixture.app.stop().await;
    }
}

#[tokio::test]
async fn invalid_items_and_projects_are_refused_by_name() {
    let fixture = Fixture::start(Backend::Redis).await;
    let client = &fixture.client;
    let id = create(client).await;
    let items = async |body: Value| client.post(&format!("{PROJECTS}/{id}/items"), body).await;
    let many: Vec<Value> = (0..1_001).map(|number| json!({"id": number.to_string()})).collect();
    for body in [
        json!({}),
        json!({"items": []}),
        json!({"items": many}),
        json!({"items": [{"id": ""}]}),
        json!({"items": [{"id": "a\nb"}]}),
        json!({"id": "x".repeat(201)}),
        json!({"id": "a", "items": [{"id": "b"}]}),
        json!({"error": true}),
        json!({"items": [{"id": "a", "colour": 1}]}),
    ] {
        items(body).await.assert_problem(422, "validation-failed");
    }
    let invalid = items(json!({"items": [{"id": "a"}, {"id": "\u{1}b"}]})).await;
    assert_eq!(invalid.json()["errors"][0]["pointer"], "/items/1/id");
    assert_eq!(counts(&show(client, &id).await), ("INITIALIZING".to_owned(), 0, 0, 0));
    for bad in ["a b", "a:b", "ä", &"a".repeat(101)] {
        client.post(PROJECTS, json!({"id": bad})).await.assert_problem(422, "validation-failed");
    }
    for body in [json!({"total": -1}), json!({"total": 1.5}), json!({"status": "done"}), json!({"colour": 1})] {
        change(client, &id, body).await.assert_problem(422, "validation-failed");
    }
    fixture.app.stop().await;
}

#[tokio::test]
async fn other_programs_read_the_state_as_documented() {
    let (database, redis) = (TestDatabase::new(&migrations()).await, TestRedis::new());
    // Without a prefix, as by default.
    let app =
        TestApp::start_with(&database, |settings| settings.progress.redis_url = Some(Secret::new(redis.url()))).await;
    let client = app.user(Uuid::now_v7(), None);
    let id = Uuid::new_v4().to_string();
    let made = client.post(PROJECTS, json!({"id": id})).await;
    assert_eq!((made.status, made.header("location")), (201, format!("{PROJECTS}/{id}").as_str()));
    assert_eq!((&made.json()["id"], &made.json()["status"]), (&json!(id), &json!("INITIALIZING")));

    let state = redis::Client::open(format!("{}/1", redis.url())).unwrap();
    let mut state = state.get_multiplexed_async_connection().await.unwrap();
    let key = format!("smap:proj:{id}");
    let fields = async |state: &mut redis::aio::MultiplexedConnection| -> HashMap<String, String> {
        state.hgetall(&key).await.unwrap()
    };
    let expected = |status: &str, total: &str, done: &str, errors: &str| {
        let fields = [("status", status), ("total", total), ("done", done), ("errors", errors)];
        HashMap::from(fields.map(|(name, value)| (name.to_owned(), value.to_owned())))
    };
    assert_eq!(fields(&mut state).await, expected("INITIALIZING", "0", "0", "0"));
    let week_ms = 7 * 24 * 3_600 * 1_000;
    for companion in ["", ":items"] {
        let ttl: i64 = state.pttl(format!("{key}{companion}")).await.unwrap();
        assert!((week_ms - 60_000..=week_ms).contains(&ttl), "{companion}: {ttl}");
    }
    change(&client, &id, json!({"total": 3, "status": "PROCESSING"})).await;
    mark_all(&client, &id, vec![json!({"id": "a"}), json!({"id": "b", "error": true})]).await;
    assert_eq!(fields(&mut state).await, expected("PROCESSING", "3", "2", "1"));
    let ttl: i64 = state.pttl(format!("{key}:rate")).await.unwrap();
    assert!((1..=week_ms).contains(&ttl), "the rate expires, too: {ttl}");
    let shown = show(&client, &id).await.json();
    assert!(shown["rate"].as_f64().is_some_and(|rate| rate > 0.0), "{shown}");
    assert!(shown["eta"].as_str().is_some(), "{shown}");
    mark(&client, &id, &["c"]).await;
    assert_eq!(fields(&mut state).await, expected("DONE", "3", "3", "1"));
    let () = state.del(&[key.clone(), format!("{key}:items"), format!("{key}:rate")]).await.unwrap();
    app.stop().await;
}

#[tokio::test]
async fn a_repeated_request_gets_the_same_answer() {
    for backend in BOTH {
        let fixture = Fixture::start(backend).await;
        let keyed = |key: &str| -> Client { fixture.client.with_header("idempotency-key", key) };
        let id = Uuid::new_v4().to_string();
        let [first, again] = [
            keyed("create").post(PROJECTS, json!({"id": id})).await,
            keyed("create").post(PROJECTS, json!({"id": id})).await,
        ];
        assert_eq!((first.status, &first.text), (201, &again.text), "{backend:?}");
        assert_eq!((again.status, again.header("idempotent-replayed")), (201, "true"));
        fixture.client.post(PROJECTS, json!({"id": id})).await.assert_problem(409, "project-exists");
        let items = format!("{PROJECTS}/{id}/items");
        let first = keyed("mark").post(&items, json!({"id": "a"})).await;
        mark(&fixture.client, &id, &["b"]).await;
        let again = keyed("mark").post(&items, json!({"id": "a"})).await;
        assert_eq!((first.status, &first.text), (200, &again.text), "{backend:?}");
        assert_eq!(again.header("idempotent-replayed"), "true");
        keyed("mark").post(&items, json!({"id": "c"})).await.assert_problem(422, "idempotency-key-reused");
        fixture.app.stop().await;
    }
}

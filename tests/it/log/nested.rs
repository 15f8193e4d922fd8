//! Payloads that are nested too deeply are refused wherever they come from, and one that is in the log stops no consumer.

use serde_json::{Value, json};
use server::migrations;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::hub::fixture::error_pointers;
use crate::notifications::fixture::{add_recipients, post_event, reservation, wait_for_inbox, with};
use crate::support::{DEADLINE, caller};

/// The most levels of a payload in SQL; a business event may have one less.
const LEVELS: usize = 127;

fn nested(levels: usize) -> Value {
    (1..levels).fold(json!([]), |inner, _| json!([inner]))
}

#[tokio::test]
async fn http_refuses_deep_bodies_and_names_the_field_and_the_limit() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let producer = caller(&app, "ingest", "main").await;
    let event = |payload: Value| json!({"event_type": "order.paid", "payload": payload});
    let batch = |payload: Value| json!({"events": [event(json!({})), event(payload)]});
    for (path, body, accepted, pointer) in [
        ("/notify/v1/events", with(&reservation(5), "payload", nested(126)), true, ""),
        ("/notify/v1/events", with(&reservation(5), "payload", nested(127)), false, "/payload"),
        ("/hub/v1/events", event(nested(126)), true, ""),
        ("/hub/v1/events", event(json!({"a": nested(126)})), false, "/payload"),
        ("/hub/v1/events/batch", batch(nested(125)), false, "/events/1/payload"),
    ] {
        for key in [None, Some("once")] {
            let answer = match key {
                None => producer.post(path, body.clone()).await,
                Some(key) => {
                    producer
                        .with_header("idempotency-key", &format!("{key}{pointer}{path}"))
                        .post(path, body.clone())
                        .await
                }
            };
            if accepted {
                assert!((200..300).contains(&answer.status), "{path}: {answer:?}");
                continue;
            }
            answer.assert_problem(422, "validation-failed");
            assert_eq!(error_pointers(&answer), [pointer], "{answer:?}");
            assert!(answer.text.contains("127 levels"), "{answer:?}");
        }
    }
    app.stop().await;
}

/// The error of a post in SQL; None if it is accepted.
async fn refusal(db: &PgPool, call: &str, payload: &str) -> Option<String> {
    let refused = sqlx::query(AssertSqlSafe(format!("select {call}"))).bind(payload).execute(db).await.err()?;
    let error = refused.into_database_error().unwrap();
    assert_eq!(error.code().unwrap(), "22023", "{error}");
    Some(error.message().to_owned())
}

#[tokio::test]
async fn sql_refuses_deep_payloads_and_accepts_wide_ones() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let objects = |levels: usize| format!("{}1{}", "{\"a\":".repeat(levels), "}".repeat(levels));
    let huge_number = |levels: usize| format!("[1e999999, {}]", nested(levels - 1));
    for (call, limit) in [
        ("pillarbox.post('a', $1::text::json)", LEVELS),
        ("pillarbox.post('a', $1::text)", LEVELS),
        ("pillarbox.post('a', $1::text::json, message_id => gen_random_uuid())", LEVELS),
        ("pillarbox.notify('A', 'CUSTOMER', 1, $1::text::json)", LEVELS - 1),
        ("pillarbox.notify('A', 'CUSTOMER', 1, $1::text, event_id => gen_random_uuid()::text)", LEVELS - 1),
    ] {
        let of_kind = |levels: usize| [nested(levels).to_string(), objects(levels), huge_number(levels)];
        for payload in of_kind(limit) {
            assert_eq!(refusal(db, call, &payload).await, None, "{call} {payload}");
        }
        for payload in of_kind(limit + 1).into_iter().chain([objects(6_000), nested(1_000).to_string()]) {
            let message = refusal(db, call, &payload).await.unwrap_or_else(|| panic!("{call} accepts {payload}"));
            assert_eq!(message, format!("payload is nested deeper than {limit} levels, which consumers cannot read"));
        }
        let wide = format!("[{}[]]", "[{}, \"[[[[\"],".repeat(10_000));
        assert_eq!(refusal(db, call, &wide).await, None, "{call}");
    }
}

/// Inserts a business event that `pillarbox.notify` refuses.
async fn insert_deep(db: &mut PgConnection, levels: usize) {
    let insert =
        "insert into pillarbox.log (shard, message_id, source, tenant, topic, key, aggregate_type, aggregate_id,
                      headers, payload)
                  values (pillarbox.shard_of('main', 'RESTAURANT:5'), pillarbox.uuid_v7(), 'notify', 'main', 'DEEP',
                      'RESTAURANT:5', 'RESTAURANT', '5', '{}', (repeat('[', $1) || repeat(']', $1))::json)";
    sqlx::query(insert).bind(levels as i32).execute(db).await.unwrap();
}

#[tokio::test]
async fn a_payload_that_postgresql_cannot_read_becomes_a_dead_letter_and_its_consumer_continues() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let user = Uuid::now_v7();
    add_recipients(db, "RESTAURANT", Some(5), &[user]).await;
    // The sessions of the app can read less than the one that posted it.
    let mut producer = PgConnection::connect(&database.url()).await.unwrap();
    let limit =
        "do $$ begin execute format('alter database %I set max_stack_depth = ''256kB''', current_database()); end $$";
    sqlx::query(limit).execute(db).await.unwrap();
    insert_deep(&mut producer, 6_000).await;
    let app = TestApp::start(&database).await;
    let client = caller(&app, "ingest", "main").await;
    assert_eq!(post_event(&client, reservation(5)).await.status, 202);
    insert_deep(&mut producer, 6_000).await;
    assert_eq!(post_event(&client, reservation(5)).await.status, 202);
    wait_for_inbox(db, user, &["RESERVATION_REQUESTED"; 2]).await;
    let dead =
        "select last_error, json_typeof(payload) from pillarbox.dead_letter where consumer = 'notify.restaurant'";
    let dead: Vec<(String, String)> = eventually("both are dead letters", DEADLINE, async || {
        match sqlx::query_as(dead).fetch_all(db).await.unwrap() {
            found if found.len() == 2 => Ok(found),
            other => Err(other),
        }
    })
    .await;
    for (error, payload_type) in dead {
        assert!(error.contains("it cannot be parked") && error.contains("stack depth"), "{error}");
        assert_eq!(payload_type, "string", "the whole payload, as a text");
    }
    producer.close().await.unwrap();
    app.stop().await;
}

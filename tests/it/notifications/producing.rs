//! Business events are posted by HTTP and in SQL with the same rules and the same ids: a repeated event id is one event.

use contracts::notify::{EVENT_TYPE_CHARS_MAX, PAYLOAD_BYTES_MAX};
use futures_util::future::join_all;
use serde_json::{Value, json};
use server::migrations;
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::{count, post_event, reservation, with};
use crate::hub::fixture::error_pointers;
use crate::support::{DEADLINE, caller, lock_waits, text};

const POSTED: &str = "select count(*) from pillarbox.log where source = 'notify'";

/// Posts in SQL. Returns the message id, or the error with its hint.
async fn notify(db: &PgPool, event_id: Option<&str>, aggregate: (&str, i64), payload: &str) -> Result<Uuid, String> {
    let query = "select pillarbox.notify('RESERVATION_REQUESTED', $1, $2, $3::json, event_id => $4)";
    let posted = sqlx::query_scalar(query).bind(aggregate.0).bind(aggregate.1).bind(payload).bind(event_id);
    posted.fetch_one(db).await.map_err(|error| {
        let hint = |error: &dyn sqlx::error::DatabaseError| {
            let error = error.downcast_ref::<sqlx::postgres::PgDatabaseError>();
            format!("{} {}", error.message(), error.hint().unwrap_or_default())
        };
        error.as_database_error().map(hint).unwrap_or_else(|| error.to_string())
    })
}

#[tokio::test]
async fn an_event_id_is_one_event_by_http_and_in_sql_however_many_race() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let producer = caller(&app, "ingest", "main").await;
    let uuid = Uuid::new_v4();
    for (at, id) in ["evt-123-456".to_owned(), uuid.to_string(), Uuid::now_v7().to_string()].iter().enumerate() {
        let event = with(&reservation(5), "event_id", json!(id));
        let by_http = join_all((0..10).map(|_| post_event(&producer, event.clone()))).await;
        let in_sql = join_all((0..10).map(|_| notify(db, Some(id), ("RESTAURANT", 5), r#"{"guests":4}"#))).await;
        let first = by_http[0].json();
        for answer in by_http {
            assert_eq!((answer.status, answer.json()), (202, first.clone()));
        }
        for posted in in_sql {
            assert_eq!(format!("evt_{}", posted.unwrap()), text(&first["event_id"]), "{id}");
        }
        assert_eq!(count(db, POSTED).await, at as i64 + 1, "{id}");
        let other = with(&event, "payload", json!({"guests": 5}));
        post_event(&producer, other).await.assert_problem(409, "event-id-conflict");
        post_event(&producer, with(&event, "aggregate_id", json!(6))).await.assert_problem(409, "event-id-conflict");
        let refused = notify(db, Some(id), ("CUSTOMER", 5), r#"{"guests":4}"#).await.unwrap_err();
        assert!(refused.contains("another type, aggregate, key or payload"), "{refused}");
    }
    // The same UUID in its other forms is the id itself.
    let id = notify(db, Some(&format!("evt_{uuid}")), ("RESTAURANT", 5), r#"{"guests":4}"#).await.unwrap();
    assert_eq!((id, count(db, POSTED).await), (uuid, 3));
    let same = post_event(&producer, with(&reservation(5), "event_id", json!(uuid.to_string().to_uppercase()))).await;
    assert_eq!((same.status, count(db, POSTED).await), (202, 3));
    // Without an id, each post is an event.
    for _ in 0..2 {
        assert_eq!(post_event(&producer, reservation(5)).await.status, 202);
    }
    let (keys, types): (Vec<String>, Vec<String>) = sqlx::query_as::<_, (String, String)>(
        "select key, json_typeof(aggregate_id) from pillarbox.log where source = 'notify'",
    )
    .fetch_all(db)
    .await
    .unwrap()
    .into_iter()
    .unzip();
    assert_eq!((keys, types), (vec!["RESTAURANT:5".to_owned(); 5], vec!["number".to_owned(); 5]));
    app.stop().await;
}

#[tokio::test]
async fn a_rolled_back_event_is_never_seen_and_its_id_is_free() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let mut tx = db.begin().await.unwrap();
    let query = "select pillarbox.notify('A', 'ADMIN', 1, '{}', event_id => 'x')";
    let first: Uuid = sqlx::query_scalar(query).fetch_one(&mut *tx).await.unwrap();
    let waiting = tokio::spawn({
        let db = db.clone();
        async move { sqlx::query_scalar::<_, Uuid>(query).fetch_one(&db).await.unwrap() }
    });
    tx.rollback().await.unwrap();
    assert_eq!(waiting.await.unwrap(), first, "the second post takes the place of the first");
    assert_eq!(count(db, POSTED).await, 1);
    for payload in ["'{\"a\":1}'::json", "'{\"a\":1}'::jsonb", "'{\"a\":1}'::text", "'{\"a\":1}'"] {
        let query = format!("select pillarbox.notify('A', 'ADMIN', 1, {payload})");
        sqlx::query(sqlx::AssertSqlSafe(query)).execute(db).await.unwrap();
    }
    assert_eq!(count(db, POSTED).await, 5);
}

#[tokio::test]
async fn an_invalid_event_is_refused_by_http_and_in_sql_with_what_is_accepted() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let producer = caller(&app, "ingest", "main").await;
    let unknown = post_event(&producer, with(&reservation(5), "aggregate_type", json!("COURIER"))).await;
    unknown.assert_problem(422, "validation-failed");
    assert_eq!(error_pointers(&unknown), ["/aggregate_type"]);
    let refused = notify(db, None, ("COURIER", 5), "{}").await.unwrap_err();
    for answer in [unknown.text.as_str(), refused.as_str()] {
        assert!(answer.contains("ADMIN, AGENCY, CUSTOMER, RESTAURANT"), "{answer}");
    }
    // With its quotes, a byte more than is accepted.
    let large = "x".repeat(PAYLOAD_BYTES_MAX - 1);
    let longest = "x".repeat(EVENT_TYPE_CHARS_MAX);
    for (field, value) in [
        ("event_type", json!("a b")),
        ("event_type", json!(format!("{longest}x"))),
        ("event_type", json!("email.code")),
        ("event_id", json!("a b")),
        ("event_id", json!("")),
        ("event_id", json!("x".repeat(256))),
        ("key", json!("")),
        ("payload", json!(large)),
    ] {
        let answer = post_event(&producer, with(&reservation(5), field, value.clone())).await;
        assert_eq!((answer.status, error_pointers(&answer)), (422, vec![format!("/{field}")]), "{answer:?}");
        let event = with(&reservation(5), field, value);
        let query = "select pillarbox.notify($1->>'event_type', $1->>'aggregate_type', 5, ($1->'payload')::text,
                         event_id => $1->>'event_id', key => $1->>'key')";
        let refused = sqlx::query(query).bind(event).execute(db).await.unwrap_err().to_string();
        // Not the text of a constraint, which contains the name of the field, too.
        assert!(refused.contains(&format!("{field} must")) || refused.contains("payload has"), "{refused}");
    }
    for (field, value) in [("aggregate_id", json!("5")), ("aggregate_id", Value::Null), ("colour", json!(1))] {
        assert_eq!(post_event(&producer, with(&reservation(5), field, value)).await.status, 422, "{field}");
    }
    assert_eq!(count(db, POSTED).await, 0);
    let largest = with(&with(&reservation(5), "event_type", json!(longest)), "payload", json!(large[1..]));
    assert_eq!(post_event(&producer, largest).await.status, 202);
    let query = "select pillarbox.notify($1, 'RESTAURANT', 5, to_json($2::text))";
    sqlx::query(query).bind(&longest).bind(&large[1..]).execute(db).await.unwrap();
    assert_eq!(count(db, POSTED).await, 2);
    app.stop().await;
}

#[tokio::test]
async fn only_producers_of_main_post_events_and_only_operators_manage_types() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    post_event(&app.anonymous(), reservation(1)).await.assert_problem(401, "unauthorized");
    let user = app.user(Uuid::now_v7(), None);
    let (stranger, producer, manager) = (
        caller(&app, "admin", "acme").await,
        caller(&app, "ingest", "main").await,
        caller(&app, "manage", "main").await,
    );
    for (client, may_post, may_manage) in
        [(&user, false, false), (&stranger, false, false), (&producer, true, false), (&manager, true, true)]
    {
        assert_eq!(post_event(client, reservation(1)).await.status, if may_post { 202 } else { 403 });
        let expected = if may_manage { 200 } else { 403 };
        assert_eq!(client.get("/notify/v1/recipients").await.status, expected);
        let row = json!({"recipients": [{"aggregate_type": "ADMIN", "user_id": Uuid::now_v7()}]});
        assert_eq!(client.post("/notify/v1/recipients/import", row).await.status, expected);
        let path = format!("/notify/v1/recipients/ADMIN/all/{}", Uuid::now_v7());
        for method in [hyper::Method::PUT, hyper::Method::DELETE] {
            assert_eq!(client.send(method, &path, None).await.status, if may_manage { 204 } else { 403 });
        }
        client.get("/notify/v1/aggregate-types").await.assert_problem(403, "forbidden");
        client.post("/notify/v1/aggregate-types", json!({"name": "X"})).await.assert_problem(403, "forbidden");
        client.delete("/notify/v1/aggregate-types/ADMIN").await.assert_problem(403, "forbidden");
    }
    let role = sqlx::query("select has_function_privilege('pillarbox_producer', oid, 'execute') and
            not exists (select from aclexplode(proacl) where grantee = 0) as granted from pg_proc where proname = 'notify'");
    for row in role.fetch_all(database.pool()).await.unwrap() {
        assert!(sqlx::Row::get::<bool, _>(&row, "granted"), "producers may call it, and not everybody");
    }
    app.stop().await;
}

#[tokio::test]
async fn the_same_content_in_another_spelling_is_the_same_event_and_a_type_in_use_is_not_deleted() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let restaurant = ("RESTAURANT", 5);
    let first = notify(db, Some("x"), restaurant, r#"{"a": 1, "b": "é"}"#).await.unwrap();
    assert_eq!(notify(db, Some("x"), restaurant, "{\"b\":\"\\u00e9\",\"a\":1}").await, Ok(first));
    assert!(notify(db, Some("x"), restaurant, r#"{"a": 2, "b": "é"}"#).await.is_err());
    let huge = format!("1{}", "0".repeat(200_000));
    let first = notify(db, Some("y"), restaurant, &huge).await.unwrap();
    assert_eq!(notify(db, Some("y"), restaurant, &huge).await, Ok(first), "JSON has larger numbers than jsonb");
    for reserved in ["MAIL", "PEOPLE"] {
        let add = "insert into pillarbox.aggregate_type (name) values ($1)";
        let refused = sqlx::query(add).bind(reserved).execute(db).await.unwrap_err().to_string();
        assert!(refused.contains("aggregate_type_reserved"), "{refused}");
    }
    // The deletion waits for a post that has not committed yet.
    let mut tx = db.begin().await.unwrap();
    sqlx::query("select pillarbox.notify('A', 'AGENCY', 1, '{}')").execute(&mut *tx).await.unwrap();
    let mut deletion = db.begin().await.unwrap();
    sqlx::query("set local lock_timeout = '200ms'").execute(&mut *deletion).await.unwrap();
    let delete = "delete from pillarbox.aggregate_type where name = 'AGENCY'";
    let refused = sqlx::query(delete).execute(&mut *deletion).await.unwrap_err().to_string();
    assert!(refused.contains("lock timeout"), "{refused}");
    tx.rollback().await.unwrap();
}

#[tokio::test]
async fn posts_of_an_event_id_of_an_open_transaction_do_not_stop_other_requests() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let producer = caller(&app, "ingest", "main").await;
    let mut open = db.begin().await.unwrap();
    let held =
        "select pillarbox.notify('RESERVATION_REQUESTED', 'RESTAURANT', 5, '{\"guests\":4}'::json, event_id => 'h1')";
    sqlx::query(held).execute(&mut *open).await.unwrap();
    let event = with(&reservation(5), "event_id", json!("h1"));
    let posts = tokio::spawn({
        let (producer, event) = (producer.clone(), event.clone());
        async move { join_all((0..20).map(|_| post_event(&producer, event.clone()))).await }
    });
    eventually("one waits for the transaction", DEADLINE, async || lock_waits(db).await == 1).await;
    let started = std::time::Instant::now();
    let other = post_event(&producer, with(&event, "event_id", json!("h2"))).await;
    assert_eq!(other.status, 202, "{other:?}");
    assert!(lock_waits(db).await <= 1, "the others wait without a connection");
    for answer in posts.await.unwrap() {
        answer.assert_problem(503, "event-in-progress");
        assert_eq!(answer.header("retry-after"), "1");
    }
    assert!(started.elapsed() < std::time::Duration::from_secs(8), "{:?}", started.elapsed());
    open.commit().await.unwrap();
    assert_eq!(post_event(&producer, event).await.status, 202);
    assert_eq!(count(db, POSTED).await, 2);
    app.stop().await;
}

#[tokio::test]
async fn all_invalid_fields_of_an_event_are_reported_at_once() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let post = async |event: Value| app.admin().post("/notify/v1/events", event).await;
    let invalid =
        json!({"event_id": 5, "event_type": "a b", "aggregate_type": "COURIER", "aggregate_id": "5", "key": ""});
    let refused = post(invalid).await;
    let mut pointers = error_pointers(&refused);
    pointers.sort();
    let all = ["/aggregate_id", "/aggregate_type", "/event_id", "/event_type", "/key", "/payload"];
    assert_eq!((refused.status, pointers), (422, all.map(str::to_owned).to_vec()), "{refused:?}");
    assert!(refused.text.contains("Known types: ADMIN, AGENCY"), "{refused:?}");
    assert_eq!(error_pointers(&post(json!({})).await).len(), 4, "the required fields");
    let null = json!({"event_type": "a", "aggregate_type": "AGENCY", "aggregate_id": 5, "payload": null});
    assert_eq!(post(null).await.status, 202);
    let user = app.user(uuid::Uuid::now_v7(), None).post("/notify/v1/events", json!({})).await;
    user.assert_problem(403, "forbidden");
    assert!(user.text.contains("requires the role ingest: use an API key"), "{user:?}");
    app.stop().await;
}

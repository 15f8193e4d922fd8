//! A repeated request is answered again, and does nothing more.

use std::time::Duration;

use chrono::Utc;
use hyper::StatusCode;
use kit::idempotency::{Answer, Identity};
use kit::problem::Problem;
use mailbox::database::migrations;
use mailbox::idempotency::{Keep, forget_expired, once};
use serde_json::json;
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase};

const IDENTITY: Identity = Identity { id: [1; 16], fingerprint: [2; 16] };

async fn counted() -> TestDatabase {
    let database = TestDatabase::new(&migrations()).await;
    sqlx::raw_sql("create table effect (at timestamptz default clock_timestamp())")
        .execute(database.pool())
        .await
        .unwrap();
    database
}

async fn effects(db: &PgPool) -> i64 {
    sqlx::query_scalar("select count(*) from effect").fetch_one(db).await.unwrap()
}

/// Takes effect, and answers with its number or is refused with `refusal`.
async fn act(
    db: &PgPool,
    identity: &Identity,
    refusal: Option<StatusCode>,
    takes: Duration,
) -> Result<Answer, Problem> {
    once(db, Some(identity), Keep::Answer, Utc::now(), |tx| {
        Box::pin(async move {
            sqlx::query("insert into effect default values").execute(&mut **tx).await.unwrap();
            tokio::time::sleep(takes).await;
            if let Some(status) = refusal {
                return Err(Problem::new(status, "refused", "for the test"));
            }
            let number: i64 = sqlx::query_scalar("select count(*) from effect").fetch_one(&mut **tx).await.unwrap();
            Ok(Answer::json(StatusCode::CREATED, &json!({ "number": number, "random": uuid::Uuid::new_v4() })))
        })
    })
    .await
}

#[tokio::test]
async fn fifty_at_once_have_one_effect_and_one_answer() {
    let database = counted().await;
    let racing = (0..50).map(|_| act(database.pool(), &IDENTITY, None, Duration::from_millis(500)));
    let answers: Vec<Answer> = futures_util::future::join_all(racing).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(effects(database.pool()).await, 1);
    assert!(answers.iter().all(|answer| answer.body() == answers[0].body()));
    assert_eq!(answers.iter().filter(|answer| !answer.is_replayed()).count(), 1);
}

#[tokio::test]
async fn the_same_key_for_another_request_is_refused() {
    let database = counted().await;
    act(database.pool(), &IDENTITY, None, Duration::ZERO).await.unwrap();
    let other = Identity { fingerprint: [3; 16], ..IDENTITY };
    let refused = act(database.pool(), &other, None, Duration::ZERO).await.unwrap_err();
    assert_eq!((refused.status().as_u16(), refused.code()), (422, "idempotency-key-reused"));
    assert_eq!(effects(database.pool()).await, 1);
}

#[tokio::test]
async fn one_that_runs_too_long_is_not_waited_for() {
    let database = counted().await;
    let slow = act(database.pool(), &IDENTITY, None, Duration::from_secs(4));
    let repeat = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        act(database.pool(), &IDENTITY, None, Duration::ZERO).await
    };
    let (slow, repeat) = tokio::join!(slow, repeat);
    assert_eq!(repeat.unwrap_err().code(), "still-running");
    assert!(slow.is_ok());
    assert_eq!(effects(database.pool()).await, 1);
}

#[tokio::test]
async fn a_settled_refusal_is_kept_and_undone_and_a_passing_one_is_tried_again() {
    let database = counted().await;
    let first = act(database.pool(), &IDENTITY, Some(StatusCode::CONFLICT), Duration::ZERO).await.unwrap();
    assert_eq!((first.status(), effects(database.pool()).await), (StatusCode::CONFLICT, 0));
    let again = act(database.pool(), &IDENTITY, None, Duration::ZERO).await.unwrap();
    assert_eq!((again.status(), again.body(), again.is_replayed()), (StatusCode::CONFLICT, first.body(), true));
    for passing in [401, 429, 500, 503] {
        let status = StatusCode::from_u16(passing).unwrap();
        let identity = Identity { id: [passing as u8; 16], ..IDENTITY };
        assert!(act(database.pool(), &identity, Some(status), Duration::ZERO).await.is_err());
        assert_eq!(act(database.pool(), &identity, None, Duration::ZERO).await.unwrap().status(), StatusCode::CREATED);
    }
    assert_eq!(effects(database.pool()).await, 4);
}

#[tokio::test]
async fn an_expired_answer_is_forgotten() {
    let database = counted().await;
    act(database.pool(), &IDENTITY, None, Duration::ZERO).await.unwrap();
    sqlx::query("update pillarbox.idempotency set expires_at = now()").execute(database.pool()).await.unwrap();
    assert!(!act(database.pool(), &IDENTITY, None, Duration::ZERO).await.unwrap().is_replayed());
    assert_eq!(effects(database.pool()).await, 2);
    let mut db = database.pool().acquire().await.unwrap();
    assert_eq!(forget_expired(&mut db, Utc::now(), 100).await.unwrap(), 0);
    assert_eq!(forget_expired(&mut db, Utc::now() + chrono::Duration::hours(25), 100).await.unwrap(), 1);
}

#[tokio::test]
async fn an_answer_with_a_secret_is_given_once_and_not_kept() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let client = app.admin().with_header("idempotency-key", "\"order 66\"");
    let body = json!({"name": "x", "role": "ingest"});
    let made = client.post("/admin/v1/keys", body.clone()).await;
    assert_eq!(made.status, 201, "{made:?}");
    client.post("/admin/v1/keys", body.clone()).await.assert_problem(409, "already-answered");
    client
        .post("/admin/v1/keys", json!({"name": "y", "role": "ingest"}))
        .await
        .assert_problem(422, "idempotency-key-reused");
    let other = app.user(uuid::Uuid::now_v7(), Some(kit::auth::Role::Admin)).with_header("idempotency-key", "order 66");
    assert_eq!(other.post("/admin/v1/keys", body).await.status, 201, "another caller's key is another key");
    let rows: Vec<String> =
        sqlx::query_scalar("select i::text from pillarbox.idempotency i").fetch_all(database.pool()).await.unwrap();
    let hex: String = made.json()["key"].as_str().unwrap().bytes().map(|byte| format!("{byte:02x}")).collect();
    assert!(rows.len() == 2 && rows.iter().all(|row| !row.contains(&hex)), "{rows:?}");
    let listed = app.admin().get("/admin/v1/keys").await.json();
    assert_eq!(listed["items"].as_array().unwrap().len(), 2);
    app.stop().await;
}

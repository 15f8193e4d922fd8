//! A request repeated with its idempotency key has one effect and gets the same response.

use std::time::Duration;

use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::problem::Problem;
use hyper::StatusCode;
use pillarbox::database::Database;
use pillarbox::operations::maintenance::delete_expired_responses;
use serde_json::json;
use server::migrations;
use service::idempotency::{Responses, StoreResponse, run_once};
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase};
use tokio::sync::oneshot;

const IDENTITY: RequestIdentity = RequestIdentity { id: [1; 16], fingerprint: [2; 16] };

async fn database_with_effects() -> TestDatabase {
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

/// Inserts an effect. Responds with the number of effects, or with `refusal` as its status.
async fn act(db: &PgPool, identity: &RequestIdentity, refusal: Option<StatusCode>) -> Result<StoredResponse, Problem> {
    act_slowly(db, identity, refusal, std::future::ready(())).await
}

/// As [`act`], with a pause between the effect and the response.
async fn act_slowly(
    db: &PgPool,
    identity: &RequestIdentity,
    refusal: Option<StatusCode>,
    pause: impl Future<Output = ()> + Send + 'static,
) -> Result<StoredResponse, Problem> {
    run_once(&Database::new(db.clone()), Some(identity), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            sqlx::query("insert into effect default values").execute(&mut **tx).await.unwrap();
            pause.await;
            if let Some(status) = refusal {
                return Err(Problem::new(status, "refused", "for the test"));
            }
            let number: i64 = sqlx::query_scalar("select count(*) from effect").fetch_one(&mut **tx).await.unwrap();
            Ok(StoredResponse::json(StatusCode::CREATED, &json!({ "number": number, "random": uuid::Uuid::new_v4() })))
        })
    })
    .await
}

/// The pause of a request: tells when it has begun, and lasts until it is ended.
struct Pause {
    begun: oneshot::Receiver<()>,
    end: oneshot::Sender<()>,
}

impl Pause {
    fn new() -> (Pause, impl Future<Output = ()> + Send + 'static) {
        let ((has_begun, begun), (end, ended)) = (oneshot::channel(), oneshot::channel());
        let pause = async move {
            has_begun.send(()).unwrap();
            ended.await.unwrap();
        };
        (Pause { begun, end }, pause)
    }

    async fn begun(mut self) -> Pause {
        (&mut self.begun).await.unwrap();
        self
    }

    fn end(self) {
        self.end.send(()).unwrap();
    }
}

#[tokio::test]
async fn fifty_equal_requests_have_one_effect_and_one_response() {
    let database = database_with_effects().await;
    let pause = || tokio::time::sleep(Duration::from_millis(500));
    let racing = (0..50).map(|_| act_slowly(database.pool(), &IDENTITY, None, pause()));
    let answers: Vec<StoredResponse> =
        futures_util::future::join_all(racing).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(effects(database.pool()).await, 1);
    assert!(answers.iter().all(|answer| answer.body() == answers[0].body()));
    assert_eq!(answers.iter().filter(|answer| !answer.is_replayed()).count(), 1);
}

#[tokio::test]
async fn the_same_key_for_another_request_is_refused() {
    let database = database_with_effects().await;
    act(database.pool(), &IDENTITY, None).await.unwrap();
    let other = RequestIdentity { fingerprint: [3; 16], ..IDENTITY };
    let refused = act(database.pool(), &other, None).await.unwrap_err();
    assert_eq!((refused.status().as_u16(), refused.code()), (422, "idempotency-key-reused"));
    assert_eq!(effects(database.pool()).await, 1);
}

/// Requests in a batch do not lock their keys, so one of them may use a key while another request runs.
#[tokio::test]
async fn a_key_that_a_concurrent_request_has_used_is_refused() {
    let database = database_with_effects().await;
    let (pause, slow) = Pause::new();
    let slow = act_slowly(database.pool(), &IDENTITY, None, slow);
    let other = async {
        let pause = pause.begun().await;
        let identity = RequestIdentity { fingerprint: [3; 16], ..IDENTITY };
        let mut tx = database.pool().begin().await.unwrap();
        let mut responses = Responses::load(&mut tx, [&identity]).await.unwrap();
        assert!(responses.find(&identity).is_none());
        responses.insert(&identity, &StoredResponse::empty(StatusCode::ACCEPTED), StoreResponse::WithBody);
        responses.save(&mut tx).await.unwrap();
        tx.commit().await.unwrap();
        pause.end();
    };
    let (slow, ()) = tokio::join!(slow, other);
    assert_eq!(slow.unwrap_err().code(), "idempotency-key-reused");
    assert_eq!(effects(database.pool()).await, 0);
}

#[tokio::test]
async fn a_repeat_does_not_wait_for_a_long_request() {
    let database = database_with_effects().await;
    let (pause, slow) = Pause::new();
    let slow = act_slowly(database.pool(), &IDENTITY, None, slow);
    let repeat = async {
        let pause = pause.begun().await;
        let repeat = act(database.pool(), &IDENTITY, None).await;
        pause.end();
        repeat
    };
    let (slow, repeat) = tokio::join!(slow, repeat);
    assert_eq!(repeat.unwrap_err().code(), "still-running");
    assert!(slow.is_ok());
    assert_eq!(effects(database.pool()).await, 1);
}

#[tokio::test]
async fn a_permanent_refusal_is_stored_and_a_temporary_one_is_not() {
    let database = database_with_effects().await;
    let first = act(database.pool(), &IDENTITY, Some(StatusCode::CONFLICT)).await.unwrap();
    assert_eq!((first.status(), effects(database.pool()).await), (StatusCode::CONFLICT, 0));
    let again = act(database.pool(), &IDENTITY, None).await.unwrap();
    assert_eq!((again.status(), again.body(), again.is_replayed()), (StatusCode::CONFLICT, first.body(), true));
    for temporary in [401, 429, 500, 503] {
        let status = StatusCode::from_u16(temporary).unwrap();
        let identity = RequestIdentity { id: [temporary as u8; 16], ..IDENTITY };
        assert!(act(database.pool(), &identity, Some(status)).await.is_err());
        assert_eq!(act(database.pool(), &identity, None).await.unwrap().status(), StatusCode::CREATED);
    }
    assert_eq!(effects(database.pool()).await, 4);
}

#[tokio::test]
async fn an_expired_response_is_deleted() {
    let database = database_with_effects().await;
    act(database.pool(), &IDENTITY, None).await.unwrap();
    sqlx::query("update pillarbox.idempotency set expires_at = now()").execute(database.pool()).await.unwrap();
    assert!(!act(database.pool(), &IDENTITY, None).await.unwrap().is_replayed());
    assert_eq!(effects(database.pool()).await, 2);
    let mut db = database.pool().acquire().await.unwrap();
    assert_eq!(delete_expired_responses(&mut db, 100).await.unwrap(), 0);
    sqlx::query("update pillarbox.idempotency set expires_at = now()").execute(database.pool()).await.unwrap();
    assert_eq!(delete_expired_responses(&mut db, 100).await.unwrap(), 1);
}

#[tokio::test]
async fn a_response_with_a_secret_is_sent_once_and_not_stored() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let client = app.admin().with_header("idempotency-key", "\"order 66\"");
    let body = json!({"name": "x", "role": "ingest"});
    let made = client.post("/admin/v1/keys", body.clone()).await;
    assert_eq!(made.status, 201, "{made:?}");
    let repeated = client.post("/admin/v1/keys", body.clone()).await;
    repeated.assert_problem(409, "already-answered");
    let next_step = format!("revoke it with DELETE /admin/v1/keys/{}", made.json()["id"].as_str().unwrap());
    assert!(repeated.json()["detail"].as_str().unwrap().contains(&next_step), "{repeated:?}");
    assert_eq!(repeated.header("idempotent-replayed"), "true");
    client
        .post("/admin/v1/keys", json!({"name": "y", "role": "ingest"}))
        .await
        .assert_problem(422, "idempotency-key-reused");
    let other =
        app.user(uuid::Uuid::now_v7(), Some(http_kit::auth::Role::Admin)).with_header("idempotency-key", "order 66");
    assert_eq!(other.post("/admin/v1/keys", body).await.status, 201, "keys of different callers are independent");
    let rows: Vec<String> =
        sqlx::query_scalar("select i::text from pillarbox.idempotency i").fetch_all(database.pool()).await.unwrap();
    let hex: String = made.json()["key"].as_str().unwrap().bytes().map(|byte| format!("{byte:02x}")).collect();
    assert!(rows.len() == 2 && rows.iter().all(|row| !row.contains(&hex)), "{rows:?}");
    let listed = app.admin().get("/admin/v1/keys").await.json();
    assert_eq!(listed["items"].as_array().unwrap().len(), 2);
    app.stop().await;
}

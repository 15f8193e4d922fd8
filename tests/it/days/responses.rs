//! Responses to repeated requests, and API keys: both expire by the database's time.

use std::time::Duration;

use serde_json::{Value, json};
use server::settings::Role;
use testkit::{Client, Response, TestApp, eventually};

use crate::days::support::{maintain, start};
use crate::events::fixture::{meetup, new_user};
use crate::support::DEADLINE;
use pillarbox::operations::maintenance::Retention;

const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_response_is_repeated_for_24_hours_and_not_longer() {
    let time = start().await;
    let db = time.database().pool();
    let app = TestApp::start_with(time.database(), |settings| settings.roles = vec![Role::Api]).await;
    let keyed = |client: Client| client.with_header("idempotency-key", "\"order 66\"");
    // One route answers requests one by one, the other one in batches.
    let (owner, producer) = (keyed(new_user(&app)), keyed(app.admin()));
    let (event, hub_event) = (meetup(), json!({"event_type": "order.paid", "payload": {"n": 1}}));
    let send = async || -> [Response; 2] {
        [owner.post("/event/v1/events", event.clone()).await, producer.post("/hub/v1/events", hub_event.clone()).await]
    };
    let id =
        |answer: &Response| -> Value { answer.json().get("id").or(answer.json().get("event_id")).cloned().unwrap() };
    let replayed = |answer: &Response| answer.headers.get("idempotent-replayed").is_some();
    let first = send().await;
    assert_eq!(first.each_ref().map(|answer| (answer.status, replayed(answer))), [(201, false), (202, false)]);

    time.advance(24 * 60 * MINUTE - MINUTE);
    maintain(db, Retention::default()).await;
    let repeated = send().await;
    assert_eq!(repeated.each_ref().map(replayed), [true, true], "after 23 hours and 59 minutes");
    assert_eq!(repeated.each_ref().map(id), first.each_ref().map(id));

    time.advance(2 * MINUTE);
    let new = send().await;
    assert_eq!(new.each_ref().map(replayed), [false, false], "after 24 hours and a minute");
    assert!(id(&new[0]) != id(&first[0]) && id(&new[1]) != id(&first[1]));
    assert_eq!(send().await.each_ref().map(replayed), [true, true], "the new responses are stored again");
    time.advance(25 * 60 * MINUTE);
    maintain(db, Retention::default()).await;
    let left: i64 = sqlx::query_scalar("select count(*) from pillarbox.idempotency").fetch_one(db).await.unwrap();
    assert_eq!(left, 0, "expired responses are deleted");
    app.stop().await;
}

#[tokio::test]
async fn an_api_key_expires_by_the_time_of_the_database() {
    let time = start().await;
    let app = TestApp::start_with(time.database(), |settings| settings.roles = vec![Role::Api]).await;
    let expires_at = chrono::Utc::now() + chrono::Duration::hours(1);
    let body = json!({"name": "short", "role": "manage", "expires_at": expires_at});
    let made = app.admin().post("/admin/v1/keys", body.clone()).await;
    assert_eq!(made.status, 201, "{made:?}");
    let client = app.anonymous().bearer(made.json()["key"].as_str().unwrap());
    assert_eq!(client.get("/hub/v1/subscribers").await.status, 200);
    time.advance(61 * MINUTE);
    // A lookup is cached for two seconds.
    eventually("the key is refused", DEADLINE, async || client.get("/hub/v1/subscribers").await.status == 401).await;
    app.admin().post("/admin/v1/keys", body).await.assert_problem(422, "validation-failed");
    app.stop().await;
}

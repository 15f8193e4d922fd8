//! The deletion of an account.

use contracts::identity::{ACCOUNT_DELETED, SUBSCRIPTION_CANCELLED};
use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{TestApp, TestDatabase, eventually};

use super::fixture::{Fixture, PASSWORD, person, sign_in, unlimited};
use crate::support::{DEADLINE, tables_with};

/// The tables of identity and of administration that contain the text, except the log. `accounts/deletion.rs` searches all of
/// them, with the service notify.
async fn found_in(fixture: &Fixture, wanted: &str) -> Vec<String> {
    let mut found = tables_with(fixture.db(), wanted).await;
    found.retain(|table| !table.starts_with("pillarbox.log") && !table.starts_with("pillarbox_notify."));
    found
}

async fn wait_until_only_the_audit_trail_has(fixture: &Fixture, id: &str) {
    // The service events keeps the id until no token of the account is valid, to find events created until then.
    let expected = ["pillarbox_identity.audit", "pillarbox.idempotency", "pillarbox_events.deleted_owner"];
    // The list of confidential messages, with their keys, is cleared a moment after they were blanked.
    eventually("only the audit trail has the id", DEADLINE, async || {
        let with_id = found_in(fixture, id).await;
        let is_in_audit = with_id.contains(&"pillarbox_identity.audit".to_owned());
        if is_in_audit && with_id.iter().all(|table| expected.contains(&table.as_str())) {
            Ok(())
        } else {
            Err(with_id)
        }
    })
    .await;
}

#[tokio::test]
async fn nothing_but_its_id_in_the_audit_trail_remains_of_a_deleted_account() {
    let fixture = Fixture::start_with(|settings| {
        (settings.login_failures_max, settings.emails_per_account_max) = (100, 100);
    })
    .await;
    let (person, other) = (fixture.person("countess").await, fixture.person("other").await);
    let elsewhere = sign_in(&fixture.app, person.id, &person.email, PASSWORD).await;
    fixture.login(&person.email, "a wrong password").await;
    fixture.post("password/forgot", json!({"email": person.email})).await;
    fixture.wait_until_processed().await;
    // Responses with personal data, and of requests with a password, that are stored for repeats.
    let keyed = |key: &str| person.client.with_header("idempotency-key", key);
    let renamed =
        keyed("a").send(Method::PATCH, "/identity/v1/me", Some(json!({"name": "Countess of Lovelace"}))).await;
    assert_eq!(renamed.status, 200);
    let subscribed = keyed("b").post("/identity/v1/subscriptions", json!({"plan": "pro"})).await;
    assert_eq!(subscribed.status, 201, "{subscribed:?}");
    let ended = person.post("subscriptions", json!({"plan": "basic"})).await.json();
    let path = format!("subscriptions/{}/cancel", ended["id"].as_str().unwrap());
    assert_eq!(person.send(Method::POST, &path, None).await.status, 200);
    assert!(!found_in(&fixture, "countess").await.is_empty(), "the search finds something before");

    let wrong = json!({"password": "a wrong password"});
    person.send(Method::DELETE, "me", Some(wrong)).await.assert_problem(403, "wrong-password");
    let deleted = keyed("c").send(Method::DELETE, "/identity/v1/me", Some(json!({"password": PASSWORD}))).await;
    assert_eq!(deleted.status, 204, "{deleted:?}");
    for client in [&person, &elsewhere] {
        client.get("me").await.assert_problem(401, "unauthorized");
        client.client.get("/event/v1/me/events").await.assert_problem(401, "unauthorized");
        fixture.refresh(&client.refresh_token).await.assert_problem(401, "invalid-refresh-token");
    }
    fixture.login(&person.email, PASSWORD).await.assert_problem(401, "wrong-credentials");

    assert_eq!(found_in(&fixture, "countess").await, Vec::<String>::new());
    wait_until_only_the_audit_trail_has(&fixture, &person.id.to_string()).await;
    let of_other = "select count(*) from pillarbox_identity.throttle where kind = 'login.account'";
    // The failure after the deletion counts against the address, as for any address without an account.
    assert_eq!(fixture.count(of_other).await, 1);

    assert_eq!(fixture.messages(ACCOUNT_DELETED).await, [json!({"user_id": person.id})]);
    let cancelled = fixture.messages(SUBSCRIPTION_CANCELLED).await;
    let plans: Vec<&Value> = cancelled.iter().map(|message| &message["plan"]).collect();
    assert_eq!(plans, [&json!("basic"), &json!("pro")], "the live one is cancelled with a message");
    let order: Vec<String> = sqlx::query_scalar(
        "select topic from pillarbox.log where source = 'identity' and key = $1 order by id desc limit 2",
    )
    .bind(person.id.to_string())
    .fetch_all(fixture.db())
    .await
    .unwrap();
    assert_eq!(order, [ACCOUNT_DELETED, SUBSCRIPTION_CANCELLED]);
    assert_eq!(other.get("me").await.status, 200);
    // The address is free again.
    assert_eq!(fixture.person("countess").await.get("me").await.status, 200);
    fixture.app.stop().await;
}

/// A request that is being processed holds its row and waits for the account.
#[tokio::test]
async fn a_deletion_does_not_wait_for_a_request_that_is_being_processed() {
    let fixture = Fixture::start().await;
    let person = fixture.person("ada").await;
    fixture
        .execute(
            "insert into pillarbox_identity.accepted_request (id, kind, email, accepted_at, due_at)
             select gen_random_uuid(), 'verification', 'ada@example.org', now(), now() + interval '1 h'
             from generate_series(1, 2)",
        )
        .await;
    let mut processing = fixture.db().begin().await.unwrap();
    let lock = "select id from pillarbox_identity.accepted_request limit 1 for update";
    sqlx::query(lock).execute(&mut *processing).await.unwrap();
    let deletion = person.send(Method::DELETE, "me", Some(json!({"password": PASSWORD})));
    let deleted =
        tokio::time::timeout(std::time::Duration::from_secs(5), deletion).await.expect("it waits for the lock");
    assert_eq!(deleted.status, 204, "{deleted:?}");
    assert_eq!(fixture.count("select count(*) from pillarbox_identity.accepted_request").await, 1);
    processing.rollback().await.unwrap();
    fixture.app.stop().await;
}

/// The service notify blanks its requests itself, a moment later. With RabbitMQ it has another database.
#[tokio::test]
async fn identity_alone_removes_the_address_of_a_deleted_account_from_its_log() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| {
        unlimited(settings);
        settings.services = vec!["identity".to_owned()];
    })
    .await;
    let person = person(&app, database.pool(), "countess").await;
    let in_log = async |wanted: &str| {
        let tables = tables_with(database.pool(), wanted).await;
        tables.into_iter().filter(|table| table.starts_with("pillarbox.log")).collect::<Vec<_>>()
    };
    assert!(!in_log(&person.email).await.is_empty(), "the requests for e-mails wait in the log");
    assert_eq!(person.send(Method::DELETE, "me", Some(json!({"password": PASSWORD}))).await.status, 204);
    for personal in [person.email.as_str(), "Ada Lovelace"] {
        assert_eq!(in_log(personal).await, [""; 0], "{personal}");
    }
    app.stop().await;
}

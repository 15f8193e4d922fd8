//! Registration, verification and the account of a user.

use contracts::identity::{EMAIL_ACCOUNT_EXISTS, EMAIL_PASSWORD_RESET_REQUESTED, EMAIL_VERIFICATION_REQUESTED};
use futures_util::future::join_all;
use hyper::Method;
use serde_json::json;
use testkit::eventually;

use super::fixture::{Fixture, PASSWORD, account_id};
use crate::support::{DEADLINE, lock_waits, text};

#[tokio::test]
async fn a_user_registers_verifies_signs_in_and_uses_other_services() {
    let fixture = Fixture::start().await;
    let accepted = fixture.register(" Ada@Example.ORG ", PASSWORD).await;
    assert_eq!(accepted.status, 202, "{accepted:?}");
    fixture.wait_until_processed().await;
    fixture.login("ada@example.org", PASSWORD).await.assert_problem(403, "email-not-verified");
    let messages = fixture.messages(EMAIL_VERIFICATION_REQUESTED).await;
    assert_eq!(messages.len(), 1);
    let id = account_id(fixture.db(), "ada@example.org").await;
    assert_eq!(messages[0]["data"]["to"], "ada@example.org");
    assert_eq!(messages[0]["user_id"], id.to_string());
    assert_eq!(messages[0]["data"]["variables"]["expires_in_hours"], "24");
    let key: String = sqlx::query_scalar("select key from pillarbox.log where topic = $1")
        .bind(EMAIL_VERIFICATION_REQUESTED)
        .fetch_one(fixture.db())
        .await
        .unwrap();
    assert_eq!(key, id.to_string());
    let token = fixture.emailed_token(EMAIL_VERIFICATION_REQUESTED).await;
    let stored =
        fixture.count("select count(*) from pillarbox_identity.one_time_token where length(digest) = 32").await;
    assert_eq!(stored, 1, "only the digest is stored");
    let verified = fixture.post("verify", json!({"token": token})).await;
    assert_eq!((verified.status, verified.json()), (200, json!({"password_reset_required": false})));
    fixture.post("verify", json!({"token": token})).await.assert_problem(404, "token-not-found");

    let person = super::fixture::sign_in(&fixture.app, id, "ada@example.org", PASSWORD).await;
    let me = person.get("me").await;
    assert_eq!(me.json()["email"], "ada@example.org");
    assert_eq!((&me.json()["role"], &me.json()["is_verified"]), (&json!("user"), &json!(true)));
    // The token serves the other services as it is.
    let event = crate::events::fixture::publish_event(&person.client, crate::events::fixture::meetup()).await;
    assert_eq!(event["owner_id"], id.to_string());

    let tag = me.header("etag").to_owned();
    let cached = person.client.with_header("if-none-match", &tag).get("/identity/v1/me").await;
    assert_eq!(cached.status, 304);
    let changed = person.send(Method::PATCH, "me", Some(json!({"name": "Ada King", "locale": "pt-BR"}))).await;
    assert_eq!((changed.status, &changed.json()["name"]), (200, &json!("Ada King")));
    let stale = person.client.with_header("if-match", &tag);
    let stale = stale.send(Method::PATCH, "/identity/v1/me", Some(json!({"name": "Ada Byron"})));
    stale.await.assert_problem(412, "stale");
    assert_eq!(person.get("me").await.json()["locale"], "pt-BR");
    fixture.app.stop().await;
}

#[tokio::test]
async fn the_answer_to_a_request_for_an_address_is_the_same_for_every_address() {
    let fixture = Fixture::start().await;
    let person = fixture.person("known").await;
    fixture.register("unverified@example.org", PASSWORD).await;
    fixture.wait_until_processed().await;
    let unverified = account_id(fixture.db(), "unverified@example.org").await;
    for path in ["register", "verify/resend", "password/forgot"] {
        let mut answers = Vec::new();
        for email in [person.email.as_str(), "unverified@example.org", "unknown@example.org"] {
            let body = match path {
                "register" => json!({"email": email, "password": "another password", "name": "Eve"}),
                _ => json!({"email": email}),
            };
            let answer = fixture.post(path, body).await;
            answers.push((answer.status, answer.text.clone(), answer.headers.len()));
        }
        assert_eq!(answers[0].0, 202, "{path}: {answers:?}");
        assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{path}: {answers:?}");
        if path == "register" {
            fixture.wait_until_processed().await;
            fixture.execute("delete from pillarbox_identity.account where email = 'unknown@example.org'").await;
        }
    }
    fixture.wait_until_processed().await;
    // What the e-mails say differs.
    let to = async |topic: &str| {
        let messages = fixture.messages(topic).await;
        messages.iter().map(|message| text(&message["data"]["to"]).to_owned()).collect::<Vec<_>>()
    };
    let (known, unverified_address) = (person.email.clone(), "unverified@example.org".to_owned());
    assert_eq!(to(EMAIL_ACCOUNT_EXISTS).await, [known.as_str()]);
    let mut reset = to(EMAIL_PASSWORD_RESET_REQUESTED).await;
    reset.sort();
    assert_eq!(reset, [known.clone(), unverified_address.clone()]);
    let verifications = to(EMAIL_VERIFICATION_REQUESTED).await;
    let of = |address: &String| verifications.iter().filter(|to| *to == address).count();
    assert_eq!((of(&known), of(&unverified_address)), (1, 3), "{verifications:?}");
    // The account of the verified user is unchanged.
    assert_eq!(fixture.login(&person.email, PASSWORD).await.status, 200);
    assert_eq!(account_id(fixture.db(), "unverified@example.org").await, unverified);
    fixture.app.stop().await;
}

#[tokio::test]
async fn two_hundred_registrations_at_once_make_one_account() {
    let fixture = Fixture::start().await;
    let replica = fixture.replica().await;
    let register = async |number: usize| {
        let app = if number.is_multiple_of(2) { &fixture.app } else { &replica };
        let body = json!({"email": "ada@example.org", "password": PASSWORD, "name": format!("Ada {number}")});
        app.anonymous().post("/identity/v1/register", body).await.status
    };
    // Accounts are found but not inserted while this transaction is open, so several registrations find none.
    let mut blocking = fixture.db().begin().await.unwrap();
    sqlx::query("lock table pillarbox_identity.account in share mode").execute(&mut *blocking).await.unwrap();
    let release = async {
        let waits = async || match lock_waits(fixture.db()).await {
            3.. => Ok(()),
            fewer => Err(fewer),
        };
        eventually("several registrations wait to insert the account", DEADLINE, waits).await;
        blocking.rollback().await.unwrap();
    };
    let (statuses, ()) = tokio::join!(join_all((0..200).map(register)), release);
    assert!(statuses.iter().all(|status| *status == 202), "{statuses:?}");
    fixture.wait_until_processed().await;
    assert_eq!(fixture.count("select count(*) from pillarbox_identity.account").await, 1);
    assert_eq!(fixture.count("select count(*) from pillarbox_identity.one_time_token").await, 1);
    assert_eq!(
        fixture.messages(EMAIL_VERIFICATION_REQUESTED).await.len(),
        200,
        "each registration is answered by e-mail"
    );
    replica.stop().await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_new_token_replaces_the_previous_one_and_expires() {
    let fixture = Fixture::start().await;
    fixture.register("ada@example.org", PASSWORD).await;
    fixture.wait_until_processed().await;
    let first = fixture.emailed_token(EMAIL_VERIFICATION_REQUESTED).await;
    fixture.post("verify/resend", json!({"email": "ADA@example.org"})).await;
    fixture.wait_until_processed().await;
    let second = fixture.emailed_token(EMAIL_VERIFICATION_REQUESTED).await;
    assert_ne!(first, second);
    fixture.post("verify", json!({"token": first})).await.assert_problem(404, "token-not-found");
    let tampered: String = second.chars().rev().collect();
    for token in [tampered.as_str(), "x", "", &format!("{second}A")] {
        fixture.post("verify", json!({"token": token})).await.assert_problem(404, "token-not-found");
    }
    // A token for a verification is none for a password.
    let reset = json!({"token": second, "new_password": "another password"});
    fixture.post("password/reset", reset).await.assert_problem(404, "token-not-found");
    fixture.execute("update pillarbox_identity.one_time_token set expires_at = now()").await;
    fixture.post("verify", json!({"token": second})).await.assert_problem(404, "token-not-found");
    fixture.execute("update pillarbox_identity.one_time_token set expires_at = now() + interval '1 h'").await;
    let uses = join_all((0..20).map(|_| fixture.post("verify", json!({"token": second})))).await;
    assert_eq!(uses.iter().filter(|answer| answer.status == 200).count(), 1, "it can be used once");
    fixture.app.stop().await;
}

#[tokio::test]
async fn every_invalid_field_is_named() {
    let fixture = Fixture::start().await;
    let body = json!({"email": "ada", "password": "password", "name": " ", "locale": "english"});
    let refused = fixture.post("register", body).await;
    refused.assert_problem(422, "validation-failed");
    let problem = refused.json();
    let pointers: Vec<&str> =
        problem["errors"].as_array().unwrap().iter().map(|error| text(&error["pointer"])).collect();
    assert_eq!(pointers, ["/email", "/name", "/locale", "/password"]);
    assert!(!refused.text.contains("english"), "a problem repeats no value: {refused:?}");
    let guessable = json!({"email": "lovelace@example.org", "password": "my lovelace 1815", "name": "Ada"});
    fixture.post("register", guessable).await.assert_problem(422, "validation-failed");
    assert_eq!(fixture.count("select count(*) from pillarbox_identity.accepted_request").await, 0);
    fixture.app.stop().await;
}

#[tokio::test]
async fn an_accepted_request_of_a_process_that_has_ended_is_processed_by_another() {
    let fixture = Fixture::start().await;
    fixture
        .execute(
            "insert into pillarbox_identity.accepted_request
                 (id, kind, email, name, locale, password_hash, accepted_at, due_at)
             values (gen_random_uuid(), 'registration', 'ada@example.org', 'Ada', 'en', 'x', now(), now() - interval '1 min')",
        )
        .await;
    fixture.wait_until_processed().await;
    assert_eq!(fixture.messages(EMAIL_VERIFICATION_REQUESTED).await.len(), 1);
    assert_eq!(fixture.count("select count(*) from pillarbox_identity.account").await, 1);
    fixture.app.stop().await;
}

//! Refresh tokens: rotation, and what happens when a token is presented again.

use futures_util::future::join_all;
use serde_json::json;
use testkit::{Response, eventually};

use super::fixture::Fixture;
use crate::support::{DEADLINE, text};

fn refresh_token(response: &Response) -> String {
    assert_eq!(response.status, 200, "{response:?}");
    text(&response.json()["refresh_token"]).to_owned()
}

#[tokio::test]
async fn a_refresh_token_that_was_used_before_ends_the_whole_session() {
    let fixture = Fixture::start_with(|settings| settings.refresh_grace_seconds = 0).await;
    let (victim, other) = (fixture.person("victim").await, fixture.person("other").await);
    let second = fixture.refresh(&victim.refresh_token).await;
    let (third_holder, second) =
        (fixture.app.anonymous().bearer(text(&second.json()["access_token"])), refresh_token(&second));
    assert_eq!(third_holder.get("/identity/v1/me").await.status, 200);
    // A thief presents the copy of the first token.
    let reused = fixture.refresh(&victim.refresh_token).await;
    reused.assert_problem(401, "refresh-token-reused");
    assert!(reused.header("www-authenticate").starts_with("Bearer"));
    fixture.refresh(&second).await.assert_problem(401, "invalid-refresh-token");
    for client in [&victim.client, &third_holder] {
        client.get("/identity/v1/me").await.assert_problem(401, "unauthorized");
        client.get("/event/v1/me/events").await.assert_problem(401, "unauthorized");
    }
    assert_eq!(fixture.refresh(&other.refresh_token).await.status, 200, "other sessions continue");
    assert_eq!(fixture.count("select count(*) from pillarbox_identity.session").await, 1);
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_repeat_within_the_grace_does_not_fork_the_session() {
    let fixture = Fixture::start_with(|settings| settings.refresh_grace_seconds = 60).await;
    let person = fixture.person("ada").await;
    // The answer is lost, and the client repeats the request.
    let lost = refresh_token(&fixture.refresh(&person.refresh_token).await);
    let received = refresh_token(&fixture.refresh(&person.refresh_token).await);
    assert_ne!(lost, received);
    assert_eq!(
        fixture.count("select count(*) from pillarbox_identity.refresh_token where replaced_at is null").await,
        1
    );
    let next = refresh_token(&fixture.refresh(&received).await);
    // The first token again, although its grace has not passed: the client has used what it received.
    let session = fixture.refresh(&person.refresh_token).await;
    session.assert_problem(401, "refresh-token-reused");
    fixture.refresh(&next).await.assert_problem(401, "invalid-refresh-token");

    // A thief has intercepted the answer that was lost: using its token reveals the theft.
    let person = fixture.person("eve").await;
    let lost = refresh_token(&fixture.refresh(&person.refresh_token).await);
    let received = refresh_token(&fixture.refresh(&person.refresh_token).await);
    fixture.refresh(&lost).await.assert_problem(401, "refresh-token-reused");
    fixture.refresh(&received).await.assert_problem(401, "invalid-refresh-token");
    fixture.app.stop().await;
}

#[tokio::test]
async fn after_twenty_concurrent_exchanges_one_token_is_valid() {
    let fixture = Fixture::start_with(|settings| settings.refresh_grace_seconds = 60).await;
    let replica = fixture.replica().await;
    let person = fixture.person("ada").await;
    let exchange = async |number: usize| {
        let app = if number.is_multiple_of(2) { &fixture.app } else { &replica };
        app.anonymous().post("/identity/v1/refresh", json!({"refresh_token": person.refresh_token})).await
    };
    let answers = join_all((0..20).map(exchange)).await;
    let tokens: Vec<String> = answers.iter().map(refresh_token).collect();
    assert_eq!(
        fixture.count("select count(*) from pillarbox_identity.refresh_token where replaced_at is null").await,
        1
    );
    let mut exchanged = 0;
    for token in &tokens {
        exchanged += usize::from(fixture.refresh(token).await.status == 200);
    }
    assert!(exchanged <= 1, "{exchanged} lines of tokens were valid");
    replica.stop().await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_refresh_token_expires_and_cannot_be_guessed() {
    let fixture = Fixture::start().await;
    let person = fixture.person("ada").await;
    let tampered: String = person.refresh_token.chars().rev().collect();
    for token in [tampered.as_str(), "", "x", &format!("{}A", person.refresh_token)] {
        fixture.refresh(token).await.assert_problem(401, "invalid-refresh-token");
    }
    assert_eq!(person.get("me").await.status, 200, "a guess ends no session");
    fixture.execute("update pillarbox_identity.refresh_token set expires_at = now()").await;
    fixture.refresh(&person.refresh_token).await.assert_problem(401, "invalid-refresh-token");
    fixture.execute("update pillarbox_identity.refresh_token set expires_at = now() + interval '1 h'").await;
    fixture.execute("update pillarbox_identity.session set expires_at = now()").await;
    fixture.refresh(&person.refresh_token).await.assert_problem(401, "invalid-refresh-token");
    person.get("me").await.assert_problem(401, "unauthorized");
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_repeated_idempotency_key_exchanges_nothing_and_shows_no_token() {
    let fixture = Fixture::start().await;
    let person = fixture.person("ada").await;
    let client = fixture.app.anonymous().with_header("idempotency-key", "refresh-1");
    let body = json!({"refresh_token": person.refresh_token});
    let next = refresh_token(&client.post("/identity/v1/refresh", body.clone()).await);
    client.post("/identity/v1/refresh", body).await.assert_problem(409, "already-answered");
    assert_eq!(fixture.refresh(&next).await.status, 200);
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_replaced_token_reveals_a_theft_until_its_session_ends() {
    let fixture = Fixture::start_with(|settings| settings.refresh_grace_seconds = 0).await;
    let person = fixture.person("ada").await;
    let second = refresh_token(&fixture.refresh(&person.refresh_token).await);
    fixture
        .execute(
            "update pillarbox_identity.refresh_token set expires_at = now() - interval '1 day' where replaced_at is not null",
        )
        .await;
    fixture
        .execute(
            "insert into pillarbox_identity.throttle (kind, subject, window_no, attempts, expires_at)
             values ('login.account', '\\x00', 1, 1, now())",
        )
        .await;
    // The task that deletes expired rows runs at the start; counts are the last ones that it deletes.
    let replica = fixture.replica().await;
    let counts = "select count(*) from pillarbox_identity.throttle";
    eventually("expired rows are deleted", DEADLINE, async || fixture.count(counts).await == 0).await;
    // Older ones than the latest thousand are forgotten.
    fixture
        .execute(
            "insert into pillarbox_identity.refresh_token (digest, session_id, expires_at, replaced_at)
             select sha256(n::text::bytea), session.id, now(), now() - interval '1 day' - n * interval '1 s'
             from pillarbox_identity.session, generate_series(1, 1500) as n",
        )
        .await;
    refresh_token(&fixture.refresh(&second).await);
    assert_eq!(fixture.count("select count(*) from pillarbox_identity.refresh_token").await, 1_001);
    fixture.refresh(&person.refresh_token).await.assert_problem(401, "refresh-token-reused");
    assert_eq!(fixture.count("select count(*) from pillarbox_identity.session").await, 0);
    replica.stop().await;
    fixture.app.stop().await;
}

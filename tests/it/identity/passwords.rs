//! Changing and resetting passwords.

use contracts::identity::{EMAIL_PASSWORD_CHANGED, EMAIL_PASSWORD_RESET_REQUESTED};
use serde_json::json;

use super::fixture::{Fixture, PASSWORD, known_token, sign_in};

const NEW_PASSWORD: &str = "four other random words";

#[tokio::test]
async fn a_change_of_the_password_ends_all_sessions_and_begins_a_new_one() {
    let fixture = Fixture::start().await;
    let here = fixture.person("ada").await;
    let there = sign_in(&fixture.app, here.id, &here.email, PASSWORD).await;
    let wrong = json!({"current_password": "a wrong password", "new_password": NEW_PASSWORD});
    here.post("password/change", wrong).await.assert_problem(403, "wrong-password");
    let common = json!({"current_password": PASSWORD, "new_password": "password123"});
    here.post("password/change", common).await.assert_problem(422, "validation-failed");
    assert_eq!(there.get("me").await.status, 200);
    let change = json!({"current_password": PASSWORD, "new_password": NEW_PASSWORD});
    let new = here.with_tokens(&fixture.app, &here.post("password/change", change).await);
    for old in [&here, &there] {
        old.get("me").await.assert_problem(401, "unauthorized");
        old.client.get("/event/v1/me/events").await.assert_problem(401, "unauthorized");
        fixture.refresh(&old.refresh_token).await.assert_problem(401, "invalid-refresh-token");
    }
    assert_eq!(new.get("me").await.status, 200);
    assert_eq!(fixture.count("select count(*) from pillarbox_identity.session").await, 1);
    assert_eq!(fixture.refresh(&new.refresh_token).await.status, 200);
    fixture.login(&here.email, PASSWORD).await.assert_problem(401, "wrong-credentials");
    assert_eq!(fixture.login(&here.email, NEW_PASSWORD).await.status, 200);
    assert_eq!(fixture.messages(EMAIL_PASSWORD_CHANGED).await.len(), 1, "the user gets an e-mail");
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_reset_of_the_password_ends_all_sessions_and_its_token_is_used_up() {
    let fixture = Fixture::start().await;
    let person = fixture.person("ada").await;
    assert_eq!(fixture.post("password/forgot", json!({"email": person.email})).await.status, 202);
    fixture.wait_until_processed().await;
    let token = fixture.emailed_token(EMAIL_PASSWORD_RESET_REQUESTED).await;
    // A password that is refused does not use up the token.
    let short = json!({"token": token, "new_password": "short"});
    fixture.post("password/reset", short).await.assert_problem(422, "validation-failed");
    let named = json!({"token": token, "new_password": "ada lovelace"});
    fixture.post("password/reset", named).await.assert_problem(422, "validation-failed");
    let body = json!({"token": token, "new_password": NEW_PASSWORD});
    assert_eq!(fixture.post("password/reset", body.clone()).await.status, 204);
    fixture.post("password/reset", body).await.assert_problem(404, "token-not-found");
    person.get("me").await.assert_problem(401, "unauthorized");
    fixture.refresh(&person.refresh_token).await.assert_problem(401, "invalid-refresh-token");
    fixture.login(&person.email, PASSWORD).await.assert_problem(401, "wrong-credentials");
    assert_eq!(fixture.login(&person.email, NEW_PASSWORD).await.status, 200);
    fixture.app.stop().await;
}

/// The token proves that the user reads the address.
#[tokio::test]
async fn a_reset_also_verifies_the_address() {
    let fixture = Fixture::start().await;
    fixture.register("ada@example.org", PASSWORD).await;
    fixture.wait_until_processed().await;
    fixture.post("password/forgot", json!({"email": "ada@example.org"})).await;
    fixture.wait_until_processed().await;
    let token = fixture.emailed_token(EMAIL_PASSWORD_RESET_REQUESTED).await;
    let body = json!({"token": token, "new_password": NEW_PASSWORD});
    assert_eq!(fixture.post("password/reset", body).await.status, 204);
    assert_eq!(fixture.login("ada@example.org", NEW_PASSWORD).await.status, 200);
    assert_eq!(
        fixture.count("select count(*) from pillarbox_identity.one_time_token").await,
        0,
        "no token stays valid"
    );
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_reset_ends_the_lockout_that_strangers_have_caused() {
    let fixture = Fixture::start_with(|settings| settings.login_failures_max = 3).await;
    let person = fixture.person("ada").await;
    fixture.execute("delete from pillarbox_identity.known_network").await;
    for _ in 0..3 {
        fixture.login(&person.email, "a wrong password").await.assert_problem(401, "wrong-credentials");
    }
    fixture.login(&person.email, PASSWORD).await.assert_problem(429, "too-many-attempts");
    let token = known_token(fixture.db(), person.id, "password_reset").await;
    let reset = json!({"token": token, "new_password": NEW_PASSWORD});
    assert_eq!(fixture.post("password/reset", reset).await.status, 204);
    assert_eq!(fixture.count("select count(*) from pillarbox_identity.throttle").await, 0, "no failure counts");
    assert_eq!(fixture.count("select count(*) from pillarbox_identity.known_network").await, 1);
    assert_eq!(fixture.login(&person.email, NEW_PASSWORD).await.status, 200);
    fixture.app.stop().await;
}

//! An address that is registered again before it is verified: no registration decides the password.

use contracts::identity::{EMAIL_PASSWORD_RESET_REQUESTED, EMAIL_VERIFICATION_REQUESTED};
use serde_json::json;

use super::fixture::{Fixture, PASSWORD, account_id};
use crate::support::text;

const OWNERS: &str = "ada@example.org";

#[tokio::test]
async fn neither_of_two_registrations_of_an_unverified_address_decides_its_password() {
    let fixture = Fixture::start().await;
    fixture.register(OWNERS, PASSWORD).await;
    fixture.wait_until_processed().await;
    let id = account_id(fixture.db(), OWNERS).await;
    fixture.login(OWNERS, PASSWORD).await.assert_problem(403, "email-not-verified");
    let first = fixture.emailed_token(EMAIL_VERIFICATION_REQUESTED).await;
    fixture.execute("update pillarbox_identity.account set role = 'admin'").await;
    let second = json!({"email": OWNERS, "password": "another password", "name": "Eve", "locale": "de"});
    assert_eq!(fixture.post("register", second).await.status, 202);
    fixture.wait_until_processed().await;
    let refuse_both = async || {
        for password in [PASSWORD, "another password"] {
            fixture.login(OWNERS, password).await.assert_problem(401, "wrong-credentials");
        }
    };
    refuse_both().await;
    fixture.post("verify", json!({"token": first})).await.assert_problem(404, "token-not-found");

    // The owner opens the link in the latest e-mail.
    let token = fixture.emailed_token(EMAIL_VERIFICATION_REQUESTED).await;
    let client = fixture.app.anonymous().with_header("idempotency-key", "verify-1");
    for _ in 0..2 {
        let verified = client.post("/identity/v1/verify", json!({"token": token})).await;
        assert_eq!((verified.status, verified.json()), (200, json!({"password_reset_required": true})));
    }
    refuse_both().await;
    let mails = fixture.messages(EMAIL_PASSWORD_RESET_REQUESTED).await;
    assert_eq!((mails.len(), text(&mails[0]["data"]["to"])), (1, OWNERS));
    let token = fixture.emailed_token(EMAIL_PASSWORD_RESET_REQUESTED).await;
    let reset = json!({"token": token, "new_password": "the word of the owner"});
    assert_eq!(fixture.post("password/reset", reset).await.status, 204);
    refuse_both().await;
    let owner = super::fixture::sign_in(&fixture.app, id, OWNERS, "the word of the owner").await;
    let me = owner.get("me").await.json();
    assert_eq!((&me["name"], &me["locale"], &me["role"]), (&json!("Ada Lovelace"), &json!("en"), &json!("admin")));
    assert_eq!(fixture.count("select count(*) from pillarbox_identity.account where needs_password").await, 0);
    fixture.app.stop().await;
}

//! Accounts and mail together: what a person does over HTTP, and what is left when the account is deleted.

mod deletion;
mod path;
mod promotion;

use std::time::Duration;

use serde_json::{Value, json};
use testkit::{Client, Response, eventually};

use crate::support::text;

/// How long a mail or the deletion of its record may take on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);
pub(crate) const PASSWORD: &str = "correct horse battery staple";

/// Registers an account and returns the token of its verification mail.
pub(crate) async fn register(anonymous: &Client, admin: &Client, address: &str) -> String {
    let body = json!({"email": address, "password": PASSWORD, "name": "Ada Lovelace"});
    let registered = anonymous.post("/identity/v1/register", body).await;
    assert_eq!(registered.status, 202, "{registered:?}");
    emailed_token(admin, address, "verification").await
}

/// Registers and verifies an account.
pub(crate) async fn register_verified(anonymous: &Client, admin: &Client, address: &str) {
    let token = register(anonymous, admin, address).await;
    let verified = anonymous.post("/identity/v1/verify", json!({"token": token})).await;
    assert!((200..300).contains(&verified.status), "{verified:?}");
}

pub(crate) async fn log_in(anonymous: &Client, address: &str, password: &str) -> Response {
    anonymous.post("/identity/v1/login", json!({"email": address, "password": password})).await
}

/// Logs in and returns a client with the access token, and the refresh token.
pub(crate) async fn session(anonymous: &Client, address: &str, password: &str) -> (Client, String) {
    let answer = log_in(anonymous, address, password).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let tokens = answer.json();
    (anonymous.bearer(text(&tokens["access_token"])), text(&tokens["refresh_token"]).to_owned())
}

/// Waits for the captured mail of this template and returns the token in its text.
pub(crate) async fn emailed_token(admin: &Client, address: &str, template: &str) -> String {
    let mail = captured_email(admin, address, template).await;
    let is_token =
        |word: &&str| word.len() >= 40 && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    let mut words = text(&mail["text"]).split(|c: char| c.is_whitespace() || "=?&:/".contains(c));
    words.rfind(is_token).unwrap_or_else(|| panic!("no token in {mail}")).to_owned()
}

async fn captured_email(admin: &Client, address: &str, template: &str) -> Value {
    eventually("the mail is captured", DEADLINE, async || {
        let mails = admin.get("/admin/v1/mail").await.json();
        let is_wanted = |mail: &&Value| mail["to"] == address && mail["template"] == template;
        mails["items"].as_array().and_then(|mails| mails.iter().find(is_wanted)).cloned().ok_or(mails)
    })
    .await
}

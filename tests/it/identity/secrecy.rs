//! No password and no token is stored or logged.

use hyper::Method;
use serde_json::json;
use server::migrations;
use testkit::{Client, Pillarbox, TestDatabase, program};

use super::fixture::{account_id, known_token, wait_until_processed};
use crate::server::process::{ADMIN_KEY, DataFolder};
use crate::support::text;

const SECRET_PASSWORD: &str = "tulips-and-chimneys";
const SECOND_PASSWORD: &str = "windmills-and-rivers";

#[tokio::test]
async fn no_password_and_no_token_reaches_the_log_or_a_stored_response() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let url = database.url();
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text(), "--services", "identity"];
    let env = [
        ("PILLARBOX_LOG", "trace"),
        ("PILLARBOX_ADMIN_KEY", ADMIN_KEY),
        ("PILLARBOX_DATABASE_URL", url.as_str()),
        ("PILLARBOX_IDENTITY__HASH_MEMORY_KIB", "64"),
    ];
    let mut process = Pillarbox::start(program(), &args, &env);
    let anonymous = Client::new(&process.base_url().await);
    let keyed = |key: &str| anonymous.with_header("idempotency-key", key);
    let path = |path: &str| format!("/identity/v1/{path}");
    let registration = json!({"email": "ada@example.org", "password": SECRET_PASSWORD, "name": "Ada"});
    assert_eq!(keyed("1").post(&path("register"), registration.clone()).await.status, 202);
    wait_until_processed(database.pool()).await;
    let repeated = keyed("1").post(&path("register"), registration).await;
    assert_eq!((repeated.status, repeated.header("idempotent-replayed")), (202, "true"));
    // A stranger who uses the same key is another caller: nothing is refused, and nothing repeated.
    let other = json!({"email": "bob@example.org", "password": SECOND_PASSWORD, "name": "Bob"});
    let other = keyed("1").post(&path("register"), other).await;
    assert_eq!((other.status, other.headers.get("idempotent-replayed")), (202, None), "{other:?}");
    let user = account_id(database.pool(), "ada@example.org").await;
    let verification = known_token(database.pool(), user, "verification").await;
    assert_eq!(keyed("2").post(&path("verify"), json!({"token": verification})).await.status, 200);
    let login = json!({"email": "ada@example.org", "password": SECRET_PASSWORD});
    let tokens = keyed("3").post(&path("login"), login.clone()).await.json();
    keyed("3").post(&path("login"), login).await.assert_problem(409, "already-answered");
    let refresh = json!({"refresh_token": tokens["refresh_token"]});
    let refreshed = keyed("4").post(&path("refresh"), refresh).await.json();
    let member = keyed("5").bearer(text(&refreshed["access_token"]));
    let change = json!({"current_password": SECRET_PASSWORD, "new_password": SECOND_PASSWORD});
    let changed = member.post(&path("password/change"), change).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    let changed = changed.json();
    let renamed = keyed("6").bearer(text(&changed["access_token"]));
    assert_eq!(renamed.send(Method::PATCH, &path("me"), Some(json!({"name": "Ada King"}))).await.status, 200);
    let wrong = json!({"email": "ada@example.org", "password": "a-password-that-is-wrong"});
    anonymous.post(&path("login"), wrong).await.assert_problem(401, "wrong-credentials");
    anonymous.post(&path("login"), json!({"password": SECRET_PASSWORD, "email": 5})).await;

    let stored: String =
        sqlx::query_scalar("select string_agg(convert_from(body, 'UTF8'), ' ') from pillarbox.idempotency")
            .fetch_one(database.pool())
            .await
            .unwrap();
    assert!(process.terminate().await.success());
    let logs = process.logs();
    assert!(logs.contains("answered"), "requests are logged");
    for (what, secret) in [
        ("a password", SECRET_PASSWORD),
        ("a new password", SECOND_PASSWORD),
        ("a wrong password", "a-password-that-is-wrong"),
        ("the token of an e-mail", &verification),
        ("an access token", text(&tokens["access_token"])),
        ("a refresh token", text(&tokens["refresh_token"])),
        ("a second refresh token", text(&refreshed["refresh_token"])),
        ("the access token of a change", text(&changed["access_token"])),
        ("the refresh token of a change", text(&changed["refresh_token"])),
    ] {
        assert!(!logs.contains(secret), "{what} is in the log");
        assert!(!stored.contains(secret), "{what} is stored: {stored}");
    }
    assert!(!stored.contains("ada@example.org") && !stored.contains("Ada King"), "{stored}");
}

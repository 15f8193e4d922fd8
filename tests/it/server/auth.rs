//! Authentication of users by token.

use std::time::Duration;

use http_kit::auth::{Role, TokenSigner};
use runtime::secret::MasterKey;
use server::migrations;
use testkit::{TestApp, TestDatabase};
use uuid::Uuid;

#[tokio::test]
async fn only_a_token_with_the_admin_role_may_operate() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    assert_eq!(app.user(Uuid::now_v7(), Some(Role::Admin)).get("/admin/v1/keys").await.status, 200);
    app.user(Uuid::now_v7(), None).get("/admin/v1/keys").await.assert_problem(403, "forbidden");
    app.stop().await;
}

#[tokio::test]
async fn expired_tokens_and_tokens_of_another_key_are_refused() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let ours: MasterKey = app.settings.secret_key.as_ref().unwrap().reveal().parse().unwrap();
    let long_ago = chrono::Utc::now() - chrono::Duration::hours(2);
    let minute = Duration::from_secs(60);
    let expired = TokenSigner::new(&ours).sign(Uuid::now_v7(), Some(Role::Admin), long_ago, minute).unwrap();
    let foreign = TokenSigner::new(&MasterKey::generate())
        .sign(Uuid::now_v7(), Some(Role::Admin), chrono::Utc::now(), minute)
        .unwrap();
    for token in [expired, foreign] {
        app.anonymous().bearer(&token).get("/admin/v1/keys").await.assert_problem(401, "unauthorized");
    }
    app.stop().await;
}

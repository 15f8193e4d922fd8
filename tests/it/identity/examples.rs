//! What the examples of the OpenAPI document need: they name one address, one password and one token of each kind.

use runtime::secret::digest;
use serde_json::json;
use sqlx::PgPool;
use testkit::{Client, TestApp};

use super::fixture::{insert_token, person, wait_until_processed};
use crate::support::text;

/// Returns a caller who may call the operation, and its path with the ids of existing resources. The account of the examples
/// is created again.
pub(crate) async fn prepare(app: &TestApp, db: &PgPool, path: &str) -> (Client, String) {
    // The example of a registration is still being processed: a second one would contest the account.
    wait_until_processed(db).await;
    let delete = "delete from pillarbox_identity.account where email = 'ada@example.org'";
    sqlx::query(delete).execute(db).await.unwrap();
    let anonymous = app.anonymous();
    if matches!(path, "/identity/v1/register" | "/identity/v1/jwks.json" | "/.well-known/openid-configuration") {
        return (anonymous, path.to_owned());
    }
    let ada = person(app, db, "ada").await;
    match path {
        "/identity/v1/login" | "/identity/v1/verify/resend" | "/identity/v1/password/forgot" => {
            (anonymous, path.to_owned())
        }
        "/identity/v1/verify" => {
            insert_token(db, ada.id, "verification", &"A".repeat(43)).await;
            (anonymous, path.to_owned())
        }
        "/identity/v1/password/reset" => {
            insert_token(db, ada.id, "password_reset", &"C".repeat(43)).await;
            (anonymous, path.to_owned())
        }
        "/identity/v1/refresh" => {
            let update = "update pillarbox_identity.refresh_token set digest = $1";
            sqlx::query(update).bind(digest(&"B".repeat(43)).as_slice()).execute(db).await.unwrap();
            (anonymous, path.to_owned())
        }
        "/identity/v1/sessions/{id}" => {
            let session = ada.session().await;
            (ada.client, path.replace("{id}", &session))
        }
        path if path.starts_with("/identity/v1/users") => (app.admin(), path.replace("{id}", &ada.id.to_string())),
        path if path.starts_with("/identity/v1/subscriptions/") => {
            let created = ada.post("subscriptions", json!({"plan": "basic"})).await.json();
            let client = if path.ends_with("/status") { app.admin() } else { ada.client };
            (client, path.replace("{id}", text(&created["id"])))
        }
        path => (ada.client, path.to_owned()),
    }
}

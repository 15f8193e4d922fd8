//! What a caller learns about its own credentials.

use http_kit::auth::Role;
use serde_json::{Value, json};
use testkit::Client;
use uuid::Uuid;

use super::routes::portal;
use crate::hub::fixture::Fixture;
use crate::support::{caller, text};

const PATH: &str = "/hub/v1/caller";

async fn shown(client: &Client) -> Value {
    let answer = client.get(PATH).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

#[tokio::test]
async fn every_kind_of_caller_learns_what_its_credentials_allow() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let expected = json!({"kind": "key", "name": "test", "tenant": "acme", "roles": ["ingest", "manage"],
        "is_operator": false, "read_only": false});
    assert_eq!(shown(&manager).await, expected);
    let operator = shown(&app.admin()).await;
    assert_eq!(operator["roles"], json!(["ingest", "manage", "admin"]), "{operator}");
    assert_eq!((&operator["tenant"], &operator["is_operator"]), (&json!("main"), &json!(true)), "{operator}");
    let acting = shown(&app.admin().with_header("pillarbox-tenant", "acme")).await;
    assert_eq!((&acting["tenant"], &acting["is_operator"]), (&json!("acme"), &json!(false)), "{acting}");
    let admin_of_acme = shown(&caller(&app, "admin", "acme").await).await;
    assert_eq!(admin_of_acme["is_operator"], false, "an admin of a customer: {admin_of_acme}");

    for (access, read_only) in [("read", true), ("manage", false)] {
        let new = json!({"access": access, "name": "support", "expires_in_seconds": 60});
        let made = manager.post("/hub/v1/portal-tokens", new).await.json();
        let token = shown(&app.anonymous().bearer(text(&made["token"]))).await;
        let expected = json!({"kind": "portal_token", "name": "support", "tenant": "acme", "roles": [],
            "is_operator": false, "read_only": read_only, "expires_at": made["expires_at"]});
        assert_eq!(token, expected);
    }
    let unnamed = shown(&portal(&app, &manager, "read").await).await;
    assert_eq!(unnamed["name"], "");
    let expires_at = "2100-01-01T00:00:00Z";
    let new = json!({"name": "for a year", "role": "manage", "tenant": "acme", "expires_at": expires_at});
    let made = app.admin().post("/admin/v1/keys", new).await.json();
    assert_eq!(shown(&app.anonymous().bearer(text(&made["key"]))).await["expires_at"], expires_at);
    let id = Uuid::now_v7();
    let user = shown(&app.user(id, Some(Role::Admin))).await;
    assert_eq!((&user["kind"], &user["name"], &user["is_operator"]), (&json!("user"), &json!(id), &json!(true)));
    app.stop().await;
}

#[tokio::test]
async fn callers_without_permissions_in_the_hub_are_refused() {
    let Fixture { database: _database, app, .. } = Fixture::start().await;
    app.anonymous().get(PATH).await.assert_problem(401, "unauthorized");
    app.user(Uuid::now_v7(), None).get(PATH).await.assert_problem(403, "forbidden");
    caller(&app, "ingest", "acme").await.get(PATH).await.assert_problem(403, "forbidden");
    let acting = caller(&app, "admin", "acme").await.with_header("pillarbox-tenant", "rival");
    acting.get(PATH).await.assert_problem(403, "forbidden");
    app.stop().await;
}

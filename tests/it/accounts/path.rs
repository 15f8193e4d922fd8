//! A person's path by HTTP alone, with the shipped defaults and the embedded PostgreSQL.

use hyper::Method;
use serde_json::json;
use testkit::Client;

use super::{PASSWORD, emailed_token, log_in, register, session};
use crate::events::fixture::{create_event, meetup, post_action};
use crate::server::process::{ADMIN_KEY, DataFolder, up};
use crate::support::text;

const ADDRESS: &str = "ada@example.org";
const NEW_PASSWORD: &str = "another staple of the horse";

#[tokio::test]
async fn a_person_registers_publishes_an_event_and_deletes_the_account_by_http_alone() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let anonymous = Client::new(&process.base_url().await);
    let admin = anonymous.bearer(ADMIN_KEY);

    let token = register(&anonymous, &admin, ADDRESS).await;
    log_in(&anonymous, ADDRESS, PASSWORD).await.assert_problem(403, "email-not-verified");
    let verified = anonymous.post("/identity/v1/verify", json!({"token": token})).await;
    assert_eq!((verified.status, verified.json()), (200, json!({"password_reset_required": false})));
    let (ada, refresh_token) = session(&anonymous, "Ada@Example.org", PASSWORD).await;
    let me = ada.get("/identity/v1/me").await.json();
    assert_eq!((text(&me["email"]), text(&me["name"])), (ADDRESS, "Ada Lovelace"));

    let event = create_event(&ada, meetup()).await;
    assert_eq!(event["owner_id"], me["id"], "the token of identity serves events");
    assert_eq!(post_action(&ada, &event, "publish").await.status, 200);

    let change = json!({"current_password": PASSWORD, "new_password": NEW_PASSWORD});
    let changed = ada.post("/identity/v1/password/change", change).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    let tokens = changed.json();
    let refresh = async |token: &str| anonymous.post("/identity/v1/refresh", json!({"refresh_token": token})).await;
    refresh(&refresh_token).await.assert_problem(401, "invalid-refresh-token");
    assert_eq!(ada.get("/identity/v1/me").await.status, 401, "a change ends the session, and begins another one");
    let (ada, refresh_token) = (anonymous.bearer(text(&tokens["access_token"])), text(&tokens["refresh_token"]));
    assert_eq!(ada.get("/identity/v1/me").await.status, 200);
    log_in(&anonymous, ADDRESS, PASSWORD).await.assert_problem(401, "wrong-credentials");
    let (other, other_refresh) = session(&anonymous, ADDRESS, NEW_PASSWORD).await;
    assert_eq!(other.get("/identity/v1/me").await.status, 200);

    let forgot = anonymous.post("/identity/v1/password/forgot", json!({"email": ADDRESS})).await;
    assert_eq!(forgot.status, 202, "{forgot:?}");
    let token = emailed_token(&admin, ADDRESS, "password_reset").await;
    let reset = anonymous.post("/identity/v1/password/reset", json!({"token": token, "new_password": PASSWORD})).await;
    assert_eq!(reset.status, 204, "{reset:?}");
    for old in [refresh_token, &other_refresh] {
        refresh(old).await.assert_problem(401, "invalid-refresh-token");
    }
    assert_eq!(other.get("/identity/v1/me").await.status, 401, "a reset ends all sessions at once");
    assert_eq!(other.get("/event/v1/events").await.status, 401, "also for the other services of this process");

    let (ada, _) = session(&anonymous, ADDRESS, PASSWORD).await;
    let deleted = ada.send(Method::DELETE, "/identity/v1/me", Some(json!({"password": PASSWORD}))).await;
    assert_eq!(deleted.status, 204, "{deleted:?}");
    assert_eq!(ada.get("/identity/v1/me").await.status, 401);
    log_in(&anonymous, ADDRESS, PASSWORD).await.assert_problem(401, "wrong-credentials");
    assert!(process.terminate().await.success());
}

//! Roles of users, granted by operators and by a command.

use hyper::Method;
use serde_json::json;

use super::fixture::{Fixture, PASSWORD, sign_in};
use crate::server::process::run;
use crate::support::{collect_pages, text};

#[tokio::test]
async fn an_operator_grants_and_withdraws_the_role_of_an_admin() {
    let fixture = Fixture::start().await;
    let (ada, bob) = (fixture.person("ada").await, fixture.person("bob").await);
    let path = format!("/identity/v1/users/{}/role", ada.id);
    let set = async |role: &str| fixture.app.admin().send(Method::PUT, &path, Some(json!({"role": role}))).await;
    bob.client.send(Method::PUT, &path, Some(json!({"role": "admin"}))).await.assert_problem(403, "forbidden");
    bob.get("users").await.assert_problem(403, "forbidden");
    assert_eq!(set("admin").await.status, 200);
    // The token was signed before; the next one has the role.
    ada.get("users").await.assert_problem(403, "forbidden");
    let refreshed = fixture.refresh(&ada.refresh_token).await.json();
    let admin = fixture.app.anonymous().bearer(text(&refreshed["access_token"]));
    assert_eq!(admin.get("/admin/v1/keys").await.status, 200);
    let users = collect_pages(&admin, "/identity/v1/users?limit=1").await;
    assert_eq!(users.len(), 2);
    let found = admin.get("/identity/v1/users?email=ADA@ex").await.json();
    assert_eq!((&found["items"][0]["email"], &found["items"][0]["role"]), (&json!(ada.email), &json!("admin")));
    assert_eq!(found["items"].as_array().unwrap().len(), 1);
    assert!(!found.to_string().contains("argon2"), "{found}");
    assert_eq!(admin.get("/identity/v1/users?email=%25").await.json()["items"], json!([]));

    assert_eq!(set("user").await.status, 200);
    for path in ["/identity/v1/me", "/admin/v1/keys"] {
        admin.get(path).await.assert_problem(401, "unauthorized");
    }
    fixture.refresh(text(&refreshed["refresh_token"])).await.assert_problem(401, "invalid-refresh-token");
    let again = sign_in(&fixture.app, ada.id, &ada.email, PASSWORD).await;
    again.client.get("/admin/v1/keys").await.assert_problem(403, "forbidden");
    let audit: Vec<(String, String)> = sqlx::query_as("select action, actor from pillarbox_identity.audit order by id")
        .fetch_all(fixture.db())
        .await
        .unwrap();
    assert_eq!(audit.iter().map(|(action, _)| action.as_str()).collect::<Vec<_>>(), ["role_granted", "role_withdrawn"]);
    assert!(audit.iter().all(|(_, actor)| actor.starts_with("key:")), "{audit:?}");
    let unknown = format!("/identity/v1/users/{}/role", uuid::Uuid::now_v7());
    let unknown = fixture.app.admin().send(Method::PUT, &unknown, Some(json!({"role": "admin"}))).await;
    unknown.assert_problem(404, "user-not-found");
    fixture.app.stop().await;
}

/// The role is withdrawn in another process, so this one knows nothing about the end of the session.
#[tokio::test]
async fn the_token_of_a_former_admin_does_not_restore_the_role() {
    let fixture = Fixture::start().await;
    let (person, other) = (fixture.person("ada").await, fixture.person("bob").await);
    identity::set_role(fixture.db(), &person.email, identity::UserRole::Admin).await.unwrap();
    let former = sign_in(&fixture.app, person.id, &person.email, PASSWORD).await;
    let subscription = other.post("subscriptions", json!({"plan": "pro"})).await.json();
    let status = format!("subscriptions/{}/status", text(&subscription["id"]));
    let set_role =
        async || former.send(Method::PUT, &format!("users/{}/role", person.id), Some(json!({"role": "admin"}))).await;
    let set_status = async |to: &str| former.post(&status, json!({"status": to})).await;
    assert_eq!(set_role().await.status, 200);
    assert_eq!(set_status("active").await.status, 200);
    // The session lives, the role has gone.
    fixture.execute("update pillarbox_identity.account set role = 'user'").await;
    for refused in [set_role().await, set_status("paused").await, former.get("users").await] {
        refused.assert_problem(403, "forbidden");
    }
    former
        .get(&format!("subscriptions/{}", text(&subscription["id"])))
        .await
        .assert_problem(404, "subscription-not-found");
    // The session has ended with the role.
    fixture.execute("update pillarbox_identity.account set role = 'admin'").await;
    identity::set_role(fixture.db(), &person.email, identity::UserRole::User).await.unwrap();
    for refused in [set_role().await, set_status("paused").await, former.get("users").await] {
        refused.assert_problem(401, "unauthorized");
    }
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_command_grants_and_withdraws_the_role_of_an_admin() {
    let fixture = Fixture::start().await;
    let person = fixture.person("ada").await;
    let url = fixture.database.url();
    let command =
        |email: &str, role: &str| run(&["user", "set-role", email, role], &[("PILLARBOX_DATABASE_URL", &url)]);
    let (code, output, error) = command(" ADA@example.org", "admin");
    assert_eq!((code, output.contains(&person.id.to_string())), (Some(0), true), "{output}{error}");
    let admin = sign_in(&fixture.app, person.id, &person.email, PASSWORD).await;
    assert_eq!(admin.client.get("/admin/v1/keys").await.status, 200);
    assert_eq!(command("ada@example.org", "user").0, Some(0));
    admin.get("me").await.assert_problem(401, "unauthorized");
    for (email, role, text) in [
        ("unknown@example.org", "admin", "no account has this address"),
        ("ada", "admin", "it has no @"),
        ("ada@example.org", "root", "must be user or admin"),
    ] {
        let (code, _, error) = command(email, role);
        assert!(code != Some(0) && error.contains(text), "{email} {role}: {error}");
    }
    fixture.app.stop().await;
}

//! A caller without permission is refused before anything of the body is read or parsed, on every route.

use serde_json::json;
use server::migrations;
use testkit::{Client, TestApp, TestDatabase};
use uuid::Uuid;

use crate::events::fixture::{meetup, publish_event};
use crate::joins::fixture::{new_event, post_event_update, wait_until_known};
use crate::server::api::{filled, operations};
use crate::server::invalid_requests::exchange;
use crate::support::{caller, text};

/// Callers who lack the permission for some routes.
struct Strangers {
    user: Client,
    producer: Client,
    manager: Client,
    admin: Client,
}

impl Strangers {
    /// A caller whom the route must refuse with 403.
    fn of(&self, path: &str) -> &Client {
        match path {
            "/events" | "/hub/v1/events" | "/hub/v1/events/batch" => &self.user,
            path if path.starts_with("/notify/v1/aggregate-types") => &self.manager,
            path if path.starts_with("/notify/v1/recipients") => &self.producer,
            "/notify/v1/events" => &self.user,
            path if path.starts_with("/hub/v1/") => &self.producer,
            path if path.starts_with("/admin/v1/") => &self.manager,
            path if path.starts_with("/identity/v1/users/") || path.ends_with("/status") => &self.user,
            "/notify/v1/event-types" => &self.producer,
            path if path.starts_with("/notify/v1/event-types/") => &self.user,
            // An API key has no inbox and no preferences.
            path if path.starts_with("/notify/v1/") => &self.admin,
            // A user of another issuer has no account; an operator may list the subscriptions of a user.
            "/identity/v1/subscriptions" => &self.user,
            // An API key has no account.
            path if path.starts_with("/identity/v1/") => &self.admin,
            "/event/v1/events/{id}/unpublish" | "/event/v1/events/{id}/cancel" | "/event/v1/events/{id}/handover" => {
                &self.user
            }
            path if path.starts_with("/event/v1/") => &self.admin,
            path if path.starts_with("/join/v1/events/{id}/") => &self.user,
            path => panic!("{path} is new: add a caller who may not use it"),
        }
    }
}

/// A request whose body the server must not look at: the ways in which it would be refused with 400, 413, 415 or 422.
fn requests(method: &str, path: &str, credential: Option<&str>) -> Vec<(&'static str, Vec<u8>)> {
    let authorization = credential.map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
    let request = |content_type: &str, length: usize, body: &[u8]| {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\n{authorization}content-type: {content_type}\r\n\
             idempotency-key: \"\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
        );
        [head.as_bytes(), body].concat()
    };
    let json = "application/json";
    vec![
        ("malformed JSON", request(json, 1, b"{")),
        ("an unknown field", request(json, 12, br#"{"colour":1}"#)),
        ("a list", request(json, 2, b"[]")),
        ("bytes that are not UTF-8", request(json, 2, b"\xff\xfe")),
        ("no body", request(json, 0, b"")),
        ("another content type", request("text/plain", 2, b"{}")),
        // The rest never arrives: a server that waits for it responds too late.
        ("a body of 1 GB announced", request(json, 1_000_000_000, b"{")),
        ("a body that does not arrive", request(json, 100_000, b"{")),
    ]
}

#[tokio::test]
async fn a_caller_without_permission_is_refused_whatever_the_body() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let strangers = Strangers {
        user: app.user(Uuid::now_v7(), None),
        producer: caller(&app, "ingest", "acme").await,
        manager: caller(&app, "manage", "main").await,
        admin: app.admin(),
    };
    let event = new_event(Uuid::now_v7(), 5);
    post_event_update(database.pool(), &event).await;
    wait_until_known(database.pool(), &event).await;
    let published = publish_event(&app.user(Uuid::now_v7(), None), meetup()).await;
    let base = app.anonymous().base().trim_start_matches("http://").to_owned();
    let mut routes = 0;
    for (method, path, operation) in operations(&app.anonymous()).await {
        // Anyone may call a route that needs no caller.
        let is_public = operation["security"].as_array().is_some_and(|security| security.contains(&json!({})));
        if is_public || !operation["requestBody"].is_object() {
            continue;
        }
        routes += 1;
        let refused = match path.as_str() {
            // Any caller with a credential may create a project; that of another owner does not exist for a caller.
            "/progress/v1/projects" => None,
            path if path.starts_with("/progress/v1/") => Some((Some(strangers.user.credential()), "404")),
            path => Some((Some(strangers.of(path).credential()), "403")),
        };
        let filled = match path.as_str() {
            path if path.starts_with("/join/v1/") => path.replace("{id}", &event.event_id.to_string()),
            path if path.starts_with("/event/v1/events/{id}/") => path.replace("{id}", text(&published["id"])),
            path => filled(path),
        };
        for (credential, status) in [(None, "401"), (Some("pbx_unknown"), "401")].into_iter().chain(refused) {
            let requests = requests(method.as_str(), &filled, credential);
            let answers = requests.iter().map(async |(kind, request)| (*kind, exchange(&base, request).await));
            for (kind, answer) in futures_util::future::join_all(answers).await {
                assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{method} {path}, {kind}: {answer}");
            }
        }
    }
    assert!(routes >= 15, "only {routes} routes have a body");
    app.stop().await;
}

/// The same for the other parts of a request.
#[tokio::test]
async fn a_caller_without_permission_is_refused_whatever_the_path_and_query() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let user = app.user(Uuid::now_v7(), None);
    for path in [
        "/admin/v1/keys?limit=x",
        "/admin/v1/keys?colour=red",
        "/admin/v1/log?limit=0",
        "/admin/v1/mail?status=lost",
        "/admin/v1/notifications?status=lost",
        "/admin/v1/announcements?given_up=perhaps",
        "/hub/v1/events?limit=x",
        "/event/v1/audit?limit=x",
        "/join/v1/audit?actor=bob",
        "/identity/v1/users?limit=x",
        "/identity/v1/sessions?limit=x",
    ] {
        user.get(path).await.assert_problem(403, "forbidden");
    }
    for path in ["/admin/v1/keys/not-a-uuid", "/identity/v1/sessions/not-a-uuid"] {
        user.delete(path).await.assert_problem(403, "forbidden");
    }
    app.stop().await;
}

//! Sessions: their list, and how they end.

use hyper::Method;
use serde_json::json;
use sqlx::AssertSqlSafe;
use testkit::eventually;
use uuid::Uuid;

use super::fixture::{Fixture, PASSWORD, sign_in};
use crate::support::{DEADLINE, collect_pages, text};

#[tokio::test]
async fn a_session_that_has_ended_is_refused_at_once_by_identity_in_every_process() {
    let fixture = Fixture::start().await;
    let replica = fixture.replica().await;
    let person = fixture.person("ada").await;
    let elsewhere = replica.anonymous().bearer(person.client.credential());
    assert_eq!(elsewhere.get("/identity/v1/me").await.status, 200);
    assert_eq!(elsewhere.get("/event/v1/me/events").await.status, 200);
    assert_eq!(person.send(Method::POST, "logout", None).await.status, 204);
    for client in [&person.client, &elsewhere] {
        client.get("/identity/v1/me").await.assert_problem(401, "unauthorized");
    }
    // The process in which the session ended refuses the token everywhere.
    person.client.get("/event/v1/me/events").await.assert_problem(401, "unauthorized");
    fixture.refresh(&person.refresh_token).await.assert_problem(401, "invalid-refresh-token");
    replica.stop().await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_user_lists_and_ends_sessions() {
    let fixture = Fixture::start().await;
    let (first, stranger) = (fixture.person("ada").await, fixture.person("eve").await);
    let phone = sign_in(&fixture.app, first.id, &first.email, PASSWORD).await;
    let laptop = sign_in(&fixture.app, first.id, &first.email, PASSWORD).await;
    let sessions = collect_pages(&laptop.client, "/identity/v1/sessions?limit=2").await;
    assert_eq!(sessions.len(), 3);
    assert_eq!(sessions.iter().filter(|session| session["is_current"] == true).count(), 1);
    let of_phone = phone.session().await;
    let path = format!("sessions/{of_phone}");
    stranger.send(Method::DELETE, &path, None).await.assert_problem(404, "session-not-found");
    assert_eq!(laptop.send(Method::DELETE, &path, None).await.status, 204);
    laptop.send(Method::DELETE, &path, None).await.assert_problem(404, "session-not-found");
    phone.get("me").await.assert_problem(401, "unauthorized");
    assert_eq!(laptop.send(Method::DELETE, "sessions", None).await.status, 204);
    for client in [&first, &laptop] {
        client.get("me").await.assert_problem(401, "unauthorized");
    }
    assert_eq!(stranger.get("me").await.status, 200);
    fixture.app.stop().await;
}

#[tokio::test]
async fn the_oldest_session_ends_when_a_user_has_too_many() {
    let fixture = Fixture::start().await;
    let first = fixture.person("ada").await;
    fixture
        .execute(
            "insert into pillarbox_identity.session (id, user_id, created_at, last_used_at, expires_at)
             select gen_random_uuid(), id, now() + interval '1 s', now(), now() + interval '1 day'
             from pillarbox_identity.account, generate_series(1, 99)",
        )
        .await;
    assert_eq!(first.get("me").await.status, 200);
    sign_in(&fixture.app, first.id, &first.email, PASSWORD).await;
    assert_eq!(fixture.count("select count(*) from pillarbox_identity.session").await, 100);
    first.get("me").await.assert_problem(401, "unauthorized");
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_token_without_an_account_is_refused_with_a_reason() {
    let fixture = Fixture::start().await;
    for (client, is_key) in [(fixture.app.user(Uuid::now_v7(), None), false), (fixture.app.admin(), true)] {
        for path in ["me", "sessions", "subscriptions"] {
            let refused = client.get(&format!("/identity/v1/{path}")).await;
            refused.assert_problem(403, "forbidden");
            let next_step = match (path, is_key) {
                ("subscriptions", true) => "?user_id=",
                _ => "/identity/v1/login",
            };
            assert!(text(&refused.json()["detail"]).contains(next_step), "{refused:?}");
        }
        client.send(Method::DELETE, "/identity/v1/me", Some(json!({}))).await.assert_problem(403, "forbidden");
    }
    fixture.app.stop().await;
}

#[tokio::test]
async fn what_has_expired_is_deleted() {
    let fixture = Fixture::start().await;
    let (person, other) = (fixture.person("ada").await, fixture.person("eve").await);
    fixture.register("never@example.org", PASSWORD).await;
    fixture.post("password/forgot", json!({"email": other.email})).await;
    fixture.wait_until_processed().await;
    // Ada's session has lasted for its whole time, the refresh token of Eve's was not used for long.
    let expire = "with ada as (
                      update pillarbox_identity.session set expires_at = now() - interval '1 h' where user_id = $1)
                  update pillarbox_identity.refresh_token set expires_at = now() - interval '1 h'
                  from pillarbox_identity.session where session.id = session_id and session.user_id = $2";
    sqlx::query(expire).bind(person.id).bind(other.id).execute(fixture.db()).await.unwrap();
    for statement in [
        "update pillarbox_identity.account set created_at = now() - interval '8 days' where verified_at is null",
        "update pillarbox_identity.one_time_token set expires_at = now() - interval '1 h' where kind = 'password_reset'",
        "update pillarbox_identity.known_network set last_used_at = now() - interval '91 days'",
        "insert into pillarbox_identity.throttle (kind, subject, window_no, attempts, expires_at)
         values ('login.account', '\\x00', 1, 1, now())",
    ] {
        fixture.execute(statement).await;
    }
    // The task runs at the start and then once a minute.
    let replica = fixture.replica().await;
    eventually("expired rows are deleted", DEADLINE, async || {
        let mut left = Vec::new();
        for table in ["session", "refresh_token", "one_time_token", "throttle", "known_network", "account"] {
            let query = format!("select count(*) from pillarbox_identity.{table}");
            let count: i64 = sqlx::query_scalar(AssertSqlSafe(query)).fetch_one(fixture.db()).await.unwrap();
            left.push((table, count));
        }
        // The accounts that were verified.
        left.retain(|row| row.1 > 0 && *row != ("account", 2));
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    let deleted = fixture.messages("account.deleted").await;
    assert_eq!(deleted.len(), 1, "other services delete what they know about the address");
    assert!(![person.id, other.id].iter().any(|id| deleted[0]["user_id"] == id.to_string()), "{deleted:?}");
    replica.stop().await;
    fixture.app.stop().await;
}

//! Kicks, bans and the permissions of organizers.

use chrono::{TimeDelta, Utc};
use http_kit::auth::Role;
use serde_json::{Value, json};
use testkit::eventually;
use uuid::Uuid;

use crate::joins::fixture::{Fixture, moderate, parse_time};
use crate::support::{DEADLINE, caller};

#[tokio::test]
async fn organizer_routes_are_for_organizers_only() {
    let fixture = Fixture::start(1).await;
    let (app, event) = (&fixture.apps[0], fixture.create_event(2).await);
    let guest = fixture.join_users(&event, 1).await[0];
    let (anyone, other) = (app.anonymous(), app.user(Uuid::now_v7(), None));
    let (ingest, elsewhere) = (caller(app, "ingest", "main").await, caller(app, "admin", "acme").await);
    let manage = caller(app, "manage", "main").await;
    let guest_client = app.user(guest, None);
    let body = json!({"user_id": guest});
    for action in ["kick", "ban", "unban"] {
        moderate(&anyone, event.event_id, action, body.clone()).await.assert_problem(401, "unauthorized");
        for stranger in [&other, &guest_client, &ingest, &manage, &elsewhere] {
            moderate(stranger, event.event_id, action, body.clone()).await.assert_problem(403, "forbidden");
            // Permission is checked before the body: a stranger learns nothing from validation errors.
            moderate(stranger, event.event_id, action, json!({})).await.assert_problem(403, "forbidden");
        }
    }
    for list in ["participants", "waitlist", "stats", "bans", "history"] {
        let path = format!("/join/v1/events/{}/{list}", event.event_id);
        anyone.get(&path).await.assert_problem(401, "unauthorized");
        for stranger in [&other, &guest_client, &ingest, &manage, &elsewhere] {
            stranger.get(&path).await.assert_problem(403, "forbidden");
        }
        let admin_user = app.user(Uuid::now_v7(), Some(Role::Admin));
        for organizer in [&fixture.organizer(), &app.admin(), &admin_user] {
            assert_eq!(organizer.get(&path).await.status, 200);
        }
        let nowhere = format!("/join/v1/events/{}/{list}", Uuid::now_v7());
        fixture.organizer().get(&nowhere).await.assert_problem(404, "event-not-found");
    }
    assert_eq!(fixture.status(&event, guest).await, "active", "no request changed anything");
    assert_eq!(moderate(&app.admin(), event.event_id, "kick", body).await.status, 200);
    fixture.check_invariants().await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_kicked_user_may_rejoin_and_a_banned_one_only_after_the_ban() {
    let fixture = Fixture::start(2).await;
    let event = fixture.create_event(2).await;
    let users = fixture.join_users(&event, 4).await;
    let organizer = fixture.organizer();
    let by = format!("user:{}", fixture.owner);
    let kicked = moderate(&organizer, event.event_id, "kick", json!({"user_id": users[0], "reason": "loud"})).await;
    assert_eq!((kicked.status, &kicked.json()["status"]), (200, &json!("rejected")), "{kicked:?}");
    assert_eq!(fixture.status(&event, users[2]).await, "active");
    assert_eq!(fixture.join(&event, users[0]).await.json()["seq"], 5);

    let soon = Utc::now() + TimeDelta::seconds(2);
    let banned = moderate(
        &organizer,
        event.event_id,
        "ban",
        json!({"user_id": users[1], "reason": "louder", "expires_at": soon}),
    )
    .await;
    assert_eq!((banned.status, &banned.json()["banned_by"]), (200, &json!(by)), "{banned:?}");
    assert_eq!(fixture.status(&event, users[1]).await, "rejected");
    assert_eq!(fixture.status(&event, users[3]).await, "active");
    let refused = fixture.join(&event, users[1]).await;
    refused.assert_problem(403, "banned");
    assert!(refused.json()["detail"].as_str().unwrap().contains("until"), "{refused:?}");
    // A user who never joined can be banned as well.
    let stranger = Uuid::now_v7();
    assert_eq!(moderate(&organizer, event.event_id, "ban", json!({"user_id": stranger})).await.status, 200);
    fixture.join(&event, stranger).await.assert_problem(403, "banned");
    assert_eq!(moderate(&organizer, event.event_id, "unban", json!({"user_id": stranger})).await.status, 204);
    moderate(&organizer, event.event_id, "unban", json!({"user_id": stranger})).await.assert_problem(404, "not-banned");
    assert_eq!(fixture.join(&event, stranger).await.status, 201);

    eventually("the ban ends", DEADLINE, async || fixture.join(&event, users[1]).await.status == 201).await;
    assert!(Utc::now() >= soon);
    let messages: Vec<(String, Value)> = sqlx::query_as(
        "select topic, payload::jsonb from pillarbox.log where source = 'joins' and topic like 'mod.%' order by id",
    )
    .fetch_all(fixture.db())
    .await
    .unwrap();
    let topics: Vec<&str> = messages.iter().map(|(topic, _)| topic.as_str()).collect();
    assert_eq!(topics, ["mod.kicked", "mod.banned", "mod.banned", "mod.unbanned"]);
    assert_eq!(
        (&messages[0].1["reason"], &messages[0].1["by"], &messages[0].1["status"]),
        (&json!("loud"), &json!(by), &json!("rejected"))
    );
    assert!((parse_time(&messages[1].1["expires_at"]) - soon).abs() < TimeDelta::milliseconds(1));
    assert!(messages[2].1.get("join_id").is_none(), "{:?}", messages[2]);

    let long = "x".repeat(501);
    for (body, pointer) in [
        (json!({"user_id": stranger, "reason": long}), "/reason"),
        (json!({"user_id": stranger, "reason": "beep \u{7} beep"}), "/reason"),
        (json!({"user_id": stranger, "expires_at": "2020-01-01T00:00:00Z"}), "/expires_at"),
        (json!({"user_id": "me"}), "/user_id"),
    ] {
        let refused = moderate(&organizer, event.event_id, "ban", body).await;
        refused.assert_problem(422, "validation-failed");
        assert_eq!(refused.json()["errors"][0]["pointer"], pointer);
    }
    fixture.check_invariants().await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_repeated_ban_request_is_replayed_after_the_ban_expired() {
    let fixture = Fixture::start(1).await;
    let event = fixture.create_event(1).await;
    let organizer = fixture.organizer().with_header("idempotency-key", "out");
    let path = format!("/join/v1/events/{}/ban", event.event_id);
    let body = json!({"user_id": Uuid::now_v7(), "expires_at": Utc::now() + TimeDelta::seconds(1)});
    let banned = organizer.post(&path, body.clone()).await;
    assert_eq!(banned.status, 200, "{banned:?}");
    eventually("the ban ends", DEADLINE, async || parse_time(&body["expires_at"]) < Utc::now()).await;
    let again = organizer.post(&path, body.clone()).await;
    assert_eq!((again.status, again.json()), (200, banned.json()), "{again:?}");
    let late = fixture.organizer().with_header("idempotency-key", "out again").post(&path, body).await;
    late.assert_problem(422, "validation-failed");
    assert_eq!(late.json()["errors"][0]["pointer"], "/expires_at");
    fixture.stop().await;
}

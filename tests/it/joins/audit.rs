//! What moderation leaves behind: reasons, bans, the history of an event, and the audit trail.

use chrono::{TimeDelta, Utc};
use http_kit::auth::Role;
use serde_json::{Value, json};
use testkit::eventually;
use uuid::Uuid;

use crate::joins::fixture::{Fixture, insert_registrations, moderate};
use crate::support::{DEADLINE, caller, collect_pages, uuid_of};

#[tokio::test]
async fn a_removed_user_sees_the_reason() {
    let fixture = Fixture::start(1).await;
    let event = fixture.create_event(5).await;
    let users = fixture.join_users(&event, 3).await;
    let organizer = fixture.organizer();
    let my = async |user: Uuid| fixture.user(user).get(&format!("/join/v1/events/{}/my", event.event_id)).await.json();
    assert!(my(users[0]).await.get("reason").is_none());
    moderate(&organizer, event.event_id, "kick", json!({"user_id": users[0], "reason": "Too loud."})).await;
    moderate(&organizer, event.event_id, "kick", json!({"user_id": users[2]})).await;
    let kicked = my(users[0]).await;
    assert_eq!((&kicked["status"], &kicked["reason"]), (&json!("rejected"), &json!("Too loud.")));
    assert!(my(users[2]).await.get("reason").is_none(), "no reason was given");
    let mine = fixture.user(users[0]).get("/join/v1/me/joins").await.json();
    assert_eq!(mine["items"][0]["reason"], "Too loud.", "{mine}");
    // The reason belongs to the removal: a user who joins again has none.
    assert_eq!(fixture.join(&event, users[0]).await.status, 201);
    assert!(my(users[0]).await.get("reason").is_none());

    let until = Utc::now() + TimeDelta::hours(1);
    let ban = json!({"user_id": users[1], "reason": "Threats.", "expires_at": until});
    assert_eq!(moderate(&organizer, event.event_id, "ban", ban).await.status, 200);
    let refused = fixture.join(&event, users[1]).await;
    refused.assert_problem(403, "banned");
    let detail = refused.json()["detail"].as_str().unwrap().to_owned();
    assert!(detail.contains("until") && detail.contains("Threats."), "{detail}");
    assert_eq!(my(users[1]).await["reason"], "Threats.");
    let stranger = Uuid::now_v7();
    moderate(&organizer, event.event_id, "ban", json!({"user_id": stranger})).await;
    let refused = fixture.join(&event, stranger).await.json();
    assert_eq!(refused["detail"], "you are banned from this event");
    fixture.stop().await;
}

#[tokio::test]
async fn organizers_and_admins_list_and_lift_bans() {
    let fixture = Fixture::start(1).await;
    let event = fixture.create_event(5).await;
    let app = &fixture.apps[0];
    let organizer = fixture.organizer();
    let path = format!("/join/v1/events/{}/bans", event.event_id);
    assert_eq!(organizer.get(&path).await.json(), json!({"items": []}));
    let users: Vec<Uuid> = (0..5).map(|_| Uuid::now_v7()).collect();
    for user in &users {
        let ban = json!({"user_id": user, "reason": "Spam."});
        assert_eq!(moderate(&organizer, event.event_id, "ban", ban).await.status, 200);
    }
    let soon = json!({"user_id": Uuid::now_v7(), "expires_at": Utc::now() + TimeDelta::milliseconds(500)});
    assert_eq!(moderate(&organizer, event.event_id, "ban", soon).await.status, 200);
    let listed = async |limit: usize| {
        let bans = collect_pages(&organizer, &format!("{path}?limit={limit}")).await;
        bans.iter().map(|ban| uuid_of(&ban["user_id"])).collect::<Vec<Uuid>>()
    };
    let newest_first: Vec<Uuid> = users.iter().rev().copied().collect();
    eventually("a ban that has ended is not listed", DEADLINE, async || listed(2).await == newest_first).await;
    let admins = [app.admin(), app.user(Uuid::now_v7(), Some(Role::Admin))];
    for (admin, user) in admins.iter().zip(&users) {
        assert_eq!(admin.get(&path).await.json()["items"][0]["reason"], "Spam.");
        assert_eq!(moderate(admin, event.event_id, "unban", json!({"user_id": user})).await.status, 204);
        assert_eq!(fixture.join(&event, *user).await.status, 201);
    }
    assert_eq!(listed(100).await, newest_first[..3]);
    fixture.stop().await;
}

#[tokio::test]
async fn the_history_and_the_audit_trail_show_who_did_what() {
    let fixture = Fixture::start(1).await;
    let (event, other) = (fixture.create_event(1).await, fixture.create_event(1).await);
    let (app, organizer) = (&fixture.apps[0], fixture.organizer());
    let users = fixture.join_users(&event, 2).await;
    let by_owner = format!("user:{}", fixture.owner);
    moderate(&organizer, event.event_id, "kick", json!({"user_id": users[0], "reason": "Too loud."})).await;
    moderate(&app.admin(), other.event_id, "ban", json!({"user_id": users[0], "reason": "Threats."})).await;
    moderate(&app.admin(), other.event_id, "unban", json!({"user_id": users[0]})).await;
    let history = collect_pages(&organizer, &format!("/join/v1/events/{}/history?limit=2", event.event_id)).await;
    let text = |entry: &Value, field: &str| entry[field].as_str().unwrap_or_default().to_owned();
    let actions: Vec<(String, Uuid, String, String)> = history
        .iter()
        .map(|entry| (text(entry, "action"), uuid_of(&entry["user_id"]), text(entry, "actor"), text(entry, "reason")))
        .collect();
    let of_user = |action: &str, user: Uuid, by: String, reason: &str| (action.to_owned(), user, by, reason.to_owned());
    assert_eq!(
        actions,
        [
            of_user("joined", users[0], format!("user:{}", users[0]), ""),
            of_user("joined", users[1], format!("user:{}", users[1]), ""),
            of_user("kicked", users[0], by_owner.clone(), "Too loud."),
            of_user("promoted", users[1], by_owner.clone(), ""),
        ]
    );
    let admin = app.user(Uuid::now_v7(), Some(Role::Admin));
    let audit = collect_pages(&admin, "/join/v1/audit?limit=1").await;
    let moderation: Vec<String> = audit.iter().map(|entry| text(entry, "action")).collect();
    assert_eq!(moderation, ["unbanned", "banned", "kicked"], "newest first, and nothing but moderation");
    assert!(text(&audit[0], "actor").starts_with("key:"), "{audit:?}");
    for (filter, expected) in [
        (format!("event_id={}", event.event_id), &audit[2..]),
        (format!("actor={by_owner}"), &audit[2..]),
        (format!("actor={}", text(&audit[0], "actor")), &audit[..2]),
        (format!("actor={by_owner}&event_id={}", other.event_id), &audit[..0]),
    ] {
        assert_eq!(collect_pages(&admin, &format!("/join/v1/audit?{filter}")).await, expected, "{filter}");
    }
    let (manager, elsewhere) = (caller(app, "manage", "main").await, caller(app, "admin", "acme").await);
    for stranger in [&organizer, &fixture.user(users[0]), &manager, &elsewhere] {
        stranger.get("/join/v1/audit").await.assert_problem(403, "forbidden");
    }
    fixture.stop().await;
}

#[tokio::test]
async fn the_waitlist_of_the_organizer_shows_positions() {
    let fixture = Fixture::start(1).await;
    let event = fixture.create_event(1).await;
    let users = fixture.join_users(&event, 6).await;
    let (organizer, path) = (fixture.organizer(), format!("/join/v1/events/{}/waitlist", event.event_id));
    fixture.cancel(&event, users[2]).await;
    let waiting = collect_pages(&organizer, &format!("{path}?limit=2")).await;
    let positions: Vec<(Uuid, i64)> =
        waiting.iter().map(|entry| (uuid_of(&entry["user_id"]), entry["position"].as_i64().unwrap())).collect();
    assert_eq!(positions, [(users[1], 1), (users[3], 2), (users[4], 3), (users[5], 4)]);
    let my = fixture.user(users[4]).get(&format!("/join/v1/events/{}/my", event.event_id)).await.json();
    assert_eq!(my["position"], 3, "the user sees the same position");
    let participants = organizer.get(&path.replace("waitlist", "participants")).await.json();
    assert!(participants["items"][0].get("position").is_none(), "{participants}");

    // The cost of a page is bounded: beyond 10,001 the position is not counted.
    let long = fixture.create_event(1).await;
    insert_registrations(&fixture, &long, 10_104).await;
    let path = format!("/join/v1/events/{}/waitlist?limit=100", long.event_id);
    let waiting = collect_pages(&organizer, &path).await;
    let counted: Vec<i64> = waiting.iter().filter_map(|entry| entry["position"].as_i64()).collect();
    assert_eq!((waiting.len(), counted), (10_103, (1..=10_001).collect::<Vec<i64>>()));
    fixture.stop().await;
}

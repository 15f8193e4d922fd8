//! Moderation of events by admins, the audit trail, and the publication of events that have ended.

use http_kit::auth::Role;
use hyper::Method;
use serde_json::{Value, json};
use testkit::{Client, Response};
use uuid::Uuid;

use crate::events::fixture::{
    Fixture, create_event, event_messages, event_path, in_hours, meetup, meetup_with, new_user, patch_event,
    post_action, publish_event,
};
use crate::support::{caller, collect_pages};

/// Cancels or unpublishes an event with a body.
async fn withdraw(client: &Client, event: &Value, action: &str, body: Value) -> Response {
    client.post(&format!("{}/{action}", event_path(event)), body).await
}

#[tokio::test]
async fn an_admin_unpublishes_and_cancels_any_event_with_a_reason() {
    let fixture = Fixture::start().await;
    let (app, admin_id) = (&fixture.app, Uuid::now_v7());
    let admin = app.user(admin_id, Some(Role::Admin));
    let event = publish_event(&fixture.owner, meetup()).await;
    for body in [json!({}), json!({"reason": null})] {
        let refused = withdraw(&admin, &event, "unpublish", body).await;
        refused.assert_problem(422, "validation-failed");
        assert_eq!(refused.json()["errors"][0]["pointer"], "/reason");
    }
    post_action(&admin, &event, "cancel").await.assert_problem(422, "validation-failed");
    for reason in ["", " ", "a\u{7}b", &"x".repeat(501)] {
        let refused = withdraw(&admin, &event, "unpublish", json!({"reason": reason})).await;
        assert_eq!(refused.json()["errors"][0]["pointer"], "/reason", "{refused:?}");
    }
    assert_eq!(app.anonymous().get(&event_path(&event)).await.json(), event, "no request changed anything");

    let unpublished = withdraw(&admin, &event, "unpublish", json!({"reason": "No address."})).await;
    assert_eq!((unpublished.status, &unpublished.json()["status"]), (200, &json!("draft")), "{unpublished:?}");
    assert_eq!(admin.get(&event_path(&event)).await.json(), unpublished.json(), "an admin sees drafts");
    // The owner corrects the event and publishes it again; only the owner can.
    patch_event(&admin, &event, json!({"title": "Mine"})).await.assert_problem(403, "forbidden");
    post_action(&admin, &event, "publish").await.assert_problem(403, "forbidden");
    assert_eq!(post_action(&fixture.owner, &event, "publish").await.status, 200);
    let canceled = withdraw(&app.admin(), &event, "cancel", json!({"reason": "Fraud."})).await;
    assert_eq!((canceled.status, &canceled.json()["status"]), (200, &json!("canceled")), "{canceled:?}");

    let messages = event_messages(fixture.db(), &event).await;
    let reasons: Vec<(&str, &Value)> =
        messages.iter().map(|(topic, payload)| (topic.as_str(), &payload["reason"])).collect();
    let (no_address, fraud) = (json!("No address."), json!("Fraud."));
    let none = Value::Null;
    assert_eq!(
        reasons,
        [
            ("event.published", &none),
            ("event.unpublished", &no_address),
            ("event.published", &none),
            ("event.canceled", &fraud)
        ]
    );
    assert_eq!(messages[1].1["by"], format!("user:{admin_id}"));
    assert!(messages[3].1["by"].as_str().unwrap().starts_with("key:"), "{:?}", messages[3]);
    assert!(messages[2].1.get("by").is_none(), "the owner is no moderator");

    let history = fixture.owner.get(&format!("{}/history", event_path(&event))).await.json();
    let recorded: Vec<&Value> = history["items"].as_array().unwrap().iter().map(|change| &change["reason"]).collect();
    assert_eq!(recorded, [&none, &none, &no_address, &none, &fraud], "the owner sees the reasons");
    assert_eq!(history["items"][2]["actor"], format!("user:{admin_id}"));
    assert_eq!(history["items"][4]["actor"], messages[3].1["by"]);
    assert_eq!(admin.get(&format!("{}/history", event_path(&event))).await.json(), history);
    fixture.app.stop().await;
}

#[tokio::test]
async fn an_owner_may_give_a_reason_and_others_may_not_moderate() {
    let fixture = Fixture::start().await;
    let app = &fixture.app;
    let (event, draft) = (publish_event(&fixture.owner, meetup()).await, create_event(&fixture.owner, meetup()).await);
    let reason = json!({"reason": "Rain."});
    let strangers = [new_user(app), caller(app, "manage", "main").await, caller(app, "admin", "acme").await];
    for stranger in &strangers {
        for action in ["unpublish", "cancel"] {
            withdraw(stranger, &event, action, reason.clone()).await.assert_problem(403, "forbidden");
            withdraw(stranger, &draft, action, reason.clone()).await.assert_problem(404, "event-not-found");
        }
        stranger.get(&format!("{}/history", event_path(&event))).await.assert_problem(403, "forbidden");
        stranger.get(&format!("{}/history", event_path(&draft))).await.assert_problem(404, "event-not-found");
        stranger.get(&event_path(&draft)).await.assert_problem(404, "event-not-found");
        stranger.get("/event/v1/audit").await.assert_problem(403, "forbidden");
    }
    // An admin of the installation who owns an event is its owner.
    let admin = app.user(Uuid::now_v7(), Some(Role::Admin));
    let own = publish_event(&admin, meetup()).await;
    assert_eq!(post_action(&admin, &own, "cancel").await.status, 200);
    let keyed = fixture.owner.with_header("idempotency-key", "rain");
    let canceled = withdraw(&keyed, &event, "cancel", reason.clone()).await;
    assert_eq!(canceled.status, 200, "{canceled:?}");
    let again = withdraw(&keyed, &event, "cancel", reason).await;
    assert_eq!((again.status, again.json()), (200, canceled.json()));
    withdraw(&keyed, &event, "cancel", json!({"reason": "Snow."})).await.assert_problem(422, "idempotency-key-reused");
    let message = event_messages(fixture.db(), &event).await.pop().unwrap();
    assert_eq!(
        (message.0.as_str(), &message.1["reason"], message.1.get("by")),
        ("event.canceled", &json!("Rain."), None)
    );
    withdraw(&fixture.owner, &draft, "cancel", json!({"why": 1})).await.assert_problem(422, "validation-failed");
    fixture.app.stop().await;
}

#[tokio::test]
async fn the_audit_trail_lists_the_changes_of_all_events() {
    let fixture = Fixture::start().await;
    let (app, admin) = (&fixture.app, fixture.app.admin());
    let mut events = Vec::new();
    for _ in 0..3 {
        events.push(publish_event(&fixture.owner, meetup()).await);
    }
    withdraw(&admin, &events[0], "cancel", json!({"reason": "Fraud."})).await;
    create_event(&new_user(app), meetup()).await;
    let changes = collect_pages(&admin, "/event/v1/audit?limit=2").await;
    assert_eq!(changes.len(), 8, "{changes:?}");
    assert!(changes.is_sorted_by(|newer, older| newer["at"].as_str() >= older["at"].as_str()), "{changes:?}");
    assert_eq!((&changes[1]["reason"], &changes[1]["to"]), (&json!("Fraud."), &json!("canceled")));
    let of_event = format!("/event/v1/audit?event_id={}", events[0]["id"].as_str().unwrap());
    assert_eq!(collect_pages(&admin, &of_event).await.len(), 3);
    let owner = format!("user:{}", events[0]["owner_id"].as_str().unwrap());
    assert_eq!(collect_pages(&admin, &format!("/event/v1/audit?limit=4&actor={owner}")).await.len(), 6);
    let moderator = changes[1]["actor"].as_str().unwrap();
    let moderated = collect_pages(&admin, &format!("/event/v1/audit?actor={moderator}")).await;
    assert_eq!(moderated, [changes[1].clone()]);
    let as_user = moderator.replace("key:", "user:");
    assert_eq!(collect_pages(&admin, &format!("/event/v1/audit?actor={as_user}")).await.len(), 0);
    let refused = admin.get("/event/v1/audit?actor=bob").await;
    refused.assert_problem(400, "malformed-query");
    assert!(refused.json()["detail"].as_str().unwrap().contains("user:, key: or portal:"), "{refused:?}");
    fixture.app.stop().await;
}

#[tokio::test]
async fn an_event_that_has_ended_cannot_be_published() {
    let fixture = Fixture::start().await;
    let past = json!({"start_time": in_hours(-3), "end_time": in_hours(-1)});
    let event = create_event(&fixture.owner, meetup_with(past)).await;
    let refused = post_action(&fixture.owner, &event, "publish").await;
    refused.assert_problem(409, "event-ended");
    assert!(refused.json()["detail"].as_str().unwrap().contains("end_time"), "{refused:?}");
    assert_eq!(fixture.owner.get(&event_path(&event)).await.json(), event);
    assert_eq!(patch_event(&fixture.owner, &event, json!({"end_time": in_hours(1)})).await.status, 200);
    assert_eq!(post_action(&fixture.owner, &event, "publish").await.status, 200, "an event that is going on");
    let method = Method::POST;
    let unpublished = fixture.owner.send(method, &format!("{}/unpublish", event_path(&event)), None).await;
    assert_eq!(unpublished.status, 200, "{unpublished:?}");
    fixture.app.stop().await;
}

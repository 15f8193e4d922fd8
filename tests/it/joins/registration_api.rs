//! The HTTP API of joins: registrations of users, and the lists, counts and moderation of organizers.

use std::collections::HashSet;

use chrono::{TimeDelta, Utc};
use contracts::events::EventStatus;
use serde_json::json;
use testkit::Client;
use uuid::Uuid;

use crate::joins::fixture::{
    Fixture, moderate, new_event, next_version, parse_time, post_join_action, post_join_action_with_key,
};
use crate::support::{caller, collect_pages_with, uuid_of};

/// The users of all registrations in a list; `between` runs after each page but the last.
async fn walk_list(client: &Client, path: &str, limit: usize, between: impl AsyncFnMut(usize)) -> Vec<Uuid> {
    let items = collect_pages_with(client, &format!("{path}?limit={limit}"), between).await;
    items.iter().map(|item| uuid_of(&item["user_id"])).collect()
}

#[tokio::test]
async fn a_canceled_seat_goes_to_the_first_on_the_waitlist() {
    let fixture = Fixture::start(2).await;
    let event = fixture.create_event(2).await;
    let users = fixture.join_users(&event, 4).await;
    let get_as = async |user: Uuid, what: &str| {
        fixture.user(user).get(&format!("/join/v1/events/{}/{what}", event.event_id)).await.json()
    };
    assert_eq!(get_as(users[3], "position").await, json!({"status": "waitlisted", "position": 2, "ahead": 1}));
    assert_eq!(get_as(users[0], "position").await, json!({"status": "active"}));
    assert_eq!(get_as(users[3], "my").await["position"], 2);
    let before = get_as(users[2], "my").await;
    assert!(before["activated_at"].is_null(), "{before}");

    let canceled = fixture.cancel(&event, users[0]).await;
    assert_eq!(canceled.status, 200, "{canceled:?}");
    assert!(parse_time(&canceled.json()["canceled_at"]) <= Utc::now());
    let promoted = get_as(users[2], "my").await;
    assert_eq!(promoted["status"], "active", "promoted in the same transaction");
    assert!(parse_time(&promoted["activated_at"]) >= parse_time(&promoted["created_at"]));
    assert_eq!(get_as(users[3], "position").await["position"], 1);
    let nothing_to_cancel = fixture.cancel(&event, users[0]).await;
    nothing_to_cancel.assert_problem(404, "not-registered");
    assert_eq!(nothing_to_cancel.json()["detail"], "you have no seat in this event and are not on its waitlist");

    // A user who joins again is last on the waitlist.
    let again = fixture.join(&event, users[0]).await.json();
    assert_eq!((&again["seq"], &again["position"]), (&json!(5), &json!(2)));
    assert_eq!(again["id"], canceled.json()["id"], "each user has one registration");
    let messages = fixture.posted_messages(&event).await;
    let topics: Vec<&str> = messages.iter().map(|(topic, _)| topic.as_str()).collect();
    assert_eq!(
        topics,
        [
            "join.confirmed",
            "join.confirmed",
            "join.waitlisted",
            "join.waitlisted",
            "join.canceled",
            "join.promoted",
            "join.waitlisted"
        ]
    );
    assert_eq!((messages[4].1, messages[5].1), (users[0], users[2]));
    fixture.check_invariants().await;
    fixture.stop().await;
}

#[tokio::test]
async fn only_existing_open_events_can_be_joined() {
    let fixture = Fixture::start(1).await;
    let user = Uuid::now_v7();
    let nowhere = new_event(fixture.owner, 1);
    let unknown = fixture.join(&nowhere, user).await;
    unknown.assert_problem(404, "event-not-found");
    assert_eq!(unknown.header("retry-after"), "1");
    assert!(unknown.json()["detail"].as_str().unwrap().contains("published this moment"), "{unknown:?}");
    fixture
        .user(user)
        .get(&format!("/join/v1/events/{}/my", nowhere.event_id))
        .await
        .assert_problem(404, "event-not-found");
    let event = fixture.create_event(1).await;
    fixture
        .user(user)
        .get(&format!("/join/v1/events/{}/my", event.event_id))
        .await
        .assert_problem(404, "not-registered");
    let unpublished = next_version(&event, |event| event.status = EventStatus::Draft);
    fixture.post_update(&unpublished).await;
    fixture.wait_until_known(&unpublished).await;
    let hidden = fixture.join(&event, user).await;
    hidden.assert_problem(404, "event-not-found");
    let same = |field: &str| hidden.json()[field] == unknown.json()[field];
    assert!(hidden.header("retry-after") == "1" && same("detail"), "a hidden event looks like an unknown one");
    let ended = next_version(&unpublished, |event| {
        (event.status, event.end_time) = (EventStatus::Published, Utc::now() - TimeDelta::seconds(1));
    });
    fixture.post_update(&ended).await;
    fixture.wait_until_known(&ended).await;
    fixture.join(&event, user).await.assert_problem(409, "event-ended");
    let canceled = next_version(&ended, |event| event.status = EventStatus::Canceled);
    fixture.post_update(&canceled).await;
    fixture.wait_until_known(&canceled).await;
    fixture.join(&event, user).await.assert_problem(409, "event-canceled");
    let malformed =
        fixture.user(user).with_header("idempotency-key", "k").post("/join/v1/events/seven/join", json!({})).await;
    malformed.assert_problem(400, "malformed-path");
    assert_eq!(malformed.json()["errors"][0]["pointer"], "/id");
    let key = caller(&fixture.apps[0], "admin", "main").await;
    post_join_action(&key, event.event_id, "join").await.assert_problem(403, "forbidden");
    fixture.stop().await;
}

#[tokio::test]
async fn stats_show_the_counts_with_their_version() {
    let fixture = Fixture::start(1).await;
    let event = fixture.create_event(2).await;
    fixture.join_users(&event, 3).await;
    let path = format!("/join/v1/events/{}/stats", event.event_id);
    let stats = fixture.organizer().get(&path).await;
    let expected = json!({"event_id": event.event_id, "status": "published", "capacity": 2, "active_count": 2,
        "waitlist_count": 1, "seats_left": 0, "joined_in_all": 3, "version": 3});
    assert_eq!(stats.json(), expected);
    let known = fixture.organizer().with_header("if-none-match", stats.header("etag"));
    assert_eq!(known.get(&path).await.status, 304);
    let users = fixture.join_users(&event, 1).await;
    let stats = known.get(&path).await;
    assert_eq!((stats.status, &stats.json()["waitlist_count"]), (200, &json!(2)));
    // A cancellation does not lower `joined_in_all`.
    assert_eq!(fixture.cancel(&event, users[0]).await.status, 200);
    let stats = fixture.organizer().get(&path).await;
    let expected = json!({"event_id": event.event_id, "status": "published", "capacity": 2, "active_count": 2,
        "waitlist_count": 1, "seats_left": 0, "joined_in_all": 4, "version": 5});
    assert_eq!(stats.json(), expected);
    // An update of the event changes the ETag, even if it promotes no user.
    let known = fixture.organizer().with_header("if-none-match", stats.header("etag"));
    let fewer = next_version(&event, |event| event.capacity = 1);
    fixture.post_update(&fewer).await;
    fixture.wait_until_known(&fewer).await;
    let stats = known.get(&path).await;
    assert_eq!((stats.status, &stats.json()["seats_left"]), (200, &json!(0)), "{stats:?}");
    let free = fixture.create_event(5).await;
    fixture.join_users(&free, 2).await;
    let path = format!("/join/v1/events/{}/stats", free.event_id);
    assert_eq!(fixture.organizer().get(&path).await.json()["seats_left"], 3);
    let unlimited = next_version(&free, |event| event.capacity = 0);
    fixture.post_update(&unlimited).await;
    fixture.wait_until_known(&unlimited).await;
    let stats = fixture.organizer().get(&path).await.json();
    assert_eq!((&stats["capacity"], stats.get("seats_left")), (&json!(0), None));
    fixture.stop().await;
}

#[tokio::test]
async fn paging_through_a_list_misses_no_user_while_others_join_and_cancel() {
    let fixture = Fixture::start(2).await;
    let event = fixture.create_event(20).await;
    let users = fixture.join_users(&event, 50).await;
    let path = |list: &str| format!("/join/v1/events/{}/{list}", event.event_id);
    let organizer = fixture.organizer();
    assert_eq!(walk_list(&organizer, &path("participants"), 7, async |_| {}).await, users[..20]);
    assert_eq!(walk_list(&organizer, &path("waitlist"), 7, async |_| {}).await, users[20..]);
    // With each page, one listed user cancels, one is promoted, and one joins.
    let seen = walk_list(&organizer, &path("participants"), 5, async |page| {
        assert_eq!(fixture.cancel(&event, users[page]).await.status, 200);
        fixture.join_users(&event, 1).await;
    })
    .await;
    assert_eq!(seen.iter().collect::<HashSet<_>>().len(), seen.len(), "no user is listed twice");
    assert!(users[..20].iter().all(|user| seen.contains(user)), "no user is missing");
    // With each page, the first on the waitlist is promoted, one of the last cancels, and one joins.
    let waiting = walk_list(&organizer, &path("waitlist"), 100, async |_| {}).await;
    let inside = walk_list(&organizer, &path("participants"), 100, async |_| {}).await;
    let mut canceled = 0;
    let seen = walk_list(&organizer, &path("waitlist"), 5, async |page| {
        canceled = page + 1;
        for user in [inside[page], waiting[waiting.len() - canceled]] {
            assert_eq!(fixture.cancel(&event, user).await.status, 200);
        }
        fixture.join_users(&event, 1).await;
    })
    .await;
    assert!(canceled > 3, "{canceled} pages");
    assert_eq!(seen.iter().collect::<HashSet<_>>().len(), seen.len(), "no user is listed twice");
    let (stayed, joined) = seen.split_at(waiting.len() - canceled);
    assert_eq!(stayed, &waiting[..waiting.len() - canceled], "no user is missing, and the order is the same");
    assert_eq!(joined.len(), canceled, "users who joined during the walk are at the end");
    let cursor = organizer.get(&format!("{}?limit=1", path("waitlist"))).await.json()["next_cursor"].clone();
    let misused = format!("{}?cursor={}", path("participants"), cursor.as_str().unwrap());
    organizer.get(&misused).await.assert_problem(400, "malformed-query");
    fixture.stop().await;
}

#[tokio::test]
async fn a_user_lists_their_registrations_newest_first() {
    let fixture = Fixture::start(1).await;
    let user = Uuid::now_v7();
    let mut events = Vec::new();
    for capacity in [1, 0, 0, 0, 0] {
        let event = fixture.create_event(capacity).await;
        if capacity == 1 {
            fixture.join_users(&event, 1).await;
        }
        assert_eq!(fixture.join(&event, user).await.status, 201);
        events.push(event);
    }
    fixture.cancel(&events[4], user).await;
    let client = fixture.user(user);
    let listed = async |query: &str| -> Vec<String> {
        let page = client.get(&format!("/join/v1/me/joins{query}")).await.json();
        let items = page["items"].as_array().unwrap();
        items.iter().map(|item| item["event_id"].as_str().unwrap().to_owned()).collect()
    };
    let newest: Vec<String> = events.iter().rev().map(|event| event.event_id.to_string()).collect();
    assert_eq!(listed("").await, newest);
    assert_eq!(listed("?status=waitlisted").await, newest[4..]);
    assert_eq!(listed("?status=active").await, newest[1..4]);
    client.get("/join/v1/me/joins?status=unknown").await.assert_problem(400, "malformed-query");
    let first = client.get("/join/v1/me/joins?limit=2").await.json();
    let cursor = first["next_cursor"].as_str().unwrap().to_owned();
    assert_eq!(listed(&format!("?limit=2&cursor={cursor}")).await, newest[2..4]);
    let other = fixture.user(Uuid::now_v7());
    assert_eq!(other.get("/join/v1/me/joins").await.json(), json!({"items": []}));
    other.get(&format!("/join/v1/me/joins?limit=2&cursor={cursor}")).await.assert_problem(400, "malformed-query");
    fixture.stop().await;
}

#[tokio::test]
async fn a_temporary_refusal_is_not_stored_under_the_key() {
    let fixture = Fixture::start(1).await;
    let (event, user) = (new_event(fixture.owner, 1), fixture.user(Uuid::now_v7()));
    post_join_action_with_key(&user, event.event_id, "join", "mine").await.assert_problem(404, "event-not-found");
    fixture.post_update(&event).await;
    fixture.wait_until_known(&event).await;
    assert_eq!(post_join_action_with_key(&user, event.event_id, "join", "mine").await.status, 201);
    fixture.stop().await;
}

#[tokio::test]
async fn an_unpublished_event_is_hidden_from_users_who_never_joined() {
    let fixture = Fixture::start(1).await;
    let event = fixture.create_event(1).await;
    let guest = fixture.join_users(&event, 1).await[0];
    let unpublished = next_version(&event, |event| event.status = EventStatus::Draft);
    fixture.post_update(&unpublished).await;
    fixture.wait_until_known(&unpublished).await;
    let stranger = Uuid::now_v7();
    fixture.join(&event, stranger).await.assert_problem(404, "event-not-found");
    fixture.cancel(&event, stranger).await.assert_problem(404, "event-not-found");
    for what in ["my", "position", "participants", "stats"] {
        let path = format!("/join/v1/events/{}/{what}", event.event_id);
        fixture.user(stranger).get(&path).await.assert_problem(404, "event-not-found");
    }
    let kick = moderate(&fixture.user(stranger), event.event_id, "kick", json!({"user_id": guest})).await;
    kick.assert_problem(404, "event-not-found");
    let path = format!("/join/v1/events/{}/stats", event.event_id);
    fixture.user(guest).get(&path).await.assert_problem(403, "forbidden");
    assert_eq!(fixture.organizer().get(&path).await.status, 200);
    assert_eq!(fixture.cancel(&event, guest).await.status, 200);
    fixture.join(&event, guest).await.assert_problem(409, "event-not-published");
    fixture.stop().await;
}

//! What a person does and sees, and what an organizer sees.

use std::collections::HashSet;

use chrono::{TimeDelta, Utc};
use contracts::events::EventStatus;
use kit::auth::Role;
use serde_json::{Value, json};
use testkit::{Client, drain};
use uuid::Uuid;

use crate::hub_delivery::caller;
use crate::joins_world::{PATIENCE, World, act, act_keyed, at, moderate, next, published};

fn ids(page: &Value) -> Vec<Uuid> {
    page["items"].as_array().unwrap().iter().map(|item| item["user_id"].as_str().unwrap().parse().unwrap()).collect()
}

async fn walk(client: &Client, path: &str, limit: usize, mut between: impl AsyncFnMut(usize)) -> Vec<Uuid> {
    let (mut all, mut query) = (Vec::new(), format!("{path}?limit={limit}"));
    for page_number in 0..1_000 {
        let answer = client.get(&query).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let page = answer.json();
        all.extend(ids(&page));
        let Some(cursor) = page["next_cursor"].as_str() else { return all };
        assert!(answer.header("link").contains("rel=\"next\""));
        between(page_number).await;
        query = format!("{path}?limit={limit}&cursor={cursor}");
    }
    panic!("a list without an end");
}

#[tokio::test]
async fn a_seat_that_is_given_up_goes_to_the_first_who_waits() {
    let world = World::start(2).await;
    let event = world.event(2).await;
    let users = world.fill(&event, 4).await;
    let place = async |user: Uuid, what: &str| {
        world.user(user).get(&format!("/join/v1/events/{}/{what}", event.event_id)).await.json()
    };
    assert_eq!(place(users[3], "position").await, json!({"status": "waitlisted", "position": 2, "ahead": 1}));
    assert_eq!(place(users[0], "position").await, json!({"status": "active"}));
    assert_eq!(place(users[3], "my").await["position"], 2);
    let before = place(users[2], "my").await;
    assert!(before["activated_at"].is_null(), "{before}");

    let canceled = world.cancel(&event, users[0]).await;
    assert_eq!(canceled.status, 200, "{canceled:?}");
    assert!(at(&canceled.json()["canceled_at"]) <= Utc::now());
    let promoted = place(users[2], "my").await;
    assert_eq!(promoted["status"], "active", "in the same transaction");
    assert!(at(&promoted["activated_at"]) >= at(&promoted["created_at"]));
    assert_eq!(place(users[3], "position").await["position"], 1);
    let nothing_to_cancel = world.cancel(&event, users[0]).await;
    nothing_to_cancel.assert_problem(404, "not-registered");
    assert_eq!(nothing_to_cancel.json()["detail"], "you are neither in this event nor on its waitlist");

    // Who comes again stands behind all others.
    let again = world.join(&event, users[0]).await.json();
    assert_eq!((&again["seq"], &again["position"]), (&json!(5), &json!(2)));
    assert_eq!(again["id"], canceled.json()["id"], "one registration for each person");
    let said = world.said(&event).await;
    let topics: Vec<&str> = said.iter().map(|(topic, _)| topic.as_str()).collect();
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
    assert_eq!((said[4].1, said[5].1), (users[0], users[2]));
    world.check().await;
    world.stop().await;
}

#[tokio::test]
async fn one_joins_only_what_is_there_and_open() {
    let world = World::start(1).await;
    let user = Uuid::now_v7();
    let nowhere = published(world.owner, 1);
    world.join(&nowhere, user).await.assert_problem(404, "event-not-found");
    world
        .user(user)
        .get(&format!("/join/v1/events/{}/my", nowhere.event_id))
        .await
        .assert_problem(404, "event-not-found");
    let event = world.event(1).await;
    world.user(user).get(&format!("/join/v1/events/{}/my", event.event_id)).await.assert_problem(404, "not-registered");
    let unpublished = next(&event, |event| event.status = EventStatus::Draft);
    world.tell(&unpublished).await;
    world.until_known(&unpublished).await;
    world.join(&event, user).await.assert_problem(404, "event-not-found");
    let ended = next(&unpublished, |event| {
        (event.status, event.end_time) = (EventStatus::Published, Utc::now() - TimeDelta::seconds(1));
    });
    world.tell(&ended).await;
    world.until_known(&ended).await;
    world.join(&event, user).await.assert_problem(409, "event-ended");
    let canceled = next(&ended, |event| event.status = EventStatus::Canceled);
    world.tell(&canceled).await;
    world.until_known(&canceled).await;
    world.join(&event, user).await.assert_problem(409, "event-canceled");
    let malformed =
        world.user(user).with_header("idempotency-key", "k").post("/join/v1/events/seven/join", json!({})).await;
    malformed.assert_problem(400, "malformed-path");
    assert_eq!(malformed.json()["errors"][0]["pointer"], "/id");
    let key = caller(&world.apps[0], "admin", "main").await;
    act(&key, event.event_id, "join").await.assert_problem(403, "forbidden");
    world.stop().await;
}

#[tokio::test]
async fn organizers_routes_are_for_organizers() {
    let world = World::start(1).await;
    let (app, event) = (&world.apps[0], world.event(2).await);
    let guest = world.fill(&event, 1).await[0];
    let (anyone, other) = (app.anyone(), app.user(Uuid::now_v7(), None));
    let (ingest, elsewhere) = (caller(app, "ingest", "main").await, caller(app, "admin", "acme").await);
    let manage = caller(app, "manage", "main").await;
    let guest_client = app.user(guest, None);
    let body = json!({"user_id": guest});
    for action in ["kick", "ban", "unban"] {
        moderate(&anyone, event.event_id, action, body.clone()).await.assert_problem(401, "unauthorized");
        for stranger in [&other, &guest_client, &ingest, &manage, &elsewhere] {
            moderate(stranger, event.event_id, action, body.clone()).await.assert_problem(403, "forbidden");
            // Who may not ask is not told what is wrong with the question.
            moderate(stranger, event.event_id, action, json!({})).await.assert_problem(403, "forbidden");
        }
    }
    for list in ["participants", "waitlist", "stats"] {
        let path = format!("/join/v1/events/{}/{list}", event.event_id);
        anyone.get(&path).await.assert_problem(401, "unauthorized");
        for stranger in [&other, &guest_client, &ingest, &manage, &elsewhere] {
            stranger.get(&path).await.assert_problem(403, "forbidden");
        }
        let admin_user = app.user(Uuid::now_v7(), Some(Role::Admin));
        for organizer in [&world.organizer(), &app.admin(), &admin_user] {
            assert_eq!(organizer.get(&path).await.status, 200);
        }
        let nowhere = format!("/join/v1/events/{}/{list}", Uuid::now_v7());
        world.organizer().get(&nowhere).await.assert_problem(404, "event-not-found");
    }
    assert_eq!(world.status(&event, guest).await, "active", "nobody did anything");
    assert_eq!(moderate(&app.admin(), event.event_id, "kick", body).await.status, 200);
    world.check().await;
    world.stop().await;
}

#[tokio::test]
async fn counts_are_shown_with_their_version() {
    let world = World::start(1).await;
    let event = world.event(2).await;
    world.fill(&event, 3).await;
    let path = format!("/join/v1/events/{}/stats", event.event_id);
    let stats = world.organizer().get(&path).await;
    let expected = json!({"event_id": event.event_id, "status": "published", "capacity": 2, "active_count": 2,
        "waitlist_count": 1, "seats_left": 0, "joined_in_all": 3, "version": 3});
    assert_eq!(stats.json(), expected);
    let known = world.organizer().with_header("if-none-match", stats.header("etag"));
    assert_eq!(known.get(&path).await.status, 304);
    let users = world.fill(&event, 1).await;
    let stats = known.get(&path).await;
    assert_eq!((stats.status, &stats.json()["waitlist_count"]), (200, &json!(2)));
    // Who leaves has joined all the same.
    assert_eq!(world.cancel(&event, users[0]).await.status, 200);
    let stats = world.organizer().get(&path).await;
    let expected = json!({"event_id": event.event_id, "status": "published", "capacity": 2, "active_count": 2,
        "waitlist_count": 1, "seats_left": 0, "joined_in_all": 4, "version": 5});
    assert_eq!(stats.json(), expected);
    // What the event's owner changes is a change, too, though it moves nobody.
    let known = world.organizer().with_header("if-none-match", stats.header("etag"));
    let fewer = next(&event, |event| event.capacity = 1);
    world.tell(&fewer).await;
    world.until_known(&fewer).await;
    let stats = known.get(&path).await;
    assert_eq!((stats.status, &stats.json()["seats_left"]), (200, &json!(0)), "{stats:?}");
    let free = world.event(5).await;
    world.fill(&free, 2).await;
    let path = format!("/join/v1/events/{}/stats", free.event_id);
    assert_eq!(world.organizer().get(&path).await.json()["seats_left"], 3);
    let unlimited = next(&free, |event| event.capacity = 0);
    world.tell(&unlimited).await;
    world.until_known(&unlimited).await;
    let stats = world.organizer().get(&path).await.json();
    assert_eq!((&stats["capacity"], stats.get("seats_left")), (&json!(0), None));
    world.stop().await;
}

#[tokio::test]
async fn a_walk_through_a_list_misses_nobody_while_people_come_and_go() {
    let world = World::start(2).await;
    let event = world.event(20).await;
    let users = world.fill(&event, 50).await;
    let path = |list: &str| format!("/join/v1/events/{}/{list}", event.event_id);
    let organizer = world.organizer();
    assert_eq!(walk(&organizer, &path("participants"), 7, async |_| {}).await, users[..20]);
    assert_eq!(walk(&organizer, &path("waitlist"), 7, async |_| {}).await, users[20..]);
    // With each page one leaves who was seen, one moves up, and one comes.
    let seen = walk(&organizer, &path("participants"), 5, async |page| {
        assert_eq!(world.cancel(&event, users[page]).await.status, 200);
        world.fill(&event, 1).await;
    })
    .await;
    assert_eq!(seen.iter().collect::<HashSet<_>>().len(), seen.len(), "nobody twice");
    assert!(users[..20].iter().all(|user| seen.contains(user)), "nobody missed");
    // With each page the first who waits moves up, one leaves from the end, and one comes.
    let waiting = walk(&organizer, &path("waitlist"), 100, async |_| {}).await;
    let inside = walk(&organizer, &path("participants"), 100, async |_| {}).await;
    let mut gone = 0;
    let seen = walk(&organizer, &path("waitlist"), 5, async |page| {
        gone = page + 1;
        for user in [inside[page], waiting[waiting.len() - gone]] {
            assert_eq!(world.cancel(&event, user).await.status, 200);
        }
        world.fill(&event, 1).await;
    })
    .await;
    assert!(gone > 3, "{gone} pages");
    assert_eq!(seen.iter().collect::<HashSet<_>>().len(), seen.len(), "nobody twice");
    let (stayed, came) = seen.split_at(waiting.len() - gone);
    assert_eq!(stayed, &waiting[..waiting.len() - gone], "nobody missed, each in their order");
    assert_eq!(came.len(), gone, "and who came meanwhile is at the end");
    let cursor = organizer.get(&format!("{}?limit=1", path("waitlist"))).await.json()["next_cursor"].clone();
    let misused = format!("{}?cursor={}", path("participants"), cursor.as_str().unwrap());
    organizer.get(&misused).await.assert_problem(400, "malformed-query");
    world.stop().await;
}

#[tokio::test]
async fn ones_own_registrations_are_listed_newest_first() {
    let world = World::start(1).await;
    let user = Uuid::now_v7();
    let mut events = Vec::new();
    for capacity in [1, 0, 0, 0, 0] {
        let event = world.event(capacity).await;
        if capacity == 1 {
            world.fill(&event, 1).await;
        }
        assert_eq!(world.join(&event, user).await.status, 201);
        events.push(event);
    }
    world.cancel(&events[4], user).await;
    let client = world.user(user);
    let listed = async |query: &str| -> Vec<String> {
        let page = client.get(&format!("/join/v1/me/joins{query}")).await.json();
        let items = page["items"].as_array().unwrap();
        items.iter().map(|item| item["event_id"].as_str().unwrap().to_owned()).collect()
    };
    let newest: Vec<String> = events.iter().rev().map(|event| event.event_id.to_string()).collect();
    assert_eq!(listed("").await, newest);
    assert_eq!(listed("?status=waitlisted").await, newest[4..]);
    assert_eq!(listed("?status=active").await, newest[1..4]);
    client.get("/join/v1/me/joins?status=nobody").await.assert_problem(400, "malformed-query");
    let first = client.get("/join/v1/me/joins?limit=2").await.json();
    let cursor = first["next_cursor"].as_str().unwrap().to_owned();
    assert_eq!(listed(&format!("?limit=2&cursor={cursor}")).await, newest[2..4]);
    let other = world.user(Uuid::now_v7());
    assert_eq!(other.get("/join/v1/me/joins").await.json(), json!({"items": []}));
    other.get(&format!("/join/v1/me/joins?limit=2&cursor={cursor}")).await.assert_problem(400, "malformed-query");
    world.stop().await;
}

#[tokio::test]
async fn a_kicked_may_come_again_and_a_banned_may_not_until_it_ends() {
    let world = World::start(2).await;
    let event = world.event(2).await;
    let users = world.fill(&event, 4).await;
    let organizer = world.organizer();
    let by = format!("user:{}", world.owner);
    let kicked = moderate(&organizer, event.event_id, "kick", json!({"user_id": users[0], "reason": "loud"})).await;
    assert_eq!((kicked.status, &kicked.json()["status"]), (200, &json!("rejected")), "{kicked:?}");
    assert_eq!(world.status(&event, users[2]).await, "active");
    assert_eq!(world.join(&event, users[0]).await.json()["seq"], 5);

    let soon = Utc::now() + TimeDelta::seconds(2);
    let banned = moderate(
        &organizer,
        event.event_id,
        "ban",
        json!({"user_id": users[1], "reason": "louder", "expires_at": soon}),
    )
    .await;
    assert_eq!((banned.status, &banned.json()["banned_by"]), (200, &json!(by)), "{banned:?}");
    assert_eq!(world.status(&event, users[1]).await, "rejected");
    assert_eq!(world.status(&event, users[3]).await, "active");
    let refused = world.join(&event, users[1]).await;
    refused.assert_problem(403, "banned");
    assert!(refused.json()["detail"].as_str().unwrap().contains("until"), "{refused:?}");
    // One who never came can be kept out, too.
    let stranger = Uuid::now_v7();
    assert_eq!(moderate(&organizer, event.event_id, "ban", json!({"user_id": stranger})).await.status, 200);
    world.join(&event, stranger).await.assert_problem(403, "banned");
    assert_eq!(moderate(&organizer, event.event_id, "unban", json!({"user_id": stranger})).await.status, 204);
    moderate(&organizer, event.event_id, "unban", json!({"user_id": stranger})).await.assert_problem(404, "not-banned");
    assert_eq!(world.join(&event, stranger).await.status, 201);

    drain("the ban ends", PATIENCE, async || world.join(&event, users[1]).await.status == 201).await;
    assert!(Utc::now() >= soon);
    let said: Vec<(String, Value)> = sqlx::query_as(
        "select topic, payload::jsonb from pillarbox.log where source = 'joins' and topic like 'mod.%' order by id",
    )
    .fetch_all(world.db())
    .await
    .unwrap();
    let topics: Vec<&str> = said.iter().map(|(topic, _)| topic.as_str()).collect();
    assert_eq!(topics, ["mod.kicked", "mod.banned", "mod.banned", "mod.unbanned"]);
    assert_eq!(
        (&said[0].1["reason"], &said[0].1["by"], &said[0].1["status"]),
        (&json!("loud"), &json!(by), &json!("rejected"))
    );
    assert!((at(&said[1].1["expires_at"]) - soon).abs() < TimeDelta::milliseconds(1));
    assert!(said[2].1.get("join_id").is_none(), "{:?}", said[2]);

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
    world.check().await;
    world.stop().await;
}

#[tokio::test]
async fn a_refusal_that_passes_does_not_stick_to_its_key() {
    let world = World::start(1).await;
    let (event, user) = (published(world.owner, 1), world.user(Uuid::now_v7()));
    act_keyed(&user, event.event_id, "join", "mine").await.assert_problem(404, "event-not-found");
    world.tell(&event).await;
    world.until_known(&event).await;
    assert_eq!(act_keyed(&user, event.event_id, "join", "mine").await.status, 201);
    world.stop().await;
}

#[tokio::test]
async fn a_repeated_ban_is_answered_again_also_when_it_is_over() {
    let world = World::start(1).await;
    let event = world.event(1).await;
    let organizer = world.organizer().with_header("idempotency-key", "out");
    let path = format!("/join/v1/events/{}/ban", event.event_id);
    let body = json!({"user_id": Uuid::now_v7(), "expires_at": Utc::now() + TimeDelta::seconds(1)});
    let banned = organizer.post(&path, body.clone()).await;
    assert_eq!(banned.status, 200, "{banned:?}");
    drain("the ban ends", PATIENCE, async || at(&body["expires_at"]) < Utc::now()).await;
    let again = organizer.post(&path, body.clone()).await;
    assert_eq!((again.status, again.json()), (200, banned.json()), "{again:?}");
    let late = world.organizer().with_header("idempotency-key", "out again").post(&path, body).await;
    late.assert_problem(422, "validation-failed");
    assert_eq!(late.json()["errors"][0]["pointer"], "/expires_at");
    world.stop().await;
}

#[tokio::test]
async fn what_is_unpublished_is_not_there_for_who_never_joined_it() {
    let world = World::start(1).await;
    let event = world.event(1).await;
    let guest = world.fill(&event, 1).await[0];
    let unpublished = next(&event, |event| event.status = EventStatus::Draft);
    world.tell(&unpublished).await;
    world.until_known(&unpublished).await;
    let stranger = Uuid::now_v7();
    world.join(&event, stranger).await.assert_problem(404, "event-not-found");
    world.cancel(&event, stranger).await.assert_problem(404, "event-not-found");
    for what in ["my", "position", "participants", "stats"] {
        let path = format!("/join/v1/events/{}/{what}", event.event_id);
        world.user(stranger).get(&path).await.assert_problem(404, "event-not-found");
    }
    let kick = moderate(&world.user(stranger), event.event_id, "kick", json!({"user_id": guest})).await;
    kick.assert_problem(404, "event-not-found");
    let path = format!("/join/v1/events/{}/stats", event.event_id);
    world.user(guest).get(&path).await.assert_problem(403, "forbidden");
    assert_eq!(world.organizer().get(&path).await.status, 200);
    assert_eq!(world.cancel(&event, guest).await.status, 200);
    world.join(&event, guest).await.assert_problem(409, "event-not-published");
    world.stop().await;
}

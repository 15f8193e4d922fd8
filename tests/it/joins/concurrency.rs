//! Concurrent requests over several replicas.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use serde_json::json;
use uuid::Uuid;

use crate::joins::fixture::{Fixture, moderate, next_version, post_join_action, post_join_action_with_key};
use crate::joins::invariants::check_invariants;

#[tokio::test]
async fn two_hundred_racers_share_three_seats() {
    let fixture = Fixture::start(3).await;
    let event = fixture.create_event(3).await;
    let racers: Vec<Uuid> = (0..200).map(|_| Uuid::new_v4()).collect();
    let answers = join_all(racers.iter().map(|user| fixture.join(&event, *user))).await;
    let (mut seated, mut seqs) = (0, BTreeSet::new());
    for answer in &answers {
        assert_eq!(answer.status, 201, "{answer:?}");
        let body = answer.json();
        let seq = body["seq"].as_i64().unwrap();
        assert!(seqs.insert(seq), "{seq} twice");
        match body["status"].as_str().unwrap() {
            "active" => {
                seated += 1;
                assert!(seq <= 3 && body["position"].is_null(), "{body}");
            }
            "waitlisted" => assert_eq!(body["position"], seq - 3, "{body}"),
            other => panic!("{other}"),
        }
    }
    assert_eq!(seated, 3);
    assert_eq!(seqs, (1..=200).collect::<BTreeSet<i64>>());
    assert_eq!(fixture.counts(&event).await, (3, 197));
    fixture.check_invariants().await;
    fixture.stop().await;
}

#[tokio::test]
async fn sequence_numbers_follow_the_order_of_joining() {
    let fixture = Fixture::start(3).await;
    let event = fixture.create_event(2).await;
    let users = fixture.join_users(&event, 12).await;
    let mut seqs = Vec::new();
    for user in &users {
        seqs.push(
            fixture.user(*user).get(&format!("/join/v1/events/{}/my", event.event_id)).await.json()["seq"].as_i64(),
        );
    }
    assert_eq!(seqs, (1..=12).map(Some).collect::<Vec<_>>());
    fixture.check_invariants().await;
    fixture.stop().await;
}

#[tokio::test]
async fn fifty_concurrent_requests_with_one_key_create_one_registration() {
    let fixture = Fixture::start(3).await;
    let event = fixture.create_event(1).await;
    let user = Uuid::now_v7();
    let repeat = |n: usize| fixture.apps[n % 3].user(user, None);
    let answers =
        join_all((0..50).map(async |n| post_join_action_with_key(&repeat(n), event.event_id, "join", "the key").await))
            .await;
    let first = answers.iter().filter(|answer| !answer.headers.contains_key("idempotent-replayed")).count();
    assert_eq!(first, 1);
    for answer in &answers {
        assert_eq!((answer.status, &answer.text), (201, &answers[0].text));
    }
    assert_eq!(fixture.posted_messages(&event).await, [("join.confirmed".to_owned(), user)]);
    // Fifty different keys are fifty requests, and still one registration.
    let answers = join_all((0..50).map(async |n| post_join_action(&repeat(n), event.event_id, "join").await)).await;
    assert!(answers.iter().all(|answer| answer.status == 200), "{:?}", answers[0]);
    assert_eq!(fixture.posted_messages(&event).await.len(), 1);
    fixture.check_invariants().await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_key_belongs_to_one_request_and_permanent_refusals_are_replayed() {
    let fixture = Fixture::start(2).await;
    let (event, other) = (fixture.create_event(1).await, fixture.create_event(1).await);
    let user = Uuid::now_v7();
    let client = fixture.user(user);
    client
        .post(&format!("/join/v1/events/{}/join", event.event_id), json!({}))
        .await
        .assert_problem(400, "idempotency-key");
    assert_eq!(post_join_action_with_key(&client, event.event_id, "join", "k").await.status, 201);
    post_join_action_with_key(&client, other.event_id, "join", "k").await.assert_problem(422, "idempotency-key-reused");
    post_join_action_with_key(&client, event.event_id, "cancel", "k")
        .await
        .assert_problem(422, "idempotency-key-reused");
    // The same key for two events at the same time, at two replicas: exactly one succeeds.
    for n in 0..20 {
        let (one, two, key) = (fixture.create_event(0).await, fixture.create_event(0).await, format!("both {n}"));
        let sent = [(&fixture.apps[0], &one), (&fixture.apps[1], &two)]
            .map(|(app, event)| (app.user(user, None), event.event_id, key.clone()));
        let sent = sent
            .map(|(client, event, key)| async move { post_join_action_with_key(&client, event, "join", &key).await });
        let statuses: BTreeSet<u16> = join_all(sent).await.iter().map(|answer| answer.status).collect();
        assert_eq!(statuses, BTreeSet::from([201, 422]));
        assert_eq!(fixture.counts(&one).await.0 + fixture.counts(&two).await.0, 1);
    }
    let organizer = fixture.organizer().with_header("idempotency-key", "kick");
    let (path, body) = (format!("/join/v1/events/{}/kick", other.event_id), json!({"user_id": user}));
    organizer.post(&path, body.clone()).await.assert_problem(404, "not-registered");
    assert_eq!(fixture.join(&other, user).await.status, 201);
    let again = organizer.post(&path, body).await;
    again.assert_problem(404, "not-registered");
    assert_eq!(again.header("idempotent-replayed"), "true");
    organizer.post(&path, json!({"user_id": Uuid::now_v7()})).await.assert_problem(422, "idempotency-key-reused");
    fixture.check_invariants().await;
    fixture.stop().await;
}

#[tokio::test]
async fn concurrent_cancellations_promote_users_in_their_order() {
    let fixture = Fixture::start(3).await;
    let event = fixture.create_event(20).await;
    let users = fixture.join_users(&event, 60).await;
    // All active users and some of the waitlisted ones cancel at the same time.
    let canceling: Vec<Uuid> = users[..20].iter().chain(users[20..].iter().step_by(4)).copied().collect();
    for answer in join_all(canceling.iter().map(|user| fixture.cancel(&event, *user))).await {
        assert_eq!((answer.status, answer.json()["status"].as_str()), (200, Some("canceled")), "{answer:?}");
    }
    let stayed: Vec<Uuid> = users[20..].iter().copied().filter(|user| !canceling.contains(user)).collect();
    for (at, user) in stayed.iter().enumerate() {
        assert_eq!(fixture.status(&event, *user).await, if at < 20 { "active" } else { "waitlisted" }, "{at}");
    }
    assert_eq!(fixture.counts(&event).await, (20, 10));
    fixture.check_invariants().await;
    fixture.stop().await;
}

/// A pseudo-random number generator that a seed reproduces.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

#[tokio::test]
async fn random_concurrent_actions_violate_no_invariant() {
    let seed = Uuid::new_v4().as_u128() as u64 | 1;
    eprintln!("seed {seed}");
    let fixture = Fixture::start(3).await;
    // The capacity of the last event does not change.
    let events = [
        fixture.create_event(3).await,
        fixture.create_event(1).await,
        fixture.create_event(0).await,
        fixture.create_event(4).await,
    ];
    let users: Vec<Uuid> = (0..24).map(|_| Uuid::new_v4()).collect();
    let actions = join_all((0..12).map(async |n: u64| {
        let mut random = Random(seed.wrapping_mul(n * 2 + 3) | 1);
        for _ in 0..40 {
            let event = &events[random.below(4) as usize];
            let user = users[random.below(users.len() as u64) as usize];
            let answer = match random.below(10) {
                0..5 => fixture.join(event, user).await,
                5..8 => fixture.cancel(event, user).await,
                8 => moderate(&fixture.organizer(), event.event_id, "kick", json!({"user_id": user})).await,
                _ => {
                    let action = if random.below(2) == 0 { "ban" } else { "unban" };
                    moderate(&fixture.organizer(), event.event_id, action, json!({"user_id": user})).await
                }
            };
            let is_expected = matches!(answer.status, 200 | 201 | 204 | 403 | 404 | 409);
            assert!(is_expected, "seed {seed}: {answer:?}");
        }
    }));
    let capacities = async {
        let mut random = Random(seed);
        let mut updated = events.clone();
        for _ in 0..30 {
            let at = random.below(3) as usize;
            let capacity = random.below(6) as i32;
            updated[at] = next_version(&updated[at], |event| event.capacity = capacity);
            fixture.post_update(&updated[at]).await;
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        updated
    };
    let (_, updated) = tokio::join!(actions, capacities);
    for event in &updated {
        fixture.wait_until_known(event).await;
    }
    let lowered = updated.each_ref().map(|event| event.event_id);
    check_invariants(fixture.db(), &lowered[..3]).await;
    // No user is waitlisted while a seat is free.
    let query = "select count(*) from pillarbox_joins.event_capacity
                 where waitlist_count > 0 and (capacity = 0 or active_count < capacity)";
    assert_eq!(sqlx::query_scalar::<_, i64>(query).fetch_one(fixture.db()).await.unwrap(), 0, "seed {seed}");
    fixture.stop().await;
}

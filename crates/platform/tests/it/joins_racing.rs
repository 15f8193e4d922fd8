//! Many at once, over several replicas.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use serde_json::json;
use uuid::Uuid;

use crate::joins_world::{World, act, act_keyed, check, moderate, next};

#[tokio::test]
async fn two_hundred_racers_share_three_seats() {
    let world = World::start(3).await;
    let event = world.event(3).await;
    let racers: Vec<Uuid> = (0..200).map(|_| Uuid::new_v4()).collect();
    let answers = join_all(racers.iter().map(|user| world.join(&event, *user))).await;
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
    assert_eq!(world.counts(&event).await, (3, 197));
    world.check().await;
    world.stop().await;
}

#[tokio::test]
async fn who_comes_first_is_first() {
    let world = World::start(3).await;
    let event = world.event(2).await;
    let users = world.fill(&event, 12).await;
    let mut seqs = Vec::new();
    for user in &users {
        seqs.push(
            world.user(*user).get(&format!("/join/v1/events/{}/my", event.event_id)).await.json()["seq"].as_i64(),
        );
    }
    assert_eq!(seqs, (1..=12).map(Some).collect::<Vec<_>>());
    world.check().await;
    world.stop().await;
}

#[tokio::test]
async fn one_key_fifty_times_at_once_is_one_join_and_one_answer() {
    let world = World::start(3).await;
    let event = world.event(1).await;
    let user = Uuid::now_v7();
    let repeat = |n: usize| world.apps[n % 3].user(user, None);
    let answers = join_all((0..50).map(async |n| act_keyed(&repeat(n), event.event_id, "join", "the key").await)).await;
    let first = answers.iter().filter(|answer| !answer.headers.contains_key("idempotent-replayed")).count();
    assert_eq!(first, 1);
    for answer in &answers {
        assert_eq!((answer.status, &answer.text), (201, &answers[0].text));
    }
    assert_eq!(world.said(&event).await, [("join.confirmed".to_owned(), user)]);
    // Fifty keys are fifty requests, and still one join.
    let answers = join_all((0..50).map(async |n| act(&repeat(n), event.event_id, "join").await)).await;
    assert!(answers.iter().all(|answer| answer.status == 200), "{:?}", answers[0]);
    assert_eq!(world.said(&event).await.len(), 1);
    world.check().await;
    world.stop().await;
}

#[tokio::test]
async fn a_key_is_for_one_request_and_a_settled_refusal_is_answered_again() {
    let world = World::start(2).await;
    let (event, other) = (world.event(1).await, world.event(1).await);
    let user = Uuid::now_v7();
    let client = world.user(user);
    client
        .post(&format!("/join/v1/events/{}/join", event.event_id), json!({}))
        .await
        .assert_problem(400, "idempotency-key");
    assert_eq!(act_keyed(&client, event.event_id, "join", "k").await.status, 201);
    act_keyed(&client, other.event_id, "join", "k").await.assert_problem(422, "idempotency-key-reused");
    act_keyed(&client, event.event_id, "cancel", "k").await.assert_problem(422, "idempotency-key-reused");
    // The same key for two events at the same moment, at two replicas: one of them is done.
    for n in 0..20 {
        let (one, two, key) = (world.event(0).await, world.event(0).await, format!("both {n}"));
        let sent = [(&world.apps[0], &one), (&world.apps[1], &two)]
            .map(|(app, event)| (app.user(user, None), event.event_id, key.clone()));
        let sent = sent.map(|(client, event, key)| async move { act_keyed(&client, event, "join", &key).await });
        let statuses: BTreeSet<u16> = join_all(sent).await.iter().map(|answer| answer.status).collect();
        assert_eq!(statuses, BTreeSet::from([201, 422]));
        assert_eq!(world.counts(&one).await.0 + world.counts(&two).await.0, 1);
    }
    let organizer = world.organizer().with_header("idempotency-key", "kick");
    let (path, body) = (format!("/join/v1/events/{}/kick", other.event_id), json!({"user_id": user}));
    organizer.post(&path, body.clone()).await.assert_problem(404, "not-registered");
    assert_eq!(world.join(&other, user).await.status, 201);
    let again = organizer.post(&path, body).await;
    again.assert_problem(404, "not-registered");
    assert_eq!(again.header("idempotent-replayed"), "true");
    organizer.post(&path, json!({"user_id": Uuid::now_v7()})).await.assert_problem(422, "idempotency-key-reused");
    world.check().await;
    world.stop().await;
}

#[tokio::test]
async fn a_storm_of_cancels_moves_people_up_in_their_order() {
    let world = World::start(3).await;
    let event = world.event(20).await;
    let users = world.fill(&event, 60).await;
    // All with a seat leave at once, and some of those who wait.
    let leaving: Vec<Uuid> = users[..20].iter().chain(users[20..].iter().step_by(4)).copied().collect();
    for answer in join_all(leaving.iter().map(|user| world.cancel(&event, *user))).await {
        assert_eq!((answer.status, answer.json()["status"].as_str()), (200, Some("canceled")), "{answer:?}");
    }
    let stayed: Vec<Uuid> = users[20..].iter().copied().filter(|user| !leaving.contains(user)).collect();
    for (at, user) in stayed.iter().enumerate() {
        assert_eq!(world.status(&event, *user).await, if at < 20 { "active" } else { "waitlisted" }, "{at}");
    }
    assert_eq!(world.counts(&event).await, (20, 10));
    world.check().await;
    world.stop().await;
}

/// Numbers that are the same each time for one seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }
}

#[tokio::test]
async fn whatever_many_do_at_once_nothing_is_broken() {
    let seed = Uuid::new_v4().as_u128() as u64 | 1;
    eprintln!("seed {seed}");
    let world = World::start(3).await;
    // The last one keeps its seats.
    let events = [world.event(3).await, world.event(1).await, world.event(0).await, world.event(4).await];
    let people: Vec<Uuid> = (0..24).map(|_| Uuid::new_v4()).collect();
    let crowd = join_all((0..12).map(async |n: u64| {
        let mut dice = Dice(seed.wrapping_mul(n * 2 + 3) | 1);
        for _ in 0..40 {
            let event = &events[dice.roll(4) as usize];
            let user = people[dice.roll(people.len() as u64) as usize];
            let answer = match dice.roll(10) {
                0..5 => world.join(event, user).await,
                5..8 => world.cancel(event, user).await,
                8 => moderate(&world.organizer(), event.event_id, "kick", json!({"user_id": user})).await,
                _ => {
                    let action = if dice.roll(2) == 0 { "ban" } else { "unban" };
                    moderate(&world.organizer(), event.event_id, action, json!({"user_id": user})).await
                }
            };
            let is_expected = matches!(answer.status, 200 | 201 | 204 | 403 | 404 | 409);
            assert!(is_expected, "seed {seed}: {answer:?}");
        }
    }));
    let capacities = async {
        let mut dice = Dice(seed);
        let mut news = events.clone();
        for _ in 0..30 {
            let at = dice.roll(3) as usize;
            let capacity = dice.roll(6) as i32;
            news[at] = next(&news[at], |event| event.capacity = capacity);
            world.tell(&news[at]).await;
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        news
    };
    let (_, news) = tokio::join!(crowd, capacities);
    for event in &news {
        world.until_known(event).await;
    }
    let lowered = news.each_ref().map(|event| event.event_id);
    check(world.db(), &lowered[..3]).await;
    // Whatever it was before, nobody waits while there is room.
    let query = "select count(*) from pillarbox_joins.event_capacity
                 where waitlist_count > 0 and (capacity = 0 or active_count < capacity)";
    assert_eq!(sqlx::query_scalar::<_, i64>(query).fetch_one(world.db()).await.unwrap(), 0, "seed {seed}");
    world.stop().await;
}

//! What joins make of what is said about events.

use std::time::Duration;

use chrono::{TimeDelta, Utc};
use contracts::events::{self, EventChanged, EventRestated, EventStatus, EventVersion, EventVersions};
use mailbox::post::{Post, Source, post};
use pillarbox::settings::Role;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use testkit::{TestApp, drain};
use uuid::Uuid;

use crate::joins_world::{PATIENCE, World, check, next, published};

/// Puts so many people in, past the service: active up to the capacity, the rest waitlisted.
pub(crate) async fn crowd(world: &World, event: &EventChanged, count: i32) {
    let mut tx = world.db().begin().await.unwrap();
    let insert = "insert into pillarbox_joins.joins (id, event_id, user_id, status, seq, created_at, updated_at)
         select gen_random_uuid(), $1, gen_random_uuid(),
                (case when $2 = 0 or n <= $2 then 'active' else 'waitlisted' end)::pillarbox_joins.join_status, n, now(), now()
         from generate_series(1, $3) as n";
    sqlx::query(insert).bind(event.event_id).bind(event.capacity).bind(count).execute(&mut *tx).await.unwrap();
    let active = if event.capacity == 0 { count } else { count.min(event.capacity) };
    let update = "update pillarbox_joins.event_capacity
         set active_count = $2, waitlist_count = $3, next_seq = $4 where event_id = $1";
    sqlx::query(update)
        .bind(event.event_id)
        .bind(active)
        .bind(count - active)
        .bind(i64::from(count) + 1)
        .execute(&mut *tx)
        .await
        .unwrap();
    tx.commit().await.unwrap();
}

pub(crate) async fn expired(world: &World, event: &EventChanged) -> i64 {
    let query = "select count(distinct payload->>'user_id') from pillarbox.log
                 where source = 'joins' and topic = 'join.expired' and key = $1";
    sqlx::query_scalar(query).bind(event.event_id.to_string()).fetch_one(world.db()).await.unwrap()
}

#[tokio::test]
async fn news_count_once_and_older_ones_not_at_all() {
    let world = World::start(2).await;
    // Canceled before anything else was heard of it.
    let unheard = next(&published(world.owner, 5), |event| event.status = EventStatus::Canceled);
    world.tell(&unheard).await;
    world.until_known(&unheard).await;
    world.join(&unheard, Uuid::now_v7()).await.assert_problem(409, "event-canceled");

    let first = published(world.owner, 1);
    let steps: Vec<EventChanged> =
        (0..12).map(|n| EventChanged { version: 2 + n, capacity: 1 + n as i32, ..first.clone() }).collect();
    world.tell(&steps[0]).await;
    world.until_known(&steps[0]).await;
    let users = world.fill(&first, 8).await;
    for n in [3, 1, 5, 5, 2, 0, 7, 4, 7, 6, 1] {
        world.tell(&steps[n]).await;
    }
    world.until_known(&steps[7]).await;
    drain("all are heard", PATIENCE, async || {
        let waiting = "select count(*) from pillarbox.log l where source = 'events' and not exists
            (select from pillarbox.inbox i where i.consumer = 'joins.events' and i.message_id = l.message_id)";
        match sqlx::query_scalar::<_, i64>(waiting).fetch_one(world.db()).await.unwrap() {
            0 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    let known: (i64, i32) =
        sqlx::query_as("select event_version, capacity from pillarbox_joins.event_capacity where event_id = $1")
            .bind(first.event_id)
            .fetch_one(world.db())
            .await
            .unwrap();
    assert_eq!(known, (9, 8));
    assert_eq!(world.counts(&first).await, (8, 0), "{users:?}");
    world.check().await;
    world.stop().await;
}

#[tokio::test]
async fn more_seats_let_people_in_and_fewer_throw_nobody_out() {
    let world = World::start(2).await;
    let event = world.event(2).await;
    let users = world.fill(&event, 6).await;
    let more = next(&event, |event| event.capacity = 4);
    world.tell(&more).await;
    world.until_counts(&event, (4, 2)).await;
    let fewer = next(&more, |event| event.capacity = 1);
    world.tell(&fewer).await;
    world.until_known(&fewer).await;
    assert_eq!(world.counts(&event).await, (4, 2));
    world.cancel(&event, users[0]).await;
    assert_eq!(world.counts(&event).await, (3, 2), "there is no seat to give on");
    assert_eq!(world.join(&event, Uuid::now_v7()).await.json()["position"], 3);
    // Nobody comes in while it is not published, and nobody is put out.
    let draft = next(&fewer, |event| (event.status, event.capacity) = (EventStatus::Draft, 4));
    world.tell(&draft).await;
    world.until_known(&draft).await;
    world.cancel(&event, users[1]).await;
    assert_eq!(world.counts(&event).await, (2, 3));
    let again = next(&draft, |event| event.status = EventStatus::Published);
    world.tell(&again).await;
    world.until_counts(&event, (4, 1)).await;
    let unlimited = next(&again, |event| event.capacity = 0);
    world.tell(&unlimited).await;
    world.until_counts(&event, (5, 0)).await;
    assert_eq!(world.join(&event, Uuid::now_v7()).await.json()["status"], "active");
    check(world.db(), &[event.event_id]).await;
    world.stop().await;
}

#[tokio::test]
async fn a_large_waitlist_moves_up_in_steps_and_nobody_passes_it() {
    let world = World::start(2).await;
    let event = world.event(10).await;
    crowd(&world, &event, 1_800).await;
    let unlimited = next(&event, |event| event.capacity = 0);
    world.tell(&unlimited).await;
    world.until_known(&unlimited).await;
    let late = world.join(&event, Uuid::now_v7()).await.json();
    world.until_counts(&event, (1_801, 0)).await;
    let orders = world.promoted(&event).await;
    let latest = if late["status"] == "waitlisted" { 1_801 } else { 1_800 };
    assert_eq!(orders, (11..=latest).collect::<Vec<i64>>());
    let transactions: i64 = sqlx::query_scalar(
        "select count(distinct xid) from pillarbox.log where source = 'joins' and topic = 'join.promoted'",
    )
    .fetch_one(world.db())
    .await
    .unwrap();
    assert!(transactions >= 4, "in steps, not in {transactions}");
    world.stop().await;
}

#[tokio::test]
async fn a_place_far_back_is_not_counted_to_the_end() {
    let world = World::start(1).await;
    let event = world.event(1).await;
    crowd(&world, &event, 10_500).await;
    let place = async |seq: i64, what: &str| {
        let query = "select user_id from pillarbox_joins.joins where event_id = $1 and seq = $2";
        let user = sqlx::query_scalar(query).bind(event.event_id).bind(seq).fetch_one(world.db()).await.unwrap();
        world.user(user).get(&format!("/join/v1/events/{}/{what}", event.event_id)).await.json()
    };
    assert_eq!(place(10_000, "position").await["ahead"], 9_998);
    for far in [10_002, 10_500] {
        let expected = json!({"status": "waitlisted", "position": 10_001, "ahead": 10_000});
        assert_eq!(place(far, "position").await, expected);
        assert_eq!(place(far, "my").await["position"], 10_001);
    }
    world.stop().await;
}

#[tokio::test]
async fn everyone_is_told_that_an_event_is_canceled_once_also_through_a_crash() {
    let without = |settings: &mut pillarbox::settings::Settings| settings.roles = vec![Role::Api, Role::Consume];
    let world = World::start_with(1, without).await;
    let event = world.event(700).await;
    crowd(&world, &event, 2_600).await;
    let canceled = next(&event, |event| event.status = EventStatus::Canceled);
    world.tell(&canceled).await;
    world.until_known(&canceled).await;
    assert_eq!(expired(&world, &event).await, 0, "nobody sweeps here");
    let (capacity,): (i32,) = sqlx::query_as("select capacity from pillarbox_joins.event_capacity where event_id = $1")
        .bind(event.event_id)
        .fetch_one(world.db())
        .await
        .unwrap();
    assert_eq!(capacity, -1);
    // Sweepers that come and go, as by crashes: their connections are cut in the middle of what they do.
    let sweeping = |settings: &mut pillarbox::settings::Settings| settings.roles = vec![Role::Maintain];
    let sweepers =
        [TestApp::start_with(&world.database, sweeping).await, TestApp::start_with(&world.database, sweeping).await];
    drain("some are told", PATIENCE, async || expired(&world, &event).await > 0).await;
    world.join(&event, Uuid::now_v7()).await.assert_problem(409, "event-canceled");
    let cut = "select count(pg_terminate_backend(pid)) from pg_stat_activity
               where datname = current_database() and pid <> pg_backend_pid() and state <> 'idle'";
    for _ in 0..5 {
        sqlx::query(cut).execute(world.db()).await.ok();
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    drain("all are told", PATIENCE, async || match expired(&world, &event).await {
        2_600 => Ok(()),
        other => Err(other),
    })
    .await;
    world.until_counts(&event, (0, 0)).await;
    let said: (i64, i64) = sqlx::query_as(
        "select count(*), count(distinct xid) from pillarbox.log where source = 'joins' and topic = 'join.expired'",
    )
    .fetch_one(world.db())
    .await
    .unwrap();
    assert_eq!(said.0, 2_600, "each once");
    assert!(said.1 >= 6, "in steps");
    let due = "select count(*) from pillarbox_joins.event_capacity where sweep_at is not null and event_id = $1";
    assert_eq!(sqlx::query_scalar::<_, i64>(due).bind(event.event_id).fetch_one(world.db()).await.unwrap(), 0);
    for sweeper in sweepers {
        sweeper.stop().await;
    }
    world.stop().await;
}

#[tokio::test]
async fn who_still_waits_when_an_event_ends_is_told() {
    let world = World::start(2).await;
    let event = world.event(2).await;
    let users = world.fill(&event, 5).await;
    let large = world.event(10).await;
    crowd(&world, &large, 1_300).await;
    let ends = |event: &EventChanged| next(event, |event| event.end_time = Utc::now() + TimeDelta::seconds(1));
    let soon = ends(&event);
    world.tell(&soon).await;
    world.tell(&ends(&large)).await;
    world.until_counts(&event, (2, 0)).await;
    world.until_counts(&large, (10, 0)).await;
    assert!(Utc::now() >= soon.end_time);
    assert_eq!(world.status(&event, users[1]).await, "active", "who took part took part");
    let told: Vec<Uuid> = world
        .said(&event)
        .await
        .into_iter()
        .filter(|(topic, _)| topic == "join.expired")
        .map(|(_, user)| user)
        .collect();
    assert_eq!(told, users[2..]);
    assert_eq!(expired(&world, &large).await, 1_290);
    // A seat that becomes free now is for nobody.
    world.cancel(&event, users[0]).await;
    assert_eq!(world.counts(&event).await, (1, 0));
    world.stop().await;
}

async fn say(world: &World, message: Post) {
    let mut tx = world.db().begin().await.unwrap();
    post(&mut tx, &Source::new(events::SOURCE), &message).await.unwrap();
    tx.commit().await.unwrap();
}

/// States these, with the version and the number of their counts, and returns the answer.
async fn state(world: &World, dry_run: bool, force: bool, events: &[(&EventChanged, i64, i32)]) -> Value {
    let version = |(event, count_version, active_participants): &(&EventChanged, i64, i32)| EventVersion {
        event_id: event.event_id,
        version: event.version,
        status: event.status,
        count_version: *count_version,
        active_participants: *active_participants,
    };
    let run = Uuid::now_v7();
    let stated = EventVersions { run, part: 7, dry_run, force, events: events.iter().map(version).collect() };
    say(world, Post::new(events::VERSIONS, to_raw_value(&stated).unwrap())).await;
    drain("the answer", PATIENCE, async || {
        let query = "select payload::jsonb from pillarbox.log where source = 'joins' and topic = 'join.counted'
                     and payload->>'run' = $1";
        sqlx::query_scalar::<_, Value>(query).bind(run.to_string()).fetch_optional(world.db()).await.unwrap()
    })
    .await
}

async fn restate(world: &World, event: &EventChanged, (count_version, active_participants): (i64, i32)) {
    let restated = EventRestated { event: event.clone(), active_participants, count_version };
    let message = Post::new(events::RESTATED, to_raw_value(&restated).unwrap()).with_key(event.event_id.to_string());
    say(world, message).await;
    world.until_known(event).await;
}

/// The events that an answer wants to hear of again, and the version that is known.
fn wanted(answer: &Value) -> Vec<(Uuid, i64)> {
    let one =
        |wanted: &Value| (wanted["event_id"].as_str().unwrap().parse().unwrap(), wanted["version"].as_i64().unwrap());
    answer["wanted"].as_array().unwrap().iter().map(one).collect()
}

#[tokio::test]
async fn what_drifted_is_named_and_put_right_when_it_is_said_again() {
    let world = World::start(2).await;
    let (event, fine) = (world.event(3).await, world.event(0).await);
    world.fill(&event, 5).await;
    world.fill(&fine, 1).await;
    // Counts that are wrong, and news that never came.
    let spoil = "update pillarbox_joins.event_capacity set active_count = 1, waitlist_count = 0 where event_id = $1";
    sqlx::query(spoil).bind(event.event_id).execute(world.db()).await.unwrap();
    let (missed, unheard) = (next(&event, |event| event.capacity = 4), published(world.owner, 2));
    let all = [(&missed, 5, 3), (&fine, 1, 1), (&unheard, 0, 0)];
    let looked = state(&world, true, false, &all).await;
    assert_eq!(
        (&looked["drifted"], &looked["repaired"], &looked["part"], &looked["checked"]),
        (&json!(1), &json!(0), &json!(7), &json!(3)),
        "{looked}"
    );
    assert_eq!(wanted(&looked), [(event.event_id, event.version), (unheard.event_id, 0)]);
    let answered = state(&world, false, false, &all).await;
    assert_eq!((&answered["drifted"], &answered["repaired"]), (&json!(1), &json!(1)), "{answered}");
    assert_eq!(world.counts(&event).await, (1, 0), "comparing changes nothing");

    restate(&world, &missed, (5, 3)).await;
    restate(&world, &unheard, (0, 0)).await;
    world.until_counts(&event, (4, 1)).await;
    assert_eq!(world.join(&unheard, Uuid::now_v7()).await.status, 201);
    world.check().await;
    let again = state(&world, false, false, &[(&missed, 7, 4), (&fine, 1, 1), (&unheard, 1, 1)]).await;
    assert_eq!((&again["drifted"], wanted(&again), &again["events"]), (&json!(0), vec![], &json!([])), "{again}");

    // Older than what is known changes nothing, however often it is said; the events service must go above it.
    restate(&world, &event, (7, 4)).await;
    let old = state(&world, false, false, &[(&event, 7, 4)]).await;
    assert_eq!((&old["drifted"], wanted(&old)), (&json!(0), vec![(event.event_id, missed.version)]), "{old}");
    let forced = state(&world, false, true, &[(&fine, 1, 1)]).await;
    assert_eq!((&forced["drifted"], wanted(&forced)), (&json!(0), vec![(fine.event_id, fine.version)]), "{forced}");
    world.check().await;
    world.stop().await;
}

#[tokio::test]
async fn a_count_on_its_way_is_no_drift_and_one_that_cannot_be_right_is() {
    let world = World::start(1).await;
    let event = world.event(0).await;
    world.fill(&event, 3).await;
    for (told, is_wrong) in [((2, 2), false), ((3, 3), false), ((3, 2), true), ((9, 3), true)] {
        let answer = state(&world, true, false, &[(&event, told.0, told.1)]).await;
        assert_eq!(answer["events"].as_array().unwrap().len(), usize::from(is_wrong), "{told:?}: {answer}");
        assert_eq!(answer["drifted"], json!(0), "{answer}");
    }
    // Who has a version that was never given here is told one above it.
    restate(&world, &next(&event, |_| {}), (9, 3)).await;
    let said: Vec<Value> = sqlx::query_scalar(
        "select payload::jsonb->'counts' from pillarbox.log where source = 'joins' and topic = 'join.recounted' and key = $1",
    )
    .bind(event.event_id.to_string())
    .fetch_all(world.db())
    .await
    .unwrap();
    assert_eq!(said, [json!({"active": 3, "waitlisted": 0, "version": 10})]);
    world.fill(&event, 1).await;
    world.check().await;
    world.stop().await;
}

#[tokio::test]
async fn people_move_up_by_news_that_are_said_again_and_are_counted_right() {
    let world = World::start(1).await;
    let event = world.event(2).await;
    world.fill(&event, 5).await;
    restate(&world, &next(&event, |event| event.capacity = 4), (5, 2)).await;
    assert_eq!(world.counts(&event).await, (4, 1));
    world.check().await;
    world.stop().await;
}

#[tokio::test]
async fn only_the_events_service_is_believed() {
    let world = World::start(1).await;
    let event = published(Uuid::now_v7(), 5);
    for source in [Source::new("hub"), Source::new("sql"), Source::from_queue("theirs")] {
        let message = Post::new(events::PUBLISHED, to_raw_value(&event).unwrap()).with_key(event.event_id.to_string());
        let mut tx = world.db().begin().await.unwrap();
        post(&mut tx, &source, &message).await.unwrap();
        tx.commit().await.unwrap();
    }
    world.event(1).await;
    let known: i64 = sqlx::query_scalar("select count(*) from pillarbox_joins.event_capacity where event_id = $1")
        .bind(event.event_id)
        .fetch_one(world.db())
        .await
        .unwrap();
    assert_eq!(known, 0);
    world.stop().await;
}

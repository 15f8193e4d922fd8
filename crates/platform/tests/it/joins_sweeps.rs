//! What joins do without being asked, whatever is wrong with one event and however busy another is.

use contracts::events::{EventChanged, EventStatus};
use kit::trace::TraceContext;
use pillarbox::settings::{Role, Settings};
use testkit::{TestApp, drain};
use uuid::Uuid;

use crate::joins_news::{crowd, expired};
use crate::joins_world::{PATIENCE, World, next};

fn without_sweeps(settings: &mut Settings) {
    settings.roles = vec![Role::Api, Role::Consume];
}

async fn sweeper(world: &World) -> TestApp {
    TestApp::start_with(&world.database, |settings| settings.roles = vec![Role::Maintain]).await
}

async fn cancel(world: &World, event: &EventChanged) {
    let canceled = next(event, |event| event.status = EventStatus::Canceled);
    TraceContext::start().scope(world.tell(&canceled)).await;
    world.until_known(&canceled).await;
}

async fn spoil(world: &World, event: &EventChanged, (active, waitlisted): (i32, i32)) {
    let spoil = "update pillarbox_joins.event_capacity set active_count = $2, waitlist_count = $3 where event_id = $1";
    sqlx::query(spoil).bind(event.event_id).bind(active).bind(waitlisted).execute(world.db()).await.unwrap();
}

async fn until_told(world: &World, event: &EventChanged, people: i64) {
    drain(&format!("{people} are told"), PATIENCE, async || match expired(world, event).await {
        told if told == people => Ok(()),
        other => Err(other),
    })
    .await;
}

#[tokio::test]
async fn counts_that_are_wrong_are_counted_anew_and_hold_up_nobody() {
    let world = World::start_with(1, without_sweeps).await;
    let wrong = [(1, 0), (9, 9), (0, 4), (700, 2)];
    let mut events = Vec::new();
    for counts in wrong {
        let event = world.event(3).await;
        world.fill(&event, 5).await;
        cancel(&world, &event).await;
        spoil(&world, &event, counts).await;
        events.push(event);
    }
    let (nobody, right) = (world.event(3).await, world.event(3).await);
    world.fill(&right, 5).await;
    for event in [&nobody, &right] {
        cancel(&world, event).await;
    }
    let due = "update pillarbox_joins.event_capacity set active_count = 2, sweep_at = now() where event_id = $1";
    sqlx::query(due).bind(nobody.event_id).execute(world.db()).await.unwrap();
    let sweeper = sweeper(&world).await;
    for event in events.iter().chain([&right]) {
        until_told(&world, event, 5).await;
    }
    world.until_counts(&nobody, (0, 0)).await;
    world.check().await;
    sweeper.stop().await;
    world.stop().await;
}

#[tokio::test]
async fn an_event_that_cannot_be_swept_waits_behind_the_others() {
    let world = World::start_with(1, without_sweeps).await;
    let (broken, fine) = (world.event(3).await, world.event(3).await);
    for event in [&broken, &fine] {
        world.fill(event, 5).await;
        cancel(&world, event).await;
    }
    // The version that its next change would have is taken.
    let taken = "insert into pillarbox_joins.history (event_id, version, user_id, action, by, at)
                 values ($1, 6, gen_random_uuid(), 'banned', 'system', now())";
    sqlx::query(taken).bind(broken.event_id).execute(world.db()).await.unwrap();
    let sweeper = sweeper(&world).await;
    until_told(&world, &fine, 5).await;
    assert_eq!(expired(&world, &broken).await, 0);
    sweeper.stop().await;
    world.stop().await;
}

#[tokio::test]
async fn a_large_event_lets_others_have_their_turn() {
    let world = World::start_with(1, without_sweeps).await;
    let (large, small) = (world.event(0).await, world.event(0).await);
    crowd(&world, &large, 5_000).await;
    crowd(&world, &small, 600).await;
    cancel(&world, &large).await;
    cancel(&world, &small).await;
    let sweeper = sweeper(&world).await;
    until_told(&world, &large, 5_000).await;
    until_told(&world, &small, 600).await;
    let last = async |event: &EventChanged| {
        let query = "select max(id) from pillarbox.log where topic = 'join.expired' and key = $1";
        let found: i64 =
            sqlx::query_scalar(query).bind(event.event_id.to_string()).fetch_one(world.db()).await.unwrap();
        found
    };
    assert!(last(&small).await < last(&large).await, "the small one does not wait for the end of the large one");
    sweeper.stop().await;
    world.stop().await;
}

#[tokio::test]
async fn an_event_too_busy_to_be_swept_is_swept_by_who_keeps_it_busy() {
    let world = World::start_with(1, without_sweeps).await;
    let event = world.event(10).await;
    crowd(&world, &event, 1_800).await;
    let unlimited = next(&event, |event| event.capacity = 0);
    world.tell(&unlimited).await;
    world.until_known(&unlimited).await;
    for _ in 0..4 {
        assert_eq!(world.join(&event, Uuid::now_v7()).await.status, 201);
    }
    assert_eq!(world.counts(&event).await, (1_804, 0));
    let orders = world.promoted(&event).await;
    assert!(orders.is_sorted() && orders[..1_790] == (11..=1_800).collect::<Vec<i64>>(), "{orders:?}");
    world.stop().await;
}

#[tokio::test]
async fn what_is_swept_says_whose_news_it_follows_from() {
    let world = World::start_with(1, without_sweeps).await;
    let (canceled, larger) = (world.event(0).await, world.event(1).await);
    crowd(&world, &canceled, 1_300).await;
    crowd(&world, &larger, 1_300).await;
    cancel(&world, &canceled).await;
    let unlimited = next(&larger, |event| event.capacity = 0);
    TraceContext::start().scope(world.tell(&unlimited)).await;
    world.until_known(&unlimited).await;
    let sweeper = sweeper(&world).await;
    until_told(&world, &canceled, 1_300).await;
    world.until_counts(&larger, (1_300, 0)).await;
    for event in [&canceled, &larger] {
        let traces = "select distinct h.by, m.payload->>'trace_id', split_part(n.headers->>'traceparent', '-', 2)
             from pillarbox_joins.history h
             join pillarbox.log m on m.source = 'joins' and m.key = h.event_id::text
                  and (m.payload->'counts'->>'version')::bigint = h.version
             join pillarbox.log n on n.source = 'events' and n.key = h.event_id::text and n.topic <> 'event.published'
             where h.event_id = $1 and h.action in ('expired', 'promoted')";
        let found: Vec<(String, String, String)> =
            sqlx::query_as(traces).bind(event.event_id).fetch_all(world.db()).await.unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].0.as_str(), &found[0].1), ("events", &found[0].2));
    }
    sweeper.stop().await;
    world.stop().await;
}

//! The background sweep of canceled, ended and enlarged events: corrupt counts, failures, fairness and tracing.

use contracts::events::{EventChanged, EventStatus};
use runtime::trace::TraceContext;
use server::settings::{Role, Settings};
use testkit::{TestApp, eventually};
use uuid::Uuid;

use crate::joins::fixture::{Fixture, expired_count, insert_registrations, next_version};
use crate::support::DEADLINE;

fn without_sweeps(settings: &mut Settings) {
    settings.roles = vec![Role::Api, Role::Consume];
}

async fn start_sweeper(fixture: &Fixture) -> TestApp {
    TestApp::start_with(&fixture.database, |settings| settings.roles = vec![Role::Maintain]).await
}

async fn cancel_event(fixture: &Fixture, event: &EventChanged) {
    let canceled = next_version(event, |event| event.status = EventStatus::Canceled);
    TraceContext::start().scope(fixture.post_update(&canceled)).await;
    fixture.wait_until_known(&canceled).await;
}

async fn corrupt_counts(fixture: &Fixture, event: &EventChanged, (active, waitlisted): (i32, i32)) {
    let update = "update pillarbox_joins.event_capacity set active_count = $2, waitlist_count = $3 where event_id = $1";
    sqlx::query(update).bind(event.event_id).bind(active).bind(waitlisted).execute(fixture.db()).await.unwrap();
}

async fn wait_for_expirations(fixture: &Fixture, event: &EventChanged, users: i64) {
    eventually(&format!("{users} registrations are expired"), DEADLINE, async || {
        match expired_count(fixture, event).await {
            count if count == users => Ok(()),
            other => Err(other),
        }
    })
    .await;
}

#[tokio::test]
async fn a_sweep_corrects_wrong_counts_and_delays_no_other_event() {
    let fixture = Fixture::start_with(1, without_sweeps).await;
    let wrong = [(1, 0), (9, 9), (0, 4), (700, 2)];
    let mut events = Vec::new();
    for counts in wrong {
        let event = fixture.create_event(3).await;
        fixture.join_users(&event, 5).await;
        cancel_event(&fixture, &event).await;
        corrupt_counts(&fixture, &event, counts).await;
        events.push(event);
    }
    let (empty, right) = (fixture.create_event(3).await, fixture.create_event(3).await);
    fixture.join_users(&right, 5).await;
    for event in [&empty, &right] {
        cancel_event(&fixture, event).await;
    }
    let due = "update pillarbox_joins.event_capacity set active_count = 2, sweep_at = now() where event_id = $1";
    sqlx::query(due).bind(empty.event_id).execute(fixture.db()).await.unwrap();
    let sweeper = start_sweeper(&fixture).await;
    for event in events.iter().chain([&right]) {
        wait_for_expirations(&fixture, event, 5).await;
    }
    fixture.wait_for_counts(&empty, (0, 0)).await;
    fixture.check_invariants().await;
    sweeper.stop().await;
    fixture.stop().await;
}

#[tokio::test]
async fn an_event_whose_sweep_fails_does_not_block_the_others() {
    let fixture = Fixture::start_with(1, without_sweeps).await;
    let (broken, fine) = (fixture.create_event(3).await, fixture.create_event(3).await);
    for event in [&broken, &fine] {
        fixture.join_users(event, 5).await;
        cancel_event(&fixture, event).await;
    }
    // The version of its next change exists already, so the sweep fails.
    let conflicting = "insert into pillarbox_joins.history (event_id, version, user_id, action, by, at)
                 values ($1, 6, gen_random_uuid(), 'banned', 'system', now())";
    sqlx::query(conflicting).bind(broken.event_id).execute(fixture.db()).await.unwrap();
    let sweeper = start_sweeper(&fixture).await;
    wait_for_expirations(&fixture, &fine, 5).await;
    assert_eq!(expired_count(&fixture, &broken).await, 0);
    sweeper.stop().await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_large_event_does_not_starve_a_small_one() {
    let fixture = Fixture::start_with(1, without_sweeps).await;
    let (large, small) = (fixture.create_event(0).await, fixture.create_event(0).await);
    insert_registrations(&fixture, &large, 5_000).await;
    insert_registrations(&fixture, &small, 600).await;
    cancel_event(&fixture, &large).await;
    cancel_event(&fixture, &small).await;
    let sweeper = start_sweeper(&fixture).await;
    wait_for_expirations(&fixture, &large, 5_000).await;
    wait_for_expirations(&fixture, &small, 600).await;
    let last = async |event: &EventChanged| {
        let query = "select max(id) from pillarbox.log where topic = 'join.expired' and key = $1";
        let found: i64 =
            sqlx::query_scalar(query).bind(event.event_id.to_string()).fetch_one(fixture.db()).await.unwrap();
        found
    };
    assert!(last(&small).await < last(&large).await, "the small event is done before the large one");
    sweeper.stop().await;
    fixture.stop().await;
}

#[tokio::test]
async fn requests_to_a_busy_event_also_promote_its_waitlist() {
    let fixture = Fixture::start_with(1, without_sweeps).await;
    let event = fixture.create_event(10).await;
    insert_registrations(&fixture, &event, 1_800).await;
    let unlimited = next_version(&event, |event| event.capacity = 0);
    fixture.post_update(&unlimited).await;
    fixture.wait_until_known(&unlimited).await;
    for _ in 0..4 {
        assert_eq!(fixture.join(&event, Uuid::now_v7()).await.status, 201);
    }
    assert_eq!(fixture.counts(&event).await, (1_804, 0));
    let promoted = fixture.promoted_seqs(&event).await;
    assert!(promoted.is_sorted() && promoted[..1_790] == (11..=1_800).collect::<Vec<i64>>(), "{promoted:?}");
    fixture.stop().await;
}

#[tokio::test]
async fn swept_registrations_carry_the_trace_of_the_event_update() {
    let fixture = Fixture::start_with(1, without_sweeps).await;
    let (canceled, larger) = (fixture.create_event(0).await, fixture.create_event(1).await);
    insert_registrations(&fixture, &canceled, 1_300).await;
    insert_registrations(&fixture, &larger, 1_300).await;
    cancel_event(&fixture, &canceled).await;
    let unlimited = next_version(&larger, |event| event.capacity = 0);
    TraceContext::start().scope(fixture.post_update(&unlimited)).await;
    fixture.wait_until_known(&unlimited).await;
    let sweeper = start_sweeper(&fixture).await;
    wait_for_expirations(&fixture, &canceled, 1_300).await;
    fixture.wait_for_counts(&larger, (1_300, 0)).await;
    for event in [&canceled, &larger] {
        let traces = "select distinct h.by, m.payload->>'trace_id', split_part(n.headers->>'traceparent', '-', 2)
             from pillarbox_joins.history h
             join pillarbox.log m on m.source = 'joins' and m.key = h.event_id::text
                  and (m.payload->'counts'->>'version')::bigint = h.version
             join pillarbox.log n on n.source = 'events' and n.key = h.event_id::text and n.topic <> 'event.published'
             where h.event_id = $1 and h.action in ('expired', 'promoted')";
        let found: Vec<(String, String, String)> =
            sqlx::query_as(traces).bind(event.event_id).fetch_all(fixture.db()).await.unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].0.as_str(), &found[0].1), ("events", &found[0].2));
    }
    sweeper.stop().await;
    fixture.stop().await;
}

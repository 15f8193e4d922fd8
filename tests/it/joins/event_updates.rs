//! How the joins service handles messages of the events service: updates, cancellation, end and reconciliation.

use std::time::Duration;

use chrono::{TimeDelta, Utc};
use contracts::events::{self, EventChanged, EventStatus};
use pillarbox::log::{Post, Source, post};
use serde_json::json;
use serde_json::value::to_raw_value;
use server::settings::Role;
use testkit::{TestApp, eventually};
use uuid::Uuid;

use crate::joins::fixture::{Fixture, expired_count, insert_registrations, new_event, next_version};
use crate::joins::invariants::check_invariants;
use crate::support::DEADLINE;

#[tokio::test]
async fn event_updates_apply_once_and_older_ones_are_ignored() {
    let fixture = Fixture::start(2).await;
    // The cancellation is the first message about this event.
    let unknown = next_version(&new_event(fixture.owner, 5), |event| event.status = EventStatus::Canceled);
    fixture.post_update(&unknown).await;
    fixture.wait_until_known(&unknown).await;
    fixture.join(&unknown, Uuid::now_v7()).await.assert_problem(409, "event-canceled");

    let first = new_event(fixture.owner, 1);
    let steps: Vec<EventChanged> =
        (0..12).map(|n| EventChanged { version: 2 + n, capacity: 1 + n as i32, ..first.clone() }).collect();
    fixture.post_update(&steps[0]).await;
    fixture.wait_until_known(&steps[0]).await;
    let users = fixture.join_users(&first, 8).await;
    for n in [3, 1, 5, 5, 2, 0, 7, 4, 7, 6, 1] {
        fixture.post_update(&steps[n]).await;
    }
    fixture.wait_until_known(&steps[7]).await;
    eventually("every update is handled", DEADLINE, async || {
        let waiting = "select count(*) from pillarbox.log l where source = 'events' and not exists
            (select from pillarbox.inbox i where i.consumer = 'joins.events' and i.message_id = l.message_id)";
        match sqlx::query_scalar::<_, i64>(waiting).fetch_one(fixture.db()).await.unwrap() {
            0 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    let known: (i64, i32) =
        sqlx::query_as("select event_version, capacity from pillarbox_joins.event_capacity where event_id = $1")
            .bind(first.event_id)
            .fetch_one(fixture.db())
            .await
            .unwrap();
    assert_eq!(known, (9, 8));
    assert_eq!(fixture.counts(&first).await, (8, 0), "{users:?}");
    fixture.check_invariants().await;
    fixture.stop().await;
}

#[tokio::test]
async fn more_seats_promote_users_and_fewer_seats_remove_no_user() {
    let fixture = Fixture::start(2).await;
    let event = fixture.create_event(2).await;
    let users = fixture.join_users(&event, 6).await;
    let more = next_version(&event, |event| event.capacity = 4);
    fixture.post_update(&more).await;
    fixture.wait_for_counts(&event, (4, 2)).await;
    let fewer = next_version(&more, |event| event.capacity = 1);
    fixture.post_update(&fewer).await;
    fixture.wait_until_known(&fewer).await;
    assert_eq!(fixture.counts(&event).await, (4, 2));
    fixture.cancel(&event, users[0]).await;
    assert_eq!(fixture.counts(&event).await, (3, 2), "there is no free seat");
    assert_eq!(fixture.join(&event, Uuid::now_v7()).await.json()["position"], 3);
    // While the event is not published, no user is promoted or removed.
    let draft = next_version(&fewer, |event| (event.status, event.capacity) = (EventStatus::Draft, 4));
    fixture.post_update(&draft).await;
    fixture.wait_until_known(&draft).await;
    fixture.cancel(&event, users[1]).await;
    assert_eq!(fixture.counts(&event).await, (2, 3));
    let again = next_version(&draft, |event| event.status = EventStatus::Published);
    fixture.post_update(&again).await;
    fixture.wait_for_counts(&event, (4, 1)).await;
    let unlimited = next_version(&again, |event| event.capacity = 0);
    fixture.post_update(&unlimited).await;
    fixture.wait_for_counts(&event, (5, 0)).await;
    assert_eq!(fixture.join(&event, Uuid::now_v7()).await.json()["status"], "active");
    check_invariants(fixture.db(), &[event.event_id]).await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_large_waitlist_is_promoted_in_batches_and_in_order() {
    let fixture = Fixture::start(2).await;
    let event = fixture.create_event(10).await;
    insert_registrations(&fixture, &event, 1_800).await;
    let unlimited = next_version(&event, |event| event.capacity = 0);
    fixture.post_update(&unlimited).await;
    fixture.wait_until_known(&unlimited).await;
    let late = fixture.join(&event, Uuid::now_v7()).await.json();
    fixture.wait_for_counts(&event, (1_801, 0)).await;
    let promoted = fixture.promoted_seqs(&event).await;
    let latest = if late["status"] == "waitlisted" { 1_801 } else { 1_800 };
    assert_eq!(promoted, (11..=latest).collect::<Vec<i64>>());
    let transactions: i64 = sqlx::query_scalar(
        "select count(distinct xid) from pillarbox.log where source = 'joins' and topic = 'join.promoted'",
    )
    .fetch_one(fixture.db())
    .await
    .unwrap();
    assert!(transactions >= 4, "in batches, not in {transactions} transactions");
    fixture.stop().await;
}

#[tokio::test]
async fn positions_beyond_ten_thousand_are_capped() {
    let fixture = Fixture::start(1).await;
    let event = fixture.create_event(1).await;
    insert_registrations(&fixture, &event, 10_500).await;
    let get_as = async |seq: i64, what: &str| {
        let query = "select user_id from pillarbox_joins.joins where event_id = $1 and seq = $2";
        let user = sqlx::query_scalar(query).bind(event.event_id).bind(seq).fetch_one(fixture.db()).await.unwrap();
        fixture.user(user).get(&format!("/join/v1/events/{}/{what}", event.event_id)).await.json()
    };
    assert_eq!(get_as(10_000, "position").await["ahead"], 9_998);
    for far in [10_002, 10_500] {
        let expected = json!({"status": "waitlisted", "position": 10_001, "ahead": 10_000});
        assert_eq!(get_as(far, "position").await, expected);
        assert_eq!(get_as(far, "my").await["position"], 10_001);
    }
    fixture.stop().await;
}

#[tokio::test]
async fn each_participant_of_a_canceled_event_expires_once_despite_crashes() {
    let without_sweeper = |settings: &mut server::settings::Settings| settings.roles = vec![Role::Api, Role::Consume];
    let fixture = Fixture::start_with(1, without_sweeper).await;
    let event = fixture.create_event(700).await;
    insert_registrations(&fixture, &event, 2_600).await;
    let canceled = next_version(&event, |event| event.status = EventStatus::Canceled);
    fixture.post_update(&canceled).await;
    fixture.wait_until_known(&canceled).await;
    assert_eq!(expired_count(&fixture, &event).await, 0, "no process sweeps here");
    let (capacity,): (i32,) = sqlx::query_as("select capacity from pillarbox_joins.event_capacity where event_id = $1")
        .bind(event.event_id)
        .fetch_one(fixture.db())
        .await
        .unwrap();
    assert_eq!(capacity, -1);
    // Two sweepers whose connections are terminated in the middle of their work, as in a crash.
    let sweeping = |settings: &mut server::settings::Settings| settings.roles = vec![Role::Maintain];
    let sweepers = [
        TestApp::start_with(&fixture.database, sweeping).await,
        TestApp::start_with(&fixture.database, sweeping).await,
    ];
    eventually("some registrations are expired", DEADLINE, async || expired_count(&fixture, &event).await > 0).await;
    fixture.join(&event, Uuid::now_v7()).await.assert_problem(409, "event-canceled");
    let cut = "select count(pg_terminate_backend(pid)) from pg_stat_activity
               where datname = current_database() and pid <> pg_backend_pid() and state <> 'idle'";
    for _ in 0..5 {
        sqlx::query(cut).execute(fixture.db()).await.ok();
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    eventually("all registrations are expired", DEADLINE, async || match expired_count(&fixture, &event).await {
        2_600 => Ok(()),
        other => Err(other),
    })
    .await;
    fixture.wait_for_counts(&event, (0, 0)).await;
    let (posted, transactions): (i64, i64) = sqlx::query_as(
        "select count(*), count(distinct xid) from pillarbox.log where source = 'joins' and topic = 'join.expired'",
    )
    .fetch_one(fixture.db())
    .await
    .unwrap();
    assert_eq!(posted, 2_600, "each exactly once");
    assert!(transactions >= 6, "in batches");
    let due = "select count(*) from pillarbox_joins.event_capacity where sweep_at is not null and event_id = $1";
    assert_eq!(sqlx::query_scalar::<_, i64>(due).bind(event.event_id).fetch_one(fixture.db()).await.unwrap(), 0);
    for sweeper in sweepers {
        sweeper.stop().await;
    }
    fixture.stop().await;
}

#[tokio::test]
async fn waitlisted_registrations_expire_when_the_event_ends() {
    let fixture = Fixture::start(2).await;
    let event = fixture.create_event(2).await;
    let users = fixture.join_users(&event, 5).await;
    let large = fixture.create_event(10).await;
    insert_registrations(&fixture, &large, 1_300).await;
    let ends = |event: &EventChanged| next_version(event, |event| event.end_time = Utc::now() + TimeDelta::seconds(1));
    let soon = ends(&event);
    fixture.post_update(&soon).await;
    fixture.post_update(&ends(&large)).await;
    fixture.wait_for_counts(&event, (2, 0)).await;
    fixture.wait_for_counts(&large, (10, 0)).await;
    assert!(Utc::now() >= soon.end_time);
    assert_eq!(fixture.status(&event, users[1]).await, "active", "active registrations stay");
    let expired_users: Vec<Uuid> = fixture
        .posted_messages(&event)
        .await
        .into_iter()
        .filter(|(topic, _)| topic == "join.expired")
        .map(|(_, user)| user)
        .collect();
    assert_eq!(expired_users, users[2..]);
    assert_eq!(expired_count(&fixture, &large).await, 1_290);
    // A seat that becomes free after the end is not given to another user.
    fixture.cancel(&event, users[0]).await;
    assert_eq!(fixture.counts(&event).await, (1, 0));
    fixture.stop().await;
}

#[tokio::test]
async fn only_messages_of_the_events_service_are_accepted() {
    let fixture = Fixture::start(1).await;
    let event = new_event(Uuid::now_v7(), 5);
    for source in [Source::new("hub"), Source::new("sql"), Source::from_queue("theirs")] {
        let message = Post::new(events::PUBLISHED, to_raw_value(&event).unwrap()).with_key(event.event_id.to_string());
        let mut tx = fixture.db().begin().await.unwrap();
        post(&mut tx, &source, &message).await.unwrap();
        tx.commit().await.unwrap();
    }
    fixture.create_event(1).await;
    let known: i64 = sqlx::query_scalar("select count(*) from pillarbox_joins.event_capacity where event_id = $1")
        .bind(event.event_id)
        .fetch_one(fixture.db())
        .await
        .unwrap();
    assert_eq!(known, 0);
    fixture.stop().await;
}

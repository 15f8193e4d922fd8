//! Reconciliation in the joins service; the test plays the events service.

use contracts::events::{self, EventChanged, EventRestated, EventVersion, EventVersions};
use pillarbox::log::{Post, Source, post};
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use testkit::eventually;
use uuid::Uuid;

use crate::joins::fixture::{Fixture, new_event, next_version};
use crate::support::DEADLINE;

/// Posts a message as the events service.
async fn post_message(fixture: &Fixture, message: Post) {
    let mut tx = fixture.db().begin().await.unwrap();
    post(&mut tx, &Source::new(events::SOURCE), &message).await.unwrap();
    tx.commit().await.unwrap();
}

/// Posts these events with their count version and count as one part of a reconciliation. Returns the answer.
async fn request_comparison(
    fixture: &Fixture,
    dry_run: bool,
    force: bool,
    events: &[(&EventChanged, i64, i32)],
) -> Value {
    let version = |(event, count_version, active_participants): &(&EventChanged, i64, i32)| EventVersion {
        event_id: event.event_id,
        version: event.version,
        status: event.status,
        count_version: *count_version,
        active_participants: *active_participants,
    };
    let run = Uuid::now_v7();
    let stated = EventVersions { run, part: 7, dry_run, force, events: events.iter().map(version).collect() };
    post_message(fixture, Post::new(events::VERSIONS, to_raw_value(&stated).unwrap())).await;
    eventually("the answer is posted", DEADLINE, async || {
        let query = "select payload::jsonb from pillarbox.log where source = 'joins' and topic = 'join.counted'
                     and payload->>'run' = $1";
        sqlx::query_scalar::<_, Value>(query).bind(run.to_string()).fetch_optional(fixture.db()).await.unwrap()
    })
    .await
}

async fn post_restatement(fixture: &Fixture, event: &EventChanged, (count_version, active_participants): (i64, i32)) {
    let restated = EventRestated { event: event.clone(), active_participants, count_version };
    let message = Post::new(events::RESTATED, to_raw_value(&restated).unwrap()).with_key(event.event_id.to_string());
    post_message(fixture, message).await;
    fixture.wait_until_known(event).await;
}

/// The events that an answer asks to restate, each with the version that the joins service knows.
fn wanted_events(answer: &Value) -> Vec<(Uuid, i64)> {
    let one =
        |wanted: &Value| (wanted["event_id"].as_str().unwrap().parse().unwrap(), wanted["version"].as_i64().unwrap());
    answer["wanted"].as_array().unwrap().iter().map(one).collect()
}

#[tokio::test]
async fn differences_are_reported_and_repaired_by_a_restatement() {
    let fixture = Fixture::start(2).await;
    let (event, fine) = (fixture.create_event(3).await, fixture.create_event(0).await);
    fixture.join_users(&event, 5).await;
    fixture.join_users(&fine, 1).await;
    // Wrong counts, and updates that never arrived.
    let corrupt = "update pillarbox_joins.event_capacity set active_count = 1, waitlist_count = 0 where event_id = $1";
    sqlx::query(corrupt).bind(event.event_id).execute(fixture.db()).await.unwrap();
    let (missed, unknown) = (next_version(&event, |event| event.capacity = 4), new_event(fixture.owner, 2));
    let all = [(&missed, 5, 3), (&fine, 1, 1), (&unknown, 0, 0)];
    let dry_run = request_comparison(&fixture, true, false, &all).await;
    assert_eq!(
        (&dry_run["drifted"], &dry_run["repaired"], &dry_run["part"], &dry_run["checked"]),
        (&json!(1), &json!(0), &json!(7), &json!(3)),
        "{dry_run}"
    );
    assert_eq!(wanted_events(&dry_run), [(event.event_id, event.version), (unknown.event_id, 0)]);
    let answered = request_comparison(&fixture, false, false, &all).await;
    assert_eq!((&answered["drifted"], &answered["repaired"]), (&json!(1), &json!(1)), "{answered}");
    assert_eq!(fixture.counts(&event).await, (1, 0), "the comparison changes nothing");

    post_restatement(&fixture, &missed, (5, 3)).await;
    post_restatement(&fixture, &unknown, (0, 0)).await;
    fixture.wait_for_counts(&event, (4, 1)).await;
    assert_eq!(fixture.join(&unknown, Uuid::now_v7()).await.status, 201);
    fixture.check_invariants().await;
    let again = request_comparison(&fixture, false, false, &[(&missed, 7, 4), (&fine, 1, 1), (&unknown, 1, 1)]).await;
    assert_eq!(
        (&again["drifted"], wanted_events(&again), &again["events"]),
        (&json!(0), vec![], &json!([])),
        "{again}"
    );

    // A restatement with an older version changes nothing; the events service must use a higher version.
    post_restatement(&fixture, &event, (7, 4)).await;
    let old = request_comparison(&fixture, false, false, &[(&event, 7, 4)]).await;
    assert_eq!((&old["drifted"], wanted_events(&old)), (&json!(0), vec![(event.event_id, missed.version)]), "{old}");
    let forced = request_comparison(&fixture, false, true, &[(&fine, 1, 1)]).await;
    assert_eq!(
        (&forced["drifted"], wanted_events(&forced)),
        (&json!(0), vec![(fine.event_id, fine.version)]),
        "{forced}"
    );
    fixture.check_invariants().await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_count_in_flight_is_no_difference_but_an_impossible_one_is() {
    let fixture = Fixture::start(1).await;
    let event = fixture.create_event(0).await;
    fixture.join_users(&event, 3).await;
    for (stated, is_wrong) in [((2, 2), false), ((3, 3), false), ((3, 2), true), ((9, 3), true)] {
        let answer = request_comparison(&fixture, true, false, &[(&event, stated.0, stated.1)]).await;
        assert_eq!(answer["events"].as_array().unwrap().len(), usize::from(is_wrong), "{stated:?}: {answer}");
        assert_eq!(answer["drifted"], json!(0), "{answer}");
    }
    // If the events service has a count version that was never assigned here, the answer uses the next higher one.
    post_restatement(&fixture, &next_version(&event, |_| {}), (9, 3)).await;
    let recounts: Vec<Value> = sqlx::query_scalar(
        "select payload::jsonb->'counts' from pillarbox.log where source = 'joins' and topic = 'join.recounted' and key = $1",
    )
    .bind(event.event_id.to_string())
    .fetch_all(fixture.db())
    .await
    .unwrap();
    assert_eq!(recounts, [json!({"active": 3, "waitlisted": 0, "version": 10})]);
    fixture.join_users(&event, 1).await;
    fixture.check_invariants().await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_restated_capacity_promotes_users_with_right_counts() {
    let fixture = Fixture::start(1).await;
    let event = fixture.create_event(2).await;
    fixture.join_users(&event, 5).await;
    post_restatement(&fixture, &next_version(&event, |event| event.capacity = 4), (5, 2)).await;
    assert_eq!(fixture.counts(&event).await, (4, 1));
    fixture.check_invariants().await;
    fixture.stop().await;
}

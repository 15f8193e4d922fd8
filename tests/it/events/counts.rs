//! Participant counts, as the joins service reports them.

use pillarbox::log::Post;
use rand::seq::SliceRandom;
use serde_json::json;
use testkit::eventually;
use uuid::Uuid;

use crate::events::fixture::{
    DEADLINE, Fixture, event_id, event_path, join_message, median_count_latency, meetup, patch_event, post_messages,
    publish_event, second_of_this_machine, start_replica, stored_count, wait_for_count,
};

#[tokio::test]
async fn a_count_is_shown_within_a_second_without_a_new_event_version() {
    let fixture = Fixture::start().await;
    let event = publish_event(&fixture.owner, meetup()).await;
    let reader = fixture.app.anonymous();
    let before = reader.get(&event_path(&event)).await;
    let took = median_count_latency(fixture.db(), &reader, &event).await;
    let second = second_of_this_machine(&reader, &event).await;
    assert!(took < second, "{took:?} of {second:?}");
    let after = reader.get(&event_path(&event)).await;
    assert_eq!((&after.json()["version"], &after.json()["active_participants"]), (&json!(2), &json!(5)));
    assert_ne!(after.header("etag"), before.header("etag"));
    let copy = reader.with_header("if-none-match", before.header("etag"));
    assert_eq!(copy.get(&event_path(&event)).await.status, 200, "the earlier copy has another count");
    let owner = fixture.owner.with_header("if-match", before.header("etag"));
    let changed = patch_event(&owner, &event, json!({"title": "Still mine"})).await;
    assert_eq!(
        (changed.status, &changed.json()["active_participants"]),
        (200, &json!(5)),
        "a new participant does not conflict with a change by the owner"
    );
    fixture.app.stop().await;
}

#[tokio::test]
async fn duplicated_shuffled_and_replayed_messages_lead_to_right_counts() {
    let fixture = Fixture::start().await;
    let mut events = Vec::new();
    for _ in 0..5 {
        events.push(publish_event(&fixture.owner, meetup()).await);
    }
    let mut messages: Vec<Post> = Vec::new();
    for event in &events {
        for version in 1..=40 {
            let message = join_message(event_id(event), (version % 7) as i32, version);
            // Without a key the messages have no order; each is posted twice.
            messages.extend([Post { key: None, ..message.clone() }, Post { key: None, ..message }]);
        }
    }
    messages.shuffle(&mut rand::rng());
    for some in messages.chunks(25) {
        post_messages(fixture.db(), "joins", some).await;
    }
    for event in &events {
        wait_for_count(fixture.db(), event_id(event), (40 % 7, 40)).await;
    }
    let other = start_replica(&fixture.database).await;
    let replayed = fixture.app.admin().post("/admin/v1/replays", json!({"consumer": "events.counts", "from": chrono::Utc::now() - chrono::TimeDelta::hours(1), "again": true})).await;
    assert!(replayed.status < 300, "{replayed:?}");
    eventually("the replay is done", DEADLINE, async || {
        let open: i64 =
            sqlx::query_scalar("select count(*) from pillarbox.inbox where consumer = 'events.counts' and run > 0")
                .fetch_one(fixture.db())
                .await
                .unwrap();
        match open {
            400 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    for event in &events {
        assert_eq!(stored_count(fixture.db(), event_id(event)).await, (40 % 7, 40));
    }
    // After a restart the next message is counted as before.
    other.stop().await;
    fixture.app.stop().await;
    post_messages(fixture.database.pool(), "joins", &[join_message(event_id(&events[0]), 1, 41)]).await;
    let app = start_replica(&fixture.database).await;
    wait_for_count(fixture.database.pool(), event_id(&events[0]), (1, 41)).await;
    app.stop().await;
}

#[tokio::test]
async fn many_counts_of_an_event_cause_few_row_updates() {
    let fixture = Fixture::start().await;
    let (busy, quiet) = (publish_event(&fixture.owner, meetup()).await, publish_event(&fixture.owner, meetup()).await);
    fixture.app.stop().await;
    let db = fixture.database.pool();
    let mut messages: Vec<Post> =
        (1..=400).map(|version| join_message(event_id(&busy), version as i32, version)).collect();
    messages.insert(200, join_message(event_id(&quiet), 7, 1));
    post_messages(db, "joins", &messages).await;
    let app = start_replica(&fixture.database).await;
    wait_for_count(db, event_id(&busy), (400, 400)).await;
    wait_for_count(db, event_id(&quiet), (7, 1)).await;
    app.stop().await;
    // A backend reports its statistics when it ends.
    let changes = eventually("the statistics are reported", DEADLINE, async || {
        let query =
            "select n_tup_upd from pg_stat_user_tables where schemaname = 'pillarbox_events' and relname = 'event'";
        let changes: i64 = sqlx::query_scalar(query).fetch_one(db).await.unwrap();
        (changes >= 4).then_some(changes)
    })
    .await;
    assert!(changes < 100, "401 messages caused {changes} updates");
}

#[tokio::test]
async fn counts_from_other_sources_are_ignored_and_invalid_ones_fail_alone() {
    let fixture = Fixture::start().await;
    let (event, other) = (publish_event(&fixture.owner, meetup()).await, publish_event(&fixture.owner, meetup()).await);
    for source in ["hub", "sql", "amqp:elsewhere"] {
        post_messages(fixture.db(), source, &[join_message(event_id(&event), 99, 99)]).await;
    }
    post_messages(fixture.db(), "joins", &[join_message(event_id(&other), -4, 1)]).await;
    post_messages(fixture.db(), "joins", &[join_message(Uuid::now_v7(), 5, 5), join_message(event_id(&event), 1, 1)])
        .await;
    wait_for_count(fixture.db(), event_id(&event), (1, 1)).await;
    eventually("the invalid message is parked or dead", DEADLINE, async || {
        let query = "select (select count(*) from pillarbox.parked where consumer = 'events.counts')
                          + (select count(*) from pillarbox.dead_letter where consumer = 'events.counts')";
        sqlx::query_scalar::<_, i64>(query).fetch_one(fixture.db()).await.unwrap() == 1
    })
    .await;
    assert_eq!(stored_count(fixture.db(), event_id(&other)).await, (0, 0));
    fixture.app.stop().await;
}

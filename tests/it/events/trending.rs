//! The trending order of the feed: scores, expiry of a cursor, and bounded pages.

use std::collections::HashSet;

use serde_json::json;
use testkit::eventually;

use crate::events::fixture::{
    DEADLINE, Fixture, event_id, feed_titles, in_hours, insert_events, join_message, meetup_with, patch_event,
    post_action, post_messages, publish_event, score_events, start_replica, wait_for_count, walk_feed,
};

#[tokio::test]
async fn trending_ranks_by_participants_and_an_expired_cursor_returns_410() {
    let fixture = Fixture::start_with(|settings| settings.events.trending_seconds = 1).await;
    let mut events = Vec::new();
    for (title, capacity) in [("empty", 0), ("half full", 4), ("full", 2), ("crowd", 0)] {
        events.push(publish_event(&fixture.owner, meetup_with(json!({"title": title, "capacity": capacity}))).await);
    }
    let counts = [0, 2, 2, 500];
    let joins: Vec<_> =
        events.iter().zip(counts).map(|(event, count)| join_message(event_id(event), count, 1)).collect();
    post_messages(fixture.db(), "joins", &joins).await;
    let reader = fixture.app.anonymous();
    // A cached page may be 15 s old; another limit is another page.
    let mut limit = 4;
    eventually("the events are scored", DEADLINE, async || {
        limit += 1;
        match feed_titles(&reader, &format!("sort=trending&limit={limit}")).await {
            found if found == ["crowd", "full", "half full", "empty"] => Ok(()),
            other => Err(other),
        }
    })
    .await;
    let page = reader.get("/event/v1/events?sort=trending&limit=2").await.json();
    assert_eq!(page["items"][0]["title"], "crowd");
    // An event that is canceled between two pages is not shown, whatever its score was.
    post_action(&fixture.owner, &events[1], "cancel").await;
    let next = format!("/event/v1/events?sort=trending&limit=2&cursor={}", page["next_cursor"].as_str().unwrap());
    assert_eq!(reader.get(&next).await.json()["items"][0]["title"], "empty");
    let epoch: i64 = sqlx::query_scalar("select max(epoch) from pillarbox_events.trending_epoch")
        .fetch_one(fixture.db())
        .await
        .unwrap();
    eventually("its epoch is deleted", DEADLINE, async || {
        let oldest: i64 = sqlx::query_scalar("select min(epoch) from pillarbox_events.trending_epoch")
            .fetch_one(fixture.db())
            .await
            .unwrap();
        oldest > epoch
    })
    .await;
    // Any change invalidates the cached page.
    patch_event(&fixture.owner, &events[0], json!({"title": "still empty"})).await;
    let late = reader.get(&next).await;
    late.assert_problem(410, "cursor-expired");
    fixture.app.stop().await;
}

#[tokio::test]
async fn trending_includes_running_events_and_excludes_past_ones() {
    let fixture = Fixture::start_with(|settings| settings.events.trending_seconds = 3_600).await;
    let at =
        |title: &str, hours| json!({"title": title, "start_time": in_hours(hours), "end_time": in_hours(hours + 2)});
    for (title, hours) in [("over", 1), ("going on", -1), ("later", 5)] {
        publish_event(&fixture.owner, meetup_with(at(title, hours))).await;
    }
    score_events(&fixture).await;
    sqlx::query(
        "update pillarbox_events.event set start_time = now() - interval '2 hours', end_time = now() where title = 'over'",
    )
    .execute(fixture.db())
    .await
    .unwrap();
    let mut found = feed_titles(&fixture.app.anonymous(), "sort=trending").await;
    found.sort();
    assert_eq!(found, ["going on", "later"]);
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_new_event_is_in_the_trending_feed_before_the_next_scoring() {
    let fixture = Fixture::start_with(|settings| settings.events.trending_seconds = 3_600).await;
    let first = publish_event(&fixture.owner, meetup_with(json!({"title": "first"}))).await;
    post_messages(fixture.db(), "joins", &[join_message(event_id(&first), 10, 1)]).await;
    wait_for_count(fixture.db(), event_id(&first), (10, 1)).await;
    score_events(&fixture).await;
    let epoch = "select max(epoch) from pillarbox_events.trending_epoch";
    let epoch = async || sqlx::query_scalar::<_, i64>(epoch).fetch_one(fixture.db()).await.unwrap();
    let before = epoch().await;
    let walked = fixture.app.anonymous().get("/event/v1/events?sort=trending&limit=1").await.json();
    let again = publish_event(&fixture.owner, meetup_with(json!({"title": "again"}))).await;
    post_action(&fixture.owner, &again, "unpublish").await;
    post_action(&fixture.owner, &again, "publish").await;
    let canceled = publish_event(&fixture.owner, meetup_with(json!({"title": "canceled"}))).await;
    post_action(&fixture.owner, &canceled, "cancel").await;
    assert_eq!(feed_titles(&fixture.app.anonymous(), "sort=trending&limit=3").await, ["first"]);
    // Every process adds new events at its start, and then every 20 s. Two processes add them once.
    for limit in [4, 5] {
        let other = start_replica(&fixture.database).await;
        eventually("the new event is added", DEADLINE, async || {
            let extended =
                "select extended_at is not null from pillarbox_events.trending_epoch order by epoch desc limit 1";
            sqlx::query_scalar::<_, bool>(extended).fetch_one(fixture.db()).await.unwrap()
        })
        .await;
        other.stop().await;
        let found = feed_titles(&fixture.app.anonymous(), &format!("sort=trending&limit={limit}")).await;
        assert_eq!(found, ["first", "again"], "the scores of other events stay");
    }
    assert_eq!(epoch().await, before, "nothing was scored again");
    assert!(walked["next_cursor"].is_null(), "{walked}");
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_narrow_time_range_of_trending_is_read_in_bounded_pages() {
    let fixture = Fixture::start_with(|settings| settings.events.trending_seconds = 3_600).await;
    insert_events(fixture.db(), 25_000).await;
    score_events(&fixture).await;
    let time = |hours: i64| in_hours(hours).format("%Y-%m-%dT%H:%M:%SZ").to_string();
    let mut pages = 1;
    let found = walk_feed(
        &fixture.app.anonymous(),
        &format!("sort=trending&from={}&to={}", time(200), time(201)),
        async || pages += 1,
    )
    .await;
    assert_eq!((found.len(), found.iter().collect::<HashSet<_>>().len()), (60, 60));
    assert!(pages > 3, "{pages}: each page examines a bounded number of scores and returns a cursor");
    fixture.app.stop().await;
}

//! Many at once.

use futures_util::future::join_all;
use serde_json::Value;

use crate::events_world::{World, act, id, made, meetup, messages_of, replica};

/// Whether a status can follow another.
fn is_legal(from: &str, to: &str) -> bool {
    matches!((from, to), ("draft", "published" | "canceled") | ("published", "draft" | "canceled"))
}

#[tokio::test]
async fn parallel_changes_leave_a_legal_history_and_the_news_of_it_in_order() {
    let world = World::start().await;
    let other = replica(&world.database).await;
    let owner_id = uuid::Uuid::now_v7();
    let replicas = [world.app.user(owner_id, None), other.user(owner_id, None)];
    for round in 0..4 {
        let event = made(&replicas[0], meetup()).await;
        let actions = (0..60).map(|number| {
            // The last round is canceled in the midst of it.
            let action = match number {
                40 if round == 3 => "cancel",
                number if number % 2 == 0 => "publish",
                _ => "unpublish",
            };
            act(&replicas[number % 2], &event, action)
        });
        let statuses: Vec<u16> = join_all(actions).await.iter().map(|answer| answer.status).collect();
        assert!(statuses.iter().all(|status| [200, 409].contains(status)), "{statuses:?}");
        let done = statuses.iter().filter(|status| **status == 200).count();
        let trail: Vec<(i64, Option<String>, String)> = sqlx::query_as(
            "select version, from_status, to_status from pillarbox_events.status_change where event_id = $1 order by version",
        )
        .bind(id(&event))
        .fetch_all(world.db())
        .await
        .unwrap();
        assert_eq!(trail.len(), done + 1, "one line for each that was told it is done, and the first");
        for (at, pair) in trail.windows(2).enumerate() {
            let (before, (version, from, to)) = (&pair[0].2, &pair[1]);
            assert_eq!((*version, from.as_ref()), (at as i64 + 2, Some(before)), "no step is missing");
            assert!(is_legal(before, to), "{before} -> {to}");
        }
        let heard = messages_of(world.db(), &event).await;
        let told: Vec<i64> = heard.iter().map(|(_, said)| said["version"].as_i64().unwrap()).collect();
        assert_eq!(told, (2..2 + done as i64).collect::<Vec<_>>(), "in the order of its versions");
        let now: Value = replicas[1].get(&crate::events_world::path(&event)).await.json();
        assert_eq!(
            (now["status"].as_str().unwrap(), now["version"].as_i64()),
            (trail.last().unwrap().2.as_str(), Some(done as i64 + 1))
        );
        if round == 3 {
            assert_eq!(now["status"], "canceled");
        }
    }
    // Counted with each step, by whoever made it.
    let counted: i64 = sqlx::query_scalar("select coalesce(sum(events), 0)::bigint from pillarbox_events.city")
        .fetch_one(world.db())
        .await
        .unwrap();
    let public: i64 = sqlx::query_scalar("select count(*) from pillarbox_events.event where status = 'published'")
        .fetch_one(world.db())
        .await
        .unwrap();
    assert_eq!(counted, public);
    other.stop().await;
    world.app.stop().await;
}

//! Concurrent changes of one event.

use futures_util::future::join_all;
use serde_json::Value;

use crate::events::fixture::{
    Fixture, create_event, event_id, event_messages, event_path, meetup, post_action, start_replica,
};

/// Whether the status `to` may follow `from`.
fn is_legal(from: &str, to: &str) -> bool {
    matches!((from, to), ("draft", "published" | "canceled") | ("published", "draft" | "canceled"))
}

#[tokio::test]
async fn concurrent_changes_lead_to_a_legal_history_and_ordered_messages() {
    let fixture = Fixture::start().await;
    let other = start_replica(&fixture.database).await;
    let owner_id = uuid::Uuid::now_v7();
    let replicas = [fixture.app.user(owner_id, None), other.user(owner_id, None)];
    for round in 0..4 {
        let event = create_event(&replicas[0], meetup()).await;
        let actions = (0..60).map(|number| {
            // The last round is canceled in the middle.
            let action = match number {
                40 if round == 3 => "cancel",
                number if number % 2 == 0 => "publish",
                _ => "unpublish",
            };
            post_action(&replicas[number % 2], &event, action)
        });
        let statuses: Vec<u16> = join_all(actions).await.iter().map(|answer| answer.status).collect();
        assert!(statuses.iter().all(|status| [200, 409].contains(status)), "{statuses:?}");
        let done = statuses.iter().filter(|status| **status == 200).count();
        let history: Vec<(i64, Option<String>, String)> = sqlx::query_as(
            "select version, from_status, to_status from pillarbox_events.status_change where event_id = $1 order by version",
        )
        .bind(event_id(&event))
        .fetch_all(fixture.db())
        .await
        .unwrap();
        assert_eq!(history.len(), done + 1, "one history entry for each successful request, and the first one");
        for (at, pair) in history.windows(2).enumerate() {
            let (before, (version, from, to)) = (&pair[0].2, &pair[1]);
            assert_eq!((*version, from.as_ref()), (at as i64 + 2, Some(before)), "no step is missing");
            assert!(is_legal(before, to), "{before} -> {to}");
        }
        let messages = event_messages(fixture.db(), &event).await;
        let versions: Vec<i64> = messages.iter().map(|(_, payload)| payload["version"].as_i64().unwrap()).collect();
        assert_eq!(versions, (2..2 + done as i64).collect::<Vec<_>>(), "in the order of the versions");
        let now: Value = replicas[1].get(&event_path(&event)).await.json();
        assert_eq!(
            (now["status"].as_str().unwrap(), now["version"].as_i64()),
            (history.last().unwrap().2.as_str(), Some(done as i64 + 1))
        );
        if round == 3 {
            assert_eq!(now["status"], "canceled");
        }
    }
    // Each change updated the count of its city, in whichever process.
    let counted: i64 = sqlx::query_scalar("select coalesce(sum(events), 0)::bigint from pillarbox_events.city")
        .fetch_one(fixture.db())
        .await
        .unwrap();
    let public: i64 = sqlx::query_scalar("select count(*) from pillarbox_events.event where status = 'published'")
        .fetch_one(fixture.db())
        .await
        .unwrap();
    assert_eq!(counted, public);
    other.stop().await;
    fixture.app.stop().await;
}

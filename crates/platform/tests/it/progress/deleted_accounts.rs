//! The projects of a deleted account are deleted, wherever their counts are.

use serde_json::json;
use testkit::eventually;
use uuid::Uuid;

use super::fixture::{BOTH, Backend, Fixture, create_with, mark_numbers, show, wait_until_completed};
use crate::mail::fixture::post_raw_from;
use crate::support::{DEADLINE, tables_with};

#[tokio::test]
async fn nothing_remains_of_the_projects_of_a_deleted_account() {
    for backend in BOTH {
        let fixture = Fixture::start(backend).await;
        let (db, id) = (fixture.db(), Uuid::now_v7());
        let (client, other) = (fixture.app.user(id, None), &fixture.client);
        let (unfinished, finished) = (create_with(&client, 10).await, create_with(&client, 2).await);
        assert_eq!(mark_numbers(&client, &unfinished, 3).await.status, 200);
        assert_eq!(mark_numbers(&client, &finished, 2).await.status, 200);
        wait_until_completed(db, &finished).await;
        let of_other = create_with(other, 10).await;
        assert_eq!(mark_numbers(other, &of_other, 3).await.status, 200);

        let deleted = json!({"user_id": id}).to_string();
        let (source, topic) = (contracts::identity::SOURCE, contracts::identity::ACCOUNT_DELETED);
        post_raw_from(db, source, topic, &deleted).await;
        eventually("the projects are gone", DEADLINE, async || {
            let mut found = Vec::new();
            for wanted in [&unfinished, &finished] {
                found.extend(tables_with(db, wanted).await);
            }
            // The message about the end of the project is not about its owner.
            found.retain(|table| table.starts_with("pillarbox_progress."));
            if found.is_empty() { Ok(()) } else { Err(found) }
        })
        .await;
        for project in [&unfinished, &finished] {
            eventually("the cache forgets it", DEADLINE, async || match show(&fixture.app.admin(), project).await {
                answer if answer.status == 404 => Ok(()),
                other => Err(other),
            })
            .await;
            if backend == Backend::Redis {
                let key = fixture.key(project);
                let keys = [format!("{key}:items"), format!("{key}:rate"), key];
                let mut redis = fixture.redis().await;
                let left: i64 = redis::cmd("EXISTS").arg(&keys[..]).query_async(&mut redis).await.unwrap();
                assert_eq!(left, 0, "{keys:?}");
            }
        }
        assert_eq!(show(other, &of_other).await.json()["done"], 3, "those of others remain");
        fixture.app.stop().await;
    }
}

//! The projects of a deleted account and of a deleted tenant are deleted, wherever their counts are.

use hyper::Method;
use serde_json::json;
use testkit::{TestApp, eventually};
use uuid::Uuid;

use super::fixture::{BOTH, Backend, Fixture, configure, create_with, mark_numbers, show, wait_until_completed};
use crate::mail::fixture::post_raw_from;
use crate::support::{DEADLINE, caller, tables_with};

/// The number of keys of a project in Redis.
async fn keys_in_redis(fixture: &Fixture, project: &str) -> i64 {
    let key = fixture.key(project);
    let keys = [format!("{key}:items"), format!("{key}:rate"), key];
    redis::cmd("EXISTS").arg(&keys[..]).query_async(&mut fixture.redis().await).await.unwrap()
}

/// Waits until no table of the service has these projects.
async fn wait_until_deleted(fixture: &Fixture, projects: [&String; 2]) {
    eventually("the projects are deleted", DEADLINE, async || {
        let mut found = Vec::new();
        for wanted in projects {
            found.extend(tables_with(fixture.db(), wanted).await);
        }
        // The message about the end of the project is not about its owner.
        found.retain(|table| table.starts_with("pillarbox_progress."));
        if found.is_empty() { Ok(()) } else { Err(found) }
    })
    .await;
}

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
        wait_until_deleted(&fixture, [&unfinished, &finished]).await;
        for project in [&unfinished, &finished] {
            eventually("the cache forgets it", DEADLINE, async || match show(&fixture.app.admin(), project).await {
                answer if answer.status == 404 => Ok(()),
                other => Err(other),
            })
            .await;
            assert_eq!(keys_in_redis(&fixture, project).await, 0, "{project}");
        }
        assert_eq!(show(other, &of_other).await.json()["done"], 3, "those of others remain");
        fixture.app.stop().await;
    }
}

#[tokio::test]
async fn nothing_remains_of_the_projects_of_a_deleted_tenant() {
    for backend in BOTH {
        let mut fixture = Fixture::start(backend).await;
        let (admin, other) = (fixture.app.admin(), fixture.client.clone());
        let client = caller(&fixture.app, "manage", "acme").await;
        let (unfinished, finished) = (create_with(&client, 10).await, create_with(&client, 2).await);
        assert_eq!(mark_numbers(&client, &unfinished, 3).await.status, 200);
        assert_eq!(mark_numbers(&client, &finished, 2).await.status, 200);
        wait_until_completed(fixture.db(), &finished).await;
        let of_other = create_with(&other, 10).await;
        assert_eq!(mark_numbers(&other, &of_other, 3).await.status, 200);
        if backend == Backend::Redis {
            assert!(keys_in_redis(&fixture, &unfinished).await > 0);
        }
        assert_eq!(admin.send(Method::POST, "/admin/v1/tenants/acme/suspend", None).await.status, 200);
        assert_eq!(admin.delete("/admin/v1/tenants/acme").await.status, 204);

        // The maintenance of the next process deletes what the tenant still has.
        fixture.app.stop().await;
        fixture.app = TestApp::start_with(&fixture.database, configure(backend, &fixture.redis)).await;
        wait_until_deleted(&fixture, [&unfinished, &finished]).await;
        for project in [&unfinished, &finished] {
            assert_eq!(keys_in_redis(&fixture, project).await, 0, "{project}");
        }
        let other = fixture.app.admin();
        assert_eq!(show(&other, &of_other).await.json()["done"], 3, "those of others remain");
        fixture.app.stop().await;
    }
}

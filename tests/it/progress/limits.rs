//! What one project or one owner can use: items, projects, and connections.

use std::time::Duration;

use serde_json::json;
use server::migrations;
use testkit::{TestApp, TestDatabase, TestRedis, eventually};
use uuid::Uuid;

use crate::progress::fixture::{
    BOTH, Backend, PROJECTS, change, configure, counts, create, create_with, mark, mark_numbers,
};
use crate::support::{DEADLINE, lock_waits};

#[tokio::test]
async fn the_items_of_a_project_and_the_unfinished_projects_of_an_owner_are_limited() {
    for backend in BOTH {
        let (database, redis) = (TestDatabase::new(&migrations()).await, TestRedis::new());
        let configured = configure(backend, &redis);
        let app = TestApp::start_with(&database, |settings| {
            configured(settings);
            settings.progress.items_max = 3;
            settings.progress.unfinished_max = 2;
        })
        .await;
        let client = &app.user(Uuid::now_v7(), None);
        let id = create(client).await;
        let refused = change(client, &id, json!({"total": 4, "status": "PROCESSING"})).await;
        refused.assert_problem(422, "validation-failed");
        let detail = &refused.json()["errors"][0];
        assert_eq!(detail["pointer"], "/total", "{backend:?}");
        let text = detail["detail"].as_str().unwrap();
        assert!(text.contains("from 0 to 3") && text.contains("progress.items_max"), "{backend:?}: {text}");
        assert_eq!(change(client, &id, json!({"status": "CRAWLING"})).await.status, 200);
        mark_numbers(client, &id, 2).await;
        mark(client, &id, &["x", "y"]).await.assert_problem(409, "too-many-items");
        assert_eq!(counts(&mark(client, &id, &["item-0", "item-1", "x"]).await), ("CRAWLING".to_owned(), 0, 3, 0));
        let repeated = mark(client, &id, &["x", "item-1"]).await;
        assert_eq!(
            (repeated.status, &repeated.json()["counted"]),
            (200, &json!(0)),
            "{backend:?}: repeats are accepted"
        );
        let refused = mark(client, &id, &["y"]).await;
        refused.assert_problem(409, "too-many-items");
        assert!(refused.json()["detail"].as_str().unwrap().contains("more than 3 items"), "{refused:?}");

        let other = create(client).await;
        client.post(PROJECTS, json!({})).await.assert_problem(409, "too-many-projects");
        assert_eq!(app.user(Uuid::now_v7(), None).post(PROJECTS, json!({})).await.status, 201, "another owner");
        change(client, &other, json!({"status": "FAILED"})).await;
        assert_eq!(client.post(PROJECTS, json!({})).await.status, 201, "{backend:?}");
        let whole = change(client, &id, json!({"total": 3, "status": "PROCESSING"})).await;
        assert_eq!(counts(&whole), ("DONE".to_owned(), 3, 3, 0), "{backend:?}: a total at the limit completes");
        app.stop().await;
    }
}

#[tokio::test]
async fn other_requests_get_connections_while_a_hundred_workers_mark_one_project() {
    let (database, redis) = (TestDatabase::new(&migrations()).await, TestRedis::new());
    let configured = configure(Backend::Postgres, &redis);
    let app = TestApp::start_with(&database, |settings| {
        configured(settings);
        settings.pool_max = 6;
    })
    .await;
    let (client, db) = (&app.user(Uuid::now_v7(), None), database.pool());
    let (busy, other) = (create_with(client, 100).await, create_with(client, 2).await);
    // All of them wait for this row.
    let mut blocks = db.begin().await.unwrap();
    let lock = "select from pillarbox_progress.state where project_id = $1 for update";
    sqlx::query(lock).bind(&busy).execute(&mut *blocks).await.unwrap();
    let marks = (0..100).map(|number| {
        let (client, busy) = (client.clone(), busy.clone());
        tokio::spawn(async move { mark(&client, &busy, &[&format!("item-{number}")]).await.status })
    });
    let marks: Vec<_> = marks.collect();
    eventually("the workers wait", DEADLINE, async || lock_waits(db).await > 0).await;
    // Time for the others to arrive, which cannot be observed: they must not do anything.
    tokio::time::sleep(Duration::from_millis(300)).await;
    for number in 0..5 {
        let others = async { mark(client, &other, &[&format!("item-{number}")]).await.status };
        let status = tokio::time::timeout(Duration::from_secs(3), others).await;
        assert_eq!(status, Ok(200), "another project");
    }
    assert_eq!(client.get(PROJECTS).await.status, 200);
    blocks.rollback().await.unwrap();
    for marked in futures_util::future::join_all(marks).await {
        assert_eq!(marked.unwrap(), 200);
    }
    assert_eq!(counts(&mark(client, &busy, &["late"]).await), ("DONE".to_owned(), 100, 100, 0));
    app.stop().await;
}

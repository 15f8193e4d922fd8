//! The time after a project: its counts expire, its final state stays readable until its retention ends.

use redis::AsyncCommands;
use serde_json::json;
use server::migrations;
use testkit::{TestApp, TestDatabase, TestRedis, eventually};
use uuid::Uuid;

use crate::progress::fixture::{
    BOTH, Backend, Fixture, change, completed, configure, counts, create_with, mark, mark_numbers, restart, show,
};
use crate::support::{DEADLINE, lock_waits};

#[tokio::test]
async fn a_finished_project_is_readable_after_its_counts_have_expired() {
    let fixture = Fixture::start(Backend::Redis).await;
    let client = &fixture.client;
    let id = create_with(client, 2).await;
    mark_numbers(client, &id, 2).await;
    let unfinished = create_with(client, 2).await;
    let mut redis = fixture.redis().await;
    for key in
        [fixture.key(&id), fixture.key(&id) + ":items", fixture.key(&unfinished), fixture.key(&unfinished) + ":items"]
    {
        let _: bool = redis.pexpire(key, 1).await.unwrap();
    }
    let expire = "update pillarbox_progress.project set expires_at = now()";
    sqlx::query(expire).execute(fixture.db()).await.unwrap();
    // Another server has nothing cached.
    let replica = TestApp::start_with(&fixture.database, configure(Backend::Redis, &fixture.redis)).await;
    let elsewhere = replica.anonymous().bearer(client.credential());
    for client in [client, &elsewhere] {
        let shown = show(client, &id).await;
        assert_eq!(counts(&shown), ("DONE".to_owned(), 2, 2, 0));
        assert!(shown.json()["finished_at"].is_string(), "{shown:?}");
        assert_eq!(counts(&mark(client, &id, &["z"]).await), ("DONE".to_owned(), 2, 2, 0));
    }
    show(&elsewhere, &unfinished).await.assert_problem(409, "progress-lost");
    assert!(show(&elsewhere, &unfinished).await.json()["detail"].as_str().unwrap().contains("expired"));
    assert_eq!(restart(&elsewhere, &unfinished).await.status, 200);
    change(&elsewhere, &unfinished, json!({"total": 1, "status": "PROCESSING"})).await;
    // The first server notices that the project was started again elsewhere.
    assert_eq!(counts(&mark(client, &unfinished, &["a"]).await), ("DONE".to_owned(), 1, 1, 0));
    assert_eq!(completed(fixture.db()).await.len(), 2);
    replica.stop().await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn what_is_no_longer_needed_is_deleted() {
    for backend in BOTH {
        let (database, redis) = (TestDatabase::new(&migrations()).await, TestRedis::new());
        let app = TestApp::start_with(&database, configure(backend, &redis)).await;
        let user = Uuid::now_v7();
        let client = app.user(user, None);
        let [old, recent, expired, live] = [
            create_with(&client, 1).await,
            create_with(&client, 1).await,
            create_with(&client, 9).await,
            create_with(&client, 9).await,
        ];
        for id in [&old, &recent, &expired, &live] {
            mark(&client, id, &["a"]).await;
        }
        app.stop().await;
        let db = database.pool();
        let age = "update pillarbox_progress.project set finished_at = finished_at - interval '31 days',
                       expires_at = expires_at - interval '38 days' where id = any($1)";
        sqlx::query(age).bind(vec![&old, &expired]).execute(db).await.unwrap();
        let age = "update pillarbox_progress.state set expires_at = now() - interval '31 days' where project_id = $1";
        sqlx::query(age).bind(&expired).execute(db).await.unwrap();

        let app = TestApp::start_with(&database, configure(backend, &redis)).await;
        let client = app.user(user, None);
        let rows = async || -> i64 {
            let query = "select count(*) from pillarbox_progress.project";
            sqlx::query_scalar(query).fetch_one(db).await.unwrap()
        };
        eventually("old projects are deleted", DEADLINE, async || rows().await == 2).await;
        show(&client, &old).await.assert_problem(404, "project-not-found");
        show(&client, &expired).await.assert_problem(404, "project-not-found");
        assert_eq!(counts(&show(&client, &recent).await), ("DONE".to_owned(), 1, 1, 0), "{backend:?}");
        assert_eq!(counts(&show(&client, &live).await), ("PROCESSING".to_owned(), 9, 1, 0), "{backend:?}");
        if backend == Backend::Postgres {
            let items: Vec<String> =
                sqlx::query_scalar("select project_id from pillarbox_progress.item").fetch_all(db).await.unwrap();
            assert_eq!(items, [live], "the items of finished and expired projects are deleted");
        }
        app.stop().await;
    }
}

/// A project is started again at the moment in which it would be deleted.
#[tokio::test]
async fn a_project_that_is_started_again_is_not_deleted() {
    let (database, redis) = (TestDatabase::new(&migrations()).await, TestRedis::new());
    let app = TestApp::start_with(&database, configure(Backend::Redis, &redis)).await;
    let user = Uuid::now_v7();
    let id = create_with(&app.user(user, None), 9).await;
    app.stop().await;
    let db = database.pool();
    let age = "update pillarbox_progress.project set expires_at = now() - interval '31 days'";
    sqlx::query(age).execute(db).await.unwrap();
    let mut starts = db.begin().await.unwrap();
    let start = "update pillarbox_progress.project set expires_at = now() + interval '7 days' where id = $1";
    sqlx::query(start).bind(&id).execute(&mut *starts).await.unwrap();
    let app = TestApp::start_with(&database, configure(Backend::Redis, &redis)).await;
    eventually("it is about to be deleted", DEADLINE, async || lock_waits(db).await > 0).await;
    starts.commit().await.unwrap();
    eventually("the deletion has ended", DEADLINE, async || lock_waits(db).await == 0).await;
    assert_eq!(show(&app.user(user, None), &id).await.status, 200);
    app.stop().await;
}

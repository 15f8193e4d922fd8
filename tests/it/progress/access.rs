//! The projects that each caller sees, and the list of an owner.

use serde_json::{Value, json};
use server::migrations;
use testkit::{TestApp, TestDatabase, TestRedis};
use uuid::Uuid;

use crate::progress::fixture::{
    BOTH, Backend, Fixture, PROJECTS, change, configure, create, create_with, mark, restart, show,
};
use crate::support::{caller, collect_pages, text};

#[tokio::test]
async fn a_project_of_another_owner_does_not_exist_for_a_caller() {
    let (database, redis) = (TestDatabase::new(&migrations()).await, TestRedis::new());
    let app = TestApp::start_with(&database, configure(Backend::Redis, &redis)).await;
    let user = app.user(Uuid::now_v7(), None);
    let worker = caller(&app, "ingest", "acme").await;
    let (of_user, of_tenant) = (create(&user).await, create(&worker).await);
    let strangers = [
        (app.user(Uuid::now_v7(), None), vec![&of_user, &of_tenant]),
        (user.clone(), vec![&of_tenant]),
        (caller(&app, "manage", "acme").await, vec![&of_user]),
        (caller(&app, "admin", "other").await, vec![&of_user, &of_tenant]),
        (caller(&app, "manage", "main").await, vec![&of_user, &of_tenant]),
    ];
    for (stranger, hidden) in &strangers {
        for id in hidden {
            for answer in [
                show(stranger, id).await,
                change(stranger, id, json!({"total": 1})).await,
                mark(stranger, id, &["a"]).await,
                restart(stranger, id).await,
                stranger.get(&format!("{PROJECTS}/{id}/events")).await,
            ] {
                answer.assert_problem(404, "project-not-found");
            }
            stranger.post(PROJECTS, json!({"id": id})).await.assert_problem(409, "project-exists");
        }
    }
    show(&user, "unknown").await.assert_problem(404, "project-not-found");
    app.anonymous().get(&format!("{PROJECTS}/{of_user}")).await.assert_problem(401, "unauthorized");
    // All keys of a tenant share its projects, and operators see all.
    assert_eq!(show(&strangers[2].0, &of_tenant).await.status, 200);
    assert_eq!(show(&app.admin(), &of_tenant).await.status, 200);
    assert_eq!(show(&app.admin(), &of_user).await.status, 200);
    // The message belongs to the tenant of the project.
    change(&worker, &of_tenant, json!({"total": 1})).await;
    mark(&worker, &of_tenant, &["a"]).await;
    let tenant: String =
        sqlx::query_scalar("select tenant from pillarbox.log where topic = 'job.completed' and key = $1")
            .bind(&of_tenant)
            .fetch_one(database.pool())
            .await
            .unwrap();
    assert_eq!(tenant, "acme");
    app.stop().await;
}

#[tokio::test]
async fn the_list_of_an_owner_has_its_projects_with_their_counts_newest_first() {
    for backend in BOTH {
        let fixture = Fixture::start(backend).await;
        let client = &fixture.client;
        let mut ids = Vec::new();
        for number in 0..5 {
            let id = create_with(client, 2).await;
            let items: &[&str] = if number % 2 == 0 { &["a"] } else { &["a", "b"] };
            mark(client, &id, items).await;
            ids.insert(0, id);
        }
        create(&fixture.app.user(Uuid::now_v7(), None)).await;
        let listed = collect_pages(client, &format!("{PROJECTS}?limit=2")).await;
        let listed_ids: Vec<&str> = listed.iter().map(|project| text(&project["id"])).collect();
        assert_eq!(listed_ids, ids, "{backend:?}");
        let statuses: Vec<(&Value, &Value)> =
            listed.iter().map(|project| (&project["status"], &project["done"])).collect();
        let (processing, done) = ((&json!("PROCESSING"), &json!(1)), (&json!("DONE"), &json!(2)));
        assert_eq!(statuses, [processing, done, processing, done, processing], "{backend:?}");
        assert_eq!(collect_pages(&fixture.app.admin(), PROJECTS).await.len(), 6, "an operator sees all");
        fixture.app.stop().await;
    }
}

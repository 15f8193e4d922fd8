//! One project that is damaged, or cannot be archived, does not concern the others.

use redis::AsyncCommands;
use serde_json::{Value, json};
use testkit::eventually;

use crate::progress::fixture::{
    Backend, Fixture, PROJECTS, change, completed, create_with, mark, show, wait_until_completed,
};
use crate::support::DEADLINE;

#[tokio::test]
async fn a_damaged_project_does_not_stop_the_check_or_the_list_of_others() {
    let fixture = Fixture::start(Backend::Redis).await;
    let (client, db, mut redis) = (&fixture.client, fixture.db(), fixture.redis().await);
    // The check goes in the order of the ids.
    for id in ["1-hash", "2-items", "3-rate", "4-refused", "5-good"] {
        assert_eq!(client.post(PROJECTS, json!({"id": id})).await.status, 201);
        assert_eq!(change(client, id, json!({"total": 2, "status": "PROCESSING"})).await.status, 200);
        assert_eq!(mark(client, id, &["a"]).await.status, 200);
    }
    for key in ["1-hash", "2-items:items", "3-rate:rate"] {
        let () = redis.set(fixture.key(key), "damaged").await.unwrap();
    }
    let refuse =
        "create function refuse() returns trigger language plpgsql as $$ begin raise exception 'refused'; end $$;
                  create trigger refuse before update on pillarbox_progress.project for each row
                      when (new.id = '4-refused') execute function refuse()";
    sqlx::raw_sql(refuse).execute(db).await.unwrap();
    for id in ["4-refused", "5-good"] {
        let _: i64 = redis.hset(fixture.key(id), "status", "DONE").await.unwrap();
    }
    wait_until_completed(db, "5-good").await;

    let listed = client.get(PROJECTS).await;
    assert_eq!(listed.status, 200, "{listed:?}");
    let items = listed.json()["items"].as_array().unwrap().clone();
    let known: Vec<(&Value, bool)> = items.iter().map(|item| (&item["id"], item["status"].is_string())).collect();
    let expected = [("5-good", true), ("4-refused", true), ("3-rate", false), ("2-items", false), ("1-hash", false)];
    assert_eq!(known, expected.map(|(id, is_known)| (&*Box::leak(Box::new(json!(id))), is_known)));
    for id in ["1-hash", "2-items", "3-rate"] {
        show(client, id).await.assert_problem(409, "progress-lost");
        mark(client, id, &["b"]).await.assert_problem(409, "progress-lost");
    }
    show(client, "4-refused").await.assert_problem(503, "unavailable");
    sqlx::raw_sql("drop trigger refuse on pillarbox_progress.project").execute(db).await.unwrap();
    wait_until_completed(db, "4-refused").await;
    eventually("it is archived", DEADLINE, async || show(client, "4-refused").await.json()["finished_at"].is_string())
        .await;
    assert_eq!(completed(db).await.len(), 2);
    let restarted = crate::progress::fixture::restart(client, "1-hash").await;
    assert_eq!(restarted.status, 200, "{restarted:?}");
    let _ = create_with(client, 1).await;
    fixture.app.stop().await;
}

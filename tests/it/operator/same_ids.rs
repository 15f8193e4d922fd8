//! Dead letters of different messages with the same id, which a producer has chosen again after retention had removed it.

use serde_json::json;
use server::migrations;
use server::settings::Role;
use testkit::{TestApp, TestDatabase};
use uuid::Uuid;

/// Inserts two dead letters of a consumer with the same event id, and returns their ids, the older one first.
async fn two_dead_letters(database: &TestDatabase) -> [i64; 2] {
    let cursor = "insert into pillarbox.cursor (consumer, kind, included) values ('c', 'handler', '^sql ')
                  on conflict do nothing";
    sqlx::query(cursor).execute(database.pool()).await.unwrap();
    let insert =
        "insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, log_id, message_id, source,
                      tenant, topic, headers, payload, at)
                  select 'c', 0, 0, 4, 'x', number, $1, 'sql', 'main', 'a', '{}', to_json(number), now()
                  from generate_series(1, 2) as number order by number returning id";
    let ids: Vec<i64> = sqlx::query_scalar(insert).bind(Uuid::new_v4()).fetch_all(database.pool()).await.unwrap();
    [ids[0], ids[1]]
}

#[tokio::test]
async fn a_dead_letter_can_be_retried_although_another_one_has_the_same_id() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Api]).await;
    let admin = app.admin();
    let retry = async |id: i64| admin.post(&format!("/admin/v1/dead-letters/{id}/retry"), json!({})).await;
    for retried in 0..2 {
        let ids = two_dead_letters(&database).await;
        assert_eq!(retry(ids[retried]).await.status, 202, "the older or the newer one");
        let other = retry(ids[1 - retried]).await;
        other.assert_problem(409, "same-id-parked");
        sqlx::query("delete from pillarbox.parked").execute(database.pool()).await.unwrap();
        assert_eq!(retry(ids[1 - retried]).await.status, 202, "after the first one was processed");
        retry(ids[0]).await.assert_problem(404, "dead-letter-not-found");
        sqlx::query("delete from pillarbox.parked").execute(database.pool()).await.unwrap();
    }
    // Of all of them, the older one is parked, and the other one stays.
    let [_, newer] = two_dead_letters(&database).await;
    let bulk = async || admin.post("/admin/v1/dead-letters/retry", json!({"all": true})).await.json();
    assert_eq!(bulk().await, json!({"count": 1, "more": false}));
    assert_eq!(bulk().await, json!({"count": 0, "more": false}));
    let left: Vec<i64> =
        sqlx::query_scalar("select id from pillarbox.dead_letter").fetch_all(database.pool()).await.unwrap();
    assert_eq!(left, [newer]);
    app.stop().await;
}

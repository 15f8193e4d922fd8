//! Final counts whose row is not final: the request or the check that finds them archives them, and they are never
//! deleted before.

use chrono::{DateTime, TimeDelta, Utc};
use redis::AsyncCommands;
use serde_json::{Value, json};
use testkit::{TestApp, eventually};
use uuid::Uuid;

use crate::progress::fixture::{
    BOTH, Backend, Fixture, completed, configure, counts, create_with, mark, mark_numbers, show, wait_until_completed,
};
use crate::support::{DEADLINE, text};

const REFUSE: &str = "create function refuse() returns trigger language plpgsql as $$ begin raise exception 'refused'; end $$;
                      create trigger refuse before insert on pillarbox_progress.completed for each row execute function refuse()";
const ACCEPT: &str = "drop trigger refuse on pillarbox_progress.completed";

#[tokio::test]
async fn a_project_that_cannot_be_archived_at_its_last_item_is_archived_with_the_repeated_mark() {
    const DAY_MS: i64 = 24 * 3_600 * 1_000;
    for backend in BOTH {
        let fixture = Fixture::start(backend).await;
        let (client, db) = (&fixture.client, fixture.db());
        let id = create_with(client, 3).await;
        mark_numbers(client, &id, 2).await;
        let (key, mut redis) = (fixture.key(&id), fixture.redis().await);
        // It would expire soon.
        for suffix in ["", ":items", ":rate"] {
            let _: bool = redis.pexpire(format!("{key}{suffix}"), 60_000).await.unwrap();
        }
        sqlx::raw_sql(REFUSE).execute(db).await.unwrap();
        let refused = mark_numbers(client, &id, 3).await;
        refused.assert_problem(503, "unavailable");
        assert_eq!(refused.header("retry-after"), "1", "{backend:?}");
        show(client, &id).await.assert_problem(503, "unavailable");
        if backend == Backend::Redis {
            for suffix in ["", ":items", ":rate"] {
                let ttl: i64 = redis.pttl(format!("{key}{suffix}")).await.unwrap();
                assert!(ttl > DAY_MS, "{suffix}: {ttl}");
            }
            let items: i64 = redis.scard(format!("{key}:items")).await.unwrap();
            assert_eq!(items, 1, "the ids are deleted, and the token stays");
        }
        sqlx::raw_sql(ACCEPT).execute(db).await.unwrap();
        let again = mark_numbers(client, &id, 3).await;
        assert_eq!(
            (counts(&again), &again.json()["counted"]),
            (("DONE".to_owned(), 3, 3, 0), &json!(0)),
            "{backend:?}"
        );
        assert_eq!(completed(db).await.len(), 1, "{backend:?}");
        assert!(show(client, &id).await.json()["finished_at"].is_string());
        fixture.app.stop().await;
    }
}

#[tokio::test]
async fn a_project_that_is_finished_in_sql_completes_once() {
    let fixture = Fixture::start(Backend::Postgres).await;
    let (client, db) = (&fixture.client, fixture.db());
    let (ended, counted) = (create_with(client, 3).await, create_with(client, 3).await);
    for (id, change) in [(&ended, "status = 'DONE'"), (&counted, "done = total")] {
        let update = format!("update pillarbox_progress.state set {change} where project_id = $1");
        sqlx::query(sqlx::AssertSqlSafe(update)).bind(id).execute(db).await.unwrap();
    }
    assert_eq!(wait_until_completed(db, &ended).await["done"], 0);
    assert_eq!(wait_until_completed(db, &counted).await["done"], 3);
    assert_eq!(counts(&show(client, &counted).await), ("DONE".to_owned(), 3, 3, 0));
    // A finished project is readable for 30 days after its end, whenever its counts would have expired.
    let time = |value: &Value| text(value).parse::<DateTime<Utc>>().unwrap();
    let listed = client.get("/progress/v1/projects").await.json()["items"].as_array().unwrap().clone();
    for project in listed.iter().chain([&show(client, &counted).await.json()]) {
        assert_eq!(time(&project["expires_at"]) - time(&project["finished_at"]), TimeDelta::days(30), "{project}");
    }
    fixture.app.stop().await;
}

/// Nothing has run for longer than the retention.
#[tokio::test]
async fn final_counts_in_postgres_are_archived_however_old_they_are() {
    let fixture = Fixture::start(Backend::Postgres).await;
    let user = Uuid::now_v7();
    let client = fixture.app.user(user, None);
    let (id, expired) = (create_with(&client, 3).await, create_with(&client, 3).await);
    mark(&client, &id, &["a"]).await;
    let (database, db) = (&fixture.database, fixture.database.pool());
    let redis = &fixture.redis;
    fixture.app.stop().await;
    // The check of a running process would extend the expiry of counts that have just ended.
    let end = "update pillarbox_progress.state set status = 'DONE', ended_at = now() - interval '67 days'
               where project_id = $1";
    sqlx::query(end).bind(&id).execute(db).await.unwrap();
    for age in [
        "update pillarbox_progress.state set expires_at = now() - interval '60 days'",
        "update pillarbox_progress.project set expires_at = now() - interval '60 days'",
    ] {
        sqlx::query(age).execute(db).await.unwrap();
    }
    // Nothing can be archived until retention has deleted the expired counts.
    sqlx::raw_sql(REFUSE).execute(db).await.unwrap();
    let app = TestApp::start_with(database, configure(Backend::Postgres, redis)).await;
    eventually("the expired counts are deleted", DEADLINE, async || {
        let query = "select count(*) from pillarbox_progress.state where project_id = $1";
        let left: i64 = sqlx::query_scalar(query).bind(&expired).fetch_one(db).await.unwrap();
        left == 0
    })
    .await;
    sqlx::raw_sql(ACCEPT).execute(db).await.unwrap();
    assert_eq!(wait_until_completed(db, &id).await["done"], 1);
    assert_eq!(counts(&show(&app.user(user, None), &id).await), ("DONE".to_owned(), 3, 1, 0));
    app.stop().await;
}

#[tokio::test]
async fn a_completion_that_is_posted_again_after_a_failover_has_the_same_message_id() {
    for backend in BOTH {
        let fixture = Fixture::start(backend).await;
        let (client, db) = (&fixture.client, fixture.db());
        let id = create_with(client, 2).await;
        mark_numbers(client, &id, 2).await;
        let message_id = async || -> Vec<Uuid> {
            let query = "select message_id from pillarbox.log where topic = 'job.completed'";
            sqlx::query_scalar(query).fetch_all(db).await.unwrap()
        };
        let first = message_id().await;
        assert_eq!(first.len(), 1, "{backend:?}");
        // As if the promoted standby lacked the transaction.
        let lose = "delete from pillarbox.log where topic = 'job.completed';
                    delete from pillarbox_progress.completed;
                    update pillarbox_progress.project
                        set finished_at = null, status = null, total = null, done = null, errors = null";
        sqlx::raw_sql(lose).execute(db).await.unwrap();
        wait_until_completed(db, &id).await;
        assert_eq!(message_id().await, first, "{backend:?}");
        fixture.app.stop().await;
    }
}

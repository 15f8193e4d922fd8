//! Message ids that the producer chooses: a repeated id is one message, and never the id of another one.

use pillarbox::log::{Post, Source, post};
use pillarbox::operations::maintenance::{Retention, run_once};
use serde_json::json;
use serde_json::value::RawValue;
use server::migrations;
use sqlx::{AssertSqlSafe, PgPool};
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::log::post_function::{CHOSEN, posted};
use crate::log::reading::LogReader;
use crate::support::{DEADLINE, lock_waits};

/// Posts with an id, in a transaction of its own.
async fn post_with_id(db: &PgPool, topic: &str, payload: &str, id: Uuid) -> sqlx::Result<Uuid> {
    let query = "select pillarbox.post($1, $2::jsonb, key => 'k', message_id => $3)";
    sqlx::query_scalar(query).bind(topic).bind(payload).bind(id).fetch_one(db).await
}

#[tokio::test]
async fn a_repeated_message_id_is_one_message() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, id) = (database.pool(), CHOSEN.parse().unwrap());
    for _ in 0..2 {
        assert_eq!(post_with_id(db, "a", "1", id).await.unwrap(), id);
    }
    // A repetition may belong to another trace.
    let twice = "select pillarbox.post('b', '3', message_id => $1)
                      = pillarbox.post('b', '3'::jsonb, headers => '{\"x\": \"y\"}', message_id => $1)";
    assert!(sqlx::query_scalar::<_, bool>(twice).bind(Uuid::new_v4()).fetch_one(db).await.unwrap());
    assert_eq!(posted(db).await, ["1", "3"]);
    assert_eq!(LogReader::from_the_beginning().read(db, 10).await.len(), 2);
    let ids: i64 = sqlx::query_scalar("select count(*) from pillarbox.chosen_id").fetch_one(db).await.unwrap();
    sqlx::query("select pillarbox.post('a', '6')").execute(db).await.unwrap();
    let after: i64 = sqlx::query_scalar("select count(*) from pillarbox.chosen_id").fetch_one(db).await.unwrap();
    assert_eq!((ids, after), (2, 2), "a post without an id stores none");
}

/// Fails unless the post is refused with an error that names its id.
async fn assert_refused(db: &PgPool, arguments: &str, says: &str) {
    let query = format!("select pillarbox.post({arguments})");
    let error = sqlx::query(AssertSqlSafe(query)).execute(db).await.unwrap_err().into_database_error().unwrap();
    assert_eq!(error.code().unwrap(), "22023", "{arguments}: {error}");
    assert!(error.message().starts_with("message_id") && error.message().contains(says), "{arguments}: {error}");
}

#[tokio::test]
async fn another_message_with_the_same_id_is_refused_and_not_dropped() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let id = format!("message_id => '{CHOSEN}'");
    let first = format!("'a', '1', key => 'k', aggregate_type => 'T', aggregate_id => '5', {id}");
    sqlx::query(AssertSqlSafe(format!("select pillarbox.post({first})"))).execute(db).await.unwrap();
    for other in [
        "'b', '1', key => 'k', aggregate_type => 'T', aggregate_id => '5'",
        "'a', '2', key => 'k', aggregate_type => 'T', aggregate_id => '5'",
        "'a', '1', aggregate_type => 'T', aggregate_id => '5'",
        "'a', '1', key => 'other', aggregate_type => 'T', aggregate_id => '5'",
        "'a', '1', key => 'k', aggregate_type => 'U', aggregate_id => '5'",
        "'a', '1', key => 'k', aggregate_type => 'T', aggregate_id => '6'",
        "'a', '1', key => 'k', aggregate_type => 'T', aggregate_id => '5', tenant => 'acme'",
    ] {
        assert_refused(db, &format!("{other}, {id}"), "another id").await;
    }
    assert_eq!(posted(db).await, ["1"]);
}

#[tokio::test]
async fn the_content_of_a_repeated_id_is_compared_as_json() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, id) = (database.pool(), Uuid::new_v4());
    let post = async |payload: &str| -> sqlx::Result<Uuid> {
        let query = "select pillarbox.post('a', $1::text::json, key => 'k', message_id => $2)";
        sqlx::query_scalar(query).bind(payload).bind(id).fetch_one(db).await
    };
    let first = r#"{"a": [1, 2], "b":  null}"#;
    for same in [first, r#"{"a":[1,2],"b":null}"#, r#"{"b": null, "a": [1,2]}"#] {
        assert_eq!(post(same).await.unwrap(), id, "{same}");
    }
    for other in [r#"{"a": [2, 1], "b": null}"#, r#"{"a": [1, 2]}"#, r#"{"a": ["1", 2], "b": null}"#] {
        let error = post(other).await.unwrap_err().to_string();
        assert!(error.contains("another payload"), "{other}: {error}");
    }
    post(r#"{"a": 1}"#).await.unwrap_err();
    assert_eq!(posted(db).await, [first]);
    // A number that jsonb does not have.
    let large = "select pillarbox.post('a', '1e200000'::json, message_id => $1)";
    for _ in 0..2 {
        sqlx::query(large).bind(Uuid::nil()).execute(db).await.unwrap();
    }
    assert_eq!(posted(db).await.len(), 2);
}

#[tokio::test]
async fn a_repeated_id_that_retention_removes_at_the_same_time_is_posted() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, id) = (database.pool(), Uuid::new_v4());
    post_with_id(db, "a", "1", id).await.unwrap();
    // Retention removes the id between the two statements of the function.
    sqlx::raw_sql(
        "create table remaining (times integer); insert into remaining values (1);
         create function remove_ids() returns trigger language plpgsql as $$
         begin
             update public.remaining set times = times - 1 where times > 0;
             if found then delete from pillarbox.chosen_id; end if;
             return null;
         end $$;
         create trigger retention after insert on pillarbox.chosen_id execute function remove_ids()",
    )
    .execute(db)
    .await
    .unwrap();
    assert_eq!(post_with_id(db, "a", "1", id).await.unwrap(), id);
    assert_eq!(posted(db).await, ["1", "1"], "the id is free again, so this is another message");
    assert_eq!(post_with_id(db, "a", "1", id).await.unwrap(), id);
    assert_eq!(posted(db).await.len(), 2, "now it is a repetition");
}

#[tokio::test]
async fn the_id_of_a_message_that_has_a_generated_one_cannot_be_chosen() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let in_sql: Uuid = sqlx::query_scalar("select pillarbox.post('a', '1')").fetch_one(db).await.unwrap();
    let mut tx = db.begin().await.unwrap();
    let message = Post::new("a", RawValue::from_string("2".to_owned()).unwrap());
    let in_rust = post(&mut tx, &Source::new("events"), &message).await.unwrap();
    tx.commit().await.unwrap();
    // It was rolled back, but may be posted again by the intake of another database.
    let mut tx = db.begin().await.unwrap();
    let rolled_back = post(&mut tx, &Source::new("events"), &message).await.unwrap();
    tx.rollback().await.unwrap();
    for id in [in_sql, in_rust, rolled_back, Uuid::now_v7()] {
        for payload in ["'3'", "'3'::json", "'3'::jsonb"] {
            assert_refused(db, &format!("'a', {payload}, message_id => '{id}'"), "version 7").await;
        }
    }
    // Every other version is accepted.
    for version in [1, 2, 3, 4, 5, 6, 8] {
        let id = format!("7c5d2a7e-0000-{version}000-8000-000000000001");
        let query = format!("select pillarbox.post('a', '4', message_id => '{id}')");
        sqlx::query(AssertSqlSafe(query)).execute(db).await.unwrap();
    }
    assert_eq!(posted(db).await.len(), 9);
}

#[tokio::test]
async fn a_concurrent_post_of_the_same_id_waits_and_posts_only_if_the_first_rolls_back() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    for commits in [true, false] {
        let id = Uuid::new_v4();
        let mut first = db.begin().await.unwrap();
        let query = "select pillarbox.post('a', '1', 'k', headers => '{\"by\": \"first\"}', message_id => $1)";
        sqlx::query(query).bind(id).execute(&mut *first).await.unwrap();
        let second = tokio::spawn({
            let db = db.clone();
            async move { post_with_id(&db, "a", "1", id).await }
        });
        let third = tokio::spawn({
            let db = db.clone();
            async move { post_with_id(&db, "a", "2", id).await }
        });
        eventually("the others wait", DEADLINE, async || lock_waits(db).await == 2).await;
        if commits {
            first.commit().await.unwrap()
        } else {
            first.rollback().await.unwrap()
        }
        let (second, third) = (second.await.unwrap(), third.await.unwrap());
        let query = "select payload::text, headers->>'by' from pillarbox.log where message_id = $1";
        let found: Vec<(String, Option<String>)> = sqlx::query_as(query).bind(id).fetch_all(db).await.unwrap();
        if commits {
            assert_eq!(found, [("1".to_owned(), Some("first".to_owned()))]);
            assert!(second.is_ok() && third.is_err(), "{second:?} {third:?}");
        } else {
            let won = if second.is_ok() { "1" } else { "2" };
            assert_eq!(found, [(won.to_owned(), None)]);
            assert!(second.is_ok() != third.is_ok(), "one of two different messages: {second:?} {third:?}");
        }
    }
}

#[tokio::test]
async fn a_message_with_a_chosen_id_is_found_by_it_and_the_id_is_free_after_retention() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, id) = (database.pool(), CHOSEN.parse().unwrap());
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![server::settings::Role::Api]).await;
    let old = Uuid::new_v4();
    for (id, number) in [(id, "1"), (old, "2")] {
        post_with_id(db, "order.paid", number, id).await.unwrap();
        for path in ["/admin/v1/log", "/hub/v1/events"] {
            let shown = app.admin().get(&format!("{path}/evt_{id}")).await.json();
            assert_eq!(shown["payload"].to_string(), number, "{path}: {shown}");
            assert_eq!(shown["event_id"], json!(format!("evt_{id}")));
        }
    }
    let age = "update pillarbox.chosen_id set at = now() - $1::text::interval where message_id = $2";
    sqlx::query(age).bind("15 days").bind(old).execute(db).await.unwrap();
    sqlx::query(age).bind("40 days").bind(id).execute(db).await.unwrap();
    run_once(db, Retention::default(), std::time::Duration::ZERO).await.unwrap();
    let left: Vec<Uuid> = sqlx::query_scalar("select message_id from pillarbox.chosen_id").fetch_all(db).await.unwrap();
    assert_eq!(left, [old], "an id is remembered for as long as inboxes are");
    post_with_id(db, "order.paid", "3", id).await.unwrap();
    assert_eq!(posted(db).await, ["1", "2", "3"]);
    app.stop().await;
}

#[tokio::test]
async fn an_id_is_not_free_while_a_consumer_knows_it() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let ids: Vec<Uuid> = (0..4).map(|_| Uuid::new_v4()).collect();
    for id in &ids {
        post_with_id(db, "a", "1", *id).await.unwrap();
    }
    sqlx::raw_sql(
        "update pillarbox.chosen_id set at = now() - interval '40 days';
         insert into pillarbox.cursor (consumer, kind, included) values ('c', 'handler', '^sql ')",
    )
    .execute(db)
    .await
    .unwrap();
    for (table, columns, values, id) in
        [("parked", "attempts", "1", ids[0]), ("dead_letter", "attempts, last_error", "1, 'x'", ids[1])]
    {
        let query = format!(
            "insert into pillarbox.{table} (consumer, run, {columns}, shard, log_id, message_id, source, tenant, topic,
                                            headers, payload, at)
             select 'c', 0, {values}, shard, id, message_id, source, tenant, topic, headers, payload, at
             from pillarbox.log where message_id = $1"
        );
        sqlx::query(AssertSqlSafe(query)).bind(id).execute(db).await.unwrap();
    }
    // A message that was parked for weeks is in the inbox for longer than its id is old.
    let processed = "insert into pillarbox.inbox_foreign (consumer, message_id) values ('c', $1)";
    sqlx::query(processed).bind(format!("{}/0", ids[2])).execute(db).await.unwrap();
    run_once(db, Retention::default(), std::time::Duration::ZERO).await.unwrap();
    let query = "select message_id from pillarbox.chosen_id order by message_id";
    let left: Vec<Uuid> = sqlx::query_scalar(query).fetch_all(db).await.unwrap();
    let mut known = ids[..3].to_vec();
    known.sort();
    assert_eq!(left, known, "all but the one that nothing refers to");
}

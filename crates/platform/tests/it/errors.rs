//! What is kept and told of a handler's failure.

use std::sync::Arc;

use mailbox::cursor::Start;
use mailbox::handler::{Handler, Handling};
use mailbox::log::Message;
use mailbox::post::{Post, post_all};
use serde_json::json;
use sqlx::{Postgres, Transaction};

use crate::consuming::{Process, SOURCE, database, quick, until_count};

const SECRET: &str = "hunter2";

/// Fails in the ways that PostgreSQL has to quote a value, and in one of its own.
struct Careless;

impl Handler for Careless {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> Handling<'t> {
        Box::pin(async move {
            let statement = match message.topic.as_str() {
                "test.unique" => "insert into secret (word) values ($1), ($1)",
                "test.deferred" => "insert into patient_secret (word) values ($1), ($1)",
                "test.json" => "select ('{\"password\": ' || $1)::json",
                "test.number" => "select ('say \"' || $1 || '\"')::integer",
                "test.wrapped" => "select $1::timestamptz",
                _ => return Err(format!("first line\n{}", "and more ".repeat(1_000)).into()),
            };
            let done = sqlx::query(statement).bind(SECRET).execute(&mut **tx).await;
            match message.topic.as_str() {
                "test.wrapped" => done.map_err(mailbox::post::PostError::Database)?,
                _ => done?,
            };
            Ok(())
        })
    }
}

#[tokio::test]
async fn a_failure_is_told_on_one_line_without_what_is_in_the_row() {
    let database = database().await;
    let db = database.pool();
    sqlx::raw_sql(
        "create table secret (word text constraint word_is_unique unique);
         create table patient_secret (word text constraint word_is_unique_at_last unique deferrable initially deferred)",
    )
    .execute(db)
    .await
    .unwrap();
    let mut rhythm = quick();
    rhythm.lane.retry.retries = Some(0);
    let process = Process::start_with(db, Arc::new(Careless), Start::Beginning, rhythm);
    let kinds = ["unique", "deferred", "json", "number", "wrapped", "long"];
    let payload = serde_json::value::to_raw_value(&json!({ "word": SECRET })).unwrap();
    let posts: Vec<Post> = kinds.iter().map(|kind| Post::new(format!("test.{kind}"), payload.clone())).collect();
    let mut tx = db.begin().await.unwrap();
    post_all(&mut tx, &SOURCE, &posts).await.unwrap();
    tx.commit().await.unwrap();
    until_count(db, "dead_letter", kinds.len() as i64).await;
    process.stop().await;

    let told_of = async |kind: &str| -> String {
        let query = "select last_error from pillarbox.dead_letter where topic = $1";
        sqlx::query_scalar(query).bind(format!("test.{kind}")).fetch_one(db).await.unwrap()
    };
    for (kind, expected) in [
        ("unique", "word_is_unique"),
        ("deferred", "word_is_unique_at_last"),
        ("json", "invalid input syntax for type json"),
        ("number", "invalid input syntax for type integer: \"…\""),
        ("wrapped", "database: "),
        ("long", "first line and more"),
    ] {
        let told = told_of(kind).await;
        assert!(told.contains(expected) && !told.contains(SECRET), "{kind}: {told}");
        assert!(!told.contains('\n') && told.chars().count() <= 501, "{kind}: {told}");
        // What is announced says the same.
        let query = "select count(*) from pillarbox.log where topic = 'dead_letter.effects' and payload->>'error' = $1";
        assert_eq!(sqlx::query_scalar::<_, i64>(query).bind(told).fetch_one(db).await.unwrap(), 1, "{kind}");
    }
}

//! The text that is stored and logged for a failure of a handler.

use std::sync::Arc;

use pillarbox::consumers::{Handler, HandlerFuture, StartAt};
use pillarbox::log::{Message, Post, post_all};
use serde_json::json;
use sqlx::{Postgres, Transaction};

use crate::consumers::support::{Process, SOURCE, database, fast_options, wait_for_count};

const SECRET: &str = "hunter2";

/// Fails with each kind of PostgreSQL error that quotes a value, and with an error of its own.
struct Careless;

impl Handler for Careless {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
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
                "test.wrapped" => done.map_err(pillarbox::log::PostError::Database)?,
                _ => done?,
            };
            Ok(())
        })
    }
}

#[tokio::test]
async fn an_error_text_is_one_line_without_values_of_the_row() {
    let database = database().await;
    let db = database.pool();
    sqlx::raw_sql(
        "create table secret (word text constraint word_is_unique unique);
         create table patient_secret (word text constraint word_is_unique_at_last unique deferrable initially deferred)",
    )
    .execute(db)
    .await
    .unwrap();
    let mut options = fast_options();
    options.worker.retry.retries = Some(0);
    let process = Process::start_with(db, Arc::new(Careless), StartAt::Beginning, options);
    let kinds = ["unique", "deferred", "json", "number", "wrapped", "long"];
    let payload = serde_json::value::to_raw_value(&json!({ "word": SECRET })).unwrap();
    let posts: Vec<Post> = kinds.iter().map(|kind| Post::new(format!("test.{kind}"), payload.clone())).collect();
    let mut tx = db.begin().await.unwrap();
    post_all(&mut tx, &SOURCE, &posts).await.unwrap();
    tx.commit().await.unwrap();
    wait_for_count(db, "dead_letter", kinds.len() as i64).await;
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
        let text = told_of(kind).await;
        assert!(text.contains(expected) && !text.contains(SECRET), "{kind}: {text}");
        assert!(!text.contains('\n') && text.chars().count() <= 501, "{kind}: {text}");
        // The announced dead letter has the same text.
        let query = "select count(*) from pillarbox.log where topic = 'dead_letter.effects' and payload->>'error' = $1";
        assert_eq!(sqlx::query_scalar::<_, i64>(query).bind(text).fetch_one(db).await.unwrap(), 1, "{kind}");
    }
}

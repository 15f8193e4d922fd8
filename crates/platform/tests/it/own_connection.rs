//! The connection that a loop keeps for itself.

use std::time::Duration;

use mailbox::own::OwnConnection;
use sqlx::PgPool;

use crate::consuming::database;

/// The process of PostgreSQL that did it, after writing a word.
async fn write(own: &OwnConnection, word: &str) -> sqlx::Result<i32> {
    let mut held = own.hold().await?;
    let done = async {
        let mut tx = held.begin().await?;
        let insert = "insert into word (word) values ($1) returning pg_backend_pid()";
        let process = sqlx::query_scalar(insert).bind(word).fetch_one(&mut *tx).await?;
        tx.commit().await?;
        Ok(process)
    }
    .await;
    held.put_back(&done).await;
    done
}

async fn words(db: &PgPool) -> Vec<String> {
    sqlx::query_scalar("select word from word order by word").fetch_all(db).await.unwrap()
}

#[tokio::test]
async fn it_is_the_same_each_time_and_another_once_it_was_lost() {
    let database = database().await;
    let db = database.pool();
    sqlx::query("create table word (word text primary key)").execute(db).await.unwrap();
    let own = OwnConnection::new(db.clone());
    let first = write(&own, "a").await.unwrap();
    assert_eq!(write(&own, "b").await.unwrap(), first);
    assert!(write(&own, "b").await.is_err(), "a word that is there already");
    assert_eq!(write(&own, "c").await.unwrap(), first, "what is wrong is the word");

    let killed: bool = sqlx::query_scalar("select pg_terminate_backend($1)").bind(first).fetch_one(db).await.unwrap();
    assert!(killed);
    // Not tried first, since it was used a moment ago: this one fails, and only this one.
    assert!(write(&own, "d").await.is_err());
    let second = write(&own, "e").await.unwrap();
    assert_ne!(second, first);

    sqlx::query("select pg_terminate_backend($1)").bind(second).execute(db).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    assert!(write(&own, "f").await.is_ok(), "tried first, since it was idle");
    assert_eq!(words(db).await, ["a", "b", "c", "e", "f"]);
}

#[tokio::test]
async fn what_is_given_up_is_undone() {
    let database = database().await;
    let db = database.pool();
    sqlx::query("create table word (word text primary key)").execute(db).await.unwrap();
    let own = OwnConnection::new(db.clone());
    let given_up = async {
        let mut held = own.hold().await.unwrap();
        let mut tx = held.begin().await.unwrap();
        sqlx::query("insert into word (word) values ('a')").execute(&mut *tx).await.unwrap();
        std::future::pending::<()>().await;
    };
    assert!(tokio::time::timeout(Duration::from_millis(300), given_up).await.is_err());
    // Waits for the same word if it is still being written.
    write(&own, "a").await.unwrap();
    assert_eq!(words(db).await, ["a"]);
}

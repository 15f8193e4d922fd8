//! The dedicated connection of a worker loop.

use std::time::Duration;

use pillarbox::database::{Database, DedicatedConnection};
use sqlx::PgPool;

use crate::consumers::support::database;

/// Inserts a word. Returns the process id of the PostgreSQL session.
async fn write(dedicated: &DedicatedConnection, word: &str) -> sqlx::Result<i32> {
    let mut connection = dedicated.acquire().await?;
    let done = async {
        let mut tx = connection.begin().await?;
        let insert = "insert into word (word) values ($1) returning pg_backend_pid()";
        let process = sqlx::query_scalar(insert).bind(word).fetch_one(&mut **tx).await?;
        tx.commit().await?;
        Ok(process)
    }
    .await;
    connection.release(&done).await;
    done
}

async fn words(db: &PgPool) -> Vec<String> {
    sqlx::query_scalar("select word from word order by word").fetch_all(db).await.unwrap()
}

#[tokio::test]
async fn a_dedicated_connection_is_reused_until_it_is_lost() {
    let database = database().await;
    let db = database.pool();
    sqlx::query("create table word (word text primary key)").execute(db).await.unwrap();
    let dedicated = Database::new(db.clone()).dedicated_connection();
    let first = write(&dedicated, "a").await.unwrap();
    assert_eq!(write(&dedicated, "b").await.unwrap(), first);
    assert!(write(&dedicated, "b").await.is_err(), "the word exists already");
    assert_eq!(write(&dedicated, "c").await.unwrap(), first, "an invalid statement does not close the connection");

    let killed: bool = sqlx::query_scalar("select pg_terminate_backend($1)").bind(first).fetch_one(db).await.unwrap();
    assert!(killed);
    // The connection was used recently, so it is not tested first: this statement fails, and only this one.
    assert!(write(&dedicated, "d").await.is_err());
    let second = write(&dedicated, "e").await.unwrap();
    assert_ne!(second, first);

    sqlx::query("select pg_terminate_backend($1)").bind(second).execute(db).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    assert!(write(&dedicated, "f").await.is_ok(), "an idle connection is tested before its use");
    assert_eq!(words(db).await, ["a", "b", "c", "e", "f"]);
}

#[tokio::test]
async fn a_cancelled_transaction_is_rolled_back() {
    let database = database().await;
    let db = database.pool();
    sqlx::query("create table word (word text primary key)").execute(db).await.unwrap();
    let dedicated = Database::new(db.clone()).dedicated_connection();
    let cancelled = async {
        let mut connection = dedicated.acquire().await.unwrap();
        let mut tx = connection.begin().await.unwrap();
        sqlx::query("insert into word (word) values ('a')").execute(&mut **tx).await.unwrap();
        std::future::pending::<()>().await;
    };
    assert!(tokio::time::timeout(Duration::from_millis(300), cancelled).await.is_err());
    // This insert would wait if the first one were still in progress.
    write(&dedicated, "a").await.unwrap();
    assert_eq!(words(db).await, ["a"]);
}

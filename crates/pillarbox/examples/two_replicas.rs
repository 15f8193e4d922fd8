//! Two processes with the same handler share the work. Each message is processed once. When one stops, the other one takes over.
//! Here both run in one program.
//!
//!     DATABASE_URL=postgres://localhost/example cargo run --example two_replicas

use std::error::Error;
use std::time::Duration;

use pillarbox::{Handle, HandlerError, Message, Pillarbox, Tx, post, testing};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

const CONSUMER: &str = "example.counts";

#[derive(Serialize, Deserialize)]
struct Counted {
    number: i64,
}

impl Message for Counted {
    const TOPIC: &str = "number.counted";
}

/// A handler with state: the name of its replica.
struct Counter(&'static str);

impl Handle<Counted> for Counter {
    async fn handle(&self, tx: &mut Tx, counted: Counted) -> Result<(), HandlerError> {
        let insert = sqlx::query("insert into public.example_count (number, replica) values ($1, $2)");
        insert.bind(counted.number).bind(self.0).execute(&mut **tx).await?;
        Ok(())
    }
}

async fn post_all(pool: &PgPool, numbers: std::ops::Range<i64>) -> Result<(), Box<dyn Error>> {
    for number in numbers {
        let mut tx = pool.begin().await?;
        post(&mut tx, &Counted { number }).await?;
        tx.commit().await?;
    }
    assert!(testing::wait_until_processed(pool, CONSUMER, Duration::from_secs(30)).await?);
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    pillarbox::database::migrate(&pool.connect_options()).await?;
    // A second effect of a message would violate the primary key.
    let table = "drop table if exists public.example_count;
                 create table public.example_count (number bigint primary key, replica text not null)";
    sqlx::raw_sql(table).execute(&pool).await?;
    let replica = |name| {
        Pillarbox::new(pool.clone()).name(name).lease_time(Duration::from_secs(2)).handler(CONSUMER, Counter(name))
    };
    let (first, second) = (replica("first").start().await?, replica("second").start().await?);
    tokio::time::sleep(Duration::from_secs(2)).await; // They divide the shards at their heartbeats.
    post_all(&pool, 0..200).await?;
    first.stop().await;
    post_all(&pool, 200..300).await?;
    second.stop().await;
    let query = "select replica, count(*) from public.example_count group by replica order by replica";
    let counts: Vec<(String, i64)> = sqlx::query_as(query).fetch_all(&pool).await?;
    println!("{counts:?}");
    assert_eq!(counts.iter().map(|(_, count)| count).sum::<i64>(), 300);
    Ok(())
}

//! A handler fails: its message is retried, becomes a dead letter, and is retried once more when the cause is gone.
//!
//!     DATABASE_URL=postgres://localhost/example cargo run --example retries_and_dead_letters

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pillarbox::consumers::{ConsumerOptions, RetryPolicy, StartAt};
use pillarbox::database::Database;
use pillarbox::operations::dead_letters::{self, Selection};
use pillarbox::{Backoff, Message, Pillarbox, Tx, post, testing};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

const CONSUMER: &str = "example.rates";

#[derive(Serialize, Deserialize)]
struct RateChanged {
    currency: String,
}

impl Message for RateChanged {
    const TOPIC: &str = "rate.changed";
}

static IS_KNOWN: AtomicBool = AtomicBool::new(false);

#[derive(Debug, thiserror::Error)]
#[error("{0} is an unknown currency")]
struct UnknownCurrency(String);

async fn apply_rate(_tx: &mut Tx, changed: RateChanged) -> Result<(), UnknownCurrency> {
    if IS_KNOWN.load(Ordering::Relaxed) { Ok(()) } else { Err(UnknownCurrency(changed.currency)) }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    pillarbox::database::migrate(&pool.connect_options()).await?;
    // Two retries, after 100 and 200 ms. The default is three, within about 7 s.
    let backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
    let mut options = ConsumerOptions::default();
    options.worker.retry = RetryPolicy { retries: Some(2), backoff };
    let running =
        Pillarbox::new(pool.clone()).handler_with(CONSUMER, StartAt::Now, options, apply_rate).start().await?;

    let mut tx = pool.begin().await?;
    post(&mut tx, &RateChanged { currency: "XTS".to_owned() }).await?;
    tx.commit().await?;

    let selection = Selection { consumer: Some(CONSUMER.to_owned()), ..Selection::default() };
    let dead = loop {
        if let Some(dead) = dead_letters::list(&pool, &selection, None, 1).await?.pop() {
            break dead;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    println!("given up after {} attempts: {}", dead.attempts, dead.last_error);

    IS_KNOWN.store(true, Ordering::Relaxed);
    let retried = dead_letters::retry_many(&Database::new(pool.clone()), &selection).await?;
    assert!(testing::wait_until_processed(&pool, CONSUMER, Duration::from_secs(10)).await?);
    println!("retried: {}, dead: {}", retried.count, dead_letters::list(&pool, &selection, None, 1).await?.len());
    running.stop().await;
    Ok(())
}

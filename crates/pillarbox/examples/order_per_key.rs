//! Messages with the same key are processed in order, while one waits for its retry; other keys continue.
//!
//!     DATABASE_URL=postgres://localhost/example cargo run --example order_per_key

use std::error::Error;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pillarbox::{Message, Pillarbox, Tx, post, testing};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

#[derive(Serialize, Deserialize)]
struct Moved {
    account: String,
    step: i32,
}

impl Message for Moved {
    const TOPIC: &str = "account.moved";

    fn key(&self) -> Option<String> {
        Some(self.account.clone())
    }
}

static HAS_FAILED: AtomicBool = AtomicBool::new(false);
/// Only for this example: a real handler has all its effects in the transaction.
static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

async fn apply(_tx: &mut Tx, moved: Moved) -> Result<(), &'static str> {
    if moved.account == "alice" && moved.step == 1 && !HAS_FAILED.swap(true, Ordering::Relaxed) {
        return Err("the first attempt fails");
    }
    let line = format!("{} {}", moved.account, moved.step);
    SEEN.lock().map_err(|_| "poisoned")?.push(line);
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    pillarbox::database::migrate(&pool.connect_options()).await?;
    let running = Pillarbox::new(pool.clone()).handler("example.moves", apply).start().await?;
    for step in 1..=3 {
        for account in ["alice", "bob"] {
            let mut tx = pool.begin().await?;
            post(&mut tx, &Moved { account: account.to_owned(), step }).await?;
            tx.commit().await?;
        }
    }
    assert!(testing::wait_until_processed(&pool, "example.moves", Duration::from_secs(20)).await?);
    let seen = SEEN.lock().map_err(|error| error.to_string())?.clone();
    println!("{seen:?}");
    let of = |account: &str| seen.iter().filter(|line| line.starts_with(account)).cloned().collect::<Vec<_>>();
    // A rolled-back attempt may have pushed a line before, so the last three count.
    assert!(of("alice").ends_with(&["alice 1", "alice 2", "alice 3"].map(str::to_owned)));
    running.stop().await;
    Ok(())
}

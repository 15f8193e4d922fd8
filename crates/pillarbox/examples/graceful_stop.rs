//! Runs until Ctrl-C, or for as many seconds as the first argument says. A stop finishes what is in progress and hands the rest
//! over at once, so a rolling update delays nothing.
//!
//!     DATABASE_URL=postgres://localhost/example cargo run --example graceful_stop

use std::error::Error;
use std::time::Duration;

use pillarbox::{Message, Pillarbox, Received, Tx};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

#[derive(Serialize, Deserialize)]
struct Tick {
    number: i64,
}

impl Message for Tick {
    const TOPIC: &str = "clock.tick";
    // It is posted in SQL: select pillarbox.post('clock.tick', '{"number": 1}')
    const SOURCE: &str = "sql";
}

/// Also receives what the log knows about the message.
async fn print(_tx: &mut Tx, tick: Received<Tick>) -> Result<(), std::convert::Infallible> {
    println!("{} was posted at {} with the id {}", tick.message.number, tick.at, tick.id);
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    pillarbox::database::migrate(&pool.connect_options()).await?;
    let seconds = std::env::args().nth(1).map(|seconds| seconds.parse()).transpose()?;
    let stop = async {
        match seconds {
            Some(seconds) => tokio::time::sleep(Duration::from_secs(seconds)).await,
            None => drop(tokio::signal::ctrl_c().await),
        }
        println!("stopping");
    };
    Pillarbox::new(pool).handler("example.ticks", print).run(stop).await?;
    println!("stopped");
    Ok(())
}

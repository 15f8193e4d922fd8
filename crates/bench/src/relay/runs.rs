//! Runs of the relay, seen from outside: what is posted, and when it is in the queue.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;

use super::fixture::{Fixture, QUEUE, SECOND_QUEUE};
use super::limits::payload;
use crate::Outcome;

const LOOK_PAUSE: Duration = Duration::from_millis(10);
const RUN_TIME_MAX: Duration = Duration::from_secs(900);

/// Posts so many in one transaction: they are there at once.
async fn post_backlog(fixture: &Fixture, count: u64) -> Outcome<()> {
    sqlx::query("select pillarbox.post('bench.posted', $1::json, key => 'k' || n) from generate_series(1, $2) as n")
        .bind(payload())
        .bind(count as i64)
        .execute(&fixture.db)
        .await?;
    Ok(())
}

/// Messages a second, from the commit until the last is in the queue (of both, if dual).
pub(super) async fn relayed(fixture: &Fixture, count: u64, dual: bool) -> Outcome<f64> {
    fixture.purge().await?;
    post_backlog(fixture, count).await?;
    let began = Instant::now();
    let queues: &[&str] = if dual { &[QUEUE, SECOND_QUEUE] } else { &[QUEUE] };
    for queue in queues {
        until_depth(fixture, queue, count, began).await?;
    }
    let rate = count as f64 / began.elapsed().as_secs_f64();
    fixture.purge().await?;
    Ok(rate)
}

async fn until_depth(fixture: &Fixture, queue: &str, depth: u64, began: Instant) -> Outcome<()> {
    loop {
        let found = fixture.depth(queue).await?;
        if found >= depth {
            return Ok(());
        }
        if began.elapsed() > RUN_TIME_MAX {
            return Err(format!("{queue} has {found} of {depth}").into());
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}

/// The p50 and p99 of five times three seconds, from commit to delivery.
pub(super) async fn latency(fixture: &Fixture) -> Outcome<(Vec<f64>, Vec<f64>)> {
    const ROUNDS: usize = 5;
    const POSTS: u32 = 600;
    fixture.purge().await?;
    let channel = fixture.new_channel().await?;
    channel.basic_qos(500, BasicQosOptions::default()).await?;
    let no_ack = BasicConsumeOptions { no_ack: true, ..Default::default() };
    let mut consumer = channel.basic_consume(QUEUE.into(), "bench".into(), no_ack, FieldTable::default()).await?;
    let (mut p50, mut p99) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let posting = async {
            let mut committed = HashMap::new();
            let mut ticks = tokio::time::interval(Duration::from_millis(5));
            for _ in 0..POSTS {
                ticks.tick().await;
                let id: uuid::Uuid = sqlx::query_scalar("select pillarbox.post('bench.posted', $1::json)")
                    .bind(payload())
                    .fetch_one(&fixture.db)
                    .await?;
                committed.insert(format!("evt_{id}"), Instant::now());
            }
            Outcome::Ok(committed)
        };
        let receiving = async {
            let mut received = HashMap::new();
            while received.len() < POSTS as usize {
                let delivery = tokio::time::timeout(Duration::from_secs(30), consumer.next()).await?;
                let delivery = delivery.ok_or("the consumer ended")??;
                let id = delivery.properties.message_id().as_ref().map(ToString::to_string).unwrap_or_default();
                received.insert(id, Instant::now());
            }
            Outcome::Ok(received)
        };
        let (committed, received) = tokio::try_join!(posting, receiving)?;
        let mut times: Vec<f64> = committed
            .iter()
            .filter_map(|(id, at)| Some(received.get(id)?.saturating_duration_since(*at).as_secs_f64() * 1e3))
            .collect();
        times.sort_by(f64::total_cmp);
        p50.push(times[times.len() / 2]);
        p99.push(times[times.len() * 99 / 100]);
    }
    channel.basic_cancel("bench".into(), Default::default()).await?;
    Ok((p50, p99))
}

/// The rates of the first and the last part of a backlog, and the relay's memory at most.
pub(super) async fn backlog(fixture: &Fixture, count: u64, part: u64) -> Outcome<(f64, f64, f64)> {
    fixture.purge().await?;
    for _ in 0..count / part {
        post_backlog(fixture, part).await?;
    }
    let relay = fixture.relay(false).await?;
    let (mut most, mut passed) = (0.0f64, Vec::new());
    let began = Instant::now();
    let mut told = 0;
    loop {
        let depth = fixture.depth(QUEUE).await?;
        most = most.max(relay.rss_mib()?);
        passed.push((depth, Instant::now()));
        if depth >= count {
            break;
        }
        if depth / part > told {
            told = depth / part;
            eprintln!("  {} of {count} after {:.0} s", told * part, began.elapsed().as_secs_f64());
        }
        if began.elapsed() > RUN_TIME_MAX {
            return Err(format!("the queue has {depth} of {count}").into());
        }
        tokio::time::sleep(LOOK_PAUSE * 5).await;
    }
    relay.stop().await?;
    fixture.purge().await?;
    let at = |wanted: u64| passed.iter().find(|(depth, _)| *depth >= wanted).ok_or("the queue never held it");
    let rate = |from: u64, to: u64| -> Outcome<f64> {
        let (from, to) = (at(from)?, at(to)?);
        Ok((to.0 - from.0) as f64 / (to.1 - from.1).as_secs_f64())
    };
    Ok((rate(1, part)?, rate(count - part, count)?, most))
}

//! Runs of the relay, measured from outside: from the post to the queue.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;

use super::fixture::{Fixture, QUEUE, SECOND_QUEUE};
use super::limits::payload;
use crate::Outcome;

const POLL_INTERVAL: Duration = Duration::from_millis(10);
const RUN_TIME_MAX: Duration = Duration::from_secs(900);

/// Posts `count` messages in one transaction, so that all become visible at once.
async fn post_backlog(fixture: &Fixture, count: u64) -> Outcome<()> {
    sqlx::query("select pillarbox.post('bench.posted', $1::json, key => 'k' || n) from generate_series(1, $2) as n")
        .bind(payload())
        .bind(count as i64)
        .execute(&fixture.db)
        .await?;
    Ok(())
}

/// Returns the messages per second, from the commit until the last one is in the queue (in both queues, if dual).
pub(super) async fn relayed(fixture: &Fixture, count: u64, dual: bool) -> Outcome<f64> {
    fixture.purge().await?;
    post_backlog(fixture, count).await?;
    let began = Instant::now();
    let queues: &[&str] = if dual { &[QUEUE, SECOND_QUEUE] } else { &[QUEUE] };
    for queue in queues {
        wait_for_depth(fixture, queue, count, began).await?;
    }
    let rate = count as f64 / began.elapsed().as_secs_f64();
    fixture.purge().await?;
    Ok(rate)
}

async fn wait_for_depth(fixture: &Fixture, queue: &str, depth: u64, began: Instant) -> Outcome<()> {
    loop {
        let found = fixture.depth(queue).await?;
        if found >= depth {
            return Ok(());
        }
        if began.elapsed() > RUN_TIME_MAX {
            return Err(format!("timeout: {queue} has {found} of {depth} messages").into());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Returns p50 and p99 of the latency from commit to delivery, for five periods of three seconds.
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

/// A part of a backlog: its rate, and the CPU microseconds per message of the relay, PostgreSQL and RabbitMQ.
pub(super) struct Drained {
    pub(super) rate: f64,
    pub(super) cpu: [f64; 3],
}

/// Measures the first and the last part of a backlog, and the peak memory of the relay. The queue is purged as it fills:
/// RabbitMQ uses 50 % more CPU per message in a queue of a million, whichever client publishes.
pub(super) async fn backlog(fixture: &Fixture, count: u64, part: u64) -> Outcome<(Drained, Drained, f64)> {
    fixture.purge().await?;
    for _ in 0..count / part {
        post_backlog(fixture, part).await?;
    }
    let relay = fixture.relay(false).await?;
    let began = Instant::now();
    // The time at which each part was in the queue, from the first message on.
    let (mut rss_most, mut passed): (f64, Vec<(u64, Instant, [f64; 3])>) = (0.0, Vec::new());
    let mut received = 0;
    loop {
        received += fixture.empty(QUEUE).await?;
        rss_most = rss_most.max(relay.rss_mib()?);
        if received > 0 && passed.last().is_none_or(|(last, ..)| received / part > last / part) {
            passed.push((received, Instant::now(), fixture.cpu(&relay)?));
            eprintln!("  {received} of {count} after {:.0} s", began.elapsed().as_secs_f64());
        }
        if received >= count {
            break;
        }
        if began.elapsed() > RUN_TIME_MAX {
            return Err(format!("timeout: {received} of {count} messages were published").into());
        }
        tokio::time::sleep(POLL_INTERVAL * 5).await;
    }
    relay.stop().await?;
    fixture.purge().await?;
    let [first, second, .., before_last, last] = &passed[..] else {
        return Err("the backlog has too few parts".into());
    };
    Ok((drained(first, second), drained(before_last, last), rss_most))
}

fn drained(from: &(u64, Instant, [f64; 3]), to: &(u64, Instant, [f64; 3])) -> Drained {
    let messages = (to.0 - from.0) as f64;
    let cpu = std::array::from_fn(|of| (to.2[of] - from.2[of]) * 1e6 / messages);
    Drained { rate: messages / (to.1 - from.1).as_secs_f64(), cpu }
}

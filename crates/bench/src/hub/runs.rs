//! Runs of the hub, measured from outside: from the post to the received webhook.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::fixture::{Fixture, TENANT, UNNOTED, payload};
use super::poster::{Accepted, Load};
use crate::Outcome;
use crate::costs::Costs;

/// The number of messages per insert of a backlog.
const CHUNK: u64 = 50_000;
/// The time until the last webhook of a run of latency.
const ARRIVAL_TIME_MAX: Duration = Duration::from_secs(60);
const FAN_OUT_TIME_MAX: Duration = Duration::from_secs(600);

/// Returns the plain POST requests per second.
pub(super) async fn raw(fixture: &Fixture, count: u64) -> Outcome<f64> {
    rate(&fixture.raw(), count).await
}

/// Returns the completed requests per second.
pub(super) async fn rate(load: &Load, count: u64) -> Outcome<f64> {
    let posted = load.run(count).await?;
    Ok(count as f64 / posted.began.elapsed().as_secs_f64())
}

/// Returns the deliveries per second to these endpoints, from the first POST to the last webhook.
pub(super) async fn delivered(
    fixture: &Fixture,
    load: &Load,
    count: u64,
    endpoints: Range<usize>,
    costs: &mut Costs,
) -> Outcome<f64> {
    let began = fixture.used().await?;
    let (rate, _) = fixture.deliver(load, count, endpoints).await?;
    costs.add(began, fixture.used().await?, count);
    Ok(rate)
}

/// Returns p50 and p99 in milliseconds, from the response 202 to the webhook, at `rate` events per second.
pub(super) async fn latency(fixture: &Fixture, load: &Load, rate: f64, count: u64) -> Outcome<(f64, f64)> {
    fixture.receiver.clear_arrivals();
    let paced = Load { rate_max: Some(rate), ..load.clone() };
    let (_, posted) = fixture.deliver(&paced, count, 0..1).await?;
    let took = |accepted: &Accepted| {
        let arrival = fixture.receiver.arrival(accepted.number)?;
        Some(arrival.saturating_duration_since(accepted.at).as_secs_f64() * 1e3)
    };
    let times: Vec<f64> = posted.accepted.iter().filter_map(took).collect();
    if times.len() < count as usize {
        return Err(format!("{} of {count} webhooks were received", times.len()).into());
    }
    Ok(percentiles(times))
}

/// Returns p50 and p99 in milliseconds, from the request to the response 202, at `rate` events per second.
pub(super) async fn ingest_latency(load: &Load, rate: f64, count: u64) -> Outcome<(f64, f64)> {
    let posted = Load { rate_max: Some(rate), ..load.clone() }.run(count).await?;
    Ok(percentiles(posted.accepted.iter().map(|accepted| accepted.took.as_secs_f64() * 1e3).collect()))
}

fn percentiles(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

/// Like [`latency`], while the endpoint also receives other webhooks.
pub(super) async fn latency_beside(fixture: &Fixture, load: &Load, rate: f64, count: u64) -> Outcome<(f64, f64)> {
    fixture.receiver.clear_arrivals();
    let posted = Load { rate_max: Some(rate), ..load.clone() }.run(count).await?;
    let until = Instant::now() + ARRIVAL_TIME_MAX;
    let mut times = Vec::new();
    for Accepted { number, at, .. } in &posted.accepted {
        let arrival = loop {
            match fixture.receiver.arrival(*number) {
                Some(arrival) => break arrival,
                None if Instant::now() > until => {
                    return Err(format!("timeout: webhook {number} was not received\n{}", fixture.log_end()?).into());
                }
                None => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        };
        times.push(arrival.saturating_duration_since(*at).as_secs_f64() * 1e3);
    }
    Ok(percentiles(times))
}

/// Inserts events into the log as the hub does, and waits until fan-out has processed them.
pub(super) async fn backlog(fixture: &Fixture, event_type: &str, lane: Option<&str>, count: u64) -> Outcome<()> {
    let newest = "select coalesce(max(n_to), 0) from pillarbox_hub.fanout_batch";
    let before: i64 = sqlx::query_scalar(newest).fetch_one(fixture.db()).await?;
    insert_events(fixture, event_type, lane, count).await?;
    let posted = Instant::now();
    loop {
        let made = sqlx::query_scalar::<_, i64>(newest).fetch_one(fixture.db()).await? - before;
        if made >= count as i64 {
            eprintln!("  fan-out has created {count} messages {:.1} s after the post", posted.elapsed().as_secs_f64());
            return Ok(());
        }
        if posted.elapsed() > FAN_OUT_TIME_MAX {
            return Err(
                format!("timeout: fan-out has created {made} of {count} messages\n{}", fixture.log_end()?).into()
            );
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Inserts events into the log as the hub does.
pub(super) async fn insert_events(fixture: &Fixture, event_type: &str, lane: Option<&str>, count: u64) -> Outcome<()> {
    let mut left = count;
    while left > 0 {
        let chunk = left.min(CHUNK);
        sqlx::query(
            "insert into pillarbox.log (shard, message_id, source, tenant, topic, key, headers, payload)
             select pillarbox.shard_of($1, coalesce($3, m.id::text)), m.id, 'hub', $1, $2, $3, '{}', $4::json
             from (select gen_random_uuid() as id from generate_series(1, $5)) as m",
        )
        .bind(TENANT)
        .bind(event_type)
        .bind(lane)
        .bind(payload(UNNOTED))
        .bind(chunk as i64)
        .execute(fixture.db())
        .await?;
        left -= chunk;
    }
    Ok(())
}

/// The number of deliveries over time since the subscriber was resumed.
pub(super) struct Drained {
    began: Instant,
    passed: Vec<(u64, Instant)>,
}

/// Resumes a paused subscriber and waits until its backlog of `count` messages is delivered.
pub(super) async fn deliver_backlog(
    fixture: &Fixture,
    subscriber: &str,
    endpoint: usize,
    count: u64,
) -> Outcome<Drained> {
    let began = Instant::now();
    let (passed, ()) = tokio::try_join!(fixture.receive(endpoint..endpoint + 1, count), fixture.resume(subscriber))?;
    Ok(Drained { began, passed })
}

impl Drained {
    /// Returns the deliveries per second between two counts.
    pub(super) fn rate(&self, from: u64, to: u64) -> Outcome<f64> {
        let at = |wanted: u64| match wanted {
            0 => Some((0, self.began)),
            _ => self.passed.iter().find(|(count, _)| *count >= wanted).copied(),
        };
        let ((from, began), (to, ended)) = at(from).zip(at(to)).ok_or("too few webhooks were received")?;
        Ok((to - from) as f64 / (ended - began).as_secs_f64())
    }
}

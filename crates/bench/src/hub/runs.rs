//! Runs of the hub, seen from outside: what is posted, and when it is received.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::fixture::{Fixture, TENANT, payload};
use super::poster::Load;
use crate::Outcome;
use crate::costs::Costs;

/// What a backlog's messages are made of at a time.
const CHUNK: u64 = 50_000;
const FAN_OUT_TIME_MAX: Duration = Duration::from_secs(600);

/// Plain POSTs a second.
pub(super) async fn raw(fixture: &Fixture, count: u64) -> Outcome<f64> {
    rate(&fixture.raw(), count).await
}

/// Requests that are answered, a second.
pub(super) async fn rate(load: &Load, count: u64) -> Outcome<f64> {
    let posted = load.run(count).await?;
    Ok(count as f64 / posted.began.elapsed().as_secs_f64())
}

/// Deliveries a second to these endpoints, from the first POST to the last webhook.
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

/// The p50 and p99 in milliseconds, from the answer 202 to the webhook, at so many events a second.
pub(super) async fn latency(fixture: &Fixture, load: &Load, rate: f64, count: u64) -> Outcome<(f64, f64)> {
    fixture.receiver.forget_arrivals();
    let paced = Load { rate_max: Some(rate), ..load.clone() };
    let (_, posted) = fixture.deliver(&paced, count, 0..1).await?;
    let took = |(number, accepted): &(u64, Instant)| {
        let arrival = fixture.receiver.arrival(*number)?;
        Some(arrival.saturating_duration_since(*accepted).as_secs_f64() * 1e3)
    };
    let mut times: Vec<f64> = posted.accepted.iter().filter_map(took).collect();
    if times.len() < count as usize {
        return Err(format!("{} of {count} came", times.len()).into());
    }
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], times[times.len() * 99 / 100]))
}

/// Puts so many events into the log as the hub does, and waits until they are messages.
pub(super) async fn backlog(fixture: &Fixture, event_type: &str, lane: Option<&str>, count: u64) -> Outcome<()> {
    let newest = "select coalesce(max(n_to), 0) from pillarbox_hub.fanned";
    let before: i64 = sqlx::query_scalar(newest).fetch_one(fixture.db()).await?;
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
        .bind(payload(0))
        .bind(chunk as i64)
        .execute(fixture.db())
        .await?;
        left -= chunk;
    }
    let posted = Instant::now();
    loop {
        let made = sqlx::query_scalar::<_, i64>(newest).fetch_one(fixture.db()).await? - before;
        if made >= count as i64 {
            eprintln!("  {count} messages are made {:.1} s after they were posted", posted.elapsed().as_secs_f64());
            return Ok(());
        }
        if posted.elapsed() > FAN_OUT_TIME_MAX {
            return Err(format!("stuck: fan-out has made {made} of {count}\n{}", fixture.log_end()?).into());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// How many had come at which time since the subscriber was resumed.
pub(super) struct Drained {
    began: Instant,
    passed: Vec<(u64, Instant)>,
}

/// Lets a paused subscriber have so many that wait for it.
pub(super) async fn drain(fixture: &Fixture, subscriber: &str, endpoint: usize, count: u64) -> Outcome<Drained> {
    let began = Instant::now();
    let (passed, ()) = tokio::try_join!(fixture.receive(endpoint..endpoint + 1, count), fixture.resume(subscriber))?;
    Ok(Drained { began, passed })
}

impl Drained {
    /// Deliveries a second between two counts.
    pub(super) fn rate(&self, from: u64, to: u64) -> Outcome<f64> {
        let at = |wanted: u64| match wanted {
            0 => Some((0, self.began)),
            _ => self.passed.iter().find(|(count, _)| *count >= wanted).copied(),
        };
        let ((from, began), (to, ended)) = at(from).zip(at(to)).ok_or("so many never came")?;
        Ok((to - from) as f64 / (ended - began).as_secs_f64())
    }
}

//! The hub, end to end: from the accepted event to the received webhook.

pub(crate) mod comparison;
mod fixture;
pub(crate) mod poster;
pub(crate) mod receiver;
mod replays;
mod runs;
pub(crate) mod tenants;

use std::path::Path;

use clap::ValueEnum;

use crate::Outcome;
use crate::costs::Costs;
use crate::report::{Pairs, Report};
use fixture::Fixture;
use receiver::{FAILING, SILENT};
use runs::{backlog, deliver_backlog, delivered, ingest_latency, latency, rate, raw};

/// Requests of a run of the raw limit, and events of a run of the hub by the number of subscribers per event.
const RAW_RUN: u64 = 60_000;
const RUN: u64 = 20_000;
const RUN_OF_FIVE: u64 = 8_000;
const RUN_OF_TEN: u64 = 3_000;
const LANES: u64 = 100;
const LATENCY_ROUND_S: f64 = 5.0;
const LATENCY_EVENTS_MAX: f64 = 100_000.0;
/// The load that the hub is designed for, in events per second, and the time within which half of them are accepted.
const DESIGN_RATE: f64 = 200.0;
const ACCEPTED_WITHIN_MS: f64 = 10.0;
const LANE_DEPTH: u64 = 100_000;
const LANE_PART: u64 = 10_000;
const BACKLOG_PART: u64 = 100_000;
/// The roles of `pillarbox up` without the relay, which is not measured.
const ROLES: &str = "api,fanout,dispatch,maintain";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// One and five subscribers, between runs of plain POSTs
    Ratio,
    /// 100 lanes, between runs without ordering
    Ordered,
    /// Accepting events without delivery, between runs of plain POSTs
    Ingest,
    /// Latency of ingest at 200 events per second, which must be below 10 ms; from accepted to received, at half of the
    /// maximum rate
    Latency,
    /// Nine of ten subscribers while the tenth fails
    Dead,
    /// While a transaction pins xmin
    Pinned,
    /// One lane with a backlog of 100,000
    Lane,
    /// A backlog of a million
    Backlog,
    /// Sending events again, between runs of live events; latency of live events during a replay at full speed
    Replay,
}

pub(crate) async fn measure(pillarbox: &Path, pairs: usize, only: &[Part], depth: u64) -> Outcome<Report> {
    let mut report = Report::default();
    let mut rss_most: f64 = 0.0;
    for part in Part::value_variants() {
        if !only.is_empty() && !only.contains(part) {
            continue;
        }
        let roles = if *part == Part::Ingest { "api" } else { ROLES };
        let fixture = Fixture::new(pillarbox, roles).await?;
        match part {
            Part::Ratio => ratio(&fixture, pairs, &mut report).await?,
            Part::Ordered => ordered(&fixture, pairs, &mut report).await?,
            Part::Ingest => ingest(&fixture, pairs, &mut report).await?,
            Part::Latency => {
                at_design_rate(&fixture, pairs, &mut report).await?;
                at_half_rate(&fixture, pairs, &mut report).await?;
            }
            Part::Dead => dead(&fixture, pairs, &mut report).await?,
            Part::Pinned => pinned(&fixture, pairs, &mut report).await?,
            Part::Lane => deep_lane(&fixture, &mut report).await?,
            Part::Backlog => deep_backlog(&fixture, depth, &mut report).await?,
            Part::Replay => {
                replays::throughput(&fixture, pairs, &mut report).await?;
                replays::live_latency(&fixture, pairs, depth * 2 / 5, &mut report).await?;
            }
        }
        rss_most = rss_most.max(fixture.end().await?);
    }
    report.add("peak memory of the server", "MiB", vec![rss_most]);
    Ok(report)
}

async fn subscribe_all(fixture: &Fixture, event_type: &str, fan_out: usize) -> Outcome<()> {
    for endpoint in 0..fan_out {
        fixture.subscribe(event_type, &format!("/{endpoint}")).await?;
    }
    Ok(())
}

async fn ratio(fixture: &Fixture, pairs: usize, report: &mut Report) -> Outcome<()> {
    for (fan_out, count) in [(1, RUN), (5, RUN_OF_FIVE)] {
        let (what, event_type) = (format!("fan-out {fan_out}"), format!("bench.to_{fan_out}"));
        subscribe_all(fixture, &event_type, fan_out).await?;
        let load = fixture.events(&event_type, None);
        let mut costs = Costs::default();
        delivered(fixture, &load, count / 4, 0..fan_out, &mut Costs::default()).await?; // warm-up
        let ours = async || delivered(fixture, &load, count, 0..fan_out, &mut costs).await;
        let runs = Pairs::run(&what, pairs, async || raw(fixture, RAW_RUN).await, ours).await?;
        report.add(&format!("plain POSTs, beside {what}"), "req/s", runs.raws);
        report.add(&format!("{what}, deliveries"), "/s", runs.ours);
        report.add(&format!("{what}, ratio to raw"), "", runs.ratios);
        costs.report(&what, report);
    }
    Ok(())
}

async fn ordered(fixture: &Fixture, pairs: usize, report: &mut Report) -> Outcome<()> {
    for (fan_out, count) in [(1, RUN), (5, RUN_OF_FIVE)] {
        let (what, event_type) = (format!("{LANES} lanes, fan-out {fan_out}"), format!("bench.to_{fan_out}"));
        subscribe_all(fixture, &event_type, fan_out).await?;
        let (free, laned) = (fixture.events(&event_type, None), fixture.events(&event_type, Some(LANES)));
        let mut costs = Costs::default();
        delivered(fixture, &laned, count / 4, 0..fan_out, &mut Costs::default()).await?; // warm-up
        let unordered = async || delivered(fixture, &free, count, 0..fan_out, &mut Costs::default()).await;
        let ours = async || delivered(fixture, &laned, count, 0..fan_out, &mut costs).await;
        let runs = Pairs::run(&what, pairs, unordered, ours).await?;
        report.add(&format!("{what}, deliveries"), "/s", runs.ours);
        report.add(&format!("{what}, ratio to unordered"), "", runs.ratios);
        costs.report(&what, report);
    }
    Ok(())
}

async fn ingest(fixture: &Fixture, pairs: usize, report: &mut Report) -> Outcome<()> {
    let load = fixture.events("bench.unheard", None);
    let mut costs = Costs::default();
    rate(&load, RUN).await?; // warm-up
    let ours = async || {
        let began = fixture.used().await?;
        let rate = rate(&load, RUN * 2).await?;
        costs.add(began, fixture.used().await?, RUN * 2);
        Ok(rate)
    };
    let runs = Pairs::run("ingest", pairs, async || raw(fixture, RAW_RUN).await, ours).await?;
    report.add("ingest alone", "evt/s", runs.ours);
    report.add("ingest alone, ratio to raw", "", runs.ratios);
    costs.report("ingest alone", report);
    Ok(())
}

/// Fails if ingest takes longer than it is designed for.
async fn at_design_rate(fixture: &Fixture, pairs: usize, report: &mut Report) -> Outcome<()> {
    let load = fixture.events("bench.unheard", None);
    let count = (DESIGN_RATE * LATENCY_ROUND_S) as u64;
    ingest_latency(&load, DESIGN_RATE, count / 5).await?; // warm-up
    let (mut p50s, mut p99s) = (Vec::new(), Vec::new());
    for pair in 1..=pairs {
        let (p50, p99) = ingest_latency(&load, DESIGN_RATE, count).await?;
        eprintln!("ingest: round {pair} of {pairs}: at {DESIGN_RATE:.0} events/s p50 {p50:.1} ms, p99 {p99:.1} ms");
        p50s.push(p50);
        p99s.push(p99);
    }
    let best = p50s.iter().copied().fold(f64::INFINITY, f64::min);
    report.add("accepted at 200 events/s, p50", "ms", p50s);
    report.add("accepted at 200 events/s, p99", "ms", p99s);
    match best < ACCEPTED_WITHIN_MS {
        true => Ok(()),
        false => Err(format!(
            "half of the events are accepted within {best:.1} ms at {DESIGN_RATE:.0} events/s; the hub is designed for {ACCEPTED_WITHIN_MS} ms"
        )
        .into()),
    }
}

async fn at_half_rate(fixture: &Fixture, pairs: usize, report: &mut Report) -> Outcome<()> {
    subscribe_all(fixture, "bench.to_1", 1).await?;
    let load = fixture.events("bench.to_1", None);
    delivered(fixture, &load, RUN / 4, 0..1, &mut Costs::default()).await?; // warm-up
    let (mut rates, mut p50s, mut p99s) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 1..=pairs {
        // The maximum rate, measured just before.
        let half = delivered(fixture, &load, RUN, 0..1, &mut Costs::default()).await? / 2.0;
        let count = (half * LATENCY_ROUND_S).min(LATENCY_EVENTS_MAX) as u64;
        let (p50, p99) = latency(fixture, &load, half, count).await?;
        eprintln!("latency: round {pair} of {pairs}: at {half:.0} events/s p50 {p50:.1} ms, p99 {p99:.1} ms");
        rates.push(half);
        p50s.push(p50);
        p99s.push(p99);
    }
    report.add("half of the maximum rate", "evt/s", rates);
    report.add("accepted to received, p50", "ms", p50s);
    report.add("accepted to received, p99", "ms", p99s);
    Ok(())
}

/// Nine endpoints are healthy; the tenth of each type is healthy, fails, or never responds.
async fn dead(fixture: &Fixture, pairs: usize, report: &mut Report) -> Outcome<()> {
    for (event_type, tenth) in [("bench.healthy", "/9"), ("bench.failing", FAILING), ("bench.silent", SILENT)] {
        subscribe_all(fixture, event_type, 9).await?;
        fixture.subscribe(event_type, tenth).await?;
    }
    let healthy = fixture.events("bench.healthy", None);
    delivered(fixture, &healthy, RUN_OF_TEN / 4, 0..9, &mut Costs::default()).await?; // warm-up
    for (what, event_type) in [("fails", "bench.failing"), ("never answers", "bench.silent")] {
        let what = format!("one of ten {what}");
        let mut costs = Costs::default();
        let load = fixture.events(event_type, None);
        let all_well = async || delivered(fixture, &healthy, RUN_OF_TEN, 0..9, &mut Costs::default()).await;
        let ours = async || delivered(fixture, &load, RUN_OF_TEN, 0..9, &mut costs).await;
        let runs = Pairs::run(&what, pairs, all_well, ours).await?;
        report.add(&format!("{what}, the nine"), "/s", runs.ours);
        report.add(&format!("{what}, ratio to ten healthy"), "", runs.ratios);
        costs.report(&what, report);
    }
    Ok(())
}

/// Runs during a transaction that pins xmin, between runs without one.
async fn pinned(fixture: &Fixture, pairs: usize, report: &mut Report) -> Outcome<()> {
    subscribe_all(fixture, "bench.to_1", 1).await?;
    let load = fixture.events("bench.to_1", None);
    let run = async |costs: &mut Costs| delivered(fixture, &load, RUN, 0..1, costs).await;
    run(&mut Costs::default()).await?; // warm-up
    let mut costs = Costs::default();
    let ours = async || {
        let pin = fixture.pin().await?;
        let rate = run(&mut costs).await?;
        pin.rollback().await?;
        Ok(rate)
    };
    let runs = Pairs::run("pinned xmin", pairs, async || run(&mut Costs::default()).await, ours).await?;
    report.add("pinned xmin, ratio to without", "", runs.ratios);
    costs.report("pinned xmin", report);
    // A long pin: many runs during one transaction, the later ones compared with the earlier ones.
    let pin = fixture.pin().await?;
    let mut rates = Vec::new();
    for _ in 0..pairs * 2 {
        rates.push(run(&mut Costs::default()).await?);
    }
    pin.rollback().await?;
    let (early, late) = rates.split_at(rates.len() / 2);
    let median = |rates: &[f64]| {
        let mut sorted = rates.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    report.add("one long pin, later runs to earlier", "", vec![median(late) / median(early)]);
    Ok(())
}

async fn deep_lane(fixture: &Fixture, report: &mut Report) -> Outcome<()> {
    eprintln!("one lane with a backlog of {LANE_DEPTH}");
    let subscriber = fixture.subscribe("bench.lane", "/0").await?;
    fixture.pause(&subscriber).await?;
    backlog(fixture, "bench.lane", Some("one"), LANE_DEPTH).await?;
    let began = fixture.used().await?;
    let drained = deliver_backlog(fixture, &subscriber, 0, LANE_DEPTH).await?;
    let mut costs = Costs::default();
    costs.add(began, fixture.used().await?, LANE_DEPTH);
    // Measured from the first delivery on, since the dispatcher notices the resumed subscriber with a delay.
    let (first, last) = (drained.rate(1, LANE_PART)?, drained.rate(LANE_DEPTH - LANE_PART, LANE_DEPTH)?);
    report.add("one lane of 100,000, first 10,000", "/s", vec![first]);
    report.add("one lane of 100,000, last 10,000", "/s", vec![last]);
    report.add("one lane of 100,000, last to first", "", vec![last / first]);
    costs.report("one lane of 100,000", report);
    Ok(())
}

async fn deep_backlog(fixture: &Fixture, depth: u64, report: &mut Report) -> Outcome<()> {
    eprintln!("a backlog of {depth}");
    subscribe_all(fixture, "bench.to_1", 1).await?;
    let load = fixture.events("bench.to_1", None);
    let beside = async || delivered(fixture, &load, RUN, 0..1, &mut Costs::default()).await;
    beside().await?; // warm-up
    let subscriber = fixture.subscribe("bench.backlog", "/1").await?;
    let part = BACKLOG_PART.min(depth);
    fixture.pause(&subscriber).await?;
    backlog(fixture, "bench.backlog", None, part).await?;
    let small = deliver_backlog(fixture, &subscriber, 1, part).await?.rate(0, part)?;
    let without = beside().await?;
    fixture.pause(&subscriber).await?;
    backlog(fixture, "bench.backlog", None, depth).await?;
    let with = beside().await?;
    let began = fixture.used().await?;
    let drained = deliver_backlog(fixture, &subscriber, 1, depth).await?;
    let mut costs = Costs::default();
    costs.add(began, fixture.used().await?, depth);
    let (first, last) = (drained.rate(0, part)?, drained.rate(depth - part, depth)?);
    report.add(&format!("{part} alone"), "/s", vec![small]);
    report.add(&format!("backlog of {depth}, first {part}"), "/s", vec![first]);
    report.add(&format!("backlog of {depth}, last {part}"), "/s", vec![last]);
    report.add("backlog, first to alone", "", vec![first / small]);
    report.add("backlog, last to alone", "", vec![last / small]);
    report.add("end to end during a paused backlog, ratio to without", "", vec![with / without]);
    costs.report("backlog", report);
    Ok(())
}

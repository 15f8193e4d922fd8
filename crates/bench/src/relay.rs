//! The log and the relay: posting, reading, and publishing to RabbitMQ.

mod fixture;
mod limits;
mod runs;

use std::path::Path;

use clap::ValueEnum;

use crate::Outcome;
use crate::report::{Pairs, Report};
use fixture::Fixture;
use limits::{NullSink, RawInserts, RawPublishing};
use runs::{backlog, latency, relayed};

/// Messages of a run.
const RUN: u64 = 60_000;
const BACKLOG: u64 = 1_000_000;
const BACKLOG_PART: u64 = 100_000;
/// The processes whose CPU time is measured, in the order of [`Fixture::cpu`].
const ACCOUNTED: [&str; 3] = ["relay", "PostgreSQL", "RabbitMQ"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// A backlog to one exchange, between runs of raw publishing
    Ratio,
    /// The same to two exchanges
    Dual,
    /// Posting and reading at the same time, without processing, between runs of raw inserts
    Null,
    /// Latency from commit to queue at 200 messages per second
    Latency,
    /// A backlog of a million, several times
    Backlog,
    /// While a transaction pins xmin
    Pinned,
}

pub(crate) async fn measure(pillarbox: &Path, pairs: usize, only: &[Part]) -> Outcome<Report> {
    let mut report = Report::default();
    let wanted = |part: Part| only.is_empty() || only.contains(&part);
    let fixture = Fixture::new(pillarbox).await?;
    let mut rss = Vec::new();
    if wanted(Part::Ratio) {
        rss.push(publishing(&fixture, pairs, false, &mut report).await?);
    }
    if wanted(Part::Dual) {
        rss.push(publishing(&fixture, pairs, true, &mut report).await?);
    }
    if wanted(Part::Null) {
        null_sink(&fixture, pairs, &mut report).await?;
    }
    if wanted(Part::Latency) {
        eprintln!("latency at 200 messages per second");
        let relay = fixture.relay(false).await?;
        relayed(&fixture, RUN / 12, false).await?; // reads past the messages of earlier parts
        let (p50, p99) = latency(&fixture).await?;
        report.add("commit to queue at 200/s, p50", "ms", p50);
        report.add("commit to queue at 200/s, p99", "ms", p99);
        rss.push(relay.rss_mib()?);
        relay.stop().await?;
    }
    if wanted(Part::Pinned) {
        rss.push(pinned(&fixture, pairs, &mut report).await?);
    }
    if wanted(Part::Backlog) {
        rss.push(backlogs(&fixture, pairs, &mut report).await?);
    }
    report.add("peak memory of the relay", "MiB", vec![rss.into_iter().fold(0.0, f64::max)]);
    fixture.end().await?;
    Ok(report)
}

/// Measures the relay between runs of plain publishing. Returns its memory in MiB.
async fn publishing(fixture: &Fixture, pairs: usize, dual: bool, report: &mut Report) -> Outcome<f64> {
    let what = if dual { "dual publish" } else { "relay" };
    let relay = fixture.relay(dual).await?;
    let raw = RawPublishing::new(fixture).await?;
    let mut cpu = [Vec::new(), Vec::new(), Vec::new()];
    relayed(fixture, RUN / 12, dual).await?; // warm-up
    let runs = Pairs::run(
        what,
        pairs,
        async || raw.run(RUN).await,
        async || {
            let began = fixture.cpu(&relay)?;
            let rate = relayed(fixture, RUN, dual).await?;
            for ((samples, began), ended) in cpu.iter_mut().zip(began).zip(fixture.cpu(&relay)?) {
                samples.push((ended - began) * 1e6 / RUN as f64);
            }
            Ok(rate)
        },
    );
    let runs = runs.await?;
    report.add(&format!("raw publishing, beside {what}"), "msg/s", runs.raws);
    report.add(what, "msg/s", runs.ours);
    report.add(&format!("{what}, ratio to raw"), "", runs.ratios);
    for (who, samples) in ACCOUNTED.into_iter().zip(cpu) {
        report.add(&format!("{what}, CPU of {who}"), "us/msg", samples);
    }
    let rss = relay.rss_mib()?;
    relay.stop().await?;
    Ok(rss)
}

async fn null_sink(fixture: &Fixture, pairs: usize, report: &mut Report) -> Outcome<()> {
    let (raw, ours) = (RawInserts::new(fixture).await?, NullSink::start(fixture).await?);
    ours.run().await?; // warm-up
    let runs = Pairs::run("null sink", pairs, async || raw.run().await, async || ours.run().await).await?;
    report.add("raw unnest inserts", "msg/s", runs.raws);
    report.add("posted and read without processing", "msg/s", runs.ours);
    report.add("posted and read, ratio to raw inserts", "", runs.ratios);
    ours.stop().await;
    Ok(())
}

/// Measures backlogs one after the other, each with a new relay. Returns the peak memory. Rates vary with the speed of the
/// machine within a minute; CPU time shows whether a message costs more at the end.
async fn backlogs(fixture: &Fixture, count: usize, report: &mut Report) -> Outcome<f64> {
    let (mut firsts, mut lasts, mut ratios, mut rss_most) = (Vec::new(), Vec::new(), Vec::new(), 0.0f64);
    let mut cpu = [Vec::new(), Vec::new(), Vec::new()];
    for number in 1..=count {
        let (first, last, rss) = backlog(fixture, BACKLOG, BACKLOG_PART).await?;
        let (from, to) = (first.rate, last.rate);
        eprintln!("backlog of {BACKLOG}: {number} of {count}: first {BACKLOG_PART} {from:.0}, last {to:.0}");
        firsts.push(from);
        lasts.push(to);
        ratios.push(to / from);
        for ((ratios, first), last) in cpu.iter_mut().zip(first.cpu).zip(last.cpu) {
            ratios.push(last / first);
        }
        rss_most = rss_most.max(rss);
    }
    report.add("backlog of 1,000,000, first 100,000", "msg/s", firsts);
    report.add("backlog of 1,000,000, last 100,000", "msg/s", lasts);
    report.add("backlog of 1,000,000, last to first", "", ratios);
    for (who, ratios) in ACCOUNTED.into_iter().zip(cpu) {
        report.add(&format!("backlog of 1,000,000, last to first, CPU of {who}"), "", ratios);
    }
    Ok(rss_most)
}

/// Runs during a transaction that pins xmin, between runs without one.
async fn pinned(fixture: &Fixture, pairs: usize, report: &mut Report) -> Outcome<f64> {
    let relay = fixture.relay(false).await?;
    relayed(fixture, RUN / 12, false).await?; // warm-up
    let mut ratios = Vec::new();
    for pair in 1..=pairs {
        let before = relayed(fixture, RUN / 3, false).await?;
        let pin = fixture.pin().await?;
        let mine = relayed(fixture, RUN / 3, false).await?;
        pin.rollback().await?;
        let after = relayed(fixture, RUN / 3, false).await?;
        eprintln!("pinned xmin: pair {pair} of {pairs}: free {before:.0}, pinned {mine:.0}, free {after:.0}");
        ratios.push(mine / ((before + after) / 2.0));
    }
    report.add("relay with a pinned xmin, ratio to without", "", ratios);
    // A long pin: many runs during one transaction, the later half compared with the earlier half.
    let pin = fixture.pin().await?;
    let began = fixture.cpu(&relay)?;
    let early = median_rate(fixture, pairs).await?;
    let halfway = fixture.cpu(&relay)?;
    let late = median_rate(fixture, pairs).await?;
    let ended = fixture.cpu(&relay)?;
    pin.rollback().await?;
    report.add("one long pin, later runs to earlier", "", vec![late / early]);
    for (at, who) in ACCOUNTED.into_iter().enumerate() {
        let ratio = (ended[at] - halfway[at]) / (halfway[at] - began[at]);
        report.add(&format!("one long pin, later runs to earlier, CPU of {who}"), "", vec![ratio]);
    }
    let rss = relay.rss_mib()?;
    relay.stop().await?;
    Ok(rss)
}

/// The median rate of `runs` runs.
async fn median_rate(fixture: &Fixture, runs: usize) -> Outcome<f64> {
    let mut rates = Vec::new();
    for _ in 0..runs {
        rates.push(relayed(fixture, RUN / 3, false).await?);
    }
    rates.sort_by(f64::total_cmp);
    Ok(rates[runs / 2])
}

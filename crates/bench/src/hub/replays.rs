//! Replays: how fast they send events again, and what live events notice of it.

use std::cell::Cell;
use std::time::Instant;

use super::fixture::Fixture;
use super::runs::{insert_events, latency_beside};
use super::{DESIGN_RATE, LATENCY_ROUND_S};
use crate::Outcome;
use crate::costs::Costs;
use crate::report::{Pairs, Report};

/// Events of a run of live events. A replay sends all of them that there are.
const RUN: u64 = 20_000;

/// Sends all events of the log again, between runs of live events that are written to the log at once. Both rates are those
/// of fan-out and dispatch, without ingest.
pub(super) async fn throughput(fixture: &Fixture, pairs: usize, report: &mut Report) -> Outcome<()> {
    fixture.subscribe("bench.again", "/0").await?;
    let (posted, mut live_costs, mut costs) = (Cell::new(0), Costs::default(), Costs::default());
    let mut live = async || -> Outcome<f64> {
        let (used, began) = (fixture.used().await?, Instant::now());
        let inserting = insert_events(fixture, "bench.again", None, RUN);
        let (passed, ()) = tokio::try_join!(fixture.receive(0..1, RUN), inserting)?;
        let ended = passed.last().ok_or("no webhook was expected")?.1;
        live_costs.add(used, fixture.used().await?, RUN);
        posted.set(posted.get() + RUN);
        Ok(RUN as f64 / (ended - began).as_secs_f64())
    };
    live().await?; // warm-up
    let ours = async || -> Outcome<f64> {
        let (used, began, count) = (fixture.used().await?, Instant::now(), posted.get());
        let (passed, replay) = tokio::try_join!(fixture.receive(0..1, count), fixture.replay("bench.again"))?;
        let ended = passed.last().ok_or("no webhook was expected")?.1;
        costs.add(used, fixture.used().await?, count);
        let shown = fixture.show(&replay).await?;
        match shown["created"] == count {
            true => Ok(count as f64 / (ended - began).as_secs_f64()),
            false => Err(format!("a replay of {count} events has created {}", shown["created"]).into()),
        }
    };
    let runs = Pairs::run("replay", pairs, live, ours).await?;
    report.add("live events, without ingest", "/s", runs.raws);
    report.add("replay", "/s", runs.ours);
    report.add("replay, ratio to live events", "", runs.ratios);
    live_costs.report("live events, without ingest", report);
    costs.report("replay", report);
    Ok(())
}

/// The latency of live events during a replay at full speed to the same subscriber, between rounds without one. The
/// replay has `depth` events: more than it can send during a round.
pub(super) async fn live_latency(fixture: &Fixture, pairs: usize, depth: u64, report: &mut Report) -> Outcome<()> {
    fixture.subscribe("bench.beside.*", "/1").await?;
    // Together: many of them are received before the last one is inserted.
    tokio::try_join!(fixture.receive(1..2, depth), insert_events(fixture, "bench.beside.old", None, depth))?;
    let (load, count) = (fixture.events("bench.beside.live", None), (DESIGN_RATE * LATENCY_ROUND_S) as u64);
    let quiet = async || latency_beside(fixture, &load, DESIGN_RATE, count).await;
    quiet().await?; // warm-up
    let mut rounds = Vec::new();
    let mut before = quiet().await?;
    for pair in 1..=pairs {
        let replay = fixture.replay("bench.beside.old").await?;
        let during = quiet().await?;
        let shown = fixture.show(&replay).await?;
        if shown["state"] != "running" {
            return Err(format!("the replay has ended before the round: {shown}").into());
        }
        fixture.cancel(&replay).await?;
        let after = quiet().await?;
        eprintln!(
            "latency beside a replay: round {pair} of {pairs}: p50 {:.1} ms, p99 {:.1} ms; without p50 {:.1} ms, p99 {:.1} ms; {} \
             messages of the replay",
            during.0, during.1, after.0, after.1, shown["created"]
        );
        rounds.push([(before.0, during.0, after.0), (before.1, during.1, after.1)]);
        before = after;
    }
    for (at, name) in ["p50", "p99"].into_iter().enumerate() {
        let column = |of: fn((f64, f64, f64)) -> f64| rounds.iter().map(|round| of(round[at])).collect();
        report.add(&format!("live event without a replay, {name}"), "ms", column(|(_, _, after)| after));
        report.add(&format!("live event during a replay, {name}"), "ms", column(|(_, during, _)| during));
        let ratio = |(before, during, after): (f64, f64, f64)| during / ((before + after) / 2.0);
        report.add(&format!("live event during a replay, {name}, ratio"), "", column(ratio));
    }
    Ok(())
}

//! Two builds of the server, measured in turn on the same machine.

use std::path::{Path, PathBuf};

use super::fixture::Fixture;
use super::runs::delivered;
use super::{ROLES, subscribe_all};
use crate::Outcome;
use crate::costs::Costs;
use crate::report::Report;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The other build of `pillarbox`, for example that of an earlier commit
    #[arg(long, value_name = "FILE")]
    before: PathBuf,
    /// Events per run; a fifth of it with five subscribers
    #[arg(long, default_value_t = 60_000)]
    events: u64,
}

/// Each build has its own database, and is stopped while the other one runs.
pub(crate) async fn measure(after: &Path, pairs: usize, options: &Options) -> Outcome<Report> {
    let mut report = Report::default();
    for (fan_out, count) in [(1, options.events), (5, options.events / 5)] {
        let (mut before_costs, mut after_costs) = (Costs::default(), Costs::default());
        for pair in 1..=pairs {
            let before_rate = run(&options.before, fan_out, count, &mut before_costs).await?;
            let after_rate = run(after, fan_out, count, &mut after_costs).await?;
            eprintln!(
                "fan-out {fan_out}: pair {pair} of {pairs}: before {before_rate:.0}/s, after {after_rate:.0}/s, \
                 CPU {:.1} and {:.1} us",
                before_costs.of_both().last().unwrap_or(&0.0),
                after_costs.of_both().last().unwrap_or(&0.0),
            );
        }
        let ratio = |(after, before): (&f64, &f64)| after / before;
        let ratios = after_costs.of_both().iter().zip(&before_costs.of_both()).map(ratio).collect();
        before_costs.report(&format!("fan-out {fan_out}, before"), &mut report);
        after_costs.report(&format!("fan-out {fan_out}, after"), &mut report);
        report.add(&format!("fan-out {fan_out}, CPU of both, ratio"), "", ratios);
    }
    Ok(report)
}

/// Returns the deliveries per second.
async fn run(pillarbox: &Path, fan_out: usize, count: u64, costs: &mut Costs) -> Outcome<f64> {
    let fixture = Fixture::new(pillarbox, ROLES).await?;
    subscribe_all(&fixture, "bench", fan_out).await?;
    let load = fixture.events("bench", None);
    delivered(&fixture, &load, count / 4, 0..fan_out, &mut Costs::default()).await?; // warm-up
    let rate = delivered(&fixture, &load, count, 0..fan_out, costs).await?;
    fixture.end().await?;
    Ok(rate)
}

//! Measured values with their median and spread.

use serde::Serialize;

use crate::Outcome;

#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    pub(crate) lines: Vec<Line>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Line {
    pub(crate) what: String,
    pub(crate) unit: &'static str,
    pub(crate) median: f64,
    pub(crate) lowest: f64,
    pub(crate) highest: f64,
}

/// Runs of Pillarbox, each between two runs of the raw limit.
#[derive(Debug, Default)]
pub(crate) struct Pairs {
    pub(crate) raws: Vec<f64>,
    pub(crate) ours: Vec<f64>,
    pub(crate) ratios: Vec<f64>,
}

impl Pairs {
    pub(crate) async fn run(
        what: &str,
        count: usize,
        mut raw: impl AsyncFnMut() -> Outcome<f64>,
        mut ours: impl AsyncFnMut() -> Outcome<f64>,
    ) -> Outcome<Pairs> {
        let mut pairs = Pairs::default();
        let mut before = raw().await?;
        for pair in 1..=count {
            let mine = ours().await?;
            let after = raw().await?;
            eprintln!("{what}: pair {pair} of {count}: raw {before:.0}, ours {mine:.0}, raw {after:.0}");
            pairs.ratios.push(mine / ((before + after) / 2.0));
            pairs.ours.push(mine);
            pairs.raws.push(after);
            before = after;
        }
        Ok(pairs)
    }
}

impl Report {
    pub(crate) fn add(&mut self, what: &str, unit: &'static str, mut samples: Vec<f64>) {
        samples.sort_by(f64::total_cmp);
        let (Some(lowest), Some(highest)) = (samples.first().copied(), samples.last().copied()) else { return };
        let median = samples[samples.len() / 2];
        self.lines.push(Line { what: what.to_owned(), unit, median, lowest, highest });
    }

    pub(crate) fn print(&self) {
        for line in &self.lines {
            println!(
                "{:44} {:>10.3} {:6} ({:.3} to {:.3})",
                line.what, line.median, line.unit, line.lowest, line.highest
            );
        }
    }
}

//! Numbers with their spread.

use serde::Serialize;

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

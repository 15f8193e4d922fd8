//! What an attack did to everybody else, and whether the goals were met.

use std::collections::BTreeMap;

use serde::Serialize;

use super::bystander::Latencies;

/// Another caller's p99 while an attack runs.
const P99_MS_MAX: f64 = 500.0;
/// The memory that an attack adds to the process, in MiB.
const MEMORY_GROWTH_MIB_MAX: f64 = 200.0;

/// The result of one attack.
#[derive(Debug, Serialize)]
pub(crate) struct Finding {
    pub(super) attack: String,
    pub(super) idle: Latencies,
    pub(super) attacked: Latencies,
    /// The answers that the attacker got, by status.
    pub(super) answers: BTreeMap<String, u64>,
    pub(super) memory: Memory,
    /// What this attack measures besides.
    pub(super) measured: Vec<Measured>,
    pub(super) missed: Vec<String>,
}

/// The resident memory of the server, in MiB: idle, at most during the attack, and three seconds after it.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Memory {
    pub(super) before_mib: f64,
    pub(super) peak_mib: f64,
    pub(super) after_mib: f64,
}

/// A value with a goal of its own.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Measured {
    pub(super) what: String,
    pub(super) unit: &'static str,
    pub(super) value: f64,
    /// Without either limit, the value explains the result and has no goal.
    pub(super) value_min: Option<f64>,
    pub(super) value_max: Option<f64>,
}

impl Measured {
    pub(super) fn new(what: impl Into<String>, value: f64, unit: &'static str) -> Measured {
        Measured { what: what.into(), unit, value, value_min: None, value_max: None }
    }

    /// The attack has had no load if the value is smaller.
    pub(super) fn at_least(self, value_min: f64) -> Measured {
        Measured { value_min: Some(value_min), ..self }
    }

    pub(super) fn at_most(self, value_max: f64) -> Measured {
        Measured { value_max: Some(value_max), ..self }
    }
}

impl Finding {
    /// Compares the measured values with the goals.
    pub(super) fn judge(&mut self) {
        let p99 = self.attacked.p99_ms;
        if p99 > P99_MS_MAX {
            self.missed.push(format!("p99 of the bystander {p99:.0} ms (at most {P99_MS_MAX} ms)"));
        }
        let growth = self.memory.peak_mib - self.memory.before_mib;
        if growth > MEMORY_GROWTH_MIB_MAX {
            self.missed.push(format!("{growth:.0} MiB more memory (at most {MEMORY_GROWTH_MIB_MAX} MiB)"));
        }
        if !self.attacked.errors.is_empty() {
            self.missed.push(format!("errors of the bystander: {}", counts(&self.attacked.errors)));
        }
        for Measured { what, unit, value, value_min, value_max } in &self.measured {
            if let Some(min) = value_min
                && value < min
            {
                self.missed.push(format!("{what}: {value:.1} {unit} (at least {min} {unit})"));
            }
            if let Some(max) = value_max
                && value > max
            {
                self.missed.push(format!("{what}: {value:.1} {unit} (at most {max} {unit})"));
            }
        }
    }

    /// The result in three to five lines.
    pub(super) fn print(&self) {
        let verdict =
            if self.missed.is_empty() { "ok".to_owned() } else { format!("MISSED: {}", self.missed.join("; ")) };
        println!("{}: {verdict}", self.attack);
        for (when, latencies) in [("idle", &self.idle), ("attacked", &self.attacked)] {
            let Latencies { requests, p50_ms, p99_ms, max_ms, errors } = latencies;
            let errors = counts(errors);
            println!(
                "    {when:9} {requests:>5} requests, p50 {p50_ms:>8.1} ms, p99 {p99_ms:>8.1} ms, max {max_ms:>8.1} ms, errors: {errors}"
            );
        }
        let Memory { before_mib, peak_mib, after_mib } = self.memory;
        let answers = counts(&self.answers);
        println!(
            "    memory {before_mib:.0} MiB, peak {peak_mib:.0}, after {after_mib:.0}; the attacker got: {answers}"
        );
        for Measured { what, unit, value, .. } in &self.measured {
            println!("    {what}: {value:.1} {unit}");
        }
    }
}

/// A row for each attack.
pub(super) fn print_table(findings: &[Finding]) {
    println!();
    println!(
        "| attack | p99 idle | p50, p99, max attacked (ms) | errors | memory before, peak, after (MiB) | attacker got | besides | goals |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for finding in findings {
        let Finding { attack, idle, attacked, answers, memory, measured, missed } = finding;
        let measured: Vec<String> =
            measured.iter().map(|one| format!("{}: {:.1} {}", one.what, one.value, one.unit)).collect();
        println!(
            "| {attack} | {:.0} | {:.0}, {:.0}, {:.0} | {} | {:.0}, {:.0}, {:.0} | {} | {} | {} |",
            idle.p99_ms,
            attacked.p50_ms,
            attacked.p99_ms,
            attacked.max_ms,
            counts(&attacked.errors),
            memory.before_mib,
            memory.peak_mib,
            memory.after_mib,
            counts(answers),
            measured.join("; "),
            if missed.is_empty() { "met" } else { "missed" },
        );
    }
}

fn counts(counts: &BTreeMap<String, u64>) -> String {
    let counts: Vec<String> = counts.iter().map(|(what, count)| format!("{count} x {what}")).collect();
    if counts.is_empty() { "none".to_owned() } else { counts.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(p99_ms: f64, peak_mib: f64, errors: &[(&str, u64)], ratio: f64) -> Finding {
        let errors = errors.iter().map(|(status, count)| ((*status).to_owned(), *count)).collect();
        Finding {
            attack: "one".to_owned(),
            idle: Latencies::default(),
            attacked: Latencies { p99_ms, errors, ..Latencies::default() },
            answers: BTreeMap::new(),
            memory: Memory { before_mib: 50.0, peak_mib, after_mib: 50.0 },
            measured: vec![Measured::new("ratio", ratio, "times").at_least(0.5).at_most(3.0)],
            missed: Vec::new(),
        }
    }

    #[test]
    fn each_goal_can_be_missed_alone() {
        for (mut finding, missed) in [
            (finding(500.0, 250.0, &[], 3.0), None),
            (finding(501.0, 250.0, &[], 3.0), Some("p99")),
            (finding(5.0, 251.0, &[], 3.0), Some("201 MiB more")),
            (finding(5.0, 60.0, &[("503", 1)], 3.0), Some("1 x 503")),
            (finding(5.0, 60.0, &[], 3.5), Some("ratio: 3.5 times (at most 3 times)")),
            (finding(5.0, 60.0, &[], 0.4), Some("ratio: 0.4 times (at least 0.5 times)")),
        ] {
            finding.judge();
            assert_eq!(finding.missed.len(), usize::from(missed.is_some()), "{:?}", finding.missed);
            assert!(missed.is_none_or(|text| finding.missed[0].contains(text)), "{:?}", finding.missed);
        }
    }
}

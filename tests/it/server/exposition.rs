//! A strict parser of Prometheus' text format, for the tests of `/metrics`.

use std::collections::{BTreeMap, BTreeSet};

/// The metrics with one name.
#[derive(Debug, Default)]
struct Family {
    help: Option<String>,
    kind: Option<String>,
    /// Series (name and labels) and values, in the order of the document.
    samples: Vec<(String, String, f64)>,
}

/// Returns the violations of the format, and the families without a help text or a type.
pub(crate) fn violations(exposition: &str) -> Vec<String> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut violations = Vec::new();
    let mut current = String::new();
    let mut closed = BTreeSet::new();
    for line in exposition.lines().filter(|line| !line.is_empty()) {
        let Some((name, parsed)) = parse(line, &families) else {
            violations.push(format!("not a line of the format: {line}"));
            continue;
        };
        if name != current {
            closed.insert(std::mem::replace(&mut current, name.clone()));
        }
        if closed.contains(&name) {
            violations.push(format!("the lines of {name} are not together: {line}"));
        }
        let family = families.entry(name).or_default();
        let is_new = match parsed {
            Line::Help(text) => family.samples.is_empty() && family.help.replace(text).is_none(),
            Line::Type(kind) => family.samples.is_empty() && family.kind.replace(kind).is_none(),
            Line::Sample(series, labels, value) => {
                let is_known = family.samples.iter().any(|sample| (&sample.0, &sample.1) == (&series, &labels));
                family.samples.push((series, labels, value));
                !is_known
            }
        };
        if !is_new {
            violations.push(format!("repeated, or after a sample: {line}"));
        }
    }
    for (name, family) in &families {
        violations.extend(family.violations().into_iter().map(|found| format!("{name}: {found}")));
    }
    if families.is_empty() || !exposition.ends_with('\n') {
        violations.push("the document is empty or does not end with a line break".to_owned());
    }
    violations
}

enum Line {
    Help(String),
    Type(String),
    /// Name, labels and value.
    Sample(String, String, f64),
}

/// Returns the name of the family and the content of a line.
fn parse(line: &str, families: &BTreeMap<String, Family>) -> Option<(String, Line)> {
    if let Some(rest) = line.strip_prefix("# ") {
        let (keyword, rest) = rest.split_once(' ')?;
        let (name, text) = rest.split_once(' ')?;
        return match keyword {
            "HELP" if is_name(name) => Some((name.to_owned(), Line::Help(text.to_owned()))),
            "TYPE" if is_name(name) => Some((name.to_owned(), Line::Type(text.to_owned()))),
            _ => None,
        };
    }
    let (series, value) = line.rsplit_once(' ')?;
    let value: f64 = value.parse().ok()?;
    let (name, labels) = match series.split_once('{') {
        Some((name, labels)) => (name, labels.strip_suffix('}')?),
        None => (series, ""),
    };
    if !is_name(name) || !are_labels(labels) {
        return None;
    }
    let has_parts = |base: &&str| {
        let kind = families.get(*base).and_then(|family| family.kind.as_deref());
        matches!(kind, Some("histogram" | "summary"))
    };
    let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix).filter(has_parts));
    Some((base.unwrap_or(name).to_owned(), Line::Sample(name.to_owned(), labels.to_owned(), value)))
}

fn is_name(text: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b':';
    text.bytes().next().is_some_and(|first| !first.is_ascii_digit()) && text.bytes().all(is_part)
}

/// Labels are `name="value"`, joined by commas, with `\\`, `\"` and `\n` as the only escapes.
fn are_labels(labels: &str) -> bool {
    let mut rest = labels;
    while !rest.is_empty() {
        let Some((name, value)) = rest.split_once("=\"") else { return false };
        let (mut end, mut characters) = (None, value.char_indices());
        while let Some((at, character)) = characters.next() {
            match character {
                '"' => {
                    end = Some(at);
                    break;
                }
                '\\' if !matches!(characters.next(), Some((_, '\\' | '"' | 'n'))) => return false,
                _ => {}
            }
        }
        let Some(end) = end else { return false };
        rest = match &value[end + 1..] {
            "" => "",
            more => match more.strip_prefix(',') {
                Some(more) if !more.is_empty() => more,
                _ => return false,
            },
        };
        if !is_name(name) {
            return false;
        }
    }
    true
}

impl Family {
    fn violations(&self) -> Vec<String> {
        let mut violations = Vec::new();
        if self.help.as_ref().is_none_or(|help| help.len() <= 10) {
            violations.push("it has no HELP".to_owned());
        }
        match self.kind.as_deref() {
            Some("counter" | "gauge" | "summary") => {}
            Some("histogram") => violations.extend(self.histogram_violations()),
            kind => violations.push(format!("its TYPE is {kind:?}")),
        }
        if self.samples.is_empty() {
            violations.push("it has no sample".to_owned());
        }
        violations
    }

    /// The buckets of each series are cumulative, and the last one contains everything.
    fn histogram_violations(&self) -> Vec<String> {
        let mut violations = Vec::new();
        let mut last: BTreeMap<String, (f64, f64)> = BTreeMap::new();
        for (name, labels, value) in &self.samples {
            let labels: Vec<&str> = labels.split(',').filter(|label| !label.is_empty()).collect();
            let (bound, others): (Vec<&str>, Vec<&str>) = labels.iter().partition(|label| label.starts_with("le=\""));
            let others = others.join(",");
            match bound.first().and_then(|bound| bound.strip_prefix("le=\"")?.strip_suffix('"')?.parse::<f64>().ok()) {
                Some(bound) if name.ends_with("_bucket") => {
                    let (least_bound, least) = last.get(&others).copied().unwrap_or((f64::NEG_INFINITY, 0.0));
                    if bound <= least_bound || *value < least {
                        violations.push(format!("its buckets are not cumulative at {bound} {{{others}}}"));
                    }
                    last.insert(others, (bound, *value));
                }
                None if name.ends_with("_sum") => {}
                None if name.ends_with("_count") => {
                    if last.get(&others) != Some(&(f64::INFINITY, *value)) {
                        violations.push(format!("its bucket +Inf does not contain everything {{{others}}}"));
                    }
                }
                _ => violations.push(format!("{name} is not a part of a histogram")),
            }
        }
        violations
    }
}

#[test]
fn violations_of_the_text_format_are_found() {
    let good = "# HELP a_total What it counts.\n# TYPE a_total counter\na_total{x=\"a,b\\\"\",y=\"\"} 1\na_total 2\n\
                # HELP d_seconds A duration.\n# TYPE d_seconds histogram\nd_seconds_bucket{le=\"1\"} 1\n\
                d_seconds_bucket{le=\"+Inf\"} 2\nd_seconds_sum 3.5\nd_seconds_count 2\n";
    assert_eq!(violations(good), [""; 0]);
    for (from, to) in [
        ("# HELP a_total What it counts.\n", ""),
        ("# TYPE a_total counter\n", ""),
        ("# TYPE a_total counter", "# TYPE a_total number"),
        ("a_total 2\n", "a_total 2\na_total 3\n"),
        ("a_total 2\n", "a_total two\n"),
        ("a_total 2\n", "a-total 2\n"),
        ("y=\"\"", "y=\"\\x\""),
        ("y=\"\"", "y"),
        ("{le=\"+Inf\"} 2", "{le=\"+Inf\"} 0"),
        ("d_seconds_count 2", "d_seconds_count 3"),
        ("d_seconds_count 2\n", "d_seconds_count 2\na_total{z=\"1\"} 1\n"),
        ("d_seconds_count 2\n", "d_seconds_count 2"),
    ] {
        assert_ne!(violations(&good.replacen(from, to, 1)), [""; 0], "{from} -> {to}");
    }
}

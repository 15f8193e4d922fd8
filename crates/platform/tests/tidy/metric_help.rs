//! Every metric has a help text for `/metrics`, in a table `METRICS` of the crate that records it.

use std::collections::BTreeSet;

/// The metrics that are recorded in a crate and are not in its table. `files` are paths and texts.
pub(crate) fn undescribed(files: &[(String, String)]) -> Vec<String> {
    let described: BTreeSet<(&str, &str)> = files
        .iter()
        .filter(|(_, text)| text.contains("METRICS"))
        .flat_map(|(path, text)| {
            text.match_indices("(\"").map(move |(at, _)| (crate_of(path), quoted(&text[at + 1..])))
        })
        .collect();
    let recorded = files.iter().flat_map(|(path, text)| {
        let macros = ["counter!(", "gauge!(", "histogram!("];
        let calls = macros.iter().flat_map(|name| text.match_indices(name).map(|(at, name)| at + name.len()));
        calls.map(move |at| (path.as_str(), quoted(text[at..].trim_start()))).collect::<Vec<_>>()
    });
    recorded
        .filter(|(path, name)| !name.is_empty() && !described.contains(&(crate_of(path), *name)))
        .map(|(path, name)| format!("{path}: {name} has no help text in a table METRICS of its crate"))
        .collect()
}

/// `crates/NAME` of a path.
fn crate_of(path: &str) -> &str {
    path.match_indices('/').nth(1).map_or(path, |(at, _)| &path[..at])
}

/// The text in quotes at the beginning; empty if there is none.
fn quoted(text: &str) -> &str {
    text.strip_prefix('"').and_then(|rest| rest.split('"').next()).unwrap_or_default()
}

mod samples {
    use super::*;

    fn found(library: &str, code: &str) -> usize {
        let file = |path: &str, text: &str| (path.to_owned(), text.to_owned());
        undescribed(&[file("crates/a/src/lib.rs", library), file("crates/a/src/b.rs", code)]).len()
    }

    #[test]
    fn a_described_metric_passes() {
        let library = "const METRICS: &[MetricHelp] = &[(\"a_total\", \"What it counts.\")];";
        assert_eq!(found(library, "fn f() { metrics::counter!(\"a_total\", &labels).increment(1); }"), 0);
        assert_eq!(found(library, "fn f() { metrics::describe_counter!(*name, *help); }"), 0);
    }

    #[test]
    fn a_metric_without_a_help_text_is_found() {
        let code = "fn f() { metrics::gauge!(\n    \"b_seconds\"\n).set(1.0); }";
        assert_eq!(found("const METRICS: &[MetricHelp] = &[(\"a_total\", \"What it counts.\")];", code), 1);
        assert_eq!(found("", code), 1);
        let elsewhere = [
            ("crates/a/src/lib.rs".to_owned(), "const METRICS: () = (\"b_seconds\", \"x\")".to_owned()),
            ("crates/b/src/lib.rs".to_owned(), code.to_owned()),
        ];
        assert_eq!(undescribed(&elsewhere).len(), 1, "the table is that of another crate");
    }
}

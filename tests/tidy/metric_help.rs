//! Every metric has a help text for `/metrics`, in a table `METRICS` of the crate that records it, and a name that begins with that of
//! the product.

use std::collections::BTreeSet;

const PREFIX: &str = "pillarbox_";
/// The names that documents 002 and 004 require.
const REQUIRED: [&str; 6] = [
    "event_publish_duration_seconds",
    "eventhub_delivery_latency_seconds",
    "eventhub_dlq_size",
    "eventhub_events_received_total",
    "eventhub_messages_delivered_total",
    "eventhub_pending_messages",
];

/// The metrics with another name. `files` are paths and texts.
pub(crate) fn misnamed(files: &[(String, String)]) -> Vec<String> {
    let is_named = |name: &str| name.is_empty() || name.starts_with(PREFIX) || REQUIRED.contains(&name);
    let others = recorded(files).filter(|(_, name)| !is_named(name));
    others.map(|(path, name)| format!("{path}: the name of {name} must begin with {PREFIX}")).collect()
}

/// The metrics that are recorded in a crate and are not in its table. `files` are paths and texts.
pub(crate) fn undescribed(files: &[(String, String)]) -> Vec<String> {
    let described: BTreeSet<(&str, &str)> = files
        .iter()
        .filter(|(_, text)| text.contains("METRICS"))
        .flat_map(|(path, text)| {
            // rustfmt writes a long entry on several lines.
            text.match_indices('(').map(move |(at, _)| (crate_of(path), quoted(text[at + 1..].trim_start())))
        })
        .collect();
    recorded(files)
        .filter(|(path, name)| !name.is_empty() && !described.contains(&(crate_of(path), *name)))
        .map(|(path, name)| format!("{path}: {name} has no help text in a table METRICS of its crate"))
        .collect()
}

/// The files and the names of the metrics that they record; an empty name if it is not a literal.
fn recorded(files: &[(String, String)]) -> impl Iterator<Item = (&str, &str)> {
    files.iter().flat_map(|(path, text)| {
        let macros = ["counter!(", "gauge!(", "histogram!("];
        let calls = macros.iter().flat_map(|name| text.match_indices(name).map(|(at, name)| at + name.len()));
        calls.map(move |at| (path.as_str(), quoted(text[at..].trim_start()))).collect::<Vec<_>>()
    })
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

    #[test]
    fn another_name_is_found_unless_a_document_requires_it() {
        let found = |code: &str| misnamed(&[("crates/a/src/b.rs".to_owned(), code.to_owned())]).len();
        assert_eq!(
            found("fn f() { metrics::gauge!(\"eventhub_dlq_size\"); counter!(\"pillarbox_a_total\"); counter!(name) }"),
            0
        );
        assert_eq!(found("fn f() { metrics::gauge!(\"eventhub_age\") }"), 1);
    }
}

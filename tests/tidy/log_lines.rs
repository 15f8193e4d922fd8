//! The log lines of the runbook: the sources log them, and a test reads them.

/// A row of the table of log lines: its level and the text that the line contains.
pub(crate) fn documented(runbook: &str) -> Vec<(String, String)> {
    let row = |line: &str| {
        let mut cells = line.strip_prefix("| ")?.split(" | ");
        let level = cells.next().filter(|level| ["WARN", "ERROR"].contains(level))?;
        Some((level.to_owned(), cells.next()?.trim_matches('`').to_owned()))
    };
    runbook.lines().filter_map(row).collect()
}

/// The lines that no source logs with their level, or that no test reads.
pub(crate) fn violations(runbook: &str, sources: &str, tests: &str) -> Vec<String> {
    let (sources, mut found) = (unwrapped(sources), Vec::new());
    for (level, text) in documented(runbook) {
        if !calls(&sources, &format!("tracing::{}!(", level.to_lowercase())).any(|call| call.contains(&text)) {
            found.push(format!("no source logs `{text}` with the level {level}"));
        }
        if !tests.contains(&text) {
            found.push(format!("no test reads `{text}`"));
        }
    }
    found
}

/// The text with string literals that are continued on the next line put on one line.
fn unwrapped(text: &str) -> String {
    text.split("\\\n").map(str::trim_start).collect()
}

/// The calls of a macro, from its name to the end of the line or block that contains the last argument.
fn calls<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(name).skip(1).map(|rest| rest.split(")\n").next().unwrap_or(rest).split(");").next().unwrap_or(rest))
}

#[test]
fn a_line_that_is_not_logged_or_not_read_is_found() {
    let runbook = "| level | line |\n|---|---|\n| WARN | `a message failed` | why |\n| ERROR | `lapsed` | why |\n";
    let source = "tracing::warn!(a, \"a mess\\\n    age failed\");\ntracing::error!(\"lapsed\");";
    assert_eq!(violations(runbook, source, "a message failed, lapsed"), Vec::<String>::new());
    assert_eq!(violations(runbook, source, "lapsed"), ["no test reads `a message failed`"]);
    let demoted = source.replace("error!", "info!");
    let found = violations(runbook, &demoted, "a message failed, lapsed");
    assert_eq!(found, ["no source logs `lapsed` with the level ERROR"]);
}

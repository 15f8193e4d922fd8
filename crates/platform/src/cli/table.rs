//! Tables for people: aligned, on standard output.

use std::io::Write;

/// Lines it up; numbers are right-aligned, the last column is as long as it is.
pub(super) fn print<const N: usize>(heads: [&str; N], rows: &[[String; N]]) -> std::io::Result<()> {
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).chain([heads[at].len()]).max().unwrap_or(0);
    let is_number = |at: usize| !rows.is_empty() && rows.iter().all(|row| row[at].parse::<f64>().is_ok());
    let columns: Vec<(usize, bool)> = (0..N).map(|at| (width(at), is_number(at))).collect();
    let mut out = std::io::stdout().lock();
    for row in std::iter::once(&heads.map(str::to_owned)).chain(rows) {
        let cell = |(text, (width, is_number)): (&String, &(usize, bool))| match (plain(text), is_number) {
            (text, true) => format!("{text:>width$}"),
            (text, false) => format!("{text:width$}"),
        };
        let line = row.iter().zip(&columns).map(cell).collect::<Vec<_>>().join("  ");
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// On one line, without what would act on a terminal, and not too long.
pub(super) fn shown(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    let plain = plain(text);
    match plain.char_indices().nth(CHARS_MAX) {
        Some((at, _)) => format!("{}…", &plain[..at]),
        None => plain,
    }
}

/// Without what would act on a terminal, or begin a line.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

pub(super) fn time(at: chrono::DateTime<chrono::Utc>) -> String {
    at.format("%Y-%m-%d %H:%M:%SZ").to_string()
}

/// A JSON value on one line, for machines.
pub(super) fn json(value: &impl serde::Serialize) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, value)?;
    writeln!(out)
}

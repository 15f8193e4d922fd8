//! Output on standard output: aligned tables for users, lines of JSON for programs.

use std::io::Write;

use serde::Serialize;

use super::Failure;

/// Rows that a paginated list loads at a time.
const PAGE_ROWS: i64 = 100;

/// Prints a list, page by page: lines of JSON, or one table. `load` returns up to the given number of rows after the given id;
/// `if_empty` replaces a table without rows.
pub(super) async fn print_list<T: Serialize, const N: usize>(
    json: bool,
    heads: [&str; N],
    if_empty: Option<&str>,
    id_and_row: fn(&T) -> (i64, [String; N]),
    mut load: impl AsyncFnMut(Option<i64>, i64) -> sqlx::Result<Vec<T>>,
) -> Result<(), Failure> {
    let (mut rows, mut last_id) = (Vec::new(), None);
    loop {
        let page = load(last_id, PAGE_ROWS).await?;
        for item in &page {
            let (id, row) = id_and_row(item);
            last_id = Some(id);
            match json {
                true => print_json(item)?,
                false => rows.push(row),
            }
        }
        if page.len() < PAGE_ROWS as usize {
            break;
        }
    }
    match (json, if_empty) {
        (true, _) => {}
        (false, Some(text)) if rows.is_empty() => print_line(text)?,
        (false, _) => print(heads, &rows)?,
    }
    Ok(())
}

/// Prints a table. Columns of numbers are right-aligned; the last column is not padded.
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

/// Shortens a text for a table cell, and removes control characters.
pub(super) fn shorten(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    let plain = plain(text);
    match plain.char_indices().nth(CHARS_MAX) {
        Some((at, _)) => format!("{}…", &plain[..at]),
        None => plain,
    }
}

/// Replaces control characters, which could act on the terminal or break the line.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

pub(super) fn format_time(at: chrono::DateTime<chrono::Utc>) -> String {
    at.format("%Y-%m-%d %H:%M:%SZ").to_string()
}

/// Prints a value as one line of JSON.
pub(super) fn print_json(value: &impl Serialize) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, value)?;
    writeln!(out)
}

/// A count with its noun and verb: `1 message is`, `2 messages are`.
pub(super) fn count(count: impl std::fmt::Display, one: &str, many: &str) -> String {
    match count.to_string() {
        count if count == "1" => format!("1 {one}"),
        count => format!("{count} {many}"),
    }
}

/// Prints one line. `println!` would panic when the reader has closed the pipe.
pub(super) fn print_line(line: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{line}")
}

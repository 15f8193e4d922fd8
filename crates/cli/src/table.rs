//! Output: aligned tables for users and lines of JSON for programs on standard output, notes on standard error.
//!
//! Whatever a command prints may come from a tenant or a producer. So all output passes through [`printable`]: no text acts on
//! the terminal, is shown in another order than it has, or is hidden. Commands print with the functions of this module only.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::Write;

use serde::Serialize;

struct Column {
    width: usize,
    is_number: bool,
}

/// Prints a table. Columns of numbers are right-aligned; the last column is not padded.
pub fn print<const N: usize>(heads: [&str; N], rows: &[[String; N]]) -> std::io::Result<()> {
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).chain([heads[at].len()]).max().unwrap_or(0);
    let is_number = |at: usize| !rows.is_empty() && rows.iter().all(|row| row[at].parse::<f64>().is_ok());
    let columns: Vec<Column> = (0..N).map(|at| Column { width: width(at), is_number: is_number(at) }).collect();
    let mut out = std::io::stdout().lock();
    for row in std::iter::once(&heads.map(str::to_owned)).chain(rows) {
        let cell = |(text, column): (&String, &Column)| {
            let (text, width) = (one_line(text), column.width);
            if column.is_number { format!("{text:>width$}") } else { format!("{text:width$}") }
        };
        let line = row.iter().zip(&columns).map(cell).collect::<Vec<_>>().join("  ");
        writeln!(out, "{}", printable(line.trim_end()))?;
    }
    Ok(())
}

/// Shortens a text for a table cell.
pub fn shorten(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    let line = one_line(text);
    match line.char_indices().nth(CHARS_MAX) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line,
    }
}

/// Replaces line breaks and tabs, which would break a row, with blanks.
fn one_line(text: &str) -> String {
    text.replace(['\n', '\r', '\t'], " ")
}

/// Writes characters that would act on a terminal, or that it would not show, as JSON escapes them, such as `\u009b`: control
/// characters but line breaks and tabs, those that change the direction of the text, and those without a width.
pub fn printable(text: &str) -> Cow<'_, str> {
    let acts = |c: char| {
        let changes_direction =
            matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        let has_no_width = matches!(
            c,
            '\u{ad}' | '\u{180e}' | '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2065}' | '\u{206a}'..='\u{206f}' | '\u{feff}'
        );
        let is_tag = matches!(c, '\u{e0000}'..='\u{e007f}');
        changes_direction || has_no_width || is_tag || (c.is_control() && !matches!(c, '\n' | '\t'))
    };
    if !text.contains(acts) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if !acts(c) {
            escaped.push(c);
            continue;
        }
        // A String accepts everything. JSON has two escapes for a character above U+FFFF.
        for unit in c.encode_utf16(&mut [0; 2]) {
            write!(escaped, "\\u{unit:04x}").unwrap_or_default();
        }
    }
    Cow::Owned(escaped)
}

pub fn format_time(at: chrono::DateTime<chrono::Utc>) -> String {
    at.format("%Y-%m-%d %H:%M:%SZ").to_string()
}

/// Prints a value as one line of JSON.
pub fn print_json(value: &impl Serialize) -> std::io::Result<()> {
    print_line(&serde_json::to_string(value)?)
}

/// A count with its noun and verb: `1 message is`, `2 messages are`.
pub fn count(count: impl std::fmt::Display, one: &str, many: &str) -> String {
    match count.to_string() {
        count if count == "1" => format!("1 {one}"),
        count => format!("{count} {many}"),
    }
}

/// The rest of a sentence about a bulk action that ends at a number of rows.
pub fn and_more(answer: &serde_json::Value) -> &'static str {
    if answer["more"] == true { "; there are more: run the command again" } else { "" }
}

/// Prints one line. `println!` would panic when the reader has closed the pipe.
pub fn print_line(line: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{}", printable(line))
}

/// Prints one line on standard error, for a person: what a program reads is on standard output.
pub fn print_note(line: &str) {
    // A command does its work whether its notes can be written or not.
    let _ = writeln!(std::io::stderr(), "{}", printable(line));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_on_a_terminal_is_escaped_and_stays_valid_json() {
        for (text, expected) in [
            ("Zürich\n\t日本 👋🏽", "Zürich\n\t日本 👋🏽"),
            ("\u{1b}[2J", "\\u001b[2J"),
            ("a\u{9b}31mb\u{7f}", "a\\u009b31mb\\u007f"),
            ("\u{202e}gpj.exe\u{2069}\u{200f}", "\\u202egpj.exe\\u2069\\u200f"),
            ("ad\u{200b}min\u{feff}\u{2060}", "ad\\u200bmin\\ufeff\\u2060"),
            ("a\u{e0041}\u{e007f}", "a\\udb40\\udc41\\udb40\\udc7f"),
        ] {
            assert_eq!(printable(text), expected);
            let json = serde_json::to_string(text).unwrap();
            assert_eq!(serde_json::from_str::<String>(&printable(&json)).unwrap(), text);
        }
        assert_eq!(one_line("a\r\nb\tc"), "a  b c");
    }
}

//! Error texts that are safe to store and to log: one line, bounded, without values from the database.

use std::error::Error;

use sqlx::postgres::PgDatabaseError;

/// The longest error text, in characters.
const CHARS_MAX: usize = 500;

/// The SQLSTATE class of data exceptions, whose messages quote the invalid value.
const DATA_EXCEPTION: &str = "22";

/// Returns the text of an error without the values that PostgreSQL quotes in it: a value may be a payload that contains
/// a secret.
pub fn redacted_error(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(database) = database_error(error) {
            text = redact(&text, database);
        }
        cause = error.source();
    }
    one_line(&text)
}

/// Replaces line breaks and control characters with blanks, and cuts the text at [`CHARS_MAX`].
pub(crate) fn one_line(text: &str) -> String {
    let is_break = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    let line: String = text.chars().map(|c| if is_break(c) { ' ' } else { c }).collect();
    match line.char_indices().nth(CHARS_MAX) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line,
    }
}

fn database_error<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e PgDatabaseError> {
    match error.downcast_ref::<sqlx::Error>() {
        Some(sqlx::Error::Database(error)) => error.try_downcast_ref(),
        Some(_) => None,
        None => error.downcast_ref(),
    }
}

fn redact(text: &str, error: &PgDatabaseError) -> String {
    let mut text = text.to_owned();
    if error.code().starts_with(DATA_EXCEPTION) {
        text = text.replace(error.message(), &without_quoted(error.message()));
    }
    // The default format does not contain these, but an error that wraps this one may.
    for values in [error.detail(), error.r#where()].into_iter().flatten().filter(|values| !values.is_empty()) {
        text = text.replace(values, "…");
    }
    text
}

/// Removes the text between the first quotation mark and the last one. A value may itself contain quotation marks.
fn without_quoted(message: &str) -> String {
    match (message.find('"'), message.rfind('"')) {
        (Some(first), Some(last)) if first < last => format!("{}\"…{}", &message[..first], &message[last..]),
        _ => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_text_is_one_bounded_line() {
        assert_eq!(one_line("a\nb\0c\u{2028}d"), "a b c d");
        assert_eq!(one_line(&"é".repeat(10_000)).chars().count(), CHARS_MAX + 1);
    }

    #[test]
    fn a_quoted_value_is_removed_with_the_quotes_in_it() {
        assert_eq!(without_quoted(r#"for type integer: "a "b" c""#), r#"for type integer: "…""#);
        assert_eq!(without_quoted(r#"value "99" is out of range"#), r#"value "…" is out of range"#);
        assert_eq!(without_quoted(r#"a lone " mark"#), r#"a lone " mark"#);
    }
}

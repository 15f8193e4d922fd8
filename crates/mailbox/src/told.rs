//! Errors as they are kept and logged: for people, on one line, without what is in a row.

use std::error::Error;

use sqlx::postgres::PgDatabaseError;

/// A novel is of no use to anybody.
const CHARS_MAX: usize = 500;

/// PostgreSQL's class of errors in data: the message quotes what could not be read.
const DATA: &str = "22";

/// What to tell of an error. What PostgreSQL says of values is left out: they may be a payload, and it may hold a secret.
pub fn told(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = Some(error);
    while let Some(one) = cause {
        if let Some(database) = of_database(one) {
            text = without_values(&text, database);
        }
        cause = one.source();
    }
    brief(&text)
}

/// On one line, and not too long.
pub(crate) fn brief(text: &str) -> String {
    let is_break = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    let line: String = text.chars().map(|c| if is_break(c) { ' ' } else { c }).collect();
    match line.char_indices().nth(CHARS_MAX) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line,
    }
}

fn of_database<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e PgDatabaseError> {
    match error.downcast_ref::<sqlx::Error>() {
        Some(sqlx::Error::Database(error)) => error.try_downcast_ref(),
        Some(_) => None,
        None => error.downcast_ref(),
    }
}

fn without_values(text: &str, error: &PgDatabaseError) -> String {
    let mut text = text.to_owned();
    if error.code().starts_with(DATA) {
        text = text.replace(error.message(), &unquoted(error.message()));
    }
    // Nobody shows these unless they format the error in a way of their own.
    for values in [error.detail(), error.r#where()].into_iter().flatten().filter(|values| !values.is_empty()) {
        text = text.replace(values, "…");
    }
    text
}

/// From the first quotation mark to the last, since a value may hold some.
fn unquoted(message: &str) -> String {
    match (message.find('"'), message.rfind('"')) {
        (Some(first), Some(last)) if first < last => format!("{}\"…{}", &message[..first], &message[last..]),
        _ => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_on_one_line_and_ends() {
        assert_eq!(brief("a\nb\0c\u{2028}d"), "a b c d");
        assert_eq!(brief(&"é".repeat(10_000)).chars().count(), CHARS_MAX + 1);
    }

    #[test]
    fn what_is_quoted_is_left_out_with_the_quotes_in_it() {
        assert_eq!(unquoted(r#"for type integer: "a "b" c""#), r#"for type integer: "…""#);
        assert_eq!(unquoted(r#"value "99" is out of range"#), r#"value "…" is out of range"#);
        assert_eq!(unquoted(r#"a lone " mark"#), r#"a lone " mark"#);
    }
}

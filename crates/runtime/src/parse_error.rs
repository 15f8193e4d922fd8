//! Describes the errors of serde in words that a caller of the API understands: which field, and what it accepts.

/// Replaces the error of the parser of times, which shows neither the format nor an example.
pub const EXPECTED_TIME: &str = "must be a time such as 2026-01-31T08:00:00Z";

/// The messages of chrono for a text that is not a time.
const TIME_ERRORS: [&str; 6] = [
    "input contains invalid characters",
    "premature end of input",
    "trailing input",
    "input is out of range",
    "input is not enough for unique date and time",
    "no possible date and time matching input",
];

/// What is wrong with an input.
#[derive(Debug, PartialEq, Eq)]
pub struct ParseError {
    /// The field that is missing, unknown or repeated in the object that serde names. None: the error is about the
    /// value that serde names.
    pub field: Option<String>,
    pub detail: String,
}

/// The messages of serde_json for text that is not JSON, and what each means.
const SYNTAX_ERRORS: [(&str, &str); 14] = [
    ("expected `:`", "a colon is missing after the name of a field"),
    ("expected `,` or `]`", "a comma or a closing ] is missing"),
    ("expected `,` or `}`", "a comma or a closing } is missing"),
    ("expected value", "a value is missing or misspelt; texts need double quotes"),
    ("expected ident", "a value is misspelt; did you mean true, false or null?"),
    ("invalid escape", "a string contains an unknown escape after a backslash"),
    ("invalid unicode code point", "a string contains an escape of a character that does not exist"),
    ("lone leading surrogate", "a string contains an incomplete \\u escape"),
    ("unexpected end of hex escape", "a string contains an incomplete \\u escape"),
    ("control character", "a string contains a control character, such as a line break: escape it (\\n)"),
    ("key must be a string", "the name of a field must be in double quotes"),
    ("trailing comma", "there is a comma after the last item"),
    ("trailing characters", "there is more text after its end"),
    ("recursion limit exceeded", "it is nested too deeply; at most 127 levels are accepted"),
];

/// Describes text that is not JSON, with the line and the column of the error.
pub fn describe_syntax(text: &str, error: &serde_json::Error) -> String {
    if text.trim().is_empty() {
        return "it is empty; send a JSON object".to_owned();
    }
    let message = error.to_string();
    let known = SYNTAX_ERRORS.iter().find(|(known, _)| message.starts_with(known));
    let meaning = match known {
        _ if error.is_eof() => "it ends too early; a value, a quote or a closing bracket is missing",
        Some((_, meaning)) => meaning,
        None if message.starts_with("number out of range") => "a number is too large",
        None if message.starts_with("invalid number") => "a number is malformed",
        None => "it is malformed",
    };
    format!("{meaning} (line {}, column {})", error.line(), error.column())
}

/// Translates the message of a serde error. A message of our own types, such as `must be ...`, stays as it is. `others`
/// are accepted names that the message does not list.
pub fn describe(message: &str, others: &[&str]) -> ParseError {
    let about = |field: &str, detail: String| ParseError { field: Some(field.to_owned()), detail };
    let value = |detail: String| ParseError { field: None, detail };
    // The names that are accepted come last. The part before may quote any text of the caller.
    let (problem, accepted) = split_expected(message);
    if let Some(field) = message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        return about(field, "is required".to_owned());
    }
    if let Some(field) = message.strip_prefix("duplicate field `").and_then(|rest| rest.strip_suffix('`')) {
        return about(field, "must not be repeated".to_owned());
    }
    if let Some(field) = problem.strip_prefix("unknown field `").and_then(|rest| rest.strip_suffix('`')) {
        return about(field, format!("does not exist; {}", accepted_names(accepted, others)));
    }
    if problem.starts_with("unknown variant `") {
        return value(format!("must be {}", joined(&quoted_names(accepted), "or")));
    }
    let is_refused = |kind: &&str| problem.starts_with(kind);
    if ["invalid type: ", "invalid value: ", "invalid length "].iter().any(is_refused) {
        return value(format!("must be {}", in_words(accepted)));
    }
    match message {
        "invalid digit found in string" | "cannot parse integer from empty string" => {
            value("must be a whole number".to_owned())
        }
        "number too large to fit in target type" | "number too small to fit in target type" => {
            value("must be a whole number that is not so large".to_owned())
        }
        "provided string was not `true` or `false`" => value("must be true or false".to_owned()),
        message if TIME_ERRORS.contains(&message) => value(EXPECTED_TIME.to_owned()),
        message if message.starts_with("UUID parsing failed") => value("must be a UUID".to_owned()),
        message => value(message.to_owned()),
    }
}

/// Splits a message before its last `, expected `, or before `, there are no fields`.
fn split_expected(message: &str) -> (&str, &str) {
    message
        .rsplit_once(", expected ")
        .or_else(|| message.strip_suffix(", there are no fields").map(|problem| (problem, "")))
        .unwrap_or((message, ""))
}

fn accepted_names(accepted: &str, others: &[&str]) -> String {
    let names = [&quoted_names(accepted), others].concat();
    match names.as_slice() {
        [] => "no field is accepted here".to_owned(),
        [only] => format!("the only accepted name is {only}"),
        names => format!("the accepted names are {}", joined(names, "and")),
    }
}

/// The names in "one of `a`, `b`, `c`" or "`a` or `b`".
fn quoted_names(accepted: &str) -> Vec<&str> {
    accepted.split('`').skip(1).step_by(2).collect()
}

/// Joins names as in "a, b or c".
fn joined(names: &[&str], last: &str) -> String {
    match names.split_last() {
        Some((name, [])) => (*name).to_owned(),
        Some((name, others)) => format!("{} {last} {name}", others.join(", ")),
        None => String::new(),
    }
}

/// Describes a type as serde names it.
pub fn in_words(expected: &str) -> String {
    match expected {
        "u8" => format!("a whole number from 0 to {}", u8::MAX),
        "u16" => format!("a whole number from 0 to {}", u16::MAX),
        "u32" => format!("a whole number from 0 to {}", u32::MAX),
        "u64" | "usize" => "a whole number from 0".to_owned(),
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a map" => "an object".to_owned(),
        "a formatted UUID string" => "a UUID".to_owned(),
        "an RFC 3339 formatted date and time string" => EXPECTED_TIME.trim_start_matches("must be ").to_owned(),
        // The name of a Rust type means nothing to a caller.
        expected if expected.starts_with("struct ") || expected.starts_with("internally tagged enum ") => {
            "an object".to_owned()
        }
        expected if expected.starts_with("enum ") || expected == "string or map" => "a string".to_owned(),
        expected => expected.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_described_by_what_is_accepted() {
        for (message, detail) in [
            ("unknown variant `king`, expected one of `ingest`, `manage`, `admin`", "must be ingest, manage or admin"),
            ("unknown variant `x`, expected `skip` or `block`", "must be skip or block"),
            ("unknown variant `x`, expected `a`", "must be a"),
            // The caller's own text imitates the message.
            ("unknown variant `x`, expected one of `root`, expected `skip` or `block`", "must be skip or block"),
            ("invalid type: string \"two\", expected u32", "must be a whole number from 0 to 4294967295"),
            ("invalid value: integer `-1`, expected u16", "must be a whole number from 0 to 65535"),
            ("invalid type: integer `5`, expected a string", "must be a string"),
            ("invalid type: map, expected a sequence", "must be a list"),
            ("invalid type: string \"x\", expected struct Kick", "must be an object"),
            ("invalid length 1, expected struct Kick with 2 elements", "must be an object"),
            ("invalid type: null, expected a boolean", "must be true or false"),
            ("UUID parsing failed: invalid length: expected length 32, found 3", "must be a UUID"),
            ("premature end of input", EXPECTED_TIME),
            ("must be a time from 1970 to 9999, such as x", "must be a time from 1970 to 9999, such as x"),
        ] {
            assert_eq!(describe(message, &[]), ParseError { field: None, detail: detail.to_owned() }, "{message}");
        }
    }

    #[test]
    fn a_missing_or_unknown_field_is_named() {
        for (message, field, detail) in [
            ("missing field `name`", "name", "is required"),
            ("duplicate field `name`", "name", "must not be repeated"),
            ("unknown field `color`, expected `a` or `b`", "color", "does not exist; the accepted names are a and b"),
            (
                "unknown field `c`, expected one of `a`, `b`, `d`",
                "c",
                "does not exist; the accepted names are a, b and d",
            ),
            ("unknown field `c`, there are no fields", "c", "does not exist; no field is accepted here"),
            ("unknown field `c`, expected `a`", "c", "does not exist; the only accepted name is a"),
        ] {
            let expected = ParseError { field: Some(field.to_owned()), detail: detail.to_owned() };
            assert_eq!(describe(message, &[]), expected, "{message}");
        }
    }

    #[test]
    fn a_syntax_error_is_described_with_its_line_and_column() {
        for (text, described) in [
            ("", "it is empty; send a JSON object"),
            ("{\"a\":", "it ends too early; a value, a quote or a closing bracket is missing (line 1, column 5)"),
            ("{\"a\" 1}", "a colon is missing after the name of a field (line 1, column 6)"),
            ("{\"a\":1,}", "there is a comma after the last item (line 1, column 8)"),
            ("{\n\"a\":king}", "a value is missing or misspelt; texts need double quotes (line 2, column 5)"),
            ("{\"a\":tru}", "a value is misspelt; did you mean true, false or null? (line 1, column 9)"),
            ("{a:1}", "the name of a field must be in double quotes (line 1, column 2)"),
            ("{} {}", "there is more text after its end (line 1, column 4)"),
            ("{\"a\":1e999}", "a number is too large (line 1, column 10)"),
            ("{\"a\":\"\\x\"}", "a string contains an unknown escape after a backslash (line 1, column 8)"),
        ] {
            let error = serde_json::from_str::<serde_json::Value>(text).unwrap_err();
            assert_eq!(describe_syntax(text, &error), described, "{text}: {error}");
        }
    }
}

//! How deep JSON is nested. Parsers read JSON with recursion, and each has its own limit: what one part of the system accepts
//! and another cannot read would stop the other for ever. So all inputs have one limit.

/// The most levels of arrays and objects: as many as serde_json reads, with which payloads are read everywhere.
pub const LEVELS_MAX: usize = 127;

/// Returns whether a JSON text has more than [`LEVELS_MAX`] levels. Of a text that is not JSON, the answer means nothing.
pub fn is_too_deep(text: &str) -> bool {
    // Each level has two brackets.
    text.len() > 2 * LEVELS_MAX && position_of_excess(text).is_some()
}

/// Returns where the first level begins that is too deep.
fn position_of_excess(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let (mut at, mut level) = (0, 0_usize);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'[' | b'{' => {
                level += 1;
                if level > LEVELS_MAX {
                    return Some(at);
                }
            }
            b']' | b'}' => level = level.saturating_sub(1),
            b'"' => at = end_of_string(bytes, at),
            _ => {}
        }
        at += 1;
    }
    None
}

/// Returns the position of the quote that ends the string at `start`, or the end of the text.
fn end_of_string(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => return at,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Returns the path to the field of a request body that is nested too deeply: the name in the object, or `list/0/name` for an
/// object in a list. None if nothing is. The names are as in the text, with its escapes.
pub fn path_to_excess(text: &str) -> Option<Vec<String>> {
    let excess = position_of_excess(text)?;
    let (bytes, mut at) = (text.as_bytes(), 0);
    // The kind of each open level, and the name or the number of its current part.
    let mut levels: Vec<(u8, String)> = Vec::new();
    while at < excess {
        match bytes[at] {
            kind @ (b'[' | b'{') => levels.push((kind, if kind == b'[' { "0".to_owned() } else { String::new() })),
            b']' | b'}' => drop(levels.pop()),
            b',' => {
                if let Some((b'[', number)) = levels.last_mut() {
                    *number = (number.parse().unwrap_or(0_usize) + 1).to_string();
                }
            }
            b'"' => {
                let end = end_of_string(bytes, at);
                let is_name = text.get(end + 1..).is_some_and(|rest| rest.trim_start().starts_with(':'));
                if let (Some((b'{', name)), true) = (levels.last_mut(), is_name) {
                    *name = text.get(at + 1..end).unwrap_or_default().to_owned();
                }
                at = end;
            }
            _ => {}
        }
        at += 1;
    }
    let is_list_of_objects = matches!(levels.as_slice(), [_, (b'[', _), (b'{', _), ..]);
    let named = if is_list_of_objects { 3 } else { 1 };
    Some(levels.into_iter().take(named).map(|(_, part)| part).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nested(levels: usize) -> String {
        format!("{}1{}", "[".repeat(levels), "]".repeat(levels))
    }

    #[test]
    fn the_limit_is_that_of_the_parser() {
        for (levels, is_accepted) in [(LEVELS_MAX, true), (LEVELS_MAX + 1, false), (20_000, false)] {
            let text = nested(levels);
            assert_eq!(!is_too_deep(&text), is_accepted, "{levels}");
            assert_eq!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), is_accepted, "{levels}");
        }
        let objects = |levels: usize| format!("{}1{}", "{\"a\": ".repeat(levels), "}".repeat(levels));
        assert!(!is_too_deep(&objects(LEVELS_MAX)) && is_too_deep(&objects(LEVELS_MAX + 1)));
    }

    #[test]
    fn brackets_in_strings_and_beside_each_other_are_no_levels() {
        assert!(!is_too_deep(&format!("[\"{}\"]", "[".repeat(1_000))));
        assert!(!is_too_deep(&format!("[\"\\\"{}\", \"\\\\\"]", "{".repeat(1_000))));
        assert!(!is_too_deep(&format!("[{}[]]", "[],".repeat(1_000))));
    }

    #[test]
    fn the_field_that_is_too_deep_is_named() {
        let path = |text: String| path_to_excess(&text).map(|path| path.join("/"));
        let deep = nested(LEVELS_MAX);
        assert_eq!(path(format!("{{\"a\": [1, \"b\"], \"payload\": {deep}}}")).as_deref(), Some("payload"));
        assert_eq!(path(format!("{{\"payload\": {{\"x\": {deep}}}}}")).as_deref(), Some("payload"));
        let list = format!("{{\"events\": [{{\"type\": \"a\"}}, {{\"type\": \"b\", \"payload\": {deep}}}]}}");
        assert_eq!(path(list).as_deref(), Some("events/1/payload"));
        assert_eq!(path("{\"a\": 1}".to_owned()), None);
    }
}

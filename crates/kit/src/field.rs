//! Checks the fields of a body that creates or changes a resource, and collects the errors of all fields.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::extract::parse_part;
use crate::problem::FieldError;

/// A field of the body. In a change, an absent field keeps its value; in a new resource, it gets its default. Null
/// sets the default.
#[derive(Debug, Default)]
pub enum Field<T> {
    #[default]
    Absent,
    Null,
    Given(T),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Field<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Field<T>, D::Error> {
        Ok(Option::deserialize(deserializer)?.map_or(Field::Null, Field::Given))
    }
}

/// A value of the body, or what is wrong with its type. The errors of several such values can be reported together; a body with
/// plain types is refused with the first one.
#[derive(Debug)]
pub struct Parsed<T>(pub Result<T, FieldErrors>);

impl<'de, T: DeserializeOwned> Deserialize<'de> for Parsed<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Parsed<T>, D::Error> {
        Box::<RawValue>::deserialize(deserializer).map(|value| Parsed(parse_part(value.get())))
    }
}

impl<T: Default> Default for Parsed<T> {
    fn default() -> Parsed<T> {
        Parsed(Ok(T::default()))
    }
}

impl<T> Parsed<T> {
    /// Returns the value; None if it is invalid, and then its errors are collected.
    pub fn collect(self, pointer: &str, errors: &mut Vec<FieldError>) -> Option<T> {
        let at = |(below, detail): (String, String)| FieldError::body(format!("{pointer}{below}"), detail);
        self.0.map_err(|found| errors.extend(found.into_iter().map(at))).ok()
    }

    /// The same for a field that is required.
    pub fn collect_required(field: Option<Parsed<T>>, pointer: &str, errors: &mut Vec<FieldError>) -> Option<T> {
        field.unwrap_or_else(|| Parsed(Err(error("is required")))).collect(pointer, errors)
    }
}

/// A whole number. JSON has one kind of numbers, so `3.0` is as whole as `3`; many clients send every number with a
/// fraction. A number that is too large becomes the largest one, which the check of the range refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Whole(pub i64);

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Whole, D::Error> {
        struct WholeVisitor;

        impl serde::de::Visitor<'_> for WholeVisitor {
            type Value = Whole;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a whole number")
            }

            fn visit_i64<E>(self, number: i64) -> Result<Whole, E> {
                Ok(Whole(number))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Whole, E> {
                Ok(Whole(i64::try_from(number).unwrap_or(i64::MAX)))
            }

            fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<Whole, E> {
                match number.fract() == 0.0 {
                    true => Ok(Whole(number as i64)), // saturates
                    false => Err(E::invalid_type(serde::de::Unexpected::Float(number), &self)),
                }
            }
        }

        deserializer.deserialize_any(WholeVisitor)
    }
}

/// The errors of one field: a pointer relative to the field, and the detail.
pub type FieldErrors = Vec<(String, String)>;

/// Checks one field after another and collects the errors.
pub struct FieldChecks<'a, S> {
    old: Option<&'a S>,
    errors: Vec<FieldError>,
}

impl<'a, S> FieldChecks<'a, S> {
    /// `old` is the resource before the change; None for a new resource.
    pub fn new(old: Option<&'a S>) -> FieldChecks<'a, S> {
        FieldChecks { old, errors: Vec::new() }
    }

    /// Returns the new value of a field; None if it is invalid, and then its errors are collected. A field without a
    /// default is required.
    pub fn check<T, U>(
        &mut self,
        pointer: &str,
        field: Field<T>,
        old: impl FnOnce(&S) -> U,
        default: Option<U>,
        check: impl FnOnce(T) -> Result<U, FieldErrors>,
    ) -> Option<U> {
        let checked = match field {
            Field::Absent => self.old.map(old).or(default).ok_or_else(|| error("is required")),
            Field::Null => default.ok_or_else(|| error("is required and must not be null")),
            Field::Given(value) => check(value),
        };
        let at = |(below, detail): (String, String)| FieldError::body(format!("{pointer}{below}"), detail);
        checked.map_err(|found| self.errors.extend(found.into_iter().map(at))).ok()
    }

    /// Returns the errors of all fields; none if the body is valid.
    pub fn into_errors(self) -> Vec<FieldError> {
        self.errors
    }
}

/// Returns one error for the field as a whole.
pub fn error(detail: impl Into<String>) -> FieldErrors {
    vec![(String::new(), detail.into())]
}

/// Checks every item of a list. Fails with the errors of all invalid items; the pointer of each is its index.
pub fn check_each<T, U>(list: Vec<T>, check: impl Fn(T) -> Result<U, String>) -> Result<Vec<U>, FieldErrors> {
    let (mut valid, mut errors) = (Vec::with_capacity(list.len()), Vec::new());
    for (at, item) in list.into_iter().enumerate() {
        match check(item) {
            Ok(item) => valid.push(item),
            Err(detail) => errors.push((format!("/{at}"), detail)),
        }
    }
    if errors.is_empty() { Ok(valid) } else { Err(errors) }
}

/// Checks a line of text that is displayed to people. Fails for blank text, text longer than `chars_max`, and control
/// characters, which a terminal would execute.
pub fn printable(text: &str, chars_max: usize) -> Result<(), String> {
    let is_printable = !text.trim().is_empty() && !text.chars().any(char::is_control);
    match is_printable && text.chars().count() <= chars_max {
        true => Ok(()),
        false => Err(format!(
            "must have 1 to {chars_max} characters, must not be blank and must not contain control characters"
        )),
    }
}

/// Checks the name that a person chooses, which is displayed to others. Fails like [`printable`], and for characters that
/// nobody sees or that change the direction of other text, and for addresses of the web, which programs for e-mails turn into
/// links. `openapi::schemas` has the same rules as a pattern.
pub fn person_name(text: &str, chars_max: usize) -> Result<(), String> {
    printable(text, chars_max)?;
    let first = text.chars().find(|c| !is_space(*c));
    if text.chars().any(is_invisible) || first.is_none_or(is_joiner) {
        return Err("must not contain characters that are not visible".to_owned());
    }
    if text.contains("://") || has_domain(text) {
        let detail = "must not contain the address of a website: write a space after a dot, and no ://";
        return Err(detail.to_owned());
    }
    Ok(())
}

fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\u{a0}' | '\u{1680}' | '\u{2000}'..='\u{200a}' | '\u{202f}' | '\u{205f}' | '\u{3000}')
}

/// Joiners, which some scripts need between letters.
fn is_joiner(c: char) -> bool {
    matches!(c, '\u{200c}' | '\u{200d}')
}

/// Characters without a shape of their own, other than spaces and joiners.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
        | '\u{180b}'..='\u{180f}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{2800}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
        | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

/// Whether the text contains something like a domain or an IP address: after a dot a digit, or two characters that are neither
/// dots nor separators. So `J.R.R. Tolkien` is none.
fn has_domain(text: &str) -> bool {
    // The characters since the last dot, up to a separator.
    let mut since_dot = None;
    text.chars().any(|c| {
        let is_separator =
            is_space(c) || matches!(c, ',' | ';' | ':' | '!' | '?' | '\'' | '"' | '(' | ')' | '/' | '&' | '-');
        since_dot = match (c, since_dot) {
            // The last three are dots in the names of domains, too.
            ('.' | '\u{3002}' | '\u{ff0e}' | '\u{ff61}', _) => Some(0),
            (_, Some(_)) if is_separator => None,
            (_, Some(0)) if !c.is_ascii_digit() => Some(1),
            (_, Some(_)) => Some(2),
            (_, None) => None,
        };
        since_dot == Some(2)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_types_of_all_fields_are_checked_at_once() {
        #[derive(Deserialize)]
        struct Order {
            id: Option<Parsed<uuid::Uuid>>,
            count: Option<Parsed<i64>>,
            #[serde(default)]
            note: Parsed<Option<String>>,
        }
        let errors = |text: &str| {
            let Order { id, count, note } = serde_json::from_str(text).unwrap();
            let mut errors = Vec::new();
            Parsed::collect_required(id, "/id", &mut errors);
            Parsed::collect_required(count, "/count", &mut errors);
            note.collect("/note", &mut errors);
            errors.into_iter().map(|error| format!("{} {}", error.pointer, error.detail)).collect::<Vec<_>>()
        };
        let valid = r#"{"id": "0198c5a0-7c5e-7b43-8f0e-3d5b8e6a1c11", "count": 3}"#;
        assert_eq!(errors(valid), [""; 0]);
        let all = ["/id must be a UUID", "/count must be a whole number", "/note must be a string"];
        assert_eq!(errors(r#"{"id": 1, "count": "3", "note": []}"#), all);
        assert_eq!(errors(r#"{"note": null}"#), ["/id is required", "/count is required"]);
    }

    #[test]
    fn a_whole_number_may_have_a_fraction_of_zero() {
        let parsed = |text: &str| serde_json::from_str::<Whole>(text).map(|Whole(number)| number).ok();
        assert_eq!(["3", "3.0", "-2.0e1", "0.0"].map(parsed), [3, 3, -20, 0].map(Some));
        assert_eq!(["1e30", "18446744073709551615"].map(parsed), [Some(i64::MAX); 2]);
        assert_eq!(["3.5", "\"3\"", "null", "true"].map(parsed), [None; 4]);
    }

    #[test]
    fn a_name_has_visible_characters_and_no_address() {
        for good in [
            "Ada",
            " Ada Lovelace ",
            "J.R.R. Tolkien",
            "J. R. R.",
            "Dr. Who",
            "Jean-Luc O'Neill, Jr.",
            "علی\u{200c}رضا",
            "山田 太郎",
            "Ada...",
            "Ada (b. 1815)",
        ] {
            assert_eq!(person_name(good, 100), Ok(()), "{good}");
        }
        for bad in [
            "",
            " ",
            "\u{200b}",
            "\u{200d}",
            " \u{200c} ",
            "\u{3000}",
            "Ada\u{202e}evil",
            "Ada\u{2028}Bob",
            "Ada\u{ad}",
            "\u{2800}",
            "Ada\u{e0041}",
            "Ada\n",
            "www.evil.example",
            "see evil.com",
            "EVIL.COM/now",
            "evil\u{3002}com",
            "evil\u{ff0e}com",
            "ada@evil.org",
            "10.0.0.1",
            "x://y",
            "No.1",
        ] {
            assert!(person_name(bad, 100).is_err(), "{bad:?}");
        }
    }
}

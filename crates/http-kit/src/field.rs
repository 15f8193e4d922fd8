//! Checks the fields of a body that creates or changes a resource, and collects the errors of all fields.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::extract::parse_part;
use crate::problem::FieldError;
pub use crate::problem::FieldErrors;

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
                if number.fract() != 0.0 {
                    return Err(E::invalid_type(serde::de::Unexpected::Float(number), &self));
                }
                Ok(Whole(number as i64)) // saturates
            }
        }

        deserializer.deserialize_any(WholeVisitor)
    }
}

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
pub fn error(detail: impl ToString) -> FieldErrors {
    vec![(String::new(), detail.to_string())]
}

/// Checks every item of a list. Fails with the errors of all invalid items; the pointer of each is its index.
pub fn check_each<T, U, E: ToString>(list: Vec<T>, check: impl Fn(T) -> Result<U, E>) -> Result<Vec<U>, FieldErrors> {
    let (mut valid, mut errors) = (Vec::with_capacity(list.len()), Vec::new());
    for (at, item) in list.into_iter().enumerate() {
        match check(item) {
            Ok(item) => valid.push(item),
            Err(detail) => errors.push((format!("/{at}"), detail.to_string())),
        }
    }
    if errors.is_empty() { Ok(valid) } else { Err(errors) }
}

/// A text that is blank, too long, or contains control characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must have 1 to {chars_max} characters, must not be blank and must not contain control characters")]
pub struct NotPrintable {
    chars_max: usize,
}

/// Checks a line of text that is displayed to people. Fails for blank text, text longer than `chars_max`, and control
/// characters, which a terminal would execute.
pub fn printable(text: &str, chars_max: usize) -> Result<(), NotPrintable> {
    let is_printable = !text.trim().is_empty() && !text.chars().any(char::is_control);
    let is_accepted = is_printable && text.chars().count() <= chars_max;
    is_accepted.then_some(()).ok_or(NotPrintable { chars_max })
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
}

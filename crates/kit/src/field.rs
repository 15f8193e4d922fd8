//! Checks the fields of a body that creates or changes a resource, and collects the errors of all fields.

use serde::{Deserialize, Deserializer};

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

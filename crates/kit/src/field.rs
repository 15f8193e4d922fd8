//! The fields of a body that makes or changes something: each checked, and every one that is wrong named.

use serde::{Deserialize, Deserializer};

use crate::problem::FieldError;

/// Absent is unchanged, or the default of what is new; null is the default, or none.
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

/// Where below the field, and what it takes there.
pub type Wrong = Vec<(String, String)>;

/// Goes through the fields, and gathers what is wrong.
pub struct Settling<'a, S> {
    old: Option<&'a S>,
    wrong: Vec<FieldError>,
}

impl<'a, S> Settling<'a, S> {
    /// `old` is None for what is new.
    pub fn of(old: Option<&'a S>) -> Settling<'a, S> {
        Settling { old, wrong: Vec::new() }
    }

    /// What a field is to be; None if it is wrong. Without a default it is required.
    pub fn be<T, U>(
        &mut self,
        pointer: &str,
        field: Field<T>,
        old: impl FnOnce(&S) -> U,
        default: Option<U>,
        check: impl FnOnce(T) -> Result<U, Wrong>,
    ) -> Option<U> {
        let settled = match field {
            Field::Absent => self.old.map(old).or(default).ok_or_else(|| one("is required")),
            Field::Null => default.ok_or_else(|| one("is required, and takes no null")),
            Field::Given(value) => check(value),
        };
        let at = |(below, detail): (String, String)| FieldError::body(format!("{pointer}{below}"), detail);
        settled.map_err(|found| self.wrong.extend(found.into_iter().map(at))).ok()
    }

    pub fn into_wrong(self) -> Vec<FieldError> {
        self.wrong
    }
}

/// The field as a whole is wrong.
pub fn one(detail: impl Into<String>) -> Wrong {
    vec![(String::new(), detail.into())]
}

/// Every one that is wrong, by its place.
pub fn each<T, U>(list: Vec<T>, check: impl Fn(T) -> Result<U, String>) -> Result<Vec<U>, Wrong> {
    let (mut good, mut wrong) = (Vec::with_capacity(list.len()), Vec::new());
    for (at, item) in list.into_iter().enumerate() {
        match check(item) {
            Ok(item) => good.push(item),
            Err(detail) => wrong.push((format!("/{at}"), detail)),
        }
    }
    if wrong.is_empty() { Ok(good) } else { Err(wrong) }
}

/// A line of text for people's screens, where a control character would act.
pub fn printable(text: &str, chars_max: usize) -> Result<(), String> {
    let is_printable = !text.trim().is_empty() && !text.chars().any(char::is_control);
    match is_printable && text.chars().count() <= chars_max {
        true => Ok(()),
        false => Err(format!("takes 1 to {chars_max} characters, not all blank, and no control characters")),
    }
}

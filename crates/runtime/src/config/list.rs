//! Lists in settings. A list is read the same from the settings file, a variable and `--set`: as a list of its format, as
//! text with a JSON list (`["a", "b"]`), or as text with commas (`a, b`).

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error, SeqAccess, Visitor};
use serde_json::Value;

use crate::parse_error;

/// A list setting. Other types use it with `#[serde(try_from = "List<T>")]`; a field that is a `Vec` uses [`list`].
#[derive(Debug)]
pub struct List<T>(pub Vec<T>);

/// For `#[serde(deserialize_with = "runtime::config::list")]`.
pub fn list<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D) -> Result<Vec<T>, D::Error> {
    List::deserialize(deserializer).map(|List(items)| items)
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<List<T>, D::Error> {
        deserializer.deserialize_any(ListVisitor(PhantomData))
    }
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: DeserializeOwned> Visitor<'de> for ListVisitor<T> {
    type Value = List<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(r#"a list such as ["a", "b"] or a,b"#)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<List<T>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = sequence.next_element()? {
            items.push(item);
        }
        Ok(List(items))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<List<T>, E> {
        let items: Result<Vec<T>, InvalidList> =
            items_of(text).and_then(|items| items.into_iter().map(Item::read).collect());
        items.map(List).map_err(E::custom)
    }

    // One number without quotes, such as a port.
    fn visit_i64<E: Error>(self, number: i64) -> Result<List<T>, E> {
        Item::Json(number.into()).read().map(|item| List(vec![item])).map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<List<T>, E> {
        Item::Json(number.into()).read().map(|item| List(vec![item])).map_err(E::custom)
    }
}

/// The error describes what is accepted, and never quotes the value, unless the type of the setting does.
#[derive(Debug, thiserror::Error)]
enum InvalidList {
    #[error(r#"must be a list such as ["a", "b"] or a,b; this is not valid JSON"#)]
    Syntax,
    #[error("{0}")]
    Item(String),
}

/// One item of a list that was given as text.
enum Item {
    Json(Value),
    /// Between commas: the type of the setting decides whether it is a number.
    Text(String),
}

impl Item {
    fn read<T: DeserializeOwned>(self) -> Result<T, InvalidList> {
        let described =
            |error: serde_json::Error| InvalidList::Item(parse_error::describe(&error.to_string(), &[]).detail);
        match self {
            Item::Json(value) => T::deserialize(value).map_err(described),
            Item::Text(text) => T::deserialize(Value::from(text.as_str()))
                .or_else(|error| serde_json::from_str(&text).map_err(|_| error))
                .map_err(described),
        }
    }
}

/// Returns the items of a JSON list, or the parts between commas. Brackets and quotes around the parts are optional, as in
/// TOML.
fn items_of(text: &str) -> Result<Vec<Item>, InvalidList> {
    let text = text.trim();
    let inner = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    if inner.is_some()
        && let Ok(values) = serde_json::from_str::<Vec<Value>>(text)
    {
        return Ok(values.into_iter().map(Item::Json).collect());
    }
    if text.contains(['{', '}']) || (inner.is_none() && text.contains(['[', ']'])) {
        return Err(InvalidList::Syntax);
    }
    let parts = inner.unwrap_or(text).split(',').map(str::trim).filter(|part| !part.is_empty());
    Ok(parts.map(|part| Item::Text(unquoted(part).to_owned())).collect())
}

fn unquoted(part: &str) -> &str {
    let between = |quote: char| part.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
    between('"').or_else(|| between('\'')).unwrap_or(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: DeserializeOwned>(text: &str) -> Result<Vec<T>, String> {
        List::deserialize(Value::from(text)).map(|List(items)| items).map_err(|error| error.to_string())
    }

    #[test]
    fn a_list_is_json_or_has_commas() {
        for text in [r#"["a","b"]"#, "a,b", " a , b, ", "['a', 'b']", "[a, b]", r#""a", "b""#] {
            assert_eq!(read::<String>(text), Ok(vec!["a".to_owned(), "b".to_owned()]), "{text}");
        }
        for text in ["443,8443", "[443, 8443]", " 443 , 8443 "] {
            assert_eq!(read::<u16>(text), Ok(vec![443, 8443]), "{text}");
        }
        assert_eq!(read::<String>("000123"), Ok(vec!["000123".to_owned()]), "digits stay text");
        for text in ["", "[]", " "] {
            assert_eq!(read::<u16>(text), Ok(Vec::new()), "{text:?}");
        }
    }

    #[test]
    fn an_invalid_item_is_described_and_not_quoted() {
        for (text, detail) in
            [("443,hunter2", "must be a whole number"), ("[443, \"hunter2\"]", "must be a whole number")]
        {
            let error = read::<u16>(text).unwrap_err();
            assert!(error.contains(detail) && !error.contains("hunter2"), "{error}");
        }
        for text in [r#"[{"hunter2": 1]"#, "[hunter2", "hunter2]"] {
            let error = read::<String>(text).unwrap_err();
            assert!(error.contains("must be a list") && !error.contains("hunter2"), "{error}");
        }
    }
}

//! The part of a body that the dead letter of an unusable message stores.

use std::collections::BTreeMap;
use std::fmt::Write;

use contracts::MESSAGE_BYTES_MAX;
use pillarbox::log::REDACTED;
use serde_json::value::{RawValue, to_raw_value};
use sha2::{Digest, Sha256};

use crate::headers;
use crate::intake::Incoming;

/// Returns the body as a JSON text of at most [`MESSAGE_BYTES_MAX`] bytes. If that is not the whole body, adds the size
/// and the digest of the whole to the headers.
///
/// Invalid UTF-8 is replaced, so that the dead letter shows the rest of the text, and so is NUL, which PostgreSQL does
/// not support.
pub(crate) fn store_body(
    one: &Incoming,
    headers: &mut BTreeMap<String, String>,
) -> Result<Box<RawValue>, serde_json::Error> {
    let text = without_nul(&String::from_utf8_lossy(&one.body));
    let stored = beginning(&text);
    let (bytes, sha256) = match one.oversized {
        Some(oversized) => (oversized.bytes, oversized.sha256),
        None if stored.len() < text.len() => (one.body.len() as u64, Sha256::digest(&one.body).into()),
        None => return to_raw_value(stored),
    };
    headers.insert(headers::BODY_BYTES.to_owned(), bytes.to_string());
    headers.insert(headers::BODY_SHA256.to_owned(), hexadecimal(&sha256));
    to_raw_value(stored)
}

/// Returns a marker instead of a body that may be confidential, and adds its size and digest to the headers.
pub(crate) fn describe_body(
    one: &Incoming,
    headers: &mut BTreeMap<String, String>,
) -> Result<Box<RawValue>, serde_json::Error> {
    let (bytes, sha256) = match one.oversized {
        Some(oversized) => (oversized.bytes, oversized.sha256),
        None => (one.body.len() as u64, Sha256::digest(&one.body).into()),
    };
    headers.insert(headers::BODY_BYTES.to_owned(), bytes.to_string());
    headers.insert(headers::BODY_SHA256.to_owned(), hexadecimal(&sha256));
    RawValue::from_string(REDACTED.to_owned())
}

/// Returns the longest beginning of the text whose JSON has at most [`MESSAGE_BYTES_MAX`] bytes.
fn beginning(text: &str) -> &str {
    let mut json_bytes = 2; // the quotes
    let end = text.char_indices().find_map(|(at, c)| {
        json_bytes += match c {
            '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
            '\0'..'\u{20}' => 6,
            c => c.len_utf8(),
        };
        (json_bytes > MESSAGE_BYTES_MAX).then_some(at)
    });
    &text[..end.unwrap_or(text.len())]
}

/// Replaces NUL, which PostgreSQL's `text` does not support.
pub(crate) fn without_nul(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_of_a_beginning_is_as_long_as_allowed() {
        let json_bytes = |text: &str| serde_json::to_string(text).unwrap().len();
        for part in ["x", "\"", "\\", "\n", "\u{1}", "\u{1f}", "\u{7f}", "é", "\u{fffd}", "😀", "a\u{2}\"é"] {
            let text = part.repeat(MESSAGE_BYTES_MAX);
            let stored = beginning(&text);
            let next = text[stored.len()..].chars().next().unwrap();
            assert!(json_bytes(stored) <= MESSAGE_BYTES_MAX, "{part:?}: {}", json_bytes(stored));
            assert!(json_bytes(&format!("{stored}{next}")) > MESSAGE_BYTES_MAX, "{part:?}: it could be longer");
            assert_eq!(beginning(part), part);
        }
    }

    #[test]
    fn a_digest_is_written_in_hexadecimal_digits() {
        assert_eq!(hexadecimal(&[0, 0x0f, 0xff]), "000fff");
    }
}

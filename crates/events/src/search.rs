//! The text of a search, as far as this service interprets it: PostgreSQL parses the rest.
//!
//! The last word also matches words that begin with it, because a user may still be typing it.

/// The shortest last word whose longer forms are found.
const PREFIX_CHARS_MIN: usize = 2;

/// The last word of a search, whose longer forms are also found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prefix<'a> {
    /// Letters and digits only, so that it contains no operator of a search.
    pub(crate) word: &'a str,
    /// The part of the search before the word; empty if the word is an alternative to it.
    pub(crate) before: &'a str,
}

impl Prefix<'_> {
    /// Returns the last word of a search; None if it is excluded, part of a phrase, or no plain word.
    pub(crate) fn of(search: &str) -> Option<Prefix<'_>> {
        let search = search.trim_end();
        let word = search.rsplit(char::is_whitespace).next().unwrap_or(search);
        let before = &search[..search.len() - word.len()];
        let is_plain = word.chars().all(char::is_alphanumeric) && word.chars().count() >= PREFIX_CHARS_MIN;
        let is_in_phrase = before.matches('"').count() % 2 == 1;
        if !is_plain || is_in_phrase || word.eq_ignore_ascii_case("or") {
            return None;
        }
        let is_alternative = before.split_whitespace().next_back().is_some_and(|word| word.eq_ignore_ascii_case("or"));
        Some(Prefix { word, before: if is_alternative { "" } else { before.trim_end() } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_plain_word_is_a_prefix() {
        let prefix = |search| Prefix::of(search).map(|Prefix { before, word }| (before, word));
        for (search, expected) in [
            ("ferr", Some(("", "ferr"))),
            (" rust  ferr ", Some((" rust", "ferr"))),
            ("-jazz ferr", Some(("-jazz", "ferr"))),
            ("\"rust meetup\" ferr", Some(("\"rust meetup\"", "ferr"))),
            ("jazz or ferr", Some(("", "ferr"))),
            ("jazz OR blues ferr", Some(("jazz OR blues", "ferr"))),
            ("東京", Some(("", "東京"))),
            ("a\u{3000}zür", Some(("a", "zür"))),
            ("", None),
            ("f", None),
            ("ferr -jazz", None),
            ("\"rust ferr", None),
            ("\"rust ferr\"", None),
            ("ferr or", None),
            ("ferr:*", None),
            ("a&b", None),
            ("rock'n", None),
            ("(ferr)", None),
        ] {
            assert_eq!(prefix(search), expected, "{search}");
        }
    }
}

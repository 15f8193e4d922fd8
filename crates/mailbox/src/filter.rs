//! Which messages a reader is for.

use std::fmt::Write;

use regex::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};

use crate::log::Message;

/// Messages by source, topic and aggregate type; an empty list means any.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Matching {
    /// Who posted it: the sources that are trusted.
    pub sources: Vec<String>,
    /// As RabbitMQ binds: words joined by dots, `*` for one word, `#` for any number of them.
    pub topics: Vec<String>,
    pub aggregate_types: Vec<String>,
}

/// What a reader takes, and what of that it leaves to others. It is applied where the log is read, in PostgreSQL or in
/// memory, as a regular expression over `source topic aggregate_type`; the first two hold no blank.
#[derive(Debug, Clone)]
pub struct Filter {
    wants: Regex,
    leaves: Option<Regex>,
    /// Those that it wants, if that is all it asks, but for what it leaves.
    sources: Option<Vec<String>>,
}

impl Filter {
    pub fn everything() -> Filter {
        Filter::matching(&Matching::default())
    }

    pub fn matching(wanted: &Matching) -> Filter {
        let asks_for_sources = wanted.topics.is_empty() && wanted.aggregate_types.is_empty();
        Filter {
            wants: compiled(&wanted.regex()),
            leaves: None,
            sources: asks_for_sources.then(|| wanted.sources.clone()),
        }
    }

    /// Takes what this matches, too.
    pub fn or(mut self, wanted: &Matching) -> Filter {
        self.wants = compiled(&format!("{}|{}", self.wants.as_str(), wanted.regex()));
        self.sources = None;
        self
    }

    /// Leaves what any of these match.
    pub fn leaving<'a>(mut self, left: impl IntoIterator<Item = &'a Matching>) -> Filter {
        let all: Vec<String> = left.into_iter().map(Matching::regex).collect();
        self.leaves = (!all.is_empty()).then(|| compiled(&all.join("|")));
        self
    }

    /// The same answer as PostgreSQL gives.
    pub fn takes(&self, message: &Message) -> bool {
        let subject =
            format!("{} {} {}", message.source, message.topic, message.aggregate_type.as_deref().unwrap_or_default());
        self.wants.is_match(&subject) && !self.leaves.as_ref().is_some_and(|leaves| leaves.is_match(&subject))
    }

    pub(crate) fn wants(&self) -> &str {
        self.wants.as_str()
    }

    /// The same in two parts, either of which may be missing, for who looks at every message of a backlog: an expression is a
    /// third of what it costs to read a message, and sources alone need none.
    pub(crate) fn narrows(&self) -> (Option<&[String]>, Option<&str>) {
        match &self.sources {
            Some(sources) => (Some(sources.as_slice()).filter(|sources| !sources.is_empty()), None),
            None => (None, Some(self.wants())),
        }
    }

    pub(crate) fn leaves(&self) -> Option<&str> {
        self.leaves.as_ref().map(Regex::as_str)
    }
}

/// Everything in it was escaped, so it compiles; one that is too large for the compiler takes nothing.
fn compiled(regex: &str) -> Regex {
    // In PostgreSQL a dot is any character, a line's end, too.
    let build = |regex: &str| RegexBuilder::new(regex).dot_matches_new_line(true).build();
    build(regex).or_else(|_| build("[^\\s\\S]")).unwrap_or_else(|error| unreachable!("{error}"))
}

impl Matching {
    pub fn topic(pattern: &str) -> Matching {
        Matching { topics: vec![pattern.to_owned()], ..Matching::default() }
    }

    /// What is wrong with it, if anything.
    pub fn check(&self) -> Result<(), String> {
        let word = |word: &str| {
            word == "*"
                || word == "#"
                || (!word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'))
        };
        if let Some(bad) = self.topics.iter().find(|topic| !topic.split('.').all(word)) {
            return Err(format!("topic `{bad}` takes words joined by dots; * is any word, # any number of them"));
        }
        match self.sources.iter().find(|source| source.is_empty() || source.contains(' ')) {
            Some(bad) => Err(format!("source `{bad}` takes a name without blanks")),
            None => Ok(()),
        }
    }

    fn regex(&self) -> String {
        let any_of = |list: &[String], one: fn(&str) -> String, otherwise: &str| match list {
            [] => otherwise.to_owned(),
            list => list.iter().map(|item| one(item)).collect::<Vec<_>>().join("|"),
        };
        let sources = any_of(&self.sources, escaped, "[^ ]*");
        let topics = any_of(&self.topics, topic_regex, "[^ ]*");
        let aggregate_types = any_of(&self.aggregate_types, escaped, ".*");
        format!("^(?:{sources}) (?:{topics}) (?:{aggregate_types})$")
    }
}

fn topic_regex(pattern: &str) -> String {
    let mut regex = String::new();
    // Whether a dot is due before the next word; `#` may stand for nothing, and then there is none.
    let mut dot_due = false;
    let words: Vec<&str> = pattern.split('.').collect();
    for (at, word) in words.iter().enumerate() {
        match *word {
            "#" if words.len() == 1 => regex.push_str("[^ ]*"),
            "#" if dot_due => regex.push_str(r"(?:\.[^. ]+)*"),
            "#" if at + 1 == words.len() => regex.push_str(r"(?:[^. ]+(?:\.[^. ]+)*)?"),
            "#" => regex.push_str(r"(?:[^. ]+\.)*"),
            word => {
                if dot_due {
                    regex.push_str(r"\.");
                }
                regex.push_str(&if word == "*" { "[^. ]+".to_owned() } else { escaped(word) });
                dot_due = true;
            }
        }
    }
    regex
}

/// Letters, digits and `_` as they are; anything else by its code, which no regular expression takes for more.
fn escaped(text: &str) -> String {
    let mut regex = String::new();
    for character in text.chars() {
        if character.is_ascii_alphanumeric() || character == '_' {
            regex.push(character);
        } else {
            let _ = write!(regex, r"\U{:08x}", character as u32);
        }
    }
    regex
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_checked_before_it_is_used() {
        for good in ["#", "*", "order.#", "#.created", "a.*.b", "a_1.#.b"] {
            assert!(Matching::topic(good).check().is_ok(), "{good}");
        }
        for bad in ["", "a..b", ".a", "a.", "a b", "a*", "é"] {
            assert!(Matching::topic(bad).check().is_err(), "{bad}");
        }
    }

    #[test]
    fn who_asks_for_sources_alone_needs_no_expression() {
        let of_hub = Matching { sources: vec!["hub".to_owned()], ..Matching::default() };
        assert_eq!(Filter::everything().narrows(), (None, None));
        assert_eq!(Filter::matching(&of_hub).narrows(), (Some(["hub".to_owned()].as_slice()), None));
        let by_topic = Filter::matching(&Matching { topics: vec!["order.#".to_owned()], ..of_hub.clone() });
        assert_eq!(by_topic.narrows(), (None, Some(by_topic.wants())));
        let either = Filter::matching(&of_hub).or(&Matching::topic("event.#"));
        assert_eq!(either.narrows(), (None, Some(either.wants())));
    }

    #[test]
    fn what_is_special_in_a_regular_expression_is_plain_in_a_name() {
        assert_eq!(escaped("a.b|c"), r"a\U0000002eb\U0000007cc");
    }
}

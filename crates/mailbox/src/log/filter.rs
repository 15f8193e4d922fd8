//! Filters: which messages a consumer reads.

use std::fmt::Write;

use regex::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};

use super::message::Message;

/// Selects messages by source, topic and aggregate type. An empty list matches everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MessagePattern {
    /// The sources that the consumer trusts.
    pub sources: Vec<String>,
    /// Patterns as in a RabbitMQ topic binding: words joined by dots, `*` for one word, `#` for any number of words.
    pub topics: Vec<String>,
    pub aggregate_types: Vec<String>,
}

/// The messages that a consumer reads: those that the included patterns match and the excluded patterns do not.
///
/// It is applied where the log is read, in PostgreSQL or in memory, as regular expressions over the text
/// `source topic aggregate_type`. Source and topic contain no blanks, so the text is unambiguous.
#[derive(Debug, Clone)]
pub struct Filter {
    included: Regex,
    excluded: Option<Regex>,
    /// The included sources, if the filter includes messages by source alone.
    sources: Option<Vec<String>>,
}

impl Filter {
    pub fn everything() -> Filter {
        Filter::matching(&MessagePattern::default())
    }

    pub fn matching(pattern: &MessagePattern) -> Filter {
        let is_by_source = pattern.topics.is_empty() && pattern.aggregate_types.is_empty();
        Filter {
            included: compile(&pattern.regex()),
            excluded: None,
            sources: is_by_source.then(|| pattern.sources.clone()),
        }
    }

    /// Also includes the messages that `pattern` matches.
    pub fn or(mut self, pattern: &MessagePattern) -> Filter {
        self.included = compile(&format!("{}|{}", self.included.as_str(), pattern.regex()));
        self.sources = None;
        self
    }

    /// Excludes the messages that any of the patterns matches.
    pub fn excluding<'a>(mut self, patterns: impl IntoIterator<Item = &'a MessagePattern>) -> Filter {
        let all: Vec<String> = patterns.into_iter().map(MessagePattern::regex).collect();
        self.excluded = (!all.is_empty()).then(|| compile(&all.join("|")));
        self
    }

    /// Whether the consumer reads this message. The result is the same as in PostgreSQL.
    pub fn matches(&self, message: &Message) -> bool {
        let subject =
            format!("{} {} {}", message.source, message.topic, message.aggregate_type.as_deref().unwrap_or_default());
        self.included.is_match(&subject) && !self.excluded.as_ref().is_some_and(|excluded| excluded.is_match(&subject))
    }

    pub(crate) fn included(&self) -> &str {
        self.included.as_str()
    }

    /// The condition for included messages in SQL: a list of sources, or a regular expression; None means no restriction.
    /// Reading a backlog evaluates this for every message: the expression is a third of the cost of reading, and a list of
    /// sources avoids it.
    pub(crate) fn sql_condition(&self) -> (Option<&[String]>, Option<&str>) {
        match &self.sources {
            Some(sources) => (Some(sources.as_slice()).filter(|sources| !sources.is_empty()), None),
            None => (None, Some(self.included())),
        }
    }

    pub(crate) fn excluded(&self) -> Option<&str> {
        self.excluded.as_ref().map(Regex::as_str)
    }
}

/// Compiles an expression. All names in it are escaped, so the syntax is valid; an expression that exceeds the
/// compiler's size limit is logged as an error and matches nothing.
fn compile(regex: &str) -> Regex {
    let too_large = |error: regex::Error| {
        tracing::error!(%error, "a filter is too large, so it matches no message in memory; use fewer or shorter patterns");
        build("[^\\s\\S]")
    };
    build(regex).or_else(too_large).unwrap_or_else(|error| unreachable!("{error}"))
}

/// In PostgreSQL a dot matches every character, including line breaks.
fn build(regex: &str) -> Result<Regex, regex::Error> {
    RegexBuilder::new(regex).dot_matches_new_line(true).build()
}

impl MessagePattern {
    pub fn topic(pattern: &str) -> MessagePattern {
        MessagePattern { topics: vec![pattern.to_owned()], ..MessagePattern::default() }
    }

    /// Checks the patterns. Fails with the invalid pattern and the syntax that is accepted, or if the patterns together are
    /// too large to be compiled.
    pub fn check(&self) -> Result<(), String> {
        let word = |word: &str| {
            word == "*"
                || word == "#"
                || (!word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'))
        };
        if let Some(bad) = self.topics.iter().find(|topic| !topic.split('.').all(word)) {
            return Err(format!(
                "topic pattern `{bad}` is invalid: use words joined by dots; * matches one word, # any number of words"
            ));
        }
        if let Some(bad) = self.sources.iter().find(|source| source.is_empty() || source.contains(' ')) {
            return Err(format!("source `{bad}` is invalid: use a name without blanks"));
        }
        match build(&self.regex()) {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("the patterns are too large: {error}")),
        }
    }

    fn regex(&self) -> String {
        let any_of = |list: &[String], one: fn(&str) -> String, otherwise: &str| match list {
            [] => otherwise.to_owned(),
            list => list.iter().map(|item| one(item)).collect::<Vec<_>>().join("|"),
        };
        let sources = any_of(&self.sources, escape, "[^ ]*");
        let topics = any_of(&self.topics, topic_regex, "[^ ]*");
        let aggregate_types = any_of(&self.aggregate_types, escape, ".*");
        format!("^(?:{sources}) (?:{topics}) (?:{aggregate_types})$")
    }
}

fn topic_regex(pattern: &str) -> String {
    let mut regex = String::new();
    // Whether the next word needs a dot before it; there is none after a `#` that matched no word.
    let mut needs_dot = false;
    let words: Vec<&str> = pattern.split('.').collect();
    for (at, word) in words.iter().enumerate() {
        match *word {
            "#" if words.len() == 1 => regex.push_str("[^ ]*"),
            "#" if needs_dot => regex.push_str(r"(?:\.[^. ]+)*"),
            "#" if at + 1 == words.len() => regex.push_str(r"(?:[^. ]+(?:\.[^. ]+)*)?"),
            "#" => regex.push_str(r"(?:[^. ]+\.)*"),
            word => {
                if needs_dot {
                    regex.push_str(r"\.");
                }
                regex.push_str(&if word == "*" { "[^. ]+".to_owned() } else { escape(word) });
                needs_dot = true;
            }
        }
    }
    regex
}

/// Escapes a name: every character except letters, digits and `_` is written as its code, which is literal in the
/// regular expressions of both PostgreSQL and Rust.
fn escape(text: &str) -> String {
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
    fn an_invalid_topic_pattern_is_rejected() {
        for good in ["#", "*", "order.#", "#.created", "a.*.b", "a_1.#.b"] {
            assert!(MessagePattern::topic(good).check().is_ok(), "{good}");
        }
        for bad in ["", "a..b", ".a", "a.", "a b", "a*", "é"] {
            assert!(MessagePattern::topic(bad).check().is_err(), "{bad}");
        }
    }

    #[test]
    fn patterns_that_are_too_large_to_compile_are_rejected() {
        let aggregate_types = (0..20).map(|n| format!("{n}{}", "a".repeat(10_000))).collect();
        let error = MessagePattern { aggregate_types, ..MessagePattern::default() }.check().unwrap_err();
        assert!(error.contains("too large"), "{error}");
    }

    #[test]
    fn a_filter_by_source_alone_needs_no_expression() {
        let of_hub = MessagePattern { sources: vec!["hub".to_owned()], ..MessagePattern::default() };
        assert_eq!(Filter::everything().sql_condition(), (None, None));
        assert_eq!(Filter::matching(&of_hub).sql_condition(), (Some(["hub".to_owned()].as_slice()), None));
        let by_topic = Filter::matching(&MessagePattern { topics: vec!["order.#".to_owned()], ..of_hub.clone() });
        assert_eq!(by_topic.sql_condition(), (None, Some(by_topic.included())));
        let either = Filter::matching(&of_hub).or(&MessagePattern::topic("event.#"));
        assert_eq!(either.sql_condition(), (None, Some(either.included())));
    }

    #[test]
    fn special_characters_in_a_name_are_escaped() {
        assert_eq!(escape("a.b|c"), r"a\U0000002eb\U0000007cc");
    }
}

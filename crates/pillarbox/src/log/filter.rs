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
    /// The types of aggregates.
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
    /// The sources whose messages may be excluded; None if they may have any source.
    excluded_sources: Option<Vec<String>>,
    /// The only tenant whose messages match; None: any.
    tenant: Option<String>,
}

impl Filter {
    /// Matches all messages.
    pub fn everything() -> Filter {
        Filter::matching(&MessagePattern::default())
    }

    /// Matches the messages that the pattern matches.
    pub fn matching(pattern: &MessagePattern) -> Filter {
        let is_by_source = pattern.topics.is_empty() && pattern.aggregate_types.is_empty();
        Filter {
            included: compile(&pattern.regex()),
            excluded: None,
            sources: is_by_source.then(|| pattern.sources.clone()),
            excluded_sources: None,
            tenant: None,
        }
    }

    /// Matches the messages of this tenant only.
    pub fn of_tenant(mut self, tenant: &str) -> Filter {
        self.tenant = Some(tenant.to_owned());
        self
    }

    /// Also includes the messages that `pattern` matches.
    pub fn or(mut self, pattern: &MessagePattern) -> Filter {
        self.included = compile(&format!("{}|{}", self.included.as_str(), pattern.regex()));
        self.sources = None;
        self
    }

    /// Excludes the messages that any of the patterns matches.
    pub fn excluding<'a>(mut self, patterns: impl IntoIterator<Item = &'a MessagePattern>) -> Filter {
        let patterns = Vec::from_iter(patterns);
        let all: Vec<String> = patterns.iter().map(|pattern| pattern.regex()).collect();
        self.excluded = (!all.is_empty()).then(|| compile(&all.join("|")));
        let of_known_sources = patterns.iter().all(|pattern| !pattern.sources.is_empty());
        self.excluded_sources =
            of_known_sources.then(|| patterns.iter().flat_map(|pattern| pattern.sources.clone()).collect());
        self
    }

    /// Whether the consumer reads this message. The result is the same as in PostgreSQL.
    pub fn matches(&self, message: &Message) -> bool {
        if self.tenant.as_ref().is_some_and(|tenant| *tenant != message.tenant) {
            return false;
        }
        if let Some(sources) = self.sources.as_ref().filter(|_| !self.may_exclude(&message.source)) {
            return sources.is_empty() || sources.contains(&message.source);
        }
        let subject =
            format!("{} {} {}", message.source, message.topic, message.aggregate_type.as_deref().unwrap_or_default());
        self.included.is_match(&subject) && !self.excluded.as_ref().is_some_and(|excluded| excluded.is_match(&subject))
    }

    /// Whether a message of this source can be excluded.
    fn may_exclude(&self, source: &String) -> bool {
        self.excluded.is_some() && self.excluded_sources.as_ref().is_none_or(|sources| sources.contains(source))
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

    pub(crate) fn tenant(&self) -> Option<&str> {
        self.tenant.as_deref()
    }

    /// The sources to which [`Filter::excluded`] applies, so that it need not be evaluated for others; None: to all.
    pub(crate) fn excluded_sources(&self) -> Option<&[String]> {
        self.excluded_sources.as_deref()
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

/// A pattern that matches no message as it is written.
#[derive(Debug, thiserror::Error)]
pub enum InvalidPattern {
    /// The pattern of a topic has another syntax.
    #[error("topic pattern `{0}` is invalid: use words joined by dots; * matches one word, # any number of words")]
    Topic(String),
    /// A source is empty or contains a blank.
    #[error("source `{0}` is invalid: use a name without blanks")]
    Source(String),
    /// The patterns together exceed the limit of the compiler of regular expressions.
    #[error("the patterns are too large: {0}")]
    TooLarge(Box<dyn std::error::Error + Send + Sync>),
}

impl MessagePattern {
    /// A pattern of topics from any source.
    pub fn topic(pattern: &str) -> MessagePattern {
        MessagePattern { topics: vec![pattern.to_owned()], ..MessagePattern::default() }
    }

    /// Checks the patterns. Fails with the invalid pattern and the syntax that is accepted, or if the patterns together are
    /// too large to be compiled.
    pub fn check(&self) -> Result<(), InvalidPattern> {
        let word = |word: &str| {
            word == "*"
                || word == "#"
                || (!word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'))
        };
        if let Some(bad) = self.topics.iter().find(|topic| !topic.split('.').all(word)) {
            return Err(InvalidPattern::Topic(bad.clone()));
        }
        if let Some(bad) = self.sources.iter().find(|source| source.is_empty() || source.contains(' ')) {
            return Err(InvalidPattern::Source(bad.clone()));
        }
        build(&self.regex()).map(drop).map_err(|error| InvalidPattern::TooLarge(Box::new(error)))
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
    use chrono::DateTime;
    use serde_json::value::RawValue;

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
        assert!(matches!(error, InvalidPattern::TooLarge(_)), "{error}");
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
    fn an_exclusion_concerns_the_messages_of_its_sources_only() {
        let of = |source: &str, topics: &[&str]| MessagePattern {
            sources: vec![source.to_owned()],
            topics: topics.iter().map(|topic| (*topic).to_owned()).collect(),
            ..MessagePattern::default()
        };
        let both = MessagePattern { sources: vec!["hub".to_owned(), "sql".to_owned()], ..MessagePattern::default() };
        let filter = Filter::matching(&both).excluding([&of("sql", &["email.#"])]);
        assert_eq!(filter.excluded_sources(), Some(["sql".to_owned()].as_slice()));
        for (source, topic, expected) in [
            ("hub", "email.code", true),
            ("sql", "emails.sent", true),
            ("sql", "email", false),
            ("sql", "email.code", false),
            ("joins", "join.confirmed", false),
        ] {
            assert_eq!(filter.matches(&message(source, topic)), expected, "{source} {topic}");
        }
        let by_topic = Filter::everything().excluding([&MessagePattern::topic("email.#")]);
        assert_eq!(by_topic.excluded_sources(), None, "messages of any source may be excluded");
        assert!(!by_topic.matches(&message("hub", "email.code")) && by_topic.matches(&message("hub", "order.paid")));
    }

    fn message(source: &str, topic: &str) -> Message {
        Message {
            id: 1,
            shard: 0,
            message_id: uuid::Uuid::nil(),
            source: source.to_owned(),
            tenant: "main".to_owned(),
            topic: topic.to_owned(),
            key: None,
            aggregate_type: None,
            aggregate_id: None,
            headers: RawValue::NULL.to_owned(),
            payload: RawValue::NULL.to_owned(),
            at: DateTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn special_characters_in_a_name_are_escaped() {
        assert_eq!(escape("a.b|c"), r"a\U0000002eb\U0000007cc");
    }
}

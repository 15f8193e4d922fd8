//! The setting `hub.export`: which messages of the services are hub events, too.

use std::sync::Arc;

use contracts::{INTERNAL_TOPICS, SERVICE_SOURCES};
use kit::config::List;
use mailbox::log::{Filter, MessagePattern, Source};
use serde::{Deserialize, Serialize};

use crate::domain::EventTypes;

/// The first part of the topics of e-mails. They are never exported: they contain sign-in codes and links for their
/// recipient only.
const EMAIL_PREFIX: &str = "email";
const TOPICS_MAX: usize = 100;

/// Topics of the services, in the syntax of event types. None of them matches e-mails.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(try_from = "List<EventTypes>", into = "Vec<EventTypes>")]
pub struct Export(Arc<[EventTypes]>);

impl TryFrom<List<EventTypes>> for Export {
    type Error = String;

    fn try_from(List(types): List<EventTypes>) -> Result<Export, String> {
        if types.len() > TOPICS_MAX {
            return Err(format!("must have at most {TOPICS_MAX} topics"));
        }
        types.iter().map(EventTypes::as_str).try_for_each(check)?;
        Ok(Export(types.into()))
    }
}

impl From<Export> for Vec<EventTypes> {
    fn from(export: Export) -> Vec<EventTypes> {
        export.0.to_vec()
    }
}

fn check(topics: &str) -> Result<(), String> {
    if topics == "*" {
        return Err("`*` would export e-mails, too; list the topics by name, such as `event.*` and `join.*`".to_owned());
    }
    if topics.split('.').next() == Some(EMAIL_PREFIX) {
        return Err(format!(
            "`{topics}` matches e-mails, which are never exported; list other topics, such as `event.*`"
        ));
    }
    match INTERNAL_TOPICS.contains(&topics) {
        true => Err(format!("`{topics}` is internal to the services and never exported; remove it")),
        false => Ok(()),
    }
}

impl Export {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a message of a service with this topic is exported.
    pub(crate) fn covers(&self, topic: &str) -> bool {
        self.0.iter().any(|types| types.include(topic))
    }

    /// Matches the messages of the hub's own sources and the exported messages of the services. Messages posted in SQL or
    /// received from the broker do not match, whatever their topic: a producer could impersonate a service.
    pub(crate) fn filter(&self, own: &[Source]) -> Filter {
        let own = own.iter().map(|source| source.as_str().to_owned()).collect();
        let own = Filter::matching(&MessagePattern { sources: own, ..MessagePattern::default() });
        if self.is_empty() {
            return own; // A filter without topics would match every topic.
        }
        let of_services = |topics: Vec<String>| MessagePattern {
            sources: SERVICE_SOURCES.map(str::to_owned).to_vec(),
            topics,
            ..MessagePattern::default()
        };
        let exported = of_services(self.0.iter().map(binding_key).collect());
        own.or(&exported).excluding([&of_services(INTERNAL_TOPICS.map(str::to_owned).to_vec())])
    }
}

/// The pattern in RabbitMQ's syntax: `event.*` matches all topics below `event`, at any depth, but not `event` itself.
fn binding_key(types: &EventTypes) -> String {
    match types.as_str().strip_suffix('*') {
        Some(above) => format!("{above}*.#"),
        None => types.as_str().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::DateTime;
    use mailbox::log::Message;
    use serde_json::json;
    use serde_json::value::RawValue;
    use uuid::Uuid;

    const HUB_SOURCES: [Source; 1] = [Source::new("hub")];

    fn export(topics: &[&str]) -> Result<Export, String> {
        serde_json::from_value(json!(topics)).map_err(|error| error.to_string())
    }

    fn message(source: &str, topic: &str) -> Message {
        Message {
            id: 1,
            shard: 0,
            message_id: Uuid::nil(),
            source: source.to_owned(),
            tenant: "main".to_owned(),
            topic: topic.to_owned(),
            key: None,
            aggregate_type: Some("EVENT".to_owned()),
            aggregate_id: None,
            headers: RawValue::NULL.to_owned(),
            payload: RawValue::NULL.to_owned(),
            at: DateTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn emails_and_invalid_topics_are_rejected_with_what_is_accepted() {
        for bad in ["*", "email", "email.*", "email.code", "email.code.*"] {
            let error = export(&["join.*", bad]).unwrap_err();
            assert!(error.contains(&format!("`{bad}`")) && error.contains("`event.*`"), "{error}");
        }
        for bad in ["event.", "event*", "event.#", "", "a b"] {
            let error = export(&[bad]).unwrap_err();
            assert!(error.contains(&format!("`{bad}` is no event type")), "{error}");
        }
        assert!(export(&["a"; 101]).unwrap_err().contains("at most 100"));
        export(&["event.*", "emails.sent", "mod.kicked"]).unwrap();
    }

    #[test]
    fn only_exported_topics_of_services_match() {
        let filter = export(&["event.*", "mod.kicked"]).unwrap().filter(&HUB_SOURCES);
        for (source, topic) in
            [("events", "event.published"), ("events", "event.a.b"), ("joins", "mod.kicked"), ("hub", "any.thing")]
        {
            assert!(filter.matches(&message(source, topic)), "{source} {topic}");
        }
        for (source, topic) in [
            ("events", "event"),
            ("events", "events.published"),
            ("joins", "mod.kicked.twice"),
            ("joins", "join.confirmed"),
            ("notify", "email.code"),
            ("sql", "event.published"),
            ("amqp:events", "event.published"),
            ("mailbox", "event.published"),
            ("hub.control", "event.published"),
        ] {
            assert!(!filter.matches(&message(source, topic)), "{source} {topic}");
        }
        let nothing = Export::default().filter(&HUB_SOURCES);
        assert!(
            nothing.matches(&message("hub", "event.published"))
                && !nothing.matches(&message("events", "event.published"))
        );
    }

    #[test]
    fn no_internal_topic_is_exported() {
        let filter = export(&["event.*", "join.*"]).unwrap().filter(&HUB_SOURCES);
        for topic in ["event.versions", "event.restated", "join.counted", "join.recounted"] {
            assert!(export(&[topic]).unwrap_err().contains("internal to the services"), "{topic}");
            assert!(SERVICE_SOURCES.iter().all(|source| !filter.matches(&message(source, topic))), "{topic}");
        }
    }

    #[test]
    fn the_longest_list_still_matches_messages_of_the_hub() {
        let long: Vec<String> =
            (0..TOPICS_MAX).map(|n| format!("{}.{n:03}.*", "a.".repeat(97).trim_end_matches('.'))).collect();
        let long: Vec<&str> = long.iter().map(String::as_str).collect();
        let filter = export(&long).unwrap().filter(&HUB_SOURCES);
        assert!(filter.matches(&message("hub", "order.paid")), "a filter that is too large matches nothing");
        assert!(filter.matches(&message("events", &long[99].replace('*', "b"))));
    }
}

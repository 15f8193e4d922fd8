//! Which messages of the services are events of the hub, too: `hub.export`.

use std::sync::Arc;

use contracts::{BETWEEN_SERVICES, SERVICE_SOURCES};
use mailbox::filter::{Filter, Matching};
use mailbox::post::Source;
use serde::{Deserialize, Serialize};

use crate::domain::EventTypes;

/// Mails hold what only their reader may see: codes, links that let someone in.
const MAIL: &str = "email";
const TYPES_MAX: usize = 100;

/// Topics of the services, as subscribers name types. That none is of mail is checked when it is made.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<EventTypes>", into = "Vec<EventTypes>")]
pub struct Export(Arc<[EventTypes]>);

impl TryFrom<Vec<EventTypes>> for Export {
    type Error = String;

    fn try_from(types: Vec<EventTypes>) -> Result<Export, String> {
        if types.len() > TYPES_MAX {
            return Err(format!("takes at most {TYPES_MAX} topics"));
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
        return Err(
            "`*` would take mails, too: it takes topics by their names, such as `event.*` and `join.*`".to_owned()
        );
    }
    if topics.split('.').next() == Some(MAIL) {
        return Err(format!("`{topics}` is of mails, which are never exported: it takes topics such as `event.*`"));
    }
    match BETWEEN_SERVICES.contains(&topics) {
        true => Err(format!("`{topics}` is what services say to each other alone, and is never exported")),
        false => Ok(()),
    }
}

impl Export {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether subscribers take what has this topic for a service's.
    pub(crate) fn covers(&self, topic: &str) -> bool {
        self.0.iter().any(|types| types.include(topic))
    }

    /// What the hub's own sources post, and what is exported. Not what a producer posts by SQL or over the broker: it could say
    /// anything in a service's name.
    pub(crate) fn filter(&self, own: &[Source]) -> Filter {
        let own = own.iter().map(|source| source.as_str().to_owned()).collect();
        let own = Filter::matching(&Matching { sources: own, ..Matching::default() });
        if self.is_empty() {
            return own; // no topics would mean any
        }
        let of_services = |topics: Vec<String>| Matching {
            sources: SERVICE_SOURCES.map(str::to_owned).to_vec(),
            topics,
            ..Matching::default()
        };
        let exported = of_services(self.0.iter().map(bound).collect());
        own.or(&exported).leaving([&of_services(BETWEEN_SERVICES.map(str::to_owned).to_vec())])
    }
}

/// The same as RabbitMQ binds it: `event.*` is all below `event`, at any depth, and not `event` itself.
fn bound(types: &EventTypes) -> String {
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

    const OWN: [Source; 1] = [Source::new("hub")];

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
    fn what_could_be_mail_or_is_no_topic_is_refused_with_what_it_takes() {
        for bad in ["*", "email", "email.*", "email.code", "email.code.*"] {
            let error = export(&["join.*", bad]).unwrap_err();
            assert!(error.contains(&format!("`{bad}`")) && error.contains("`event.*`"), "{error}");
        }
        for bad in ["event.", "event*", "event.#", "", "a b"] {
            let error = export(&[bad]).unwrap_err();
            assert!(error.contains(&format!("`{bad}` is no event type")), "{error}");
        }
        assert!(export(&["event.stated"]).unwrap_err().contains("to each other alone"));
        assert!(export(&["a"; 101]).unwrap_err().contains("at most 100"));
        export(&["event.*", "emails.sent", "mod.kicked"]).unwrap();
    }

    #[test]
    fn only_services_are_taken_and_only_with_what_is_exported() {
        let filter = export(&["event.*", "mod.kicked"]).unwrap().filter(&OWN);
        for (source, topic) in
            [("events", "event.published"), ("events", "event.a.b"), ("joins", "mod.kicked"), ("hub", "any.thing")]
        {
            assert!(filter.takes(&message(source, topic)), "{source} {topic}");
        }
        for (source, topic) in [
            ("events", "event"),
            ("events", "events.published"),
            ("events", "event.stated"),
            ("joins", "mod.kicked.twice"),
            ("joins", "join.confirmed"),
            ("notify", "email.code"),
            ("sql", "event.published"),
            ("amqp:events", "event.published"),
            ("mailbox", "event.published"),
            ("hub.control", "event.published"),
        ] {
            assert!(!filter.takes(&message(source, topic)), "{source} {topic}");
        }
        let nothing = Export::default().filter(&OWN);
        assert!(
            nothing.takes(&message("hub", "event.published")) && !nothing.takes(&message("events", "event.published"))
        );
    }

    #[test]
    fn the_longest_list_still_lets_the_hubs_own_through() {
        let long: Vec<String> =
            (0..TYPES_MAX).map(|n| format!("{}.{n:03}.*", "a.".repeat(97).trim_end_matches('.'))).collect();
        let long: Vec<&str> = long.iter().map(String::as_str).collect();
        let filter = export(&long).unwrap().filter(&OWN);
        assert!(filter.takes(&message("hub", "order.paid")), "a filter that is too large takes nothing");
        assert!(filter.takes(&message("events", &long[99].replace('*', "b"))));
    }
}

//! Which messages of the log are hub events: those posted to the hub, those posted in SQL (`hub.sql_events`), those of the
//! services that are exported (`hub.export`), and those of the hub itself.

use contracts::{INTERNAL_TOPICS, SERVICE_SOURCES, notify};
use pillarbox::log::Tenant;
use pillarbox::log::{Filter, Message, MessagePattern, Source};

use crate::deliveries::command::CONTROL_SOURCE;
use crate::deliveries::message::EVENT_SOURCE;
use crate::deliveries::system_event::SYSTEM_SOURCE;
use crate::events::export::Export;
use crate::events::sql_events::{SQL_SOURCE, SqlEvents, of_sql};

/// The hub events of a process, by its settings.
#[derive(Debug, Clone)]
pub(crate) struct EventSelection {
    export: Export,
    /// The messages that fan-out reads: the events of all tenants, and operator commands.
    fan_out: Filter,
    of_main: Filter,
    of_other_tenants: Filter,
}

impl EventSelection {
    pub(crate) fn new(export: &Export, sql_events: &SqlEvents) -> EventSelection {
        // In `main`, receivers trust that exported types come from the services.
        let forged = of_sql(export.patterns());
        let forged = [forged].into_iter().filter(|_| !export.is_empty());
        EventSelection {
            export: export.clone(),
            fan_out: filter(&[EVENT_SOURCE, SYSTEM_SOURCE, CONTROL_SOURCE], export, sql_events, []),
            of_main: filter(&[EVENT_SOURCE, SYSTEM_SOURCE], export, sql_events, forged),
            of_other_tenants: filter(&[EVENT_SOURCE, SYSTEM_SOURCE], &Export::default(), sql_events, []),
        }
    }

    /// The filter of fan-out. Not all messages that it matches are events: see [`EventSelection::is_event`].
    pub(crate) fn fan_out(&self) -> Filter {
        self.fan_out.clone()
    }

    /// Matches the events among the messages of a tenant.
    pub(crate) fn of_tenant(&self, tenant: &Tenant) -> &Filter {
        match tenant.as_str() {
            Tenant::MAIN => &self.of_main,
            _ => &self.of_other_tenants,
        }
    }

    /// Whether a message that the filter of fan-out matches is an event of its tenant. The message must not be a command.
    pub(crate) fn is_event(&self, message: &Message) -> bool {
        let is_main = message.tenant == Tenant::MAIN;
        match message.source.as_str() {
            source if source == EVENT_SOURCE.as_str() || source == SYSTEM_SOURCE.as_str() => true,
            // Its payload is for the consumers of this installation only, whatever its topic.
            _ if message.confidential_until().is_some() => false,
            // An exported type would be mistaken for a message of a service.
            source if source == SQL_SOURCE.as_str() => !is_main || !self.export.covers(&message.topic),
            // The messages of a service are events of the tenant that the services live in, whatever tenant they carry.
            _ => is_main,
        }
    }
}

/// Whether messages of this source can be hub events.
pub(crate) fn is_event_source(source: &str) -> bool {
    source == EVENT_SOURCE.as_str()
        || source == SYSTEM_SOURCE.as_str()
        || source == SQL_SOURCE.as_str()
        || exported_sources().any(|service| service == source)
}

/// Matches the messages of the hub's own sources, those posted in SQL, and the exported messages of the services, but not
/// those of `excluded`. Messages received from the broker do not match, whatever their topic: their producer could
/// impersonate a service.
fn filter(
    own: &[Source],
    export: &Export,
    sql_events: &SqlEvents,
    excluded: impl IntoIterator<Item = MessagePattern>,
) -> Filter {
    // A filter by source alone is the fastest.
    let sql = sql_events.matches_all().then_some(SQL_SOURCE);
    let sources = own.iter().chain(sql.as_ref()).map(|source| source.as_str().to_owned()).collect();
    let mut filter = Filter::matching(&MessagePattern { sources, ..MessagePattern::default() });
    let mut excluded = Vec::from_iter(excluded);
    // A pattern without topics would match every topic.
    if !sql_events.is_empty() {
        if !sql_events.matches_all() {
            filter = filter.or(&sql_events.pattern());
        }
        excluded.push(SqlEvents::emails());
    }
    if !export.is_empty() {
        filter = filter.or(&of_services(export.patterns()));
        excluded.push(of_services(INTERNAL_TOPICS.map(str::to_owned).to_vec()));
    }
    filter.excluding(&excluded)
}

/// The services whose messages can be exported. Not notify: the producer of a business event chooses its topic, and could
/// impersonate another service.
fn exported_sources() -> impl Iterator<Item = &'static str> {
    SERVICE_SOURCES.into_iter().filter(|source| *source != notify::SOURCE)
}

fn of_services(topics: Vec<String>) -> MessagePattern {
    MessagePattern { sources: exported_sources().map(str::to_owned).collect(), topics, ..MessagePattern::default() }
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;
    use serde_json::json;
    use serde_json::value::RawValue;
    use uuid::Uuid;

    use super::*;

    fn selection(export: &[&str], sql_events: &[&str]) -> EventSelection {
        let export = serde_json::from_value(json!(export)).unwrap();
        EventSelection::new(&export, &serde_json::from_value(json!(sql_events)).unwrap())
    }

    fn message(source: &str, tenant: &str, topic: &str) -> Message {
        Message {
            id: 1,
            shard: 0,
            message_id: Uuid::nil(),
            source: source.to_owned(),
            tenant: tenant.to_owned(),
            topic: topic.to_owned(),
            key: None,
            aggregate_type: Some("EVENT".to_owned()),
            aggregate_id: None,
            headers: RawValue::NULL.to_owned(),
            payload: RawValue::NULL.to_owned(),
            at: DateTime::UNIX_EPOCH,
        }
    }

    /// Whether fan-out sends a message, and whether it is listed. Both must agree.
    fn is_event(selection: &EventSelection, source: &str, tenant: &str, topic: &str) -> bool {
        let message = message(source, tenant, topic);
        let is_sent = selection.fan_out().matches(&message) && selection.is_event(&message);
        let is_listed = selection.of_tenant(&tenant.parse().unwrap()).matches(&message);
        assert_eq!(is_sent, is_listed, "{source} {tenant} {topic}");
        is_sent
    }

    #[test]
    fn only_exported_topics_of_services_are_events_and_only_in_main() {
        let selection = selection(&["event.*", "mod.kicked"], &[]);
        for (source, topic) in
            [("events", "event.published"), ("events", "event.a.b"), ("joins", "mod.kicked"), ("hub", "any.thing")]
        {
            assert!(is_event(&selection, source, "main", topic), "{source} {topic}");
            assert!(is_event(&selection, "hub.system", "acme", topic), "{topic}");
            assert_eq!(is_event(&selection, source, "acme", topic), source == "hub", "{source} {topic}");
        }
        for (source, topic) in [
            ("events", "event"),
            ("events", "events.published"),
            ("joins", "mod.kicked.twice"),
            ("joins", "join.confirmed"),
            ("notify", "email.code"),
            ("sql", "event.published"),
            ("notify", "event.published"),
            ("notify", "mod.kicked"),
            ("amqp:events", "event.published"),
            ("pillarbox", "event.published"),
        ] {
            assert!(!is_event(&selection, source, "main", topic), "{source} {topic}");
        }
        let command = message("hub.control", "main", "event.published");
        assert!(selection.fan_out().matches(&command));
        assert!(!selection.of_tenant(&Tenant::main()).matches(&command), "no list shows commands");
        let nothing = self::selection(&[], &[]);
        assert!(is_event(&nothing, "hub", "main", "event.published"));
        assert!(!is_event(&nothing, "events", "main", "event.published"));
    }

    #[test]
    fn no_internal_topic_is_exported() {
        let selection = selection(&["event.*", "join.*", "account.*"], &["*"]);
        for topic in INTERNAL_TOPICS {
            assert!(SERVICE_SOURCES.iter().all(|source| !is_event(&selection, source, "main", topic)), "{topic}");
        }
    }

    #[test]
    fn messages_posted_in_sql_are_events_of_their_tenant_except_emails_and_exported_types() {
        let all = selection(&["event.*"], &["*"]);
        for (tenant, topic, expected) in [
            ("acme", "order.paid", true),
            ("main", "order.paid", true),
            ("acme", "event.published", true),
            ("main", "event.published", false),
            ("acme", "email", false),
            ("acme", "email.code", false),
            ("main", "email.code.sent", false),
            ("acme", "emails.sent", true),
        ] {
            assert_eq!(is_event(&all, "sql", tenant, topic), expected, "{tenant} {topic}");
        }
        for topic in ["email.code", "order.paid"] {
            assert!(is_event(&all, "hub", "acme", topic), "posted to the hub on purpose: {topic}");
        }
        let narrowed = selection(&[], &["order.*", "user.created"]);
        for (topic, expected) in
            [("order.paid", true), ("order", false), ("user.created", true), ("user.left", false), ("email.a", false)]
        {
            assert_eq!(is_event(&narrowed, "sql", "acme", topic), expected, "{topic}");
        }
        let off = selection(&["event.*"], &[]);
        assert!(!is_event(&off, "sql", "acme", "order.paid") && !is_event(&off, "sql", "main", "order.paid"));
    }

    #[test]
    fn the_longest_lists_still_match_messages_of_the_hub() {
        let long: Vec<String> =
            (0..100).map(|n| format!("{}.{n:03}.*", "a.".repeat(97).trim_end_matches('.'))).collect();
        let long: Vec<&str> = long.iter().map(String::as_str).collect();
        let exported = selection(&long, &["*"]);
        assert!(is_event(&exported, "hub", "acme", "order.paid"), "a filter that is too large matches nothing");
        assert!(is_event(&exported, "events", "main", &long[99].replace('*', "b")));
        let both = selection(&long, &long);
        assert!(is_event(&both, "hub", "acme", "order.paid"), "a filter that is too large matches nothing");
        assert!(is_event(&both, "sql", "acme", &long[99].replace('*', "b")));
    }
}

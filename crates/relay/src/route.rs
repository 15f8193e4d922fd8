//! Routes: the settings that say which messages of the log are published to which exchange, and in which format.

use contracts::{SERVICE_SOURCES, SQL_SOURCE};
use mailbox::consumers::{Consumer, ConsumerKind, StartAt};
use mailbox::log::{Filter, MessagePattern};
use serde::{Deserialize, Serialize};

use crate::topology::{Exchange, ExchangeKind};

/// The exchange of the dead letters of all consumers.
pub(crate) const DEAD_LETTERS: &str = "pillarbox.dead_letters";

/// The settings of one route. A message is published by the first route that matches it, and by every matching route
/// with `also`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Route {
    /// The name. The consumer of the route is `relay.<name>`.
    pub name: String,
    pub exchange: String,
    #[serde(default)]
    pub exchange_kind: ExchangeKind,
    #[serde(default = "default_sources", deserialize_with = "kit::config::list")]
    pub sources: Vec<String>,
    /// Topic patterns in RabbitMQ's syntax: `order.#`. Empty: all topics.
    #[serde(default, deserialize_with = "kit::config::list")]
    pub topics: Vec<String>,
    /// Empty: all messages, with or without an aggregate type.
    #[serde(default, deserialize_with = "kit::config::list")]
    pub aggregate_types: Vec<String>,
    /// The routing key. `{topic}` and `{aggregate_type}` (in lower case) are replaced with the values of the message.
    #[serde(default = "topic_as_key")]
    pub routing_key: String,
    #[serde(default)]
    pub format: Format,
    /// Whether an unroutable message is parked and retried for ever. Otherwise it is counted as unrouted and skipped.
    #[serde(default)]
    pub required: bool,
    /// Whether the route publishes a copy of messages that another route publishes too.
    #[serde(default)]
    pub also: bool,
    /// Whether the route starts at the end of the log. Otherwise it starts at the beginning.
    #[serde(default)]
    pub from_now: bool,
}

/// The format of a published body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    #[default]
    Envelope,
    /// The payload as it was posted, without an envelope.
    Bare,
    /// The object `data` of the payload, byte for byte: an e-mail as the consumers of the old exchange know it.
    Data,
}

/// The name of the route of e-mails, which dual publishing repeats.
const EMAIL: &str = "email";

/// The sources of a route whose settings list none. Not `hub`: the events of tenants are meant for their webhooks only. Not
/// `amqp:...`: messages that came from the broker are not published to it again.
fn default_sources() -> Vec<String> {
    SERVICE_SOURCES.into_iter().chain([SQL_SOURCE]).map(str::to_owned).collect()
}

fn topic_as_key() -> String {
    "{topic}".to_owned()
}

impl Route {
    pub fn new(name: &str, exchange: &str) -> Route {
        Route {
            name: name.to_owned(),
            exchange: exchange.to_owned(),
            exchange_kind: ExchangeKind::Topic,
            sources: default_sources(),
            topics: Vec::new(),
            aggregate_types: Vec::new(),
            routing_key: topic_as_key(),
            format: Format::Envelope,
            required: false,
            also: false,
            from_now: false,
        }
    }

    /// The default routes. Each belongs to sources, so what a service publishes never depends on the topics that other
    /// producers choose: notifications by the type of their recipient; e-mails, subscriptions and jobs; dead letters; and the
    /// messages of all other services and those posted in SQL.
    pub fn defaults() -> Vec<Route> {
        let list = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let of_identity_and_progress =
            Route { sources: list(&["identity", "progress"]), ..Route::new("", "smap.events") };
        let of_notify =
            Route { sources: list(&["notify"]), required: true, ..Route::new("", "notifications.exchange") };
        let has_route =
            |source: &String| of_notify.sources.contains(source) || of_identity_and_progress.sources.contains(source);
        let of_others = default_sources().into_iter().filter(|source| !has_route(source)).collect();
        vec![
            Route {
                name: "notifications".to_owned(),
                aggregate_types: list(&["RESTAURANT", "CUSTOMER", "AGENCY", "ADMIN"]),
                routing_key: "notification.{aggregate_type}".to_owned(),
                ..of_notify.clone()
            },
            Route { name: "notification-topics".to_owned(), ..of_notify },
            Route {
                name: EMAIL.to_owned(),
                topics: list(&["email.#"]),
                required: true,
                ..of_identity_and_progress.clone()
            },
            Route { name: "smap".to_owned(), ..of_identity_and_progress },
            Route {
                sources: list(&["mailbox"]),
                topics: list(&["dead_letter.#"]),
                ..Route::new("dead-letters", DEAD_LETTERS)
            },
            Route { sources: of_others, ..Route::new("default", "pillarbox.events") },
        ]
    }

    /// The route of dual publishing: the messages of the route `email` go to their old fanout exchange too, with the e-mail
    /// alone as the body, as its consumers expect it.
    pub(crate) fn legacy(routes: &[Route]) -> Route {
        let email = routes.iter().find(|route| route.name == EMAIL);
        Route {
            exchange_kind: ExchangeKind::Fanout,
            sources: email.map_or_else(default_sources, |email| email.sources.clone()),
            topics: vec!["email.#".to_owned()],
            routing_key: String::new(),
            format: Format::Data,
            also: true,
            from_now: true,
            ..Route::new("legacy", "smtp_send_email_exc")
        }
    }

    /// Returns the name of the route's consumer.
    fn consumer_name(&self) -> String {
        format!("relay.{}", self.name)
    }

    /// Checks the values. Fails with the invalid one and the accepted values.
    pub fn check(&self) -> Result<(), String> {
        let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        if self.name.is_empty() || self.name.len() > 80 || !self.name.chars().all(is_allowed) {
            return Err(format!("name `{}` must have 1 to 80 characters of a-z, 0-9, - and _", self.name));
        }
        if self.sources.is_empty() {
            return Err(format!("route `{}`: sources must have at least one entry", self.name));
        }
        if let Some(source) = self.sources.iter().find(|source| source.starts_with("amqp:")) {
            return Err(format!(
                "route `{}`: `{source}` in sources comes from the broker and is not published to it again",
                self.name
            ));
        }
        self.pattern().check().map_err(|error| format!("route `{}`: {error}", self.name))
    }

    pub(crate) fn exchange(&self) -> Exchange {
        Exchange { name: self.exchange.clone(), kind: self.exchange_kind }
    }

    /// Returns the pattern of the messages that the route publishes.
    fn pattern(&self) -> MessagePattern {
        MessagePattern {
            sources: self.sources.clone(),
            topics: self.topics.clone(),
            aggregate_types: self.aggregate_types.clone(),
        }
    }

    /// Returns the consumer of the route with index `at`. Its filter excludes the messages of earlier routes.
    pub(crate) fn consumer(routes: &[Route], at: usize) -> Consumer {
        let route = &routes[at];
        // A route of other sources matches no message of this one. Without exclusions, the log is read faster.
        let shares_source = |earlier: &&Route| earlier.sources.iter().any(|source| route.sources.contains(source));
        let earlier: Vec<MessagePattern> = match route.also {
            true => Vec::new(),
            false => {
                let earlier = routes[..at].iter().filter(|earlier| !earlier.also).filter(shares_source);
                earlier.map(Route::pattern).collect()
            }
        };
        Consumer {
            name: route.consumer_name(),
            kind: ConsumerKind::Relay,
            filter: Filter::matching(&route.pattern()).excluding(&earlier),
            start: if route.from_now { StartAt::Now } else { StartAt::Beginning },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::DateTime;
    use mailbox::log::Message;
    use serde_json::value::RawValue;

    #[test]
    fn the_default_routes_are_valid() {
        for route in Route::defaults().iter().chain([&Route::legacy(&[])]) {
            assert_eq!(route.check(), Ok(()));
        }
    }

    fn message(source: &str, topic: &str, aggregate_type: Option<&str>) -> Message {
        Message {
            id: 1,
            shard: 0,
            message_id: uuid::Uuid::nil(),
            source: source.to_owned(),
            tenant: "main".to_owned(),
            topic: topic.to_owned(),
            key: None,
            aggregate_type: aggregate_type.map(str::to_owned),
            aggregate_id: None,
            headers: RawValue::NULL.to_owned(),
            payload: RawValue::NULL.to_owned(),
            at: DateTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn the_default_route_of_a_message_depends_on_its_source() {
        let routes = Route::defaults();
        let published = |message: &Message| -> Vec<&str> {
            let matches = |at: &usize| Route::consumer(&routes, *at).filter.matches(message);
            (0..routes.len()).filter(matches).map(|at| &*routes[at].name).collect()
        };
        let topics = ["order.created", "email.requested", "subscription.renewed", "job.done", "notification.customer"];
        for topic in topics {
            for source in ["sql", "events", "joins"] {
                for aggregate_type in [None, Some("CUSTOMER"), Some("EVENT")] {
                    assert_eq!(published(&message(source, topic, aggregate_type)), ["default"], "{source} {topic}");
                }
            }
            for source in ["identity", "progress"] {
                let expected = if topic.starts_with("email.") { "email" } else { "smap" };
                assert_eq!(published(&message(source, topic, Some("CUSTOMER"))), [expected], "{source} {topic}");
            }
            assert_eq!(published(&message("notify", topic, Some("ADMIN"))), ["notifications"], "{topic}");
            assert_eq!(published(&message("notify", topic, Some("USER"))), ["notification-topics"], "{topic}");
            for source in ["hub", "amqp:orders", "hub.control"] {
                assert_eq!(published(&message(source, topic, None)), [""; 0], "{source} {topic}");
            }
        }
        assert_eq!(published(&message("mailbox", "dead_letter.relay_default", None)), ["dead-letters"]);
    }

    #[test]
    fn dual_publishing_repeats_the_sources_of_the_route_of_emails() {
        assert_eq!(Route::legacy(&Route::defaults()).sources, ["identity", "progress"]);
        let configured = Route { sources: vec!["sql".to_owned()], ..Route::new("email", "smap.events") };
        assert_eq!(Route::legacy(&[configured]).sources, ["sql"]);
        assert_eq!(Route::legacy(&[]).sources, default_sources());
    }

    #[test]
    fn an_invalid_route_is_rejected_with_the_accepted_values() {
        let route = Route::new("a", "e");
        for (invalid, expected) in [
            (Route { name: "A b".to_owned(), ..route.clone() }, "a-z"),
            (Route { sources: vec!["amqp:q".to_owned()], ..route.clone() }, "not published to it again"),
            (Route { sources: Vec::new(), ..route.clone() }, "at least one entry"),
            (Route { topics: vec!["a..b".to_owned()], ..route }, "words joined by dots"),
        ] {
            let error = invalid.check().unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}

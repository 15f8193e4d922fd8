//! Routes: the settings that say which messages of the log are published to which exchange, and in which format.

use contracts::{SERVICE_SOURCES, SQL_SOURCE, identity, notify};
use pillarbox::consumers::{Consumer, ConsumerKind, StartAt};
use pillarbox::log::{Filter, InvalidPattern, MessagePattern};
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
    #[serde(default = "default_sources", deserialize_with = "runtime::config::list")]
    pub sources: Vec<String>,
    /// Topic patterns in RabbitMQ's syntax: `order.#`. Empty: all topics.
    #[serde(default, deserialize_with = "runtime::config::list")]
    pub topics: Vec<String>,
    /// Empty: all messages, with or without an aggregate type.
    #[serde(default, deserialize_with = "runtime::config::list")]
    pub aggregate_types: Vec<String>,
    /// The routing key. `{topic}` and `{aggregate_type}` (in lower case) are replaced with the values of the message.
    #[serde(default = "topic_as_key")]
    pub routing_key: String,
    #[serde(default)]
    pub format: Format,
    /// Whether an unroutable message is parked and retried for ever. Otherwise it is counted as unrouted and skipped.
    #[serde(default)]
    pub required: bool,
    /// Whether the route publishes a copy of messages that another route also publishes.
    #[serde(default)]
    pub also: bool,
    /// Whether the messages are for services of this installation only: they are published where the services read queues
    /// (`bus = "rabbitmq"`). Not a setting.
    #[serde(skip)]
    pub services_only: bool,
    /// Whether the route is one of the defaults, and not configured. Not a setting.
    #[serde(skip)]
    pub is_default: bool,
    /// Whether the route starts at the end of the log. Otherwise it starts at the beginning, unless it is one of the first routes
    /// of the installation: those start at the end.
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

/// The place of the aggregate type in a routing key.
const AGGREGATE_TYPE: &str = "{aggregate_type}";

/// The name of the route of addresses.
const CONTACTS: &str = "contacts";

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

/// An invalid route, by its name.
#[derive(Debug, thiserror::Error)]
pub enum InvalidRoute {
    #[error("name `{0}` must have 1 to 80 characters of a-z, 0-9, - and _")]
    Name(String),
    #[error("route `{route}`: sources must have at least one entry")]
    NoSource { route: String },
    #[error("route `{route}`: `{broker_source}` in sources comes from the broker and is not published to it again")]
    BrokerSource { route: String, broker_source: String },
    #[error(
        "route `{route}`: `{}` in sources has the addresses of accounts, which only the services of this installation get; remove it",
        identity::CONTACTS_SOURCE
    )]
    ContactsSource { route: String },
    #[error("route `{route}`: {error}")]
    Pattern { route: String, error: InvalidPattern },
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
            services_only: false,
            is_default: false,
            from_now: false,
        }
    }

    /// The default routes. Each belongs to sources, so what a service publishes never depends on the topics that other
    /// producers choose: business events by their aggregate type; e-mails, subscriptions and jobs; dead letters; and the messages of all other services and those posted in SQL.
    pub fn defaults() -> Vec<Route> {
        let list = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let of_identity_and_progress =
            Route { sources: list(&["identity", "progress"]), ..Route::new("", "smap.events") };
        let has_route = |source: &String| source == notify::SOURCE || of_identity_and_progress.sources.contains(source);
        let of_others = default_sources().into_iter().filter(|source| !has_route(source)).collect();
        let defaults = vec![
            Route {
                sources: list(&[notify::SOURCE]),
                routing_key: format!("notification.{AGGREGATE_TYPE}"),
                required: true,
                from_now: true,
                ..Route::new("notifications", "notifications.exchange")
            },
            Route {
                name: EMAIL.to_owned(),
                topics: list(&["email.#"]),
                required: true,
                from_now: true,
                ..of_identity_and_progress.clone()
            },
            Route { name: "smap".to_owned(), ..of_identity_and_progress },
            Route {
                sources: list(&["pillarbox"]),
                topics: list(&["dead_letter.#"]),
                ..Route::new("dead-letters", DEAD_LETTERS)
            },
            Route { sources: of_others, ..Route::new("default", "pillarbox.events") },
        ];
        defaults.into_iter().map(|route| Route { is_default: true, ..route }).collect()
    }

    /// Whether it is a default route whose messages need a reader, because they are parked until a queue is bound.
    pub(crate) fn is_default_for_readers(&self) -> bool {
        self.required && self.is_default
    }

    /// The route of the addresses of accounts, whatever the settings are: personal data has a separate exchange, to which
    /// only queues of services are bound.
    pub(crate) fn contacts() -> Route {
        Route {
            sources: vec![identity::CONTACTS_SOURCE.to_owned()],
            topics: vec![identity::ACCOUNT_CONTACT_CHANGED.to_owned()],
            required: true,
            services_only: true,
            ..Route::new(CONTACTS, "pillarbox.contacts")
        }
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
    pub(crate) fn consumer_name(&self) -> String {
        format!("relay.{}", self.name)
    }

    /// Checks the values. Fails with the invalid one and the accepted values.
    pub fn check(&self) -> Result<(), InvalidRoute> {
        let route = || self.name.clone();
        let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        if self.name.is_empty() || self.name.len() > 80 || !self.name.chars().all(is_allowed) {
            return Err(InvalidRoute::Name(route()));
        }
        if self.sources.is_empty() {
            return Err(InvalidRoute::NoSource { route: route() });
        }
        if let Some(source) = self.sources.iter().find(|source| source.starts_with("amqp:")) {
            return Err(InvalidRoute::BrokerSource { route: route(), broker_source: source.clone() });
        }
        if !self.services_only && self.sources.iter().any(|source| source == identity::CONTACTS_SOURCE) {
            return Err(InvalidRoute::ContactsSource { route: route() });
        }
        self.pattern().check().map_err(|error| InvalidRoute::Pattern { route: route(), error })
    }

    /// Returns the routing key of a message.
    pub(crate) fn routing_key(&self, topic: &str, aggregate_type: &str) -> String {
        self.routing_key.replace("{topic}", topic).replace(AGGREGATE_TYPE, &aggregate_type.to_lowercase())
    }

    /// Whether the route may publish messages of this source and aggregate type.
    pub(crate) fn admits_type(&self, source: &str, aggregate_type: &str) -> bool {
        self.sources.iter().any(|own| own == source)
            && (self.aggregate_types.is_empty() || self.aggregate_types.iter().any(|own| own == aggregate_type))
    }

    /// Whether the messages of this source have a routing key for each aggregate type: it is also the name of a queue.
    pub(crate) fn has_queue_for_each_type(&self, source: &str) -> bool {
        self.exchange_kind == ExchangeKind::Topic
            && self.routing_key.contains(AGGREGATE_TYPE)
            && !self.routing_key.contains("{topic}")
            && self.sources.iter().any(|own| own == source)
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

    /// Returns the consumer of the route with index `at`. Its filter excludes the messages of earlier routes, also if those are
    /// off.
    pub(crate) fn consumer(routes: &[Route], at: usize) -> Consumer {
        let route = &routes[at];
        // A route of other sources matches no message of this one. Without exclusions, the log is read faster.
        let shares_source = |earlier: &&Route| earlier.sources.iter().any(|source| route.sources.contains(source));
        let earlier = routes[..at].iter().filter(|earlier| !route.also && !earlier.also).filter(shares_source);
        let earlier: Vec<MessagePattern> = earlier.map(Route::pattern).collect();
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
    use pillarbox::log::Message;
    use serde_json::value::RawValue;

    #[test]
    fn the_default_routes_are_valid() {
        for route in Route::defaults().iter().chain([&Route::legacy(&[])]) {
            route.check().unwrap();
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
            for aggregate_type in ["ADMIN", "COURIER"] {
                assert_eq!(published(&message("notify", topic, Some(aggregate_type))), ["notifications"], "{topic}");
            }
            for source in ["hub", "amqp:orders", "hub.control", "hub.system"] {
                assert_eq!(published(&message(source, topic, None)), [""; 0], "{source} {topic}");
            }
        }
        assert_eq!(published(&message("pillarbox", "dead_letter.relay_default", None)), ["dead-letters"]);
    }

    #[test]
    fn addresses_of_accounts_are_published_to_services_only() {
        let greedy = Route { also: true, ..Route::new("greedy", "pillarbox.events") };
        for configured in [Route::defaults(), vec![Route::new("all", "pillarbox.events"), greedy]] {
            let routes: Vec<Route> = [Route::contacts()].into_iter().chain(configured).collect();
            let published = |source: &str, topic: &str| -> Vec<&str> {
                let message = message(source, topic, None);
                let matches = |at: &usize| Route::consumer(&routes, *at).filter.matches(&message);
                (0..routes.len()).filter(matches).map(|at| &*routes[at].name).collect()
            };
            assert_eq!(published("identity.contacts", "account.contact_changed"), ["contacts"]);
            let deleted = published("identity", "account.deleted");
            assert!(!deleted.is_empty() && !deleted.contains(&"contacts"));
            // No other route publishes them, not even where the route for them is off.
            let configured = &routes[1..];
            let message = message("identity.contacts", "account.contact_changed", None);
            assert!((0..configured.len()).all(|at| !Route::consumer(configured, at).filter.matches(&message)));
        }
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
            (Route { sources: vec!["identity.contacts".to_owned()], ..route.clone() }, "addresses of accounts"),
            (Route { topics: vec!["a..b".to_owned()], ..route }, "words joined by dots"),
        ] {
            let error = invalid.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}

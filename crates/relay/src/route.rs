//! Routes: the settings that say which messages of the log are published to which exchange, and in which format.

use contracts::SERVICE_SOURCES;
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
}

/// The default sources of a route. Not `hub`: the events of tenants are meant for their webhooks only. Not
/// `amqp:...`: messages that came from the broker are not published to it again.
fn default_sources() -> Vec<String> {
    SERVICE_SOURCES.into_iter().chain(["sql"]).map(str::to_owned).collect()
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

    /// The default routes: notifications by the type of their recipient, e-mails, subscriptions and jobs, dead
    /// letters, and all other messages.
    pub fn defaults() -> Vec<Route> {
        let list = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        vec![
            Route {
                aggregate_types: list(&["RESTAURANT", "CUSTOMER", "AGENCY", "ADMIN"]),
                routing_key: "notification.{aggregate_type}".to_owned(),
                required: true,
                ..Route::new("notifications", "notifications.exchange")
            },
            Route {
                topics: list(&["notification.#"]),
                required: true,
                ..Route::new("notification-topics", "notifications.exchange")
            },
            Route { topics: list(&["email.#"]), required: true, ..Route::new("email", "smap.events") },
            Route { topics: list(&["subscription.#", "job.#"]), ..Route::new("smap", "smap.events") },
            Route {
                sources: list(&["mailbox"]),
                topics: list(&["dead_letter.#"]),
                ..Route::new("dead-letters", DEAD_LETTERS)
            },
            Route::new("default", "pillarbox.events"),
        ]
    }

    /// The route of dual publishing: e-mail messages go to their old fanout exchange too, with the bare payload that
    /// its consumers expect.
    pub fn legacy() -> Route {
        Route {
            exchange_kind: ExchangeKind::Fanout,
            topics: vec!["email.#".to_owned()],
            routing_key: String::new(),
            format: Format::Bare,
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
        let earlier: Vec<MessagePattern> = match route.also {
            true => Vec::new(),
            false => routes[..at].iter().filter(|route| !route.also).map(Route::pattern).collect(),
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

    #[test]
    fn the_default_routes_are_valid() {
        for route in Route::defaults().iter().chain([&Route::legacy()]) {
            assert_eq!(route.check(), Ok(()));
        }
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

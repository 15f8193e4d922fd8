//! Routes: which messages go to which exchange, and in what shape.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use contracts::{Envelope, EventId, SCHEMA_VERSION, SERVICE_SOURCES};
use mailbox::cursor::{Cursor, Kind, Start};
use mailbox::filter::{Filter, Matching};
use mailbox::handler::trace_of;
use mailbox::log::Message;
use mailbox::work::{Item, LaneError, LaneId, Outcome, Work, Worked};
use serde::{Deserialize, Serialize};
use serde_json::value::to_raw_value;

use crate::broker::Broker;
use crate::bus::DEAD_LETTERS;
use crate::publish::{Outgoing, Publisher, Sent};
use crate::topology::{Exchange, ExchangeKind};

/// The headers that a message carries beside its envelope.
pub(crate) const KEY_HEADER: &str = "pillarbox-key";
pub(crate) const TENANT_HEADER: &str = "pillarbox-tenant";
pub(crate) const SOURCE_HEADER: &str = "pillarbox-source";
pub(crate) const TRACE_HEADER: &str = "traceparent";
/// About what an envelope adds to its payload.
const ENVELOPE_BYTES: usize = 512;

/// A message goes by the first route that takes it, and by every one that takes it `also`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Route {
    /// Its consumer is `relay.<name>`.
    pub name: String,
    pub exchange: String,
    #[serde(default)]
    pub exchange_kind: ExchangeKind,
    #[serde(default = "trusted_sources")]
    pub sources: Vec<String>,
    /// As RabbitMQ binds: `order.#`. Empty: any.
    #[serde(default)]
    pub topics: Vec<String>,
    /// Empty: any, and none.
    #[serde(default)]
    pub aggregate_types: Vec<String>,
    /// `{topic}` and `{aggregate_type}` (in lower case) stand for the message's.
    #[serde(default = "topic_as_key")]
    pub routing_key: String,
    #[serde(default)]
    pub format: Format,
    /// A message that no queue wants is kept and tried for ever; otherwise it is counted as unrouted.
    #[serde(default)]
    pub required: bool,
    /// Takes its copy beside the route that the message goes by.
    #[serde(default)]
    pub also: bool,
    /// Begins with what is posted from now on, not with what is in the log already.
    #[serde(default)]
    pub from_now: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    #[default]
    Envelope,
    /// The payload as it was posted, and nothing around it.
    Bare,
}

/// Who posts what is carried, unless a route says otherwise. Not `hub`: what tenants send to their webhooks is theirs. Not
/// `amqp:...`: what came from the broker does not go back to it.
fn trusted_sources() -> Vec<String> {
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
            sources: trusted_sources(),
            topics: Vec::new(),
            aggregate_types: Vec::new(),
            routing_key: topic_as_key(),
            format: Format::Envelope,
            required: false,
            also: false,
            from_now: false,
        }
    }

    /// What ships: notifications by the type of who receives them, identity's events, dead letters, and the rest.
    pub fn shipped() -> Vec<Route> {
        let topics = |topics: &[&str]| topics.iter().map(|topic| (*topic).to_owned()).collect();
        vec![
            Route {
                aggregate_types: topics(&["RESTAURANT", "CUSTOMER", "AGENCY", "ADMIN"]),
                routing_key: "notification.{aggregate_type}".to_owned(),
                required: true,
                ..Route::new("notifications", "notifications.exchange")
            },
            Route {
                topics: topics(&["notification.#"]),
                required: true,
                ..Route::new("notification-topics", "notifications.exchange")
            },
            Route { topics: topics(&["email.#"]), required: true, ..Route::new("email", "smap.events") },
            Route { topics: topics(&["subscription.#", "job.#"]), ..Route::new("smap", "smap.events") },
            Route {
                sources: topics(&["mailbox"]),
                topics: topics(&["dead_letter.#"]),
                ..Route::new("dead-letters", DEAD_LETTERS)
            },
            Route::new("default", "pillarbox.events"),
        ]
    }

    /// Dual publish: the mails' old fanout, with the bare payload that its consumers know.
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

    pub fn consumer(&self) -> String {
        format!("relay.{}", self.name)
    }

    /// What is wrong with it, if anything.
    pub fn check(&self) -> Result<(), String> {
        let in_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        if self.name.is_empty() || self.name.len() > 80 || !self.name.chars().all(in_name) {
            return Err(format!("name `{}` takes 1 to 80 of a-z, 0-9, - and _", self.name));
        }
        if self.sources.is_empty() {
            return Err(format!("route `{}`: sources takes at least one", self.name));
        }
        if let Some(source) = self.sources.iter().find(|source| source.starts_with("amqp:")) {
            return Err(format!("route `{}`: `{source}` came from the broker and does not go back to it", self.name));
        }
        self.matching().check().map_err(|error| format!("route `{}`: {error}", self.name))
    }

    pub(crate) fn exchange(&self) -> Exchange {
        Exchange { name: self.exchange.clone(), kind: self.exchange_kind }
    }

    fn matching(&self) -> Matching {
        Matching {
            sources: self.sources.clone(),
            topics: self.topics.clone(),
            aggregate_types: self.aggregate_types.clone(),
        }
    }

    /// The consumer of the route at `at`.
    pub(crate) fn cursor(routes: &[Route], at: usize) -> Cursor {
        let route = &routes[at];
        let before: Vec<Matching> = match route.also {
            true => Vec::new(),
            false => routes[..at].iter().filter(|earlier| !earlier.also).map(Route::matching).collect(),
        };
        Cursor {
            consumer: route.consumer(),
            kind: Kind::Relay,
            filter: Filter::matching(&route.matching()).leaving(&before),
            start: if route.from_now { Start::Now } else { Start::Beginning },
        }
    }

    fn outgoing(&self, message: &Message) -> Result<Outgoing, serde_json::Error> {
        let event_id = EventId(message.message_id);
        let trace = trace_of(message);
        let payload = message.payload.get();
        let body = match self.format {
            Format::Bare => payload.as_bytes().to_vec(),
            Format::Envelope => {
                let mut body = Vec::with_capacity(payload.len() + ENVELOPE_BYTES);
                let envelope = Envelope {
                    event_id,
                    event_type: message.topic.clone(),
                    timestamp: message.at,
                    aggregate_type: message.aggregate_type.clone(),
                    aggregate_id: message.aggregate_id.as_ref().map(to_raw_value).transpose()?,
                    // Posted outside of a trace, it begins one: the same on every repeat.
                    trace_id: Some(match trace {
                        Some(trace) => trace.trace_id(),
                        None => message.message_id.simple().to_string(),
                    }),
                    schema_version: SCHEMA_VERSION,
                    payload: message.payload.clone(),
                };
                serde_json::to_writer(&mut body, &envelope)?;
                body
            }
        };
        let mut headers = Vec::new();
        headers.extend(message.key.as_ref().map(|key| (KEY_HEADER, key.clone())));
        headers.push((TENANT_HEADER, message.tenant.clone()));
        headers.push((SOURCE_HEADER, message.source.clone()));
        headers.extend(trace.map(|trace| (TRACE_HEADER, trace.to_string())));
        let aggregate_type = message.aggregate_type.as_deref().unwrap_or_default().to_lowercase();
        Ok(Outgoing {
            message_id: event_id.to_string(),
            routing_key: self
                .routing_key
                .replace("{topic}", &message.topic)
                .replace("{aggregate_type}", &aggregate_type),
            // A tenant's name holds no blank.
            key: message.key.as_ref().map(|key| format!("{} {key}", message.tenant)),
            body: body.into(),
            headers,
            timestamp: message.at,
            kind: message.topic.clone(),
        })
    }
}

/// Carries messages to the route's exchange.
pub(crate) struct Carry {
    route: Arc<Route>,
    publisher: Publisher,
    /// Whether the log has it that messages of the route come back; shared by its lanes.
    told_returned: Arc<AtomicBool>,
}

impl Carry {
    pub(crate) fn new(route: Arc<Route>, broker: Arc<Broker>, told_returned: Arc<AtomicBool>) -> Carry {
        let publisher = Publisher::new(broker, route.exchange.clone(), route.required);
        Carry { route, publisher, told_returned }
    }

    /// Once: the metric counts the rest.
    fn tell_returned(&self, routing_key: &str) {
        if !self.told_returned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                route = self.route.name,
                exchange = self.route.exchange,
                routing_key,
                "no queue is bound for a message, and it is passed; more of them are only counted, in \
                 pillarbox_relay_returned_total"
            );
        }
    }
}

impl Work for Carry {
    async fn run(&mut self, _: &LaneId, items: &[&Item]) -> Result<Worked, LaneError> {
        let outgoing: Result<Vec<Outgoing>, _> = items.iter().map(|item| self.route.outgoing(&item.message)).collect();
        let outgoing = outgoing.map_err(|error| LaneError::Work(error.to_string()))?;
        let began = Instant::now();
        let sent = self.publisher.publish(&outgoing).await.map_err(|error| LaneError::Work(error.to_string()))?;
        let took = began.elapsed();
        let (mut published, mut returned) = (0, 0);
        let outcome = |(sent, outgoing): (Sent, &Outgoing)| match sent {
            Sent::Confirmed => {
                published += 1;
                Outcome::Done
            }
            Sent::Unroutable => {
                returned += 1;
                match self.route.required {
                    true => Outcome::Failed(format!(
                        "unroutable: no queue is bound to `{}` for `{}`",
                        self.route.exchange, outgoing.routing_key
                    )),
                    false => {
                        self.tell_returned(&outgoing.routing_key);
                        Outcome::Unrouted
                    }
                }
            }
            Sent::Refused(reason) => Outcome::Failed(reason),
            Sent::Behind => Outcome::Behind,
        };
        let outcomes = sent.into_iter().zip(&outgoing).map(outcome).collect();
        let labels = [("route", self.route.name.clone())];
        metrics::counter!("pillarbox_relay_published_total", &labels).increment(published);
        metrics::counter!("pillarbox_relay_returned_total", &labels).increment(returned);
        metrics::histogram!("event_publish_duration_seconds", &labels).record_many(took.as_secs_f64(), items.len());
        Ok(Worked { outcomes, tx: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_routes_are_good() {
        for route in Route::shipped().iter().chain([&Route::legacy()]) {
            assert_eq!(route.check(), Ok(()));
        }
    }

    #[test]
    fn a_bad_route_is_refused_with_what_it_takes() {
        let route = Route::new("a", "e");
        for (bad, says) in [
            (Route { name: "A b".to_owned(), ..route.clone() }, "a-z"),
            (Route { sources: vec!["amqp:q".to_owned()], ..route.clone() }, "does not go back"),
            (Route { sources: Vec::new(), ..route.clone() }, "at least one"),
            (Route { topics: vec!["a..b".to_owned()], ..route }, "words joined by dots"),
        ] {
            let error = bad.check().unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}

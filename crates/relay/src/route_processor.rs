//! The processor of a route: publishes messages of the log to the route's exchange and waits for the confirms.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use contracts::{Envelope, EventId, SCHEMA_VERSION, notify};
use pillarbox::consumers::{BatchResult, ConsumerError, Delivery, Outcome, Processor, WorkerContext};
use pillarbox::log::Message;
use runtime::trace::TraceContext;
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::broker::{Broker, BrokerError};
use crate::headers;
use crate::publish::{Outgoing, PublishOutcome, Publisher};
use crate::route::{Format, Route};
use crate::signature::{MessageSigner, SignedFields};

/// The approximate number of bytes that an envelope adds to its payload.
const ENVELOPE_BYTES: usize = 512;

/// Publishes the messages of one route.
pub(crate) struct RouteProcessor {
    route: Arc<Route>,
    publisher: Publisher,
    signer: MessageSigner,
    /// Whether an unroutable message of this route has been logged; shared by the shard workers of the route.
    logged_unroutable: Arc<AtomicBool>,
}

/// The messages of a batch.
struct Prepared {
    /// Those that are published.
    outgoing: Vec<Outgoing>,
    /// For each message of the batch: the outcome if it is not published.
    withheld: Vec<Option<Outcome>>,
}

impl RouteProcessor {
    pub(crate) fn new(
        route: Arc<Route>,
        broker: Arc<Broker>,
        signer: MessageSigner,
        logged_unroutable: Arc<AtomicBool>,
    ) -> RouteProcessor {
        let publisher = Publisher::new(broker, route.exchange.clone(), route.required);
        RouteCounters::of(&route.name).add(0, 0);
        RouteProcessor { route, publisher, signer, logged_unroutable }
    }

    /// Prepares the messages of a batch. Fails if one cannot be encoded, which never happens.
    fn prepare(&self, items: &[&Delivery]) -> Result<Prepared, ConsumerError> {
        let mut prepared =
            Prepared { outgoing: Vec::with_capacity(items.len()), withheld: Vec::with_capacity(items.len()) };
        let mut unfit_keys: HashSet<(&str, &str)> = HashSet::new();
        for item in items {
            let message = &item.message;
            let key = message.key.as_deref().map(|key| (message.tenant.as_str(), key));
            let withheld = match unfit_data(&self.route, message) {
                // Its payload is blanked, and no reader on the broker knows the marker.
                _ if message.is_blanked() => Some(withheld_outcome(item)),
                _ if key.is_some_and(|key| unfit_keys.contains(&key)) => Some(Outcome::Blocked),
                Some(error) => {
                    unfit_keys.extend(key);
                    Some(Outcome::Failed(error))
                }
                None => None,
            };
            if withheld.is_none() {
                let outgoing = outgoing(&self.route, &self.signer, message);
                prepared.outgoing.push(outgoing.map_err(|error| ConsumerError::Processing(error.to_string()))?);
            }
            prepared.withheld.push(withheld);
        }
        Ok(prepared)
    }

    /// Returns the outcome of one message for its consumer.
    fn outcome(&self, published: PublishOutcome, routing_key: &str) -> Outcome {
        match published {
            PublishOutcome::Confirmed => Outcome::Done,
            PublishOutcome::Unroutable if self.route.required => Outcome::Failed(format!(
                "unroutable: no queue is bound to `{}` for `{routing_key}`",
                self.route.exchange
            )),
            PublishOutcome::Unroutable => {
                self.log_unroutable(routing_key);
                Outcome::Unrouted
            }
            PublishOutcome::Rejected(reason) => Outcome::Failed(reason),
            PublishOutcome::Blocked => Outcome::Blocked,
        }
    }

    /// Logs only the first unroutable message; the metric counts all of them.
    fn log_unroutable(&self, routing_key: &str) {
        if !self.logged_unroutable.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                route = self.route.name,
                exchange = self.route.exchange,
                routing_key,
                "no queue is bound for a message, so its status is `unrouted`; further ones are only counted, in \
                 pillarbox_relay_returned_total and by `pillarbox cursors`"
            );
        }
    }
}

/// The metrics of a route. They are exported at 0 when the route starts, so that a query sees the first message.
struct RouteCounters {
    published: metrics::Counter,
    returned: metrics::Counter,
    duration: metrics::Histogram,
}

impl RouteCounters {
    fn of(route: &str) -> RouteCounters {
        let labels = [("route", route.to_owned())];
        RouteCounters {
            published: metrics::counter!("pillarbox_relay_published_total", &labels),
            returned: metrics::counter!("pillarbox_relay_returned_total", &labels),
            duration: metrics::histogram!("event_publish_duration_seconds", &labels),
        }
    }

    fn add(&self, published: u64, returned: u64) {
        self.published.increment(published);
        self.returned.increment(returned);
    }
}

impl Processor for RouteProcessor {
    async fn process(&mut self, context: &WorkerContext, items: &[&Delivery]) -> Result<BatchResult, ConsumerError> {
        let Prepared { outgoing, withheld } = self.prepare(items)?;
        if outgoing.is_empty() {
            return Ok(BatchResult { outcomes: withheld.into_iter().flatten().collect(), tx: None });
        }
        let started = Instant::now();
        // A process that was suspended must not publish what its successor has published before.
        let published = match self.publisher.publish_while(&outgoing, || context.has_valid_lease()).await {
            Err(BrokerError::Stopped) => return Err(ConsumerError::LeaseLost),
            published => published.map_err(|error| ConsumerError::Processing(error.to_string()))?,
        };
        let elapsed = started.elapsed();

        let count = |wanted: PublishOutcome| published.iter().filter(|outcome| **outcome == wanted).count() as u64;
        let counters = RouteCounters::of(&self.route.name);
        counters.add(count(PublishOutcome::Confirmed), count(PublishOutcome::Unroutable));
        counters.duration.record_many(elapsed.as_secs_f64(), outgoing.len());

        let mut published =
            published.into_iter().zip(&outgoing).map(|(one, sent)| self.outcome(one, &sent.routing_key));
        let outcomes = withheld.into_iter().filter_map(|outcome| outcome.or_else(|| published.next())).collect();
        Ok(BatchResult { outcomes, tx: None })
    }
}

/// Returns the signed AMQP message for a message of the log.
pub(crate) fn outgoing(
    route: &Route,
    signer: &MessageSigner,
    message: &Message,
) -> Result<Outgoing, serde_json::Error> {
    let trace = message.trace();
    let body = match route.format {
        Format::Bare => message.payload.get().as_bytes().to_vec(),
        Format::Data => data_of(message).map_or_else(Vec::new, |data| data.get().as_bytes().to_vec()),
        Format::Envelope => envelope(message, trace)?,
    };
    let message_id = EventId(message.message_id).to_string();
    let signature = signer.sign(&SignedFields {
        message_id: &message_id,
        source: &message.source,
        tenant: &message.tenant,
        kind: &message.topic,
        key: message.key.as_deref(),
        body: &body,
    });
    let mut headers: Vec<(Cow<'static, str>, String)> = Vec::new();
    headers.extend(message.key.as_ref().map(|key| (headers::KEY.into(), key.clone())));
    headers.push((headers::TENANT.into(), message.tenant.clone()));
    headers.push((headers::SOURCE.into(), message.source.clone()));
    headers.extend(signature.map(|signature| (headers::SIGNATURE.into(), signature)));
    headers.extend(trace.map(|trace| (headers::TRACE.into(), trace.to_string())));
    headers.extend(message.confidential_until().map(|until| (headers::CONFIDENTIAL_UNTIL.into(), until.to_rfc3339())));
    let of_producer = message.producer_headers().into_iter();
    headers.extend(of_producer.map(|(name, value)| (format!("{}{name}", headers::OF_PRODUCER).into(), value)));
    Ok(Outgoing {
        message_id,
        routing_key: route.routing_key(&message.topic, message.aggregate_type.as_deref().unwrap_or_default()),
        // The name of a tenant contains no space, so the combination is unambiguous.
        key: message.key.as_ref().map(|key| format!("{} {key}", message.tenant)),
        body: body.into(),
        headers,
        timestamp: message.at,
        kind: message.topic.clone(),
    })
}

/// The outcome of a message that was blanked before this route has published it. It must not count as sent. In a replay, what
/// happened to it before still counts.
fn withheld_outcome(item: &Delivery) -> Outcome {
    if item.is_replayed { Outcome::Done } else { Outcome::Unrouted }
}

/// Why the message does not fit the format of the route; None if it does. Such a message is parked and not skipped: a producer
/// has posted what the consumers of this exchange cannot read, and an operator must see it.
fn unfit_data(route: &Route, message: &Message) -> Option<String> {
    match route.format {
        Format::Envelope | Format::Bare => None,
        Format::Data if data_of(message).is_some() => None,
        Format::Data => Some("the payload has no object `data`, which is all that this route publishes".to_owned()),
    }
}

/// The object `data` of the payload, as it was posted.
fn data_of(message: &Message) -> Option<&RawValue> {
    #[derive(Deserialize)]
    struct Payload<'a> {
        #[serde(borrow)]
        data: &'a RawValue,
    }
    let payload: Payload<'_> = serde_json::from_str(message.payload.get()).ok()?;
    Some(payload.data).filter(|data| data.get().starts_with('{'))
}

/// Returns the JSON of the envelope with the payload.
fn envelope(message: &Message, trace: Option<TraceContext>) -> Result<Vec<u8>, serde_json::Error> {
    let envelope = Envelope {
        event_id: EventId(message.message_id),
        event_type: message.topic.clone(),
        timestamp: message.at,
        aggregate_type: message.aggregate_type.clone(),
        aggregate_id: message.aggregate_id.as_ref().map(to_raw_value).transpose()?,
        // A message without a trace starts one. The trace id is derived from the message, so that all repetitions of
        // the message have the same.
        trace_id: Some(match trace {
            Some(trace) => trace.trace_id(),
            None => message.message_id.simple().to_string(),
        }),
        schema_version: SCHEMA_VERSION,
        // Headers of others may contain anything.
        source_event_id: (message.source == notify::SOURCE).then(|| message.source_event_id()).flatten(),
        payload: message.payload.clone(),
    };
    let mut body = Vec::with_capacity(message.payload.get().len() + ENVELOPE_BYTES);
    serde_json::to_writer(&mut body, &envelope)?;
    Ok(body)
}

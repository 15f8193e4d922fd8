//! Subscriptions over the broker: consumers whose messages are published by services with another database.
//!
//! The consumer gets a queue, which is read into the log of this database; from there the same handler processes it
//! like any other consumer. So parking, dead letters, replays and ordering work as usual, and a failing message never
//! blocks the queue. Only one reader of the queue is active at a time, so the log has the order of the queue.
//!
//! Every program that can publish to the broker can publish to the queue. So the source and the tenant of a message are
//! believed only if its signature proves that a relay of this installation has published it.

use std::sync::Arc;

use pillarbox::consumers::{Runtime, Subscription};
use pillarbox::log::MessagePattern;
use pillarbox::operations::dead_letters;

use crate::broker::Broker;
use crate::intake_queue::{IntakeFormat, IntakeQueue};
use crate::intake_worker::{Trust, source_of};
use crate::relay::{RelaySettings, start_intake_with};
use crate::route::{DEAD_LETTERS, Route};
use crate::service_queue::{self, ServiceQueue};
use crate::signature::MessageSigner;
use crate::topology::{Binding, Exchange, ExchangeKind, Queue, Topology};
use crate::type_queues;

/// Starts a subscription over the broker. Its queue is bound to the exchanges of the routes.
pub fn subscribe(
    runtime: &Runtime,
    settings: &RelaySettings,
    broker: &Arc<Broker>,
    signer: &MessageSigner,
    subscription: Subscription,
) {
    let source = QueueSource::of(settings, &subscription);
    let (queue, prefetch, is_shared) = (source.queue.name.clone(), source.prefetch, source.is_shared);
    let topology = topology(source, &subscription);
    let kept = ServiceQueue { name: queue.clone(), topology, matching: subscription.matching.clone() };
    let wake = service_queue::start(runtime, kept, broker, signer);
    let trust = Trust {
        sources: subscription.matching.sources.clone(),
        aggregate_types: subscription.matching.aggregate_types.clone(),
        is_shared,
        signer: signer.clone(),
    };
    let intake = IntakeQueue { prefetch, ..IntakeQueue::new(&queue) };
    start_intake_with(runtime, &intake, broker, Some(trust), wake);
    let matching = MessagePattern { sources: vec![source_of(&queue)], ..subscription.matching };
    runtime.subscribe(&with_intake_sources(settings, Subscription { matching, ..subscription }));
}

/// Returns the subscription with the queues that are read into the log for its consumer, in addition to its own messages:
/// the consumer of e-mails also gets those of the old exchange. A message that arrives both ways has the same id, so it has
/// one effect.
pub fn with_intake_sources(settings: &RelaySettings, mut subscription: Subscription) -> Subscription {
    // Without sources, the subscription accepts all of them anyway.
    if subscription.consumer == EMAIL_CONSUMER && !subscription.matching.sources.is_empty() {
        let of_emails = settings.intake.iter().filter(|queue| queue.format == IntakeFormat::Email);
        subscription.matching.sources.extend(of_emails.map(|queue| source_of(&queue.queue)));
    }
    subscription
}

/// The consumer of e-mails, and its queue. The name of the queue is part of the agreement with the operators of the old one,
/// `smtp_send_email`.
const EMAIL_CONSUMER: &str = "notify.mail";
const EMAIL_QUEUE: &str = "smtp_send_email_v2";

/// The number of unacknowledged messages of a queue of business events: a listener writes many at once.
const TYPE_PREFETCH: u16 = 100;

/// Where the messages of a subscription come from.
struct QueueSource {
    queue: Queue,
    /// The exchanges that the queue is bound to.
    exchanges: Vec<Exchange>,
    prefetch: u16,
    /// Whether other programs know the queue.
    is_shared: bool,
}

impl QueueSource {
    /// A consumer of one aggregate type reads the queue of the type, which other programs may know, if exactly its messages are
    /// published to it. Any other consumer has a separate queue, bound for its topics to all topic exchanges of the routes.
    fn of(settings: &RelaySettings, subscription: &Subscription) -> QueueSource {
        let MessagePattern { sources, topics, aggregate_types } = &subscription.matching;
        if let ([source], [], [aggregate_type]) = (&sources[..], &topics[..], &aggregate_types[..])
            && let Some(queue) = type_queues::queue_of(&settings.routes, source, aggregate_type)
        {
            let is_bound = |exchange: &Exchange| queue.bindings.iter().any(|one| one.exchange == exchange.name);
            let exchanges = settings.routes.iter().map(Route::exchange).filter(is_bound).take(1).collect();
            return QueueSource { queue, exchanges, prefetch: TYPE_PREFETCH, is_shared: true };
        }
        let mut published = Topology::default();
        let routes = settings.routes();
        // Without a key for their type, messages of all types arrive, so the queue gets those of its sources only.
        let publishes =
            |route: &&Route| aggregate_types.is_empty() || route.sources.iter().any(|source| sources.contains(source));
        let topic_routes = routes.iter().filter(|route| route.exchange_kind == ExchangeKind::Topic).filter(publishes);
        topic_routes.for_each(|route| published.add_exchange(route.exchange()));
        let all_topics = ["#".to_owned()];
        let topics = if topics.is_empty() { &all_topics } else { topics.as_slice() };
        let binding = |exchange: &Exchange, topic: &String| Binding {
            exchange: exchange.name.clone(),
            routing_key: topic.clone(),
        };
        let bindings =
            published.exchanges.iter().flat_map(|exchange| topics.iter().map(move |topic| binding(exchange, topic)));
        let name = match &*subscription.consumer {
            EMAIL_CONSUMER => EMAIL_QUEUE.to_owned(),
            consumer => format!("pillarbox.{consumer}"),
        };
        let queue = Queue { name, bindings: bindings.collect(), single_active_consumer: true };
        let prefetch = IntakeQueue::new(&queue.name).prefetch;
        QueueSource { prefetch, queue, exchanges: published.exchanges, is_shared: false }
    }
}

/// Returns the consumer's queue with its exchanges, and the queue for copies of its dead letters.
fn topology(source: QueueSource, subscription: &Subscription) -> Topology {
    let dead_letter_topic = dead_letters::topic_of(&subscription.consumer);
    let dead_letter_queue = Queue {
        name: format!("{}.dlq", source.queue.name),
        bindings: vec![Binding { exchange: DEAD_LETTERS.to_owned(), routing_key: dead_letter_topic }],
        single_active_consumer: false,
    };
    let mut topology = Topology { exchanges: source.exchanges, queues: vec![source.queue, dead_letter_queue] };
    topology.add_exchange(Exchange { name: DEAD_LETTERS.to_owned(), kind: ExchangeKind::Topic });
    topology
}

//! Subscriptions over the broker: consumers whose messages are published by services with another database.
//!
//! The consumer gets a queue, which is read into the log of this database; from there the same handler processes it
//! like any other consumer. So parking, dead letters, replays and ordering work as usual, and a failing message never
//! blocks the queue. Only one reader of the queue is active at a time, so the log has the order of the queue.
//!
//! Every program that can publish to the broker can publish to the queue. So the source and the tenant of a message are
//! believed only if its signature proves that a relay of this installation has published it.

use std::sync::Arc;

use mailbox::consumers::{Runtime, Subscription};
use mailbox::log::MessagePattern;
use mailbox::operations::dead_letters;

use crate::broker::Broker;
use crate::intake_queue::{IntakeFormat, IntakeQueue};
use crate::intake_worker::{Trust, source_of};
use crate::relay::{RelaySettings, start_intake_with, start_topology_worker};
use crate::route::DEAD_LETTERS;
use crate::signature::MessageSigner;
use crate::topology::{Binding, Exchange, ExchangeKind, Queue, Topology};

/// Starts a subscription over the broker. Its queue is bound to the exchanges of the routes.
pub fn subscribe(
    runtime: &Runtime,
    settings: &RelaySettings,
    broker: &Arc<Broker>,
    signer: &MessageSigner,
    subscription: Subscription,
) {
    let queue = queue_of(subscription.consumer);
    start_topology_worker(runtime, topology(settings, &subscription, &queue), broker);
    if let Some(until) = settings.accept_unsigned_until.filter(|until| runtime.clock().now() < *until) {
        tracing::warn!(
            queue, %until,
            "messages without a signature are accepted: anybody who can publish to the queue can speak for a service; \
             remove relay.accept_unsigned_until after the upgrade"
        );
    }
    let trust = Trust {
        sources: subscription.matching.sources.clone(),
        signer: signer.clone(),
        accept_unsigned_until: settings.accept_unsigned_until,
    };
    start_intake_with(runtime, &IntakeQueue::new(&queue), broker, Some(trust));
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

/// Returns the name of a consumer's queue.
fn queue_of(consumer: &str) -> String {
    match consumer {
        EMAIL_CONSUMER => EMAIL_QUEUE.to_owned(),
        consumer => format!("pillarbox.{consumer}"),
    }
}

/// Returns the consumer's queue, bound for its topics to all topic exchanges of the routes, and the queue for copies
/// of its dead letters.
fn topology(settings: &RelaySettings, subscription: &Subscription, queue: &str) -> Topology {
    let mut topology = Topology::default();
    let published = settings.routes.iter().filter(|route| route.exchange_kind == ExchangeKind::Topic);
    published.for_each(|route| topology.add_exchange(route.exchange()));
    let all_topics = ["#".to_owned()];
    let topics = match subscription.matching.topics.as_slice() {
        [] => &all_topics,
        topics => topics,
    };
    let binding =
        |exchange: &Exchange, topic: &String| Binding { exchange: exchange.name.clone(), routing_key: topic.clone() };
    let bindings =
        topology.exchanges.iter().flat_map(|exchange| topics.iter().map(move |topic| binding(exchange, topic)));
    let consumer_queue = Queue { name: queue.to_owned(), bindings: bindings.collect(), single_active_consumer: true };
    let dead_letter_topic = dead_letters::topic_of(subscription.consumer);
    let dead_letter_queue = Queue {
        name: format!("{queue}.dlq"),
        bindings: vec![Binding { exchange: DEAD_LETTERS.to_owned(), routing_key: dead_letter_topic }],
        single_active_consumer: false,
    };
    topology.add_exchange(Exchange { name: DEAD_LETTERS.to_owned(), kind: ExchangeKind::Topic });
    topology.queues = vec![consumer_queue, dead_letter_queue];
    topology
}

//! The other bus: a consumer whose messages come over the broker, from services with databases of their own.
//!
//! The consumer gets a queue, which is read into this database's log; from there it is worked on like any other consumer,
//! by the same handler. So it parks, dies, replays and keeps its order in the same way, and a queue is never held up by a
//! message that fails. One of the queue's readers is active at a time: what it posts keeps the queue's order.

use std::sync::Arc;

use mailbox::dead_letter;
use mailbox::filter::Matching;
use mailbox::runtime::{Rhythm, Runtime, Subscription};

use crate::bridge::{IntakeQueue, source_of};
use crate::broker::Broker;
use crate::relay::{RelaySettings, keep_declared, start_intake};
use crate::topology::{Binding, Exchange, ExchangeKind, Queue, Topology};

/// Where dead letters are mirrored.
pub(crate) const DEAD_LETTERS: &str = "pillarbox.dead_letters";

/// Runs a subscription over the broker, by the exchanges that the routes publish to.
pub fn subscribe(
    runtime: &Runtime,
    settings: &RelaySettings,
    broker: &Arc<Broker>,
    subscription: Subscription,
    rhythm: Rhythm,
) {
    let queue = queue_of(subscription.consumer);
    keep_declared(runtime, topology(settings, &subscription, &queue), broker);
    let trusted_sources = Some(subscription.matching.sources.clone());
    start_intake(runtime, &IntakeQueue { trusted_sources, ..IntakeQueue::new(&queue) }, broker);
    let matching = Matching { sources: vec![source_of(&queue)], ..subscription.matching };
    runtime.subscribe(&Subscription { matching, ..subscription }, rhythm);
}

/// The queue of a consumer.
pub fn queue_of(consumer: &str) -> String {
    format!("pillarbox.{consumer}")
}

/// Its queue, bound for its topics wherever they may be published, and the queue that its dead letters are mirrored to.
fn topology(settings: &RelaySettings, subscription: &Subscription, queue: &str) -> Topology {
    let published: Vec<Exchange> = settings
        .routes
        .iter()
        .filter(|route| route.exchange_kind == ExchangeKind::Topic)
        .map(|r| r.exchange())
        .collect();
    let mut exchanges: Vec<Exchange> = Vec::new();
    // Nothing is bound to the default exchange.
    for exchange in published.into_iter().filter(|exchange| !exchange.name.is_empty()) {
        if !exchanges.contains(&exchange) {
            exchanges.push(exchange);
        }
    }
    let everything = ["#".to_owned()];
    let topics = match subscription.matching.topics.as_slice() {
        [] => &everything,
        topics => topics,
    };
    let binding =
        |exchange: &Exchange, topic: &String| Binding { exchange: exchange.name.clone(), routing_key: topic.clone() };
    let bindings = exchanges.iter().flat_map(|exchange| topics.iter().map(move |topic| binding(exchange, topic)));
    let own = Queue { name: queue.to_owned(), bindings: bindings.collect(), single_active_consumer: true };
    let died = dead_letter::topic_of(subscription.consumer);
    let dead = Queue {
        name: format!("{queue}.dlq"),
        bindings: vec![Binding { exchange: DEAD_LETTERS.to_owned(), routing_key: died }],
        single_active_consumer: false,
    };
    exchanges.push(Exchange { name: DEAD_LETTERS.to_owned(), kind: ExchangeKind::Topic });
    Topology { exchanges, queues: vec![own, dead] }
}

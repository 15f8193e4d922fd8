//! The queues of business events: one for each aggregate type of the table, declared without a restart when an operator adds a
//! type. The route of business events is required, so messages of a new type wait until its queue exists.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use contracts::notify;
use pillarbox::consumers::Runtime;
use pillarbox::database::Database;
use pillarbox::log::aggregate_types;
use runtime::worker::{Round, RoundLimits};
use tokio::sync::Mutex;

use crate::broker::{Broker, BrokerError};
use crate::route::Route;
use crate::topology::{Binding, Difference, Queue, TOPOLOGY_PAUSE, Topology, declare};

/// The pause between two reads of the table.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
enum TypeQueuesError {
    #[error(transparent)]
    Broker(#[from] BrokerError),
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

/// What was declared last, when, and what exists with other properties.
#[derive(Default)]
struct Declared {
    last: Option<(BTreeSet<String>, Instant)>,
    differences: Vec<Difference>,
}

/// Returns the queue that the relay declares for an aggregate type: its name is the routing key of the first route that has a
/// key for each type. None if there is no such route. Several processes may read it, and RabbitMQ delivers to one of them at a
/// time, in order.
fn declared_queue(routes: &[Route], source: &str, aggregate_type: &str) -> Option<Queue> {
    let has_queue = |route: &&Route| route.has_queue_for_each_type(source) && route.admits_type(source, aggregate_type);
    routes.iter().find(has_queue).map(|route| queue(route, aggregate_type))
}

/// Returns the queue of an aggregate type if a listener of the source can read it: it gets all messages of the source and the
/// type, and no others. None if the routes are configured otherwise: then the listener needs a separate queue, because a
/// message that it reads is lost for the program that it is meant for.
pub(crate) fn queue_of(routes: &[Route], source: &str, aggregate_type: &str) -> Option<Queue> {
    let publishes = |route: &&Route| !route.also && route.admits_type(source, aggregate_type);
    let route = routes.iter().find(publishes)?;
    let is_exclusive = route.has_queue_for_each_type(source) && route.sources == [source] && route.topics.is_empty();
    let queue = queue(route, aggregate_type);
    // Another route can publish to the same exchange with the same key.
    let others = routes.iter().filter(|other| *other != route && other.exchange == route.exchange);
    (is_exclusive && others.count() == 0).then_some(queue)
}

fn queue(route: &Route, aggregate_type: &str) -> Queue {
    let routing_key = route.routing_key("", aggregate_type);
    let bindings = vec![Binding { exchange: route.exchange.clone(), routing_key: routing_key.clone() }];
    Queue { name: routing_key, bindings, single_active_consumer: true }
}

/// Starts a worker that declares the queues of all types, unless no route needs them.
pub(crate) fn start(runtime: &Runtime, routes: &[Route], broker: &Arc<Broker>) {
    if !routes.iter().any(|route| route.has_queue_for_each_type(notify::SOURCE)) {
        return;
    }
    let worker = runtime.worker("topology of business events".to_owned(), PAUSE).with_limits(RoundLimits::STEPS);
    let (routes, broker, db) = (routes.to_vec(), broker.clone(), runtime.db().clone());
    runtime.spawn(async move {
        let declared = Mutex::new(Declared::default());
        worker.run(async || declare_new(&db, &routes, &broker, &mut *declared.lock().await).await).await;
    });
}

/// Declares the queues if there is a new type, and periodically: a broker may lose its objects in a restart.
async fn declare_new(
    db: &Database,
    routes: &[Route],
    broker: &Broker,
    declared: &mut Declared,
) -> Result<Round, TypeQueuesError> {
    let types = BTreeSet::from_iter(aggregate_types(&mut *db.acquire().await?).await?);
    let is_current = |(known, at): &(BTreeSet<String>, Instant)| *known == types && at.elapsed() < TOPOLOGY_PAUSE;
    if declared.last.as_ref().is_some_and(is_current) {
        return Ok(Round::Idle);
    }
    let mut topology = Topology::default();
    routes.iter().for_each(|route| topology.add_exchange(route.exchange()));
    topology.queues = types.iter().filter_map(|one| declared_queue(routes, notify::SOURCE, one)).collect();
    let needed = |name: &str| topology.queues.iter().flat_map(|queue| &queue.bindings).any(|one| one.exchange == name);
    topology.exchanges = topology.exchanges.iter().filter(|exchange| needed(&exchange.name)).cloned().collect();
    declare(&topology, broker, &mut declared.differences).await?;
    declared.last = Some((types, Instant::now()));
    Ok(Round::Idle)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listened(routes: &[Route], aggregate_type: &str) -> Option<String> {
        queue_of(routes, notify::SOURCE, aggregate_type).map(|queue| queue.name)
    }

    fn declared(routes: &[Route], aggregate_type: &str) -> Option<String> {
        declared_queue(routes, notify::SOURCE, aggregate_type).map(|queue| queue.name)
    }

    #[test]
    fn a_listener_reads_the_queue_of_its_type_only_if_exactly_its_messages_are_published_to_it() {
        let usual = Route {
            sources: vec!["notify".to_owned()],
            routing_key: "notification.{aggregate_type}".to_owned(),
            ..Route::new("notifications", "notifications.exchange")
        };
        let queue = Some("notification.courier".to_owned());
        assert_eq!(listened(&Route::defaults(), "COURIER"), queue);
        assert_eq!(listened(std::slice::from_ref(&usual), "COURIER"), queue);
        let list = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let shared = Route { sources: list(&["notify", "sql"]), ..usual.clone() };
        let some_types = Route { aggregate_types: list(&["AGENCY"]), ..usual.clone() };
        let some_topics = Route { topics: list(&["order.#"]), ..usual.clone() };
        let of_sql = Route { name: "of-sql".to_owned(), sources: list(&["sql"]), ..usual.clone() };
        for (what, routes) in [
            ("also messages of SQL", vec![shared.clone()]),
            ("not this type", vec![some_types.clone()]),
            ("only some topics", vec![some_topics.clone(), usual.clone()]),
            ("another route to the same queue", vec![usual.clone(), of_sql]),
            ("an earlier route to another exchange", vec![Route::new("all", "pillarbox.events"), usual.clone()]),
        ] {
            assert_eq!(listened(&routes, "COURIER"), None, "{what}");
        }
        assert_eq!(listened(std::slice::from_ref(&some_types), "AGENCY"), Some("notification.agency".to_owned()));
        // The relay declares the queues for the programs that read them.
        assert_eq!((declared(&[shared], "COURIER"), declared(&[some_types], "COURIER")), (queue, None));
    }
}

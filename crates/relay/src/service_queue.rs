//! The queue of a service: declares it, notices when it was deleted or differs, and announces it to the relays, which then
//! check that it loses nothing (see `queue_check`).

use std::sync::Arc;

use pillarbox::consumers::Runtime;
use pillarbox::log::MessagePattern;
use runtime::health::Probe;
use runtime::worker::{Round, RoundLimits, Wake};
use tokio::sync::Mutex;

use crate::broker::{Broker, BrokerError};
use crate::control::{self, Announcement, SERVICES_EXCHANGE};
use crate::publish::Publisher;

use crate::signature::MessageSigner;
use crate::topology::{Difference, Exchange, ExchangeKind, TOPOLOGY_PAUSE, Topology, consumers_of};

/// The queue of a service, with everything that it needs.
pub(crate) struct ServiceQueue {
    pub(crate) name: String,
    /// The queue itself, its exchanges, and the queue for copies of its dead letters.
    pub(crate) topology: Topology,
    /// The messages that the queue is meant for, as their publishers know them.
    pub(crate) matching: MessagePattern,
}

struct Keeper {
    queue: ServiceQueue,
    broker: Arc<Broker>,
    publisher: Publisher,
    signer: MessageSigner,
    /// Down while the queue differs from what the service needs.
    requirement: Probe,
    known: Vec<Difference>,
    /// Whether the queue existed in an earlier round.
    was_seen: bool,
}

/// Starts the worker that keeps the queue. Returns its wake-up, for the reader of the queue.
pub(crate) fn start(runtime: &Runtime, mut queue: ServiceQueue, broker: &Arc<Broker>, signer: &MessageSigner) -> Wake {
    queue.topology.add_exchange(Exchange { name: SERVICES_EXCHANGE.to_owned(), kind: ExchangeKind::Fanout });
    // Each request to the broker has a time limit, and there are many of them.
    let worker = runtime.worker(format!("topology {}", queue.name), TOPOLOGY_PAUSE).with_limits(RoundLimits::STEPS);
    let wake = worker.wake.clone();
    created_counter(&queue.name).increment(0);
    let keeper = Keeper {
        requirement: runtime.requirement(format!("queue {}", queue.name)),
        publisher: Publisher::new(broker.clone(), SERVICES_EXCHANGE.to_owned(), false),
        broker: broker.clone(),
        signer: signer.clone(),
        known: Vec::new(),
        was_seen: false,
        queue,
    };
    runtime.spawn(async move {
        let keeper = Mutex::new(keeper);
        worker.run(async || keeper.lock().await.round().await).await;
    });
    wake
}

fn created_counter(queue: &str) -> metrics::Counter {
    metrics::counter!("pillarbox_service_queues_created_total", "queue" => queue.to_owned())
}

impl Keeper {
    async fn round(&mut self) -> Result<Round, BrokerError> {
        let existed = consumers_of(&self.broker, &self.queue.name).await?.is_some();
        let differences = self.queue.topology.declare(&self.broker).await?;
        if !existed {
            self.report_creation();
        }
        self.was_seen = true;
        self.report_differences(differences);
        self.announce().await?;
        Ok(Round::Idle)
    }

    fn report_creation(&self) {
        let queue = &self.queue.name;
        created_counter(queue).increment(1);
        if self.was_seen {
            tracing::warn!(
                queue,
                "the queue of a service was deleted and is declared again; the relays publish again what it has lost"
            );
        } else {
            tracing::info!(queue, "declared the queue of a service");
        }
    }

    fn report_differences(&mut self, differences: Vec<Difference>) {
        let (own, others): (Vec<_>, Vec<_>) = differences.iter().partition(|one| one.name == self.queue.name);
        others.iter().filter(|one| !self.known.contains(one)).for_each(|one| one.warn());
        match own.first() {
            Some(difference) => self.requirement.down(&requirement_text(difference)),
            None => self.requirement.up(),
        }
        self.known = differences;
    }

    /// The relays may have started after the last announcement.
    async fn announce(&mut self) -> Result<(), BrokerError> {
        // A relay cannot tell which messages a queue of all sources is meant for.
        if self.queue.matching.sources.is_empty() {
            return Ok(());
        }
        let ServiceQueue { name: queue, matching, .. } = &self.queue;
        let announcement = Announcement { queue: queue.clone(), matching: matching.clone() };
        if let Ok(announcement) = control::seal(&self.signer, "", &announcement) {
            self.publisher.publish(&[announcement]).await?;
        }
        Ok(())
    }
}

fn requirement_text(Difference { name, answer, .. }: &Difference) -> String {
    format!(
        "the queue `{name}` differs from the one that the service needs, a durable quorum queue with \
         x-single-active-consumer = true and no other argument, so it can lose messages or deliver them out of order: {answer}. \
         Delete it: it is declared again within seconds, and the relays publish again what it has lost"
    )
}

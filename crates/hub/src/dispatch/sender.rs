//! Sending: the attempts in flight, each in a task of its own.

use chrono::{DateTime, Utc};
use kit::clock::Clock;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::Dispatcher;
use super::attempt::attempt;
use super::subscriber_queue::SubscriberQueue;
use crate::delivery::AttemptResult;
use crate::domain::{Reason, Verdict};
use crate::hub_message::LaneKey;
use crate::tenant_clients::TenantClients;

/// Messages in flight, of all subscribers of this process.
const IN_FLIGHT_MAX: usize = 4_096;

pub(super) struct Sender {
    clients: TenantClients,
    clock: Clock,
    in_flight: usize,
    finished: mpsc::UnboundedSender<FinishedAttempt>,
    pub(super) results: mpsc::UnboundedReceiver<FinishedAttempt>,
}

/// The result of an attempt, with the subscriber queue that it belongs to.
pub(super) struct FinishedAttempt {
    /// The generation of the queue. The result is ignored if the queue was replaced meanwhile.
    generation: u64,
    subscriber: Uuid,
    /// The version of the subscriber that the message was sent to.
    version: i64,
    key: LaneKey,
    result: AttemptResult,
}

impl Sender {
    pub(super) fn new(clients: TenantClients, clock: Clock) -> Sender {
        let (finished, results) = mpsc::unbounded_channel();
        Sender { clients, clock, in_flight: 0, finished, results }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(super) fn is_full(&self) -> bool {
        self.in_flight >= IN_FLIGHT_MAX
    }

    /// Drops all attempts from the count. Their results are ignored, because their queues no longer exist.
    pub(super) fn reset(&mut self) {
        self.in_flight = 0;
    }

    /// Drops the attempts of a removed queue from the count.
    pub(super) fn drop_queue(&mut self, queue: &SubscriberQueue) {
        self.in_flight -= queue.in_flight();
    }

    /// Starts attempts for all messages of a queue that may be sent now.
    pub(super) fn send_from(&mut self, queue: &mut SubscriberQueue, now: DateTime<Utc>) {
        // A queue may start an attempt while it has fewer in flight than there are free slots:
        // queue.in_flight < IN_FLIGHT_MAX - in_flight of all queues. So one queue gets at most half of the slots, and the
        // more slots all queues use, the fewer each of them may use: a new queue finds a free one.
        while queue.in_flight() < IN_FLIGHT_MAX.saturating_sub(self.in_flight)
            && let Some((key, message)) = queue.start_next(now)
        {
            self.in_flight += 1;
            // A message without content is not given up here: its attempt makes it a dead letter as `expired`, not `manual`.
            let requested_by = queue.pop_dead_letter_request(message.n).filter(|_| message.event.is_some());
            let (finished, generation) = (self.finished.clone(), queue.generation);
            let recipient = queue.recipient.clone();
            let (subscriber, version) = (recipient.id, recipient.version);
            if let Some(by) = requested_by {
                let result = AttemptResult::not_sent(Reason::Manual, &format!("given up by {by}"));
                let _ = finished.send(FinishedAttempt { generation, subscriber, version, key, result });
                continue;
            }
            let (client, clock) = (self.clients.of(&recipient.tenant).clone(), self.clock.clone());
            tokio::spawn(async move {
                let result = attempt(&client, &recipient, &message, &clock).await;
                let _ = finished.send(FinishedAttempt { generation, subscriber, version, key, result });
            });
        }
    }
}

impl Dispatcher {
    pub(super) fn send(&mut self, now: DateTime<Utc>) {
        for subscriber in self.scheduler.active() {
            if let Some(queue) = self.queues.get_mut(subscriber) {
                self.sender.send_from(queue, now);
            }
        }
    }

    /// Passes the result of an attempt to its subscriber queue.
    pub(super) fn finish_attempt(&mut self, finished: FinishedAttempt) {
        let queue = self.queues.get_mut(&finished.subscriber);
        let Some(queue) = queue.filter(|queue| queue.generation == finished.generation) else { return };
        self.sender.in_flight -= 1;
        let mut result = finished.result;
        if result.verdict == Verdict::Gone && finished.version != queue.recipient.version {
            // The tenant has changed the subscriber meanwhile, perhaps its address: the new address may exist.
            result.verdict = Verdict::Retry;
        }
        queue.finish_attempt(&finished.key, result, self.clock.now(), rand::random());
        self.scheduler.activate(finished.subscriber);
    }
}

//! Sending: the attempts in flight, each in a task of its own.

use chrono::{DateTime, Utc};
use kit::clock::Clock;
use mailbox::consumers::Lease;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::Dispatcher;
use super::attempt::attempt;
use super::subscriber_queue::SubscriberQueue;
use crate::client::Client;
use crate::delivery::AttemptResult;
use crate::domain::{Reason, Verdict};
use crate::hub_message::LaneKey;

/// Messages in flight, of all subscribers of this process.
const IN_FLIGHT_MAX: usize = 4_096;

pub(super) struct Sender {
    client: Client,
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
    /// None: the lease may have expired before the request was sent, so it was not sent.
    result: Option<AttemptResult>,
}

impl Sender {
    pub(super) fn new(client: Client, clock: Clock) -> Sender {
        let (finished, results) = mpsc::unbounded_channel();
        Sender { client, clock, in_flight: 0, finished, results }
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
    pub(super) fn send_from(&mut self, queue: &mut SubscriberQueue, lease: &Lease, now: DateTime<Utc>) {
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
                let result = Some(AttemptResult::not_sent(Reason::Manual, &format!("given up by {by}")));
                let _ = finished.send(FinishedAttempt { generation, subscriber, version, key, result });
                continue;
            }
            let (client, clock, lease) = (self.client.clone(), self.clock.clone(), lease.clone());
            tokio::spawn(async move {
                let result = attempt(&client, &recipient, &message, &clock, || lease.is_valid()).await;
                let _ = finished.send(FinishedAttempt { generation, subscriber, version, key, result });
            });
        }
    }
}

impl Dispatcher {
    /// Starts attempts, unless the lease may have expired: another process may send the same messages then. The next
    /// rebalance finds out.
    pub(super) fn send(&mut self, now: DateTime<Utc>) {
        let Some(lease) = self.ownership.valid_lease() else { return };
        for subscriber in self.scheduler.active() {
            if let Some(queue) = self.queues.get_mut(subscriber) {
                self.sender.send_from(queue, &lease, now);
            }
        }
    }

    /// Passes the result of an attempt to its subscriber queue.
    pub(super) fn finish_attempt(&mut self, finished: FinishedAttempt) {
        let queue = self.queues.get_mut(&finished.subscriber);
        let Some(queue) = queue.filter(|queue| queue.generation == finished.generation) else { return };
        self.sender.in_flight -= 1;
        self.scheduler.activate(finished.subscriber);
        let Some(mut result) = finished.result else { return queue.cancel_attempt(&finished.key) };
        if result.verdict == Verdict::Gone && finished.version != queue.recipient.version {
            // The tenant has changed the subscriber meanwhile, perhaps its address: the new address may exist.
            result.verdict = Verdict::Retry;
        }
        queue.finish_attempt(&finished.key, result, self.clock.now(), rand::random());
    }
}

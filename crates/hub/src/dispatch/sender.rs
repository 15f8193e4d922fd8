//! Sending: the attempts in flight, each in a separate task.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use pillarbox::consumers::Lease;
use runtime::clock::Clock;
use tokio::sync::mpsc;
use uuid::Uuid;
use webhook_client::Permit;

use super::queues::Queues;
use super::slots::Slots;
use super::subscriber_queue::{StartedBatch, SubscriberQueue};
use crate::deliveries::attempt::{attempt, attempt_batch};
use crate::deliveries::attempt_result::AttemptResult;
use crate::deliveries::clients::TenantClients;
use crate::deliveries::domain::{Reason, Verdict};
use crate::deliveries::message::{HubMessage, LaneKey};
use crate::dispatch::send_permit::SendPermit;

/// Attempts that one round starts: then the dispatcher looks for results and new messages.
const ROUND_STARTS_MAX: usize = 256;
/// Attempts of one subscriber that one turn starts.
const TURN_STARTS_MAX: usize = 8;

pub(super) struct Sender {
    clients: TenantClients,
    clock: Clock,
    slots: Slots,
    /// The last round has ended before every queue had its turn.
    is_interrupted: bool,
    finished: mpsc::UnboundedSender<FinishedAttempt>,
    results: mpsc::UnboundedReceiver<FinishedAttempt>,
}

/// The result of an attempt, with the subscriber queue that it belongs to.
pub(super) struct FinishedAttempt {
    /// The generation of the queue. The result is ignored if the queue was replaced since then.
    generation: u64,
    subscriber: Uuid,
    /// The version of the subscriber that the message was sent to.
    version: i64,
    sent: Sent,
    /// The subscriber was slow when the attempt was started.
    was_slow: bool,
    /// None: before the request was sent, the lease may have expired, the subscriber was changed or its queue was dropped,
    /// so it was not sent.
    result: Option<AttemptResult>,
}

/// What an attempt sends.
enum Sent {
    /// The head of a lane.
    Head(LaneKey),
    /// The first messages of these lanes.
    Batch(Vec<(LaneKey, usize)>),
}

/// The messages that one request contains.
enum Content {
    Message(HubMessage),
    Batch(Vec<HubMessage>),
}

impl Content {
    /// Marks the next messages of the queue as in flight and returns them. None if none may be sent now.
    fn start(queue: &mut SubscriberQueue, now: DateTime<Utc>) -> Option<(Sent, Content)> {
        if queue.recipient.batch.is_none() {
            let (key, message) = queue.start_next(now)?;
            return Some((Sent::Head(key), Content::Message(message)));
        }
        let StartedBatch { lanes, messages } = queue.start_batch(now)?;
        Some((Sent::Batch(lanes), Content::Batch(messages)))
    }

    /// The first message. One that was given up, or that has no content, is the only one of its batch.
    fn head(&self) -> Option<&HubMessage> {
        match self {
            Content::Message(message) => Some(message),
            Content::Batch(messages) => messages.first(),
        }
    }
}

impl Sender {
    pub(super) fn new(clients: TenantClients, clock: Clock, in_flight_max: usize) -> Sender {
        let (finished, results) = mpsc::unbounded_channel();
        Sender { clients, clock, slots: Slots::new(in_flight_max), is_interrupted: false, finished, results }
    }

    /// Whether the last round has ended before every queue had its turn.
    pub(super) fn is_interrupted(&self) -> bool {
        self.is_interrupted
    }

    pub(super) fn in_flight(&self) -> usize {
        self.slots.in_flight()
    }

    /// Drops all attempts from the counts. Their results are ignored, because their queues no longer exist.
    pub(super) fn reset(&mut self) {
        self.slots.reset();
        self.is_interrupted = false;
    }

    /// Drops the attempts of a removed queue from the counts.
    pub(super) fn drop_queue(&mut self, queue: &SubscriberQueue) {
        self.slots.drop_queue(queue);
    }

    /// Starts attempts for messages of a queue whose turn it is. Returns how many.
    fn send_from(&mut self, queue: &mut SubscriberQueue, lease: &Lease, now: DateTime<Utc>) -> usize {
        queue.waits_for_slot = false;
        let mut started = 0;
        while started < TURN_STARTS_MAX
            && self.slots.allow(queue, now)
            && let Some((sent, content)) = Content::start(queue, now)
        {
            started += 1;
            self.start(queue, sent, content, lease, now);
        }
        // A queue at its limit has attempts in flight. The result of one of them makes it active again.
        if !self.slots.is_at_limit(queue) && queue.can_start(now) {
            self.slots.enqueue(queue, now);
        }
        started
    }

    /// Starts one attempt. A message that an operator has given up is not sent.
    fn start(&mut self, queue: &mut SubscriberQueue, sent: Sent, content: Content, lease: &Lease, now: DateTime<Utc>) {
        let was_slow = self.slots.start(queue, now);
        let requested_by = content.head().and_then(|head| {
            // A message without content is not given up here: its attempt makes it a dead letter as `expired`, not `manual`.
            queue.pop_dead_letter_request(head.n).filter(|_| head.event.is_some())
        });
        let (finished, generation) = (self.finished.clone(), queue.generation);
        let recipient = queue.recipient.clone();
        let (subscriber, version) = (recipient.id, recipient.version);
        let finish = move |result| {
            let _ = finished.send(FinishedAttempt { generation, subscriber, version, sent, was_slow, result });
        };
        if let Some(by) = requested_by {
            return finish(Some(AttemptResult::not_sent(Reason::Manual, &format!("given up by {by}"))));
        }
        let (client, clock) = (self.clients.of(&recipient.tenant).clone(), self.clock.clone());
        let permit: Arc<dyn Permit> = Arc::new(SendPermit::new(lease.clone(), queue.validity.watch()));
        let permit = Some(permit);
        tokio::spawn(async move {
            finish(match content {
                Content::Message(message) => attempt(&client, &recipient, &message, &clock, permit).await,
                Content::Batch(messages) => {
                    Box::pin(attempt_batch(&client, &recipient, &messages, &clock, permit)).await
                }
            });
        });
    }

    /// Gives every tenant its turns, until all slots are used or every waiting queue has to wait longer.
    fn run_turns(&mut self, queues: &mut Queues, lease: &Lease, now: DateTime<Utc>) {
        let mut started = 0;
        loop {
            let mut has_progress = false;
            for _ in 0..self.slots.turns() {
                let Some(subscriber) = self.slots.next_turn() else { continue };
                has_progress = true;
                // Without a queue, the subscriber belongs to another process, or was deleted.
                if let Some(queue) = queues.get_mut(subscriber) {
                    started += self.send_from(queue, lease, now);
                }
            }
            self.is_interrupted = has_progress && started >= ROUND_STARTS_MAX;
            if !has_progress || self.is_interrupted {
                return;
            }
        }
    }

    /// Starts attempts for the queues that can start some. The lease is valid.
    pub(super) fn send(&mut self, queues: &mut Queues, lease: &Lease, now: DateTime<Utc>) {
        queues.visit_active(|queue| {
            if !queue.waits_for_slot && queue.can_start(now) {
                self.slots.enqueue(queue, now);
            }
        });
        self.run_turns(queues, lease, now);
    }

    /// Waits until an attempt ends. Cancelling it loses none.
    pub(super) async fn finished(&mut self) -> Option<FinishedAttempt> {
        self.results.recv().await
    }

    /// The result of another attempt, if one has ended.
    pub(super) fn try_finished(&mut self) -> Option<FinishedAttempt> {
        self.results.try_recv().ok()
    }

    /// Passes the result of an attempt to its subscriber queue.
    pub(super) fn finish_attempt(&mut self, finished: FinishedAttempt, queues: &mut Queues, now: DateTime<Utc>) {
        let queue = queues.get_mut(finished.subscriber);
        let Some(queue) = queue.filter(|queue| queue.generation == finished.generation) else { return };
        self.slots.finish(queue, finished.was_slow);
        match finished.result {
            None => match &finished.sent {
                Sent::Head(key) => queue.cancel_attempt(key, now),
                Sent::Batch(lanes) => queue.cancel_batch(lanes, now),
            },
            Some(mut result) => {
                if result.verdict == Verdict::Gone && finished.version != queue.recipient.version {
                    // The tenant has changed the subscriber since then, perhaps its address: the new address may exist.
                    result.verdict = Verdict::Retry;
                }
                match &finished.sent {
                    Sent::Head(key) => queue.finish_attempt(key, result, now, rand::random()),
                    Sent::Batch(lanes) => queue.finish_batch(lanes, &result, now, rand::random()),
                }
            }
        }
        queues.activate(finished.subscriber);
    }
}

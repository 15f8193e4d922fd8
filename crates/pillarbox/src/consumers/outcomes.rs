//! The outcomes of a batch: which messages are parked, retried later, given up or finished.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use sqlx::{Postgres, Transaction};

use super::consumer::{Consumer, ConsumerKind};
use super::dead_letter_notice;
use super::parked_messages::{self, Key, NewParked, NotParked};
use super::processor::{Delivery, Origin, Outcome};
use super::retry::RetryPolicy;
use super::unrouted_messages;
use crate::database::one_line;
use crate::log::Message;

/// A message to park.
struct ToPark<'a> {
    delivery: &'a Delivery,
    attempts: i32,
    /// None: it waits for an earlier message of its key.
    next_at: Option<DateTime<Utc>>,
    error: Option<String>,
}

/// A parked message that failed again and is retried later.
struct ToRetry {
    parked_id: i64,
    attempts: i32,
    next_at: DateTime<Utc>,
    error: String,
}

/// A message that failed for the last time.
struct ToGiveUp<'a> {
    delivery: &'a Delivery,
    /// None: it failed at its first attempt, and its consumer does not retry.
    parked_id: Option<i64>,
    attempts: i32,
    error: String,
}

/// The outcomes of a batch, collected to be saved in one transaction.
pub(super) struct Outcomes<'a> {
    consumer: &'a str,
    kind: ConsumerKind,
    retry: RetryPolicy,
    now: DateTime<Utc>,
    to_park: Vec<ToPark<'a>>,
    to_retry: Vec<ToRetry>,
    to_give_up: Vec<ToGiveUp<'a>>,
    /// Ids of parked messages that are done.
    finished: Vec<i64>,
    /// Ids of parked messages that an operator discarded.
    discarded: Vec<i64>,
    /// Log ids of messages that no queue took.
    unrouted: Vec<i64>,
    /// Messages that a route may have published before. Whether a queue took them then no longer counts.
    republished: Vec<&'a Message>,
    /// Keys whose parked messages have changed, with their shards.
    changed_keys: HashMap<Key, i16>,
    counts: HashMap<&'static str, u64>,
}

/// Whether a key has parked messages after a batch.
pub(super) struct KeyState {
    pub(super) shard: i16,
    pub(super) key: Key,
    pub(super) is_blocked: bool,
}

impl<'a> Outcomes<'a> {
    pub(super) fn new(consumer: &'a Consumer, retry: RetryPolicy, now: DateTime<Utc>) -> Outcomes<'a> {
        Outcomes {
            consumer: &consumer.name,
            kind: consumer.kind,
            retry,
            now,
            to_park: Vec::new(),
            to_retry: Vec::new(),
            to_give_up: Vec::new(),
            finished: Vec::new(),
            discarded: Vec::new(),
            unrouted: Vec::new(),
            republished: Vec::new(),
            changed_keys: HashMap::new(),
            counts: HashMap::new(),
        }
    }

    pub(super) fn add(&mut self, delivery: &'a Delivery, outcome: Outcome) {
        let (parked_id, attempts) = match delivery.origin {
            Origin::Log => (None, 0),
            Origin::Parked { id, attempts, .. } => (Some(id), attempts),
        };
        let was_parked = parked_id.is_some();
        // Whether the key is blocked can change if the message was parked before, or is parked now.
        let changes_key = was_parked || matches!(outcome, Outcome::Failed(_) | Outcome::Blocked);
        let is_published = self.kind == ConsumerKind::Relay && matches!(outcome, Outcome::Done | Outcome::Unrouted);
        if is_published && (was_parked || delivery.is_replayed) {
            self.republished.push(&delivery.message);
        }
        if outcome == Outcome::Unrouted {
            self.unrouted.push(delivery.message.id);
        }
        let label = match outcome {
            Outcome::Done | Outcome::Unrouted => {
                match delivery.origin {
                    Origin::Parked { discarded: true, .. } => self.discarded.extend(parked_id),
                    Origin::Parked { .. } | Origin::Log => self.finished.extend(parked_id),
                }
                if outcome == Outcome::Done { "done" } else { "unrouted" }
            }
            Outcome::Blocked => {
                if !was_parked {
                    self.to_park.push(ToPark { delivery, attempts: 0, next_at: None, error: None });
                }
                "behind"
            }
            Outcome::Failed(error) => {
                let error = one_line(&delivery.message.hide_payload_in(error));
                self.add_failure(delivery, parked_id, attempts + 1, error)
            }
        };
        *self.counts.entry(label).or_default() += 1;
        if changes_key && let Some(key) = delivery.message.ordering_key() {
            self.changed_keys.insert(key, delivery.message.shard);
        }
    }

    /// Returns the label of the outcome in the metrics.
    fn add_failure(
        &mut self,
        delivery: &'a Delivery,
        parked_id: Option<i64>,
        attempts: i32,
        error: String,
    ) -> &'static str {
        let message = &delivery.message;
        let next_at = self.retry.delay_after(attempts).map(|delay| self.now + delay);
        // Only the first and the last failure are warnings: a message that waits for a queue to be bound is retried
        // forever.
        if attempts == 1 || next_at.is_none() {
            tracing::warn!(
                consumer = self.consumer, message_id = %message.message_id, topic = message.topic, attempts, error,
                "a message failed"
            );
        } else {
            tracing::debug!(
                consumer = self.consumer, message_id = %message.message_id, attempts, error, "a message failed again"
            );
        }
        match (parked_id, next_at) {
            (None, Some(next_at)) => {
                self.to_park.push(ToPark { delivery, attempts, next_at: Some(next_at), error: Some(error) });
                "failed"
            }
            (Some(parked_id), Some(next_at)) => {
                self.to_retry.push(ToRetry { parked_id, attempts, next_at, error });
                "failed"
            }
            (parked_id, None) => {
                self.to_give_up.push(ToGiveUp { delivery, parked_id, attempts, error });
                "dead"
            }
        }
    }

    /// Whether there is nothing to save besides the new positions.
    pub(super) fn is_plain(&self) -> bool {
        self.to_park.is_empty()
            && self.to_retry.is_empty()
            && self.to_give_up.is_empty()
            && self.finished.is_empty()
            && self.discarded.is_empty()
            && self.unrouted.is_empty()
            && self.republished.is_empty()
            && self.changed_keys.is_empty()
    }

    /// Saves the outcomes. Returns the state of the keys whose parked messages have changed.
    pub(super) async fn save(&self, tx: &mut Transaction<'_, Postgres>) -> sqlx::Result<Vec<KeyState>> {
        let to_park: Vec<NewParked<'_>> = self
            .to_park
            .iter()
            .map(|parked| NewParked {
                message: &parked.delivery.message,
                run: parked.delivery.run,
                attempts: parked.attempts,
                next_at: parked.next_at,
                last_error: parked.error.as_deref(),
            })
            .collect();
        for NotParked { new, reason } in parked_messages::insert(tx, self.consumer, &to_park).await? {
            parked_messages::insert_dead_letter(tx, self.consumer, new, &reason).await?;
            dead_letter_notice::post_notice(tx, self.consumer, new.message, new.attempts, &reason).await?;
        }
        for ToRetry { parked_id, attempts, next_at, error } in &self.to_retry {
            parked_messages::retry_at(tx, *parked_id, *attempts, *next_at, error).await?;
        }
        for ToGiveUp { delivery, parked_id, attempts, error } in &self.to_give_up {
            match parked_id {
                Some(parked_id) => parked_messages::give_up(tx, *parked_id, *attempts, error).await?,
                None => {
                    let (message, run, next_at) = (&delivery.message, delivery.run, Some(self.now));
                    let new = NewParked { message, run, attempts: *attempts, next_at, last_error: Some(error) };
                    if !parked_messages::give_up_new(tx, self.consumer, new).await? {
                        continue;
                    }
                }
            }
            dead_letter_notice::post_notice(tx, self.consumer, &delivery.message, *attempts, error).await?;
        }
        if !self.finished.is_empty() || !self.discarded.is_empty() {
            parked_messages::delete(tx, &self.finished, &self.discarded).await?;
        }
        unrouted_messages::replace(tx, self.consumer, &self.republished, &self.unrouted).await?;
        if self.changed_keys.is_empty() {
            return Ok(Vec::new());
        }
        let keys: HashSet<Key> = self.changed_keys.keys().cloned().collect();
        parked_messages::unblock(tx, self.consumer, &keys, self.now).await?;
        let blocked = parked_messages::still_blocked(tx, self.consumer, &keys).await?;
        let state = |(key, shard): (&Key, &i16)| KeyState {
            shard: *shard,
            key: key.clone(),
            is_blocked: blocked.contains(key),
        };
        Ok(self.changed_keys.iter().map(state).collect())
    }

    /// Returns when the first message that this batch parked, or retries later, is due.
    pub(super) fn next_due(&self) -> Option<DateTime<Utc>> {
        let parked = self.to_park.iter().filter_map(|parked| parked.next_at);
        parked.chain(self.to_retry.iter().map(|retried| retried.next_at)).min()
    }

    /// Exports the counters of a consumer at 0, so that a query sees the first message. `unrouted` is an outcome of routes alone.
    pub(super) fn register_counters(consumer: &Consumer) {
        let of_routes = (consumer.kind == ConsumerKind::Relay).then_some("unrouted");
        for outcome in ["done", "failed", "behind", "dead"].into_iter().chain(of_routes) {
            counter(&consumer.name, outcome).increment(0);
        }
    }

    /// Adds the outcomes to the metrics.
    pub(super) fn count(&self) {
        for (outcome, count) in &self.counts {
            counter(self.consumer, outcome).increment(*count);
        }
    }
}

fn counter(consumer: &str, outcome: &'static str) -> metrics::Counter {
    let labels = [("consumer", consumer.to_owned()), ("outcome", outcome.to_owned())];
    metrics::counter!("pillarbox_consumer_messages_total", &labels)
}

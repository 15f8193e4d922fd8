//! Keeping what came of a batch.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use sqlx::{Postgres, Transaction};

use crate::dead_letter;
use crate::parked::{self, Key, Parking, key_of};
use crate::retry::Retry;
use crate::told::brief;
use crate::work::{Item, Origin, Outcome};

/// With its attempts, when it is due, and what went wrong.
type ToPark<'a> = (&'a Item, i32, Option<DateTime<Utc>>, Option<String>);

pub(crate) struct Settlement<'a> {
    consumer: &'a str,
    retry: Retry,
    now: DateTime<Utc>,
    parking: Vec<ToPark<'a>>,
    put_off: Vec<(i64, i32, DateTime<Utc>, String)>,
    buried: Vec<(&'a Item, i64, i32, String)>,
    finished: Vec<i64>,
    discarded: Vec<i64>,
    /// Keys whose parked messages have changed, with their shards.
    touched: HashMap<Key, i16>,
    counts: HashMap<&'static str, u64>,
}

impl<'a> Settlement<'a> {
    pub(crate) fn new(consumer: &'a str, retry: Retry, now: DateTime<Utc>) -> Settlement<'a> {
        Settlement {
            consumer,
            retry,
            now,
            parking: Vec::new(),
            put_off: Vec::new(),
            buried: Vec::new(),
            finished: Vec::new(),
            discarded: Vec::new(),
            touched: HashMap::new(),
            counts: HashMap::new(),
        }
    }

    pub(crate) fn add(&mut self, item: &'a Item, outcome: Outcome) {
        let (place, attempts) = match item.origin {
            Origin::Log => (None, 0),
            Origin::Parked { place, attempts, .. } => (Some(place), attempts),
        };
        let was_parked = place.is_some();
        let counted = match outcome {
            Outcome::Done | Outcome::Unrouted => {
                match item.origin {
                    Origin::Parked { discarded: true, .. } => self.discarded.extend(place),
                    Origin::Parked { .. } | Origin::Log => self.finished.extend(place),
                }
                if outcome == Outcome::Done { "done" } else { "unrouted" }
            }
            Outcome::Behind => {
                if !was_parked {
                    self.parking.push((item, 0, None, None));
                }
                "behind"
            }
            Outcome::Failed(error) => self.failed(item, place, attempts + 1, brief(&error)),
        };
        *self.counts.entry(counted).or_default() += 1;
        if (was_parked || counted == "failed" || counted == "behind")
            && let Some(key) = key_of(&item.message)
        {
            self.touched.insert(key, item.message.shard);
        }
    }

    fn failed(&mut self, item: &'a Item, place: Option<i64>, attempts: i32, error: String) -> &'static str {
        let message = &item.message;
        let next_at = self.retry.after(attempts).map(|pause| self.now + pause);
        // Those in between are no news: what waits for a queue that nobody binds is tried for ever.
        match attempts == 1 || next_at.is_none() {
            true => tracing::warn!(
                consumer = self.consumer, message_id = %message.message_id, topic = message.topic, attempts, error,
                "a message failed"
            ),
            false => tracing::debug!(
                consumer = self.consumer, message_id = %message.message_id, attempts, error, "a message failed again"
            ),
        }
        match (place, next_at) {
            (None, next_at) => {
                // Without a retry it is due at once, and given up then.
                self.parking.push((item, attempts, Some(next_at.unwrap_or(self.now)), Some(error)));
                "failed"
            }
            (Some(place), Some(next_at)) => {
                self.put_off.push((place, attempts, next_at, error));
                "failed"
            }
            (Some(place), None) => {
                self.buried.push((item, place, attempts, error));
                "dead"
            }
        }
    }

    /// Whether there is nothing to write down but the new places.
    pub(crate) fn is_plain(&self) -> bool {
        self.parking.is_empty()
            && self.put_off.is_empty()
            && self.buried.is_empty()
            && self.finished.is_empty()
            && self.discarded.is_empty()
            && self.touched.is_empty()
    }

    /// Writes it down; returns the keys that were touched, and whether they still wait for something.
    pub(crate) async fn keep(&self, tx: &mut Transaction<'_, Postgres>) -> sqlx::Result<Vec<(i16, Key, bool)>> {
        let parking: Vec<Parking<'_>> = self
            .parking
            .iter()
            .map(|(item, attempts, next_at, error)| Parking {
                message: &item.message,
                run: item.run,
                attempts: *attempts,
                next_at: *next_at,
                last_error: error.as_deref(),
            })
            .collect();
        parked::park(tx, self.consumer, &parking).await?;
        for (place, attempts, next_at, error) in &self.put_off {
            parked::put_off(tx, *place, *attempts, *next_at, error).await?;
        }
        for (item, place, attempts, error) in &self.buried {
            parked::bury(tx, *place, *attempts, error).await?;
            dead_letter::announce(tx, self.consumer, &item.message, *attempts, error).await?;
        }
        if !self.finished.is_empty() || !self.discarded.is_empty() {
            parked::finish(tx, &self.finished, &self.discarded).await?;
        }
        if self.touched.is_empty() {
            return Ok(Vec::new());
        }
        let keys: HashSet<Key> = self.touched.keys().cloned().collect();
        parked::promote(tx, self.consumer, &keys, self.now).await?;
        let still = parked::still_parked(tx, self.consumer, &keys).await?;
        Ok(self.touched.iter().map(|(key, shard)| (*shard, key.clone(), still.contains(key))).collect())
    }

    /// When the first of what was parked is due.
    pub(crate) fn next_due(&self) -> Option<DateTime<Utc>> {
        let parked = self.parking.iter().filter_map(|(_, _, next_at, _)| *next_at);
        parked.chain(self.put_off.iter().map(|(_, _, next_at, _)| *next_at)).min()
    }

    pub(crate) fn count(&self) {
        for (outcome, count) in &self.counts {
            let labels = [("consumer", self.consumer.to_owned()), ("outcome", (*outcome).to_owned())];
            metrics::counter!("pillarbox_consumer_messages_total", &labels).increment(*count);
        }
    }
}

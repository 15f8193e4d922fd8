//! Keeping what came of the messages of all feeds, many at a time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};

use super::feed::Save;
use super::{AGAIN_PAUSE, DispatchError, Dispatcher, Ended, ended, flat};
use crate::store;

/// Outcomes are kept together: it saves a quarter of the database's work.
pub(super) const SAVE_LINGER: Duration = Duration::from_millis(10);
const SAVE_AT_ONCE: usize = 1_000;

impl Dispatcher {
    pub(super) fn save(&mut self, now: DateTime<Utc>) {
        if self.saving.is_some() || (self.unsaved.is_none() && self.is_time_to_look()) {
            return;
        }
        if let Some(save) = self.unsaved.take() {
            return self.keep(save, now);
        }
        let news = self.hot.iter().filter(|id| self.feeds.get(id).is_some_and(|feed| feed.has_news(now)));
        let count = news.take(SAVE_AT_ONCE).count();
        if count > 0 && (count == SAVE_AT_ONCE || self.saved_at.elapsed() >= SAVE_LINGER) {
            let save = self.news(now);
            self.keep(save, now);
        }
    }

    /// Keeps all that there is, and waits for it: who is given a shard must find what came of its messages.
    pub(super) async fn flush(&mut self) -> Result<(), DispatchError> {
        if self.has_news() {
            let now = self.clock.now();
            let save = self.news(now);
            self.keep(save, now);
        }
        if self.saving.is_some() {
            let saved = ended(self.saving.as_mut().map(|(_, saving)| saving)).await;
            self.saved(saved)?;
        }
        Ok(())
    }

    pub(super) fn has_news(&self) -> bool {
        let now = self.clock.now();
        self.hot.iter().any(|id| self.feeds.get(id).is_some_and(|feed| feed.has_news(now)))
    }

    /// What is to be kept of all feeds.
    pub(super) fn news(&mut self, now: DateTime<Utc>) -> Arc<Save> {
        let mut save = Save::default();
        for subscriber in &self.hot {
            if let Some(feed) = self.feeds.get_mut(subscriber)
                && feed.has_news(now)
            {
                feed.save(now, &mut save);
            }
        }
        Arc::new(save)
    }

    pub(super) fn keep(&mut self, save: Arc<Save>, now: DateTime<Utc>) {
        if save.is_empty() {
            return; // what there is waits a little, to be kept with more
        }
        let (db, fence, kept) = (self.db.clone(), self.share.fence(), save.clone());
        let saving = tokio::spawn(async move { store::dispatch::keep(&db, fence, &kept, now).await });
        self.saving = Some((save, saving));
    }

    pub(super) fn saved(&mut self, saved: Ended<bool>) -> Result<(), DispatchError> {
        let Some((save, _)) = self.saving.take() else { return Ok(()) };
        self.saved_at = tokio::time::Instant::now();
        match flat(saved) {
            Ok(true) => {
                count(&save);
                Ok(())
            }
            Ok(false) => {
                tracing::warn!("others have taken over; what was under way is theirs to send");
                self.forget();
                Ok(())
            }
            Err(error) if error.may_pass() => {
                self.unsaved = Some(save);
                self.again_at = Some(tokio::time::Instant::now() + AGAIN_PAUSE);
                Err(error)
            }
            // It would be refused for ever. What it told of is sent again.
            Err(error) => {
                self.forget();
                Err(error)
            }
        }
    }
}

fn count(save: &Save) {
    let latency = metrics::histogram!("eventhub_delivery_latency_seconds");
    let mut counts: HashMap<&'static str, u64> = HashMap::new();
    for attempt in &save.attempts {
        *counts.entry(attempt.outcome.as_str()).or_default() += 1;
        if attempt.came.unsent.is_none() {
            latency.record(attempt.came.latency.as_secs_f64());
        }
    }
    for (outcome, count) in counts {
        metrics::counter!("eventhub_messages_delivered_total", "outcome" => outcome).increment(count);
    }
}

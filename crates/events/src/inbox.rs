//! Message handlers: the messages of the joins service.

use std::collections::BTreeMap;
use std::sync::Arc;

use contracts::joins::{self, Count, JoinsCounted};
use kit::clock::Clock;
use mailbox::consumers::{ConsumerOptions, Handler, HandlerError, HandlerFuture, StartAt, Subscription};
use mailbox::log::{Message, MessagePattern};
use serde::Deserialize;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::flow;

/// Two consumers: one stores the participant counts, one takes part in reconciliation.
pub(crate) fn subscriptions(clock: &Clock) -> Vec<Subscription> {
    let subscribe = |consumer: &'static str, topics: &[&str], handler: Arc<dyn Handler>| {
        let topics = topics.iter().map(|topic| (*topic).to_owned()).collect();
        let matching = MessagePattern { sources: vec![joins::SOURCE.to_owned()], topics, ..MessagePattern::default() };
        let options = ConsumerOptions::default();
        Subscription { consumer: consumer.into(), matching, start: StartAt::Beginning, handler, options }
    };
    vec![
        subscribe("events.counts", &["join.#", "mod.#"], Arc::new(CountMessages)),
        subscribe("events.reconcile", &[joins::COUNTED], Arc::new(ReconcileMessages { clock: clock.clone() })),
    ]
}

struct CountMessages;

/// The fields that [`joins::JoinChanged`] and [`joins::EventRecounted`] have in common.
#[derive(Deserialize)]
struct CountChanged {
    event_id: Uuid,
    counts: Count,
}

impl Handler for CountMessages {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move { self.save_newest(tx, &[message]).await })
    }

    /// Most messages of a batch may concern one popular event: its row is updated once per batch.
    fn handle_all<'t>(
        &'t self,
        tx: &'t mut Transaction<'static, Postgres>,
        messages: &'t [&'t Message],
    ) -> Option<HandlerFuture<'t>> {
        Some(Box::pin(async move { self.save_newest(tx, messages).await }))
    }
}

impl CountMessages {
    async fn save_newest(
        &self,
        tx: &mut Transaction<'static, Postgres>,
        messages: &[&Message],
    ) -> Result<(), HandlerError> {
        let mut newest: BTreeMap<Uuid, Count> = BTreeMap::new();
        for message in messages {
            // `join.#` matches this topic too; the other consumer handles it.
            if message.topic == joins::COUNTED {
                continue;
            }
            let CountChanged { event_id, counts } = serde_json::from_str(message.payload.get())?;
            let known = newest.entry(event_id).or_insert(counts);
            if counts.version > known.version {
                *known = counts;
            }
        }
        Ok(flow::counts::save(tx, &newest).await?)
    }
}

struct ReconcileMessages {
    clock: Clock,
}

impl Handler for ReconcileMessages {
    /// One message per transaction: it locks events in another order than the log, and its drift metrics must not be
    /// counted again because another message of the batch fails.
    fn needs_separate_transaction(&self) -> bool {
        true
    }

    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move {
            let counted: JoinsCounted = serde_json::from_str(message.payload.get())?;
            Ok(flow::reconcile::apply_reply(tx, &counted, self.clock.now()).await?)
        })
    }
}

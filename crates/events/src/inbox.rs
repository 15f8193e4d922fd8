//! Message handlers: the messages of the joins service, and deleted accounts.

use std::collections::BTreeMap;
use std::sync::Arc;

use contracts::identity::{self, AccountDeleted};
use contracts::joins::{self, Count, JoinsCounted};
use pillarbox::consumers::{ConsumerOptions, Handler, HandlerError, HandlerFuture, StartAt, Subscription};
use pillarbox::log::{Message, MessagePattern};
use runtime::clock::Clock;
use serde::Deserialize;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::flow;

/// Three consumers: one stores the participant counts, one takes part in reconciliation, and one learns of deleted accounts.
pub(crate) fn subscriptions(clock: &Clock) -> Vec<Subscription> {
    let subscribe = |consumer: &'static str, source: &str, topics: &[&str], handler: Arc<dyn Handler>| {
        let topics = topics.iter().map(|topic| (*topic).to_owned()).collect();
        let matching = MessagePattern { sources: vec![source.to_owned()], topics, ..MessagePattern::default() };
        let options = ConsumerOptions::default();
        Subscription { consumer: consumer.into(), matching, start: StartAt::Beginning, handler, options }
    };
    vec![
        subscribe("events.counts", joins::SOURCE, &["join.#", "mod.#"], Arc::new(CountMessages)),
        subscribe(
            "events.reconcile",
            joins::SOURCE,
            &[joins::COUNTED],
            Arc::new(ReconcileMessages { clock: clock.clone() }),
        ),
        subscribe("events.accounts", identity::SOURCE, &[identity::ACCOUNT_DELETED], Arc::new(DeletedAccounts)),
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
            // `join.#` also matches this topic, which the other consumer handles.
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

struct DeletedAccounts;

impl Handler for DeletedAccounts {
    /// Only records the user: a worker closes the events in steps, however many there are.
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move {
            let AccountDeleted { user_id } = serde_json::from_str(message.payload.get())?;
            Ok(flow::handover::record_deleted(tx, user_id).await?)
        })
    }
}

//! The door for messages: what the joins service says of how many there are.

use std::collections::BTreeMap;
use std::sync::Arc;

use contracts::joins::{self, Count, JoinsCounted};
use kit::clock::Clock;
use mailbox::cursor::Start;
use mailbox::filter::Matching;
use mailbox::handler::{Failure, Handler, Handling};
use mailbox::log::Message;
use mailbox::runtime::Subscription;
use serde::Deserialize;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::flow::reconcile;
use crate::store::event as store;

pub(crate) fn subscriptions(clock: &Clock) -> Vec<Subscription> {
    let listen = |consumer, topics: &[&str], handler: Arc<dyn Handler>| {
        let topics = topics.iter().map(|topic| (*topic).to_owned()).collect();
        let matching = Matching { sources: vec![joins::SOURCE.to_owned()], topics, ..Matching::default() };
        Subscription { consumer, matching, start: Start::Beginning, handler }
    };
    vec![
        listen("events.counts", &["join.#", "mod.#"], Arc::new(Counts)),
        listen("events.reconcile", &[joins::COUNTED], Arc::new(Differences { clock: clock.clone() })),
    ]
}

struct Counts;

/// All that matters here of a [`joins::JoinChanged`] or a [`joins::EventRecounted`].
#[derive(Deserialize)]
struct Changed {
    event_id: Uuid,
    counts: Count,
}

impl Handler for Counts {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> Handling<'t> {
        Box::pin(async move { self.take(tx, &[message]).await })
    }

    /// An event that people crowd into has most of a batch: its row changes once.
    fn handle_all<'t>(
        &'t self,
        tx: &'t mut Transaction<'static, Postgres>,
        messages: &'t [&'t Message],
    ) -> Option<Handling<'t>> {
        Some(Box::pin(async move { self.take(tx, messages).await }))
    }
}

impl Counts {
    async fn take(&self, tx: &mut Transaction<'static, Postgres>, messages: &[&Message]) -> Result<(), Failure> {
        let mut newest: BTreeMap<Uuid, Count> = BTreeMap::new();
        for message in messages {
            if message.topic == joins::COUNTED {
                continue;
            }
            let Changed { event_id, counts } = serde_json::from_str(message.payload.get())?;
            let known = newest.entry(event_id).or_insert(counts);
            if counts.version > known.version {
                *known = counts;
            }
        }
        Ok(store::count(tx, &newest).await?)
    }
}

struct Differences {
    clock: Clock,
}

impl Handler for Differences {
    /// It locks events in another order than that of the log; and what it counts is not counted again because a neighbour
    /// of its batch fails.
    fn works_alone(&self) -> bool {
        true
    }

    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> Handling<'t> {
        Box::pin(async move {
            let counted: JoinsCounted = serde_json::from_str(message.payload.get())?;
            Ok(reconcile::take_up(tx, &counted, self.clock.now()).await?)
        })
    }
}

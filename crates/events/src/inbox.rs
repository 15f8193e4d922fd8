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
    let topics = ["join.#", "mod.#"].map(str::to_owned).to_vec();
    let matching = Matching { sources: vec![joins::SOURCE.to_owned()], topics, ..Matching::default() };
    let handler = Arc::new(Counts { clock: clock.clone() });
    vec![Subscription { consumer: "events.counts", matching, start: Start::Beginning, handler }]
}

struct Counts {
    clock: Clock,
}

/// All that matters here of a [`joins::JoinChanged`].
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
                store::count(tx, &std::mem::take(&mut newest)).await?;
                let counted: JoinsCounted = serde_json::from_str(message.payload.get())?;
                reconcile::take_over(tx, &counted, self.clock.now()).await?;
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

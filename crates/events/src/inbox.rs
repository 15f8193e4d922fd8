//! The door for messages: what the joins service says of how many there are.

use std::sync::Arc;

use contracts::joins::{self, Count, JoinsCounted};
use kit::clock::Clock;
use mailbox::cursor::Start;
use mailbox::filter::Matching;
use mailbox::handler::{Handler, Handling};
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
        Box::pin(async move {
            if message.topic == joins::COUNTED {
                let counted: JoinsCounted = serde_json::from_str(message.payload.get())?;
                return Ok(reconcile::take_over(tx, &counted, self.clock.now()).await?);
            }
            let changed: Changed = serde_json::from_str(message.payload.get())?;
            Ok(store::count(tx, changed.event_id, changed.counts).await?)
        })
    }
}

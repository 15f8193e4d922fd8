//! The door for messages: what the events service says.

use std::sync::Arc;

use contracts::events::{self, EventChanged, EventRestated, EventVersions};
use kit::clock::Clock;
use mailbox::cursor::Start;
use mailbox::filter::Matching;
use mailbox::handler::{Handler, Handling};
use mailbox::log::Message;
use mailbox::runtime::Subscription;
use sqlx::{Postgres, Transaction};

use crate::domain::{Actor, Command, News, Order};
use crate::flow;

/// Keeps what is known here of events in line with what is said of them.
pub(crate) fn subscription(clock: Clock) -> Subscription {
    let news = [events::PUBLISHED, events::UPDATED, events::UNPUBLISHED, events::CANCELED];
    let topics = news.into_iter().chain([events::VERSIONS, events::RESTATED]);
    Subscription {
        consumer: "joins.events",
        matching: Matching {
            sources: vec![events::SOURCE.to_owned()],
            topics: topics.map(str::to_owned).collect(),
            ..Matching::default()
        },
        start: Start::Beginning,
        handler: Arc::new(EventNews { clock }),
    }
}

struct EventNews {
    clock: Clock,
}

impl Handler for EventNews {
    /// Each locks its event, in the order of the log: together they could wait for who locks events in another order.
    fn works_alone(&self) -> bool {
        true
    }

    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> Handling<'t> {
        Box::pin(async move {
            let payload = message.payload.get();
            match message.topic.as_str() {
                events::VERSIONS => {
                    let stated: EventVersions = serde_json::from_str(payload)?;
                    flow::reconcile::compare(tx, &stated, self.clock.now()).await?;
                }
                events::RESTATED => {
                    let restated: EventRestated = serde_json::from_str(payload)?;
                    flow::reconcile::put_right(tx, &self.clock, &restated).await?;
                }
                _ => {
                    let event: EventChanged = serde_json::from_str(payload)?;
                    let learn = Command::Learn { news: News::from(&event) };
                    flow::settle(tx, &self.clock, &[Order::new(event.event_id, Actor::Events, learn)]).await?;
                }
            }
            Ok(())
        })
    }
}

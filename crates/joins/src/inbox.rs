//! The door for messages: what the events service says.

use std::sync::Arc;

use contracts::events::{self, EventChanged, EventsStated};
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
    let topics = [events::PUBLISHED, events::UPDATED, events::UNPUBLISHED, events::CANCELED, events::STATED];
    Subscription {
        consumer: "joins.events",
        matching: Matching {
            sources: vec![events::SOURCE.to_owned()],
            topics: topics.map(str::to_owned).to_vec(),
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
            let now = self.clock.now();
            if message.topic == events::STATED {
                let stated: EventsStated = serde_json::from_str(message.payload.get())?;
                flow::reconcile::reconcile(tx, &stated, now).await?;
                return Ok(());
            }
            let event: EventChanged = serde_json::from_str(message.payload.get())?;
            let learn = Command::Learn { news: News::from(&event), force: false };
            flow::settle(tx, &Order::new(event.event_id, Actor::Events, learn), now).await?;
            Ok(())
        })
    }
}

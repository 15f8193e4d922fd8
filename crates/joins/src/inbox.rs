//! Message handlers: the messages of the events service.

use std::sync::Arc;

use contracts::events::{self, EventChanged, EventRestated, EventVersions};
use pillarbox::consumers::{ConsumerOptions, Handler, HandlerFuture, StartAt, Subscription};
use pillarbox::log::{Message, MessagePattern};
use runtime::clock::Clock;
use sqlx::{Postgres, Transaction};

use crate::domain::{Actor, CommandKind, EventUpdate};
use crate::flow;
use crate::flow::command_batch::{execute, new_command};

/// One consumer, which applies the updates of events and takes part in reconciliation.
pub(crate) fn subscriptions(clock: &Clock) -> Vec<Subscription> {
    let updates = [events::PUBLISHED, events::UPDATED, events::UNPUBLISHED, events::CANCELED];
    let topics = updates.into_iter().chain([events::VERSIONS, events::RESTATED]);
    vec![Subscription {
        consumer: "joins.events".into(),
        matching: MessagePattern {
            sources: vec![events::SOURCE.to_owned()],
            topics: topics.map(str::to_owned).collect(),
            ..MessagePattern::default()
        },
        start: StartAt::Beginning,
        handler: Arc::new(EventMessages { clock: clock.clone() }),
        options: ConsumerOptions::default(),
    }]
}

struct EventMessages {
    clock: Clock,
}

impl Handler for EventMessages {
    /// One message per transaction: a batch would lock events in the order of the log, and could deadlock with the
    /// command batchers, which lock them in the order of their ids.
    fn needs_separate_transaction(&self) -> bool {
        true
    }

    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move {
            let payload = message.payload.get();
            match message.topic.as_str() {
                events::VERSIONS => {
                    let reported: EventVersions = serde_json::from_str(payload)?;
                    flow::reconcile::compare(tx, &reported, self.clock.now()).await?;
                }
                events::RESTATED => {
                    let restated: EventRestated = serde_json::from_str(payload)?;
                    flow::reconcile::repair(tx, &self.clock, &restated).await?;
                }
                _ => {
                    let event: EventChanged = serde_json::from_str(payload)?;
                    let kind = CommandKind::UpdateEvent { update: EventUpdate::from(&event) };
                    let command = new_command(event.event_id, Actor::Events, kind);
                    execute(tx, &self.clock, &[command]).await?;
                }
            }
            Ok(())
        })
    }
}

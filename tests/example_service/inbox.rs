//! The message handler of the greetings service. The processed ids make its effect happen once.

use std::sync::Arc;

use pillarbox::consumers::{ConsumerOptions, Handler, HandlerFuture, StartAt, Subscription};
use pillarbox::log::{Message, MessagePattern};
use sqlx::{Postgres, Transaction};

use super::contract::{GreetingReceived, RECEIVED, SOURCE};
use super::store;

pub(super) const CONSUMER: &str = "greetings.answer";

pub(super) fn subscription() -> Subscription {
    let (sources, topics) = (vec![SOURCE.to_owned()], vec![RECEIVED.to_owned()]);
    Subscription {
        consumer: CONSUMER.into(),
        matching: MessagePattern { sources, topics, ..MessagePattern::default() },
        start: StartAt::Beginning,
        handler: Arc::new(AnswerGreeting),
        options: ConsumerOptions::default(),
    }
}

struct AnswerGreeting;

impl Handler for AnswerGreeting {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move {
            let received: GreetingReceived = serde_json::from_str(message.payload.get())?;
            Ok(store::mark_answered(tx, received.id).await?)
        })
    }
}

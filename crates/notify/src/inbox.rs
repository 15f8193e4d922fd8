//! Message handlers: requests for e-mails, and deleted accounts.

use std::sync::Arc;

use contracts::{identity, notify};
use mailbox::consumers::{ConsumerOptions, Handler, HandlerFuture, StartAt, Subscription};
use mailbox::log::{Message, MessagePattern};
use sqlx::{Postgres, Transaction};

use crate::flow::requests::{self, Recorder};

pub(crate) const MAIL_CONSUMER: &str = "notify.mail";
pub(crate) const ACCOUNTS_CONSUMER: &str = "notify.accounts";

/// Two consumers, so that the deletion of an account does not wait for a request that is parked.
pub(crate) fn subscriptions(recorder: &Arc<Recorder>) -> Vec<Subscription> {
    let subscribe = |consumer, sources: &[&str], topic: &str, handler: Arc<dyn Handler>| {
        let sources = sources.iter().map(|source| (*source).to_owned()).collect();
        let matching = MessagePattern { sources, topics: vec![topic.to_owned()], ..MessagePattern::default() };
        Subscription { consumer, matching, start: StartAt::Beginning, handler, options: ConsumerOptions::default() }
    };
    let requests = Arc::new(MailRequests { recorder: Arc::clone(recorder) });
    vec![
        subscribe(MAIL_CONSUMER, &[identity::SOURCE, notify::SOURCE], "email.#", requests),
        subscribe(ACCOUNTS_CONSUMER, &[identity::SOURCE], identity::ACCOUNT_DELETED, Arc::new(DeletedAccounts)),
    ]
}

struct MailRequests {
    recorder: Arc<Recorder>,
}

impl Handler for MailRequests {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move { Ok(requests::record(tx, &self.recorder, &[message]).await?) })
    }

    fn handle_all<'t>(
        &'t self,
        tx: &'t mut Transaction<'static, Postgres>,
        messages: &'t [&'t Message],
    ) -> Option<HandlerFuture<'t>> {
        Some(Box::pin(async move { Ok(requests::record(tx, &self.recorder, messages).await?) }))
    }
}

struct DeletedAccounts;

impl Handler for DeletedAccounts {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move { Ok(requests::delete_accounts(tx, &[message]).await?) })
    }

    fn handle_all<'t>(
        &'t self,
        tx: &'t mut Transaction<'static, Postgres>,
        messages: &'t [&'t Message],
    ) -> Option<HandlerFuture<'t>> {
        Some(Box::pin(async move { Ok(requests::delete_accounts(tx, messages).await?) }))
    }
}

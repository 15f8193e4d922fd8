//! Message handlers: deleted accounts.

use std::sync::Arc;
use std::time::Duration;

use contracts::identity;
use pillarbox::consumers::{ConsumerOptions, Handler, HandlerFuture, RetryPolicy, StartAt, Subscription};
use pillarbox::log::{Message, MessagePattern};
use runtime::backoff::Backoff;
use runtime::worker::Wake;
use sqlx::{Postgres, Transaction};

use crate::Progress;
use crate::flow::deletion;

pub(crate) const ACCOUNTS_CONSUMER: &str = "progress.accounts";

pub(crate) fn subscriptions(progress: &Progress) -> Vec<Subscription> {
    let (sources, topics) = (vec![identity::SOURCE.to_owned()], vec![identity::ACCOUNT_DELETED.to_owned()]);
    let mut options = ConsumerOptions::default();
    // The database may be down for long, and the data must be deleted all the same.
    let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
    options.worker.retry = RetryPolicy { retries: None, backoff };
    vec![Subscription {
        consumer: ACCOUNTS_CONSUMER.into(),
        matching: MessagePattern { sources, topics, ..MessagePattern::default() },
        start: StartAt::Beginning,
        handler: Arc::new(DeletedAccounts { wakes: [progress.deletions.clone()], progress: progress.clone() }),
        options,
    }]
}

struct DeletedAccounts {
    progress: Progress,
    /// Of the worker that deletes the projects.
    wakes: [Wake; 1],
}

impl Handler for DeletedAccounts {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move { Ok(deletion::disown_projects(&self.progress, tx, message).await?) })
    }

    fn wakes_after_commit(&self) -> &[Wake] {
        &self.wakes
    }
}

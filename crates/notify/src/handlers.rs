//! Message handlers: requests for e-mails, accounts, business events, and what happens to events and registrations.

use std::sync::Arc;

use contracts::{events, identity, joins, notify};
use pillarbox::consumers::{ConsumerOptions, Handler, HandlerError, HandlerFuture, StartAt, Subscription};
use pillarbox::log::{Message, MessagePattern};
use runtime::worker::Wake;
use sqlx::{Postgres, Transaction};

use crate::domain::policy::Policy;
use crate::flow::requests::{self, Recorder};
use crate::flow::{contacts, expansion, participants};
use crate::workers::Wakes;

pub(crate) const MAIL_CONSUMER: &str = "notify.mail";
pub(crate) const ACCOUNTS_CONSUMER: &str = "notify.accounts";
pub(crate) const CONTACTS_CONSUMER: &str = "notify.contacts";
pub(crate) const EVENTS_CONSUMER: &str = "notify.events";
pub(crate) const REGISTRATIONS_CONSUMER: &str = "notify.people";

/// The messages of a batch of a listener: each batch is some statements, however large it is.
const LISTENER_BATCH: u32 = 500;
/// One prepares a batch while the database writes another.
const LISTENER_WORKERS: u32 = 2;

/// Several consumers, so that the deletion of an account does not wait for a request that is parked.
pub(crate) fn subscriptions(recorder: &Arc<Recorder>, policy: &Arc<Policy>, wakes: &Wakes) -> Vec<Subscription> {
    let subscribe = |consumer: &'static str, sources: &[&str], topics: &[&str], handler: Arc<dyn Handler>| {
        let texts = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
        let matching = MessagePattern { sources: texts(sources), topics: texts(topics), ..MessagePattern::default() };
        let options = ConsumerOptions::default();
        Subscription { consumer: consumer.into(), matching, start: StartAt::Beginning, handler, options }
    };
    let requests = Arc::new(MailRequests { recorder: Arc::clone(recorder), wakes: [wakes.mails.clone()] });
    let policy = Arc::clone(policy);
    let people = subscribe(
        REGISTRATIONS_CONSUMER,
        &[joins::SOURCE],
        &REGISTRATIONS,
        Arc::new(EventMessages::Registrations { policy: Arc::clone(&policy), wakes: wakes.of_notifications() }),
    );
    vec![
        subscribe(MAIL_CONSUMER, &[identity::SOURCE, notify::SOURCE], &["email.#"], requests),
        subscribe(ACCOUNTS_CONSUMER, &[identity::SOURCE], &[identity::ACCOUNT_DELETED], Arc::new(DeletedAccounts)),
        subscribe(
            CONTACTS_CONSUMER,
            &[identity::CONTACTS_SOURCE],
            &[identity::ACCOUNT_CONTACT_CHANGED],
            Arc::new(EventMessages::Contacts),
        ),
        subscribe(EVENTS_CONSUMER, &[events::SOURCE], &CHANGES, Arc::new(EventMessages::Changes { policy })),
        people,
    ]
}

/// The messages about registrations that users are notified of.
const REGISTRATIONS: [&str; 7] = [
    joins::CONFIRMED,
    joins::CANCELED,
    joins::WAITLISTED,
    joins::PROMOTED,
    joins::EXPIRED,
    joins::KICKED,
    joins::BANNED,
];

/// The messages with the state of an event.
const CHANGES: [&str; 5] =
    [events::PUBLISHED, events::UPDATED, events::UNPUBLISHED, events::CANCELED, events::RESTATED];

/// The consumer of the business events of an aggregate type.
pub(crate) fn listener_name(aggregate_type: &str) -> String {
    format!("notify.{}", aggregate_type.to_lowercase())
}

/// The listener of an aggregate type. Its name is lower case, so it differs from those of the other consumers, unless a type
/// is called like one of them: see [`RESERVED_TYPES`].
pub(crate) fn listener(aggregate_type: String, policy: &Arc<Policy>, wakes: &Wakes) -> Subscription {
    let mut options = ConsumerOptions::default();
    options.worker.batch = LISTENER_BATCH;
    options.workers = LISTENER_WORKERS;
    Subscription {
        consumer: listener_name(&aggregate_type).into(),
        matching: MessagePattern {
            sources: vec![notify::SOURCE.to_owned()],
            topics: Vec::new(),
            aggregate_types: vec![aggregate_type.clone()],
        },
        start: StartAt::Beginning,
        handler: Arc::new(EventMessages::Business {
            aggregate_type,
            policy: Arc::clone(policy),
            wakes: wakes.of_notifications(),
        }),
        options,
    }
}

/// The names that listeners must not have, because other consumers of this service have them.
pub(crate) const RESERVED_TYPES: [&str; 5] = ["MAIL", "ACCOUNTS", "CONTACTS", "EVENTS", "PEOPLE"];

/// The messages that become notifications, or that decide about them.
enum EventMessages {
    Business { aggregate_type: String, policy: Arc<Policy>, wakes: [Wake; 2] },
    Registrations { policy: Arc<Policy>, wakes: [Wake; 2] },
    Changes { policy: Arc<Policy> },
    Contacts,
}

impl EventMessages {
    async fn process(
        &self,
        tx: &mut Transaction<'static, Postgres>,
        messages: &[&Message],
    ) -> Result<(), HandlerError> {
        match self {
            EventMessages::Business { aggregate_type, policy, .. } => {
                expansion::expand(tx, aggregate_type, policy, messages).await?;
            }
            EventMessages::Registrations { policy, .. } => {
                participants::notify_of_registrations(tx, policy, messages).await?
            }
            EventMessages::Changes { policy } => participants::record_changes(tx, policy, messages).await?,
            EventMessages::Contacts => contacts::save_contacts(tx, messages).await?,
        }
        Ok(())
    }
}

impl Handler for EventMessages {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move { self.process(tx, &[message]).await })
    }

    fn handle_all<'t>(
        &'t self,
        tx: &'t mut Transaction<'static, Postgres>,
        messages: &'t [&'t Message],
    ) -> Option<HandlerFuture<'t>> {
        Some(Box::pin(self.process(tx, messages)))
    }

    fn wakes_after_commit(&self) -> &[Wake] {
        match self {
            EventMessages::Business { wakes, .. } | EventMessages::Registrations { wakes, .. } => wakes,
            EventMessages::Changes { .. } | EventMessages::Contacts => &[],
        }
    }
}

struct MailRequests {
    recorder: Arc<Recorder>,
    wakes: [Wake; 1],
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

    fn wakes_after_commit(&self) -> &[Wake] {
        &self.wakes
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

//! Notify: notifies people of what concerns them. Its mail part sends the e-mails that other services request.
//!
//! Owns the schema `pillarbox_notify`: e-mails, notifications, recipients, contacts, preferences, and the ids of
//! deleted accounts. Publishes business events for other applications (`POST /notify/v1/events`), and consumes them: one
//! listener for each aggregate type turns them into notifications (`notify.restaurant` and so on). Consumes
//! `account.contact_changed` of identity (`notify.contacts`), the changes of events (`notify.events`) and of registrations
//! (`notify.people`), and notifies the users of them. Posts hub events `notification.<event type>`.
//!
//! Consumes `email.#` of the sources `identity` and `notify` (consumer `notify.mail`): each
//! [`contracts::email::EmailRequested`] is rendered and recorded in the transaction of its handler. The sender, a worker in
//! processes with the role `dispatch`, sends what is recorded. Consumes `account.deleted` of identity (consumer
//! `notify.accounts`), deletes every e-mail of the user, and blanks the requests for them in its log.
//!
//! A notification is one row for each event, person and channel. [`flow::delivery`] turns those that are due into e-mails and
//! hub events, in one transaction with their results; those of the inbox are delivered when they are inserted, and
//! [`flow::inbox`] streams them.
//!
//! Invariants: one notification for each event, person and channel, and no gap in the numbers of an inbox. One e-mail for each
//! message of the log, and for each idempotency key of a source. No transaction is open
//! during a transfer; an e-mail is claimed for a limited time instead. An e-mail is sent at least once, always with the same
//! Message-ID. The bodies, which contain secrets, are erased when they are no longer needed: [`domain::Status::has_bodies`].
//! No address, body or variable is logged or part of an error.

mod address;
mod compose;
mod counters;
#[cfg(test)]
mod delivery_rules_test;
mod domain;
mod error;
mod flow;
mod handlers;
mod http;
mod settings;
mod smtp;
mod store;
mod templates;
mod unsubscribe;
mod view;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use chrono::TimeDelta;
use http_kit::admission::gates::Gates;
use http_kit::page::CursorKey;
use pillarbox::consumers::{Runtime, Subscription};
use pillarbox::database::time::maintain;
use pillarbox::database::{Database, SchemaMigrations};
use pillarbox::log::Tenant;
use pillarbox::log::aggregate_types;
use pillarbox::operations::maintenance::Retention;
use runtime::MetricHelp;
use runtime::backoff::Backoff;
use runtime::config::InvalidSetting;
use runtime::worker::Worker;
use service::{AddedSubscriptions, DeletedRows, Role, Roles, Service, ServiceContext};
use sqlx::PgConnection;
use tokio::sync::Semaphore;
use utoipa_axum::router::OpenApiRouter;

pub use crate::domain::delivery_rules::Channel;
pub use crate::flow::operator::{given_up, retry_dead_mails, retry_dead_notifications};
pub use crate::settings::{MailSettings, NotifySettings, Settings, Starttls};
pub use crate::store::notifications::DeadNotifications;
pub use crate::store::{DeadMails, GivenUp};
pub use crate::view::BulkRetry;

use crate::compose::Sender;
use crate::domain::Status;
use crate::domain::policy::Policy;
use crate::flow::delivery::{Deliverer, EmailTexts};
use crate::flow::inbox::InboxStreams;
use crate::flow::requests::Recorder;
use crate::flow::retention::UnknownEvents;
use crate::flow::sending::{MailSender, Outgoing};
use crate::smtp::SmtpClient;
use crate::templates::Templates;
use crate::unsubscribe::UnsubscribeLinks;
use crate::workers::Wakes;

/// The migrations of the schema `pillarbox_notify`.
pub const MIGRATIONS: SchemaMigrations =
    SchemaMigrations { schema: "pillarbox_notify", texts: &[include_str!("../migrations/0001_pillarbox_notify.sql")] };

/// The longest time until the sender finds an e-mail that is due and that another process has recorded.
const SENDER_PAUSE: Duration = Duration::from_millis(500);
/// Time between two checks for e-mails that no process sends.
const OVERDUE_PAUSE: Duration = Duration::from_secs(5);
/// The longest time until participants are notified of a change of their event.
const ANNOUNCEMENT_PAUSE: Duration = Duration::from_secs(1);
/// The longest time until a notification that is due is delivered.
const DELIVERY_PAUSE: Duration = Duration::from_millis(500);
/// The longest time until a stream notices a notification that another process has committed.
const STREAMS_PAUSE: Duration = Duration::from_millis(500);
/// Time between two runs of the retention task.
const RETENTION_PAUSE: Duration = Duration::from_secs(10);

/// The notify service of one process.
pub struct Notify {
    pub(crate) db: Database,
    pub(crate) cursor_key: CursorKey,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) wakes: Wakes,
    /// None: e-mails are captured, or shadowed.
    outgoing: Option<Outgoing>,
    pub(crate) policy: Arc<Policy>,
    pub(crate) links: Arc<UnsubscribeLinks>,
    pub(crate) streams: Arc<InboxStreams>,
    /// Posts of the same event id wait for each other without a connection.
    pub(crate) event_gates: Gates<String>,
    settings: Settings,
    log_retention: Retention,
}

impl Service for Notify {
    const NAME: &'static str = "notify";
    const DESCRIPTION: &'static str = "E-mails and notifications. API keys of the tenant `main` post business events and manage recipients; operators \
         manage aggregate types and see e-mails.";
    const WORK: &'static [(Role, &'static str)] = &[
        (Role::Consume, handlers::MAIL_CONSUMER),
        (Role::Consume, handlers::ACCOUNTS_CONSUMER),
        (Role::Consume, handlers::CONTACTS_CONSUMER),
        (Role::Consume, handlers::EVENTS_CONSUMER),
        (Role::Consume, handlers::REGISTRATIONS_CONSUMER),
    ];
    const METRICS: &'static [MetricHelp] = &[
        ("pillarbox_mail_sent_total", "E-mails that the mail server has accepted."),
        ("pillarbox_mail_failures_total", "Attempts to send that were deferred, refused, or failed for the server."),
        ("pillarbox_mail_dead_total", "E-mails that were given up."),
        ("pillarbox_mail_queued", "E-mails that wait to be sent, counted up to 100,000."),
        ("pillarbox_mail_dead", "E-mails that were given up and can be retried, counted up to 100,000."),
        ("pillarbox_mail_oldest_seconds", "The age of the oldest e-mail that waits to be sent."),
        ("pillarbox_notifications_delivered_total", "Notifications that became e-mails or hub events, by channel."),
        ("pillarbox_notifications_skipped_total", "Notifications that were muted or undeliverable, by channel."),
        ("pillarbox_notifications_failures_total", "Attempts to deliver a notification that failed, by channel."),
        ("pillarbox_notifications_dead_total", "Notifications that were given up, by channel."),
        ("pillarbox_notifications_due", "Notifications that are due, counted up to 100,000."),
        ("pillarbox_notifications_dead", "Notifications that were given up and can be retried, counted up to 100,000."),
        ("pillarbox_notifications_oldest_seconds", "The time since the oldest notification that waits was due."),
        ("pillarbox_inbox_users_connected", "Users with an open stream of their inbox."),
    ];
    const MIGRATIONS: SchemaMigrations = MIGRATIONS;
    type Settings = Settings;

    fn delete_tenant_rows<'a>(db: &'a mut PgConnection, tenant: &'a Tenant, limit: i64) -> DeletedRows<'a> {
        Box::pin(store::recipients::remove_tenant(db, tenant, limit))
    }

    fn check(settings: &Settings) -> Result<(), InvalidSetting> {
        settings.notify.check()?;
        settings.mail.check()
    }

    fn build(context: &ServiceContext, settings: &Settings) -> Result<Notify, InvalidSetting> {
        counters::register();
        let mail = &settings.mail;
        let templates = Templates::load(mail.templates_dir.as_deref())
            .map_err(|error| InvalidSetting::new("mail.templates_dir", error))?;
        let outgoing = outgoing(context, mail)?;
        let status = match &outgoing {
            _ if mail.shadow => Status::Shadowed,
            Some(_) => Status::Queued,
            None => Status::Captured,
        };
        let retry_time = TimeDelta::hours(i64::from(mail.retry_hours));
        let streams = Arc::new(InboxStreams::new(context.db.clone()));
        let open = Arc::downgrade(&streams);
        context.db.on_invalidation(move || open.upgrade().iter().for_each(|streams| streams.end_all()));
        Ok(Notify {
            db: context.db.clone(),
            cursor_key: context.cursor_key.clone(),
            recorder: Arc::new(Recorder { templates, status, retry_time }),
            wakes: Wakes::default(),
            outgoing: outgoing.filter(|_| !mail.shadow),
            policy: Arc::new(settings.policy()),
            links: Arc::new(UnsubscribeLinks::new(
                context.derived_key("notify unsubscribe"),
                context.public_url.clone(),
            )),
            streams,
            event_gates: Gates::new(1),
            settings: settings.clone(),
            log_retention: context.retention,
        })
    }

    fn routes() -> OpenApiRouter<Arc<Notify>> {
        http::router()
    }

    fn subscriptions(&self) -> Vec<Subscription> {
        handlers::subscriptions(&self.recorder, &self.policy, &self.wakes)
    }

    fn added_subscriptions<'a>(&'a self, db: &'a Database) -> AddedSubscriptions<'a> {
        Box::pin(async move {
            let types = aggregate_types(&mut *db.acquire().await?).await?;
            Ok(types.into_iter().map(|one| handlers::listener(one, &self.policy, &self.wakes)).collect())
        })
    }

    fn start_workers(&self, runtime: &Runtime, roles: &Roles) {
        if roles.contains(Role::Consume) {
            let worker = runtime.worker("notify.announcements".to_owned(), ANNOUNCEMENT_PAUSE);
            let (db, policy, wakes) = (runtime.db().clone(), Arc::clone(&self.policy), self.wakes.clone());
            runtime.spawn(async move { worker.run(|| workers::announce(&db, &policy, &wakes)).await });
        }
        if roles.contains(Role::Api) {
            let worker = runtime.worker("notify.streams".to_owned(), STREAMS_PAUSE);
            let worker = Worker { wake: self.wakes.streams.clone(), ..worker };
            runtime.spawn(workers::watch_streams(worker, Arc::clone(&self.streams)));
        }
        if !roles.contains(Role::Dispatch) {
            return;
        }
        let worker = runtime.worker("notify.delivery".to_owned(), DELIVERY_PAUSE);
        let worker = Worker { wake: self.wakes.deliveries.clone(), ..worker };
        let (deliverer, wakes) = (self.deliverer(runtime), self.wakes.clone());
        runtime.spawn(async move { worker.run(|| workers::deliver(&deliverer, &wakes)).await });
        let Some(outgoing) = self.outgoing.clone() else { return self.watch_overdue(runtime) };
        let limits = workers::sender_limits(&outgoing);
        let worker = runtime.worker("notify.sender".to_owned(), SENDER_PAUSE).with_limits(limits);
        let worker = Worker { wake: self.wakes.mails.clone(), ..worker };
        let sender = MailSender::new(runtime.db().clone(), outgoing, worker.stop.clone());
        runtime.spawn(async move { worker.run(|| workers::send(&sender)).await });
    }

    fn start_maintenance(&self, runtime: &Runtime) {
        let worker = runtime.worker("notify.retention".to_owned(), RETENTION_PAUSE);
        let (db, settings, log) = (runtime.db().clone(), self.settings.clone(), self.log_retention);
        let unknown = UnknownEvents::default();
        runtime.spawn(async move {
            worker.run(|| maintain(db.pool(), flow::retention::maintain(&db, &settings, log, &unknown))).await;
        });
    }
}

impl Notify {
    /// Without a mail server, no process sends the e-mails that were queued when there was one.
    fn watch_overdue(&self, runtime: &Runtime) {
        let worker = runtime.worker("notify.sender".to_owned(), OVERDUE_PAUSE);
        let (db, is_shadow) = (runtime.db().clone(), self.settings.mail.shadow);
        runtime.spawn(async move { worker.run(|| workers::check_overdue(&db, is_shadow)).await });
    }

    fn deliverer(&self, runtime: &Runtime) -> Deliverer {
        let millis = |value: u32| Duration::from_millis(u64::from(value));
        let mail = &self.settings.mail;
        let emails = EmailTexts { recorder: Arc::clone(&self.recorder), links: Arc::clone(&self.links) };
        let backoff = Backoff::new(millis(mail.retry_first_ms), millis(mail.retry_max_ms));
        Deliverer::new(runtime.db().clone(), self.policy.default_rules.clone(), emails, backoff)
    }
}

/// How e-mails are sent; None if there is no mail server.
fn outgoing(context: &ServiceContext, settings: &MailSettings) -> Result<Option<Outgoing>, InvalidSetting> {
    let Some(url) = &context.smtp_url else { return Ok(None) };
    let sender = Sender { from: settings.sender()?, reply_to: settings.answers_to()? };
    let client = Arc::new(SmtpClient::new(url, settings, sender.from.email.domain())?);
    let millis = |value: u32| Duration::from_millis(u64::from(value));
    Ok(Some(Outgoing {
        client,
        sender,
        backoff: Backoff::new(millis(settings.retry_first_ms), millis(settings.retry_max_ms)),
        slots: Arc::new(Semaphore::new(settings.concurrency as usize)),
        claimed_max: 2 * settings.concurrency as usize,
        lease_time: context.lease_time,
    }))
}

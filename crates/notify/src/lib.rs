//! Notify: tells people what concerns them. Its mail part sends the e-mails that other services request.
//!
//! Owns the schema `pillarbox_notify`: e-mails, and the ids of deleted accounts. Publishes nothing yet.
//!
//! Consumes `email.#` of the sources `identity` and `notify` (consumer `notify.mail`): each
//! [`contracts::email::EmailRequested`] is rendered and recorded in the transaction of the inbox. The sender, a worker in
//! processes with the role `dispatch`, sends what is recorded. Consumes `account.deleted` of identity (consumer
//! `notify.accounts`), deletes every e-mail of the user, and blanks the requests for them in its log.
//!
//! Invariants: one e-mail for each message of the log, and for each idempotency key of a source. No transaction is open
//! during a transfer; an e-mail is claimed for a limited time instead. An e-mail is sent at least once, always with the same
//! Message-ID. The bodies, which contain secrets, are erased when they are no longer needed: [`domain::Status::has_bodies`].
//! No address, body or variable is logged or part of an error.

mod address;
mod compose;
mod domain;
mod error;
mod flow;
mod http;
mod inbox;
mod settings;
mod smtp;
mod store;
mod templates;
mod view;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use chrono::TimeDelta;
use kit::backoff::Backoff;
use kit::config::InvalidSetting;
use kit::page::CursorKey;
use kit::telemetry::MetricHelp;
use mailbox::consumers::{Runtime, Subscription};
use mailbox::database::Database;
use mailbox::database::time::maintain;
use mailbox::operations::maintenance::Retention;
use mailbox::service::{Role, Roles, Service, ServiceContext};
use tokio::sync::Semaphore;
use utoipa_axum::router::OpenApiRouter;

pub use crate::settings::{MailSettings, Starttls};

use crate::compose::Sender;
use crate::domain::Status;
use crate::flow::requests::Recorder;
use crate::flow::sending::{MailSender, Outgoing};
use crate::smtp::SmtpClient;
use crate::templates::Templates;

/// The longest time until the sender finds an e-mail that is due.
const SENDER_PAUSE: Duration = Duration::from_millis(500);
/// Time between two runs of the retention task.
const RETENTION_PAUSE: Duration = Duration::from_secs(10);

/// The notify service of one process.
pub struct Notify {
    pub(crate) db: Database,
    pub(crate) cursor_key: CursorKey,
    pub(crate) recorder: Arc<Recorder>,
    /// None: e-mails are captured, or shadowed.
    outgoing: Option<Outgoing>,
    settings: MailSettings,
    log_retention: Retention,
}

impl Service for Notify {
    const NAME: &'static str = "notify";
    const DESCRIPTION: &'static str = "E-mails and notifications. Only operators see e-mails.";
    const WORK: &'static [(Role, &'static str)] =
        &[(Role::Consume, inbox::MAIL_CONSUMER), (Role::Consume, inbox::ACCOUNTS_CONSUMER)];
    const METRICS: &'static [MetricHelp] = &[
        ("pillarbox_mail_sent_total", "E-mails that the mail server has accepted."),
        ("pillarbox_mail_failures_total", "Attempts to send that were deferred, refused, or failed for the server."),
        ("pillarbox_mail_dead_total", "E-mails that were given up."),
        ("pillarbox_mail_queued", "E-mails that wait to be sent, counted up to 100,000."),
        ("pillarbox_mail_dead", "E-mails that were given up and can be retried, counted up to 100,000."),
        ("pillarbox_mail_oldest_seconds", "The age of the oldest e-mail that waits to be sent."),
    ];
    type Settings = MailSettings;

    fn check(settings: &MailSettings) -> Result<(), InvalidSetting> {
        settings.check()
    }

    fn build(context: &ServiceContext, settings: &MailSettings) -> Result<Notify, InvalidSetting> {
        let templates = Templates::load(settings.templates_dir.as_deref())
            .map_err(|error| InvalidSetting::new("mail.templates_dir", error))?;
        let outgoing = outgoing(context, settings)?;
        let status = match (settings.shadow, &outgoing) {
            (true, _) => Status::Shadowed,
            (false, Some(_)) => Status::Queued,
            (false, None) => Status::Captured,
        };
        let retry_time = TimeDelta::hours(i64::from(settings.retry_hours));
        Ok(Notify {
            db: context.db.clone(),
            cursor_key: context.cursor_key.clone(),
            recorder: Arc::new(Recorder { templates, status, retry_time }),
            outgoing: outgoing.filter(|_| !settings.shadow),
            settings: settings.clone(),
            log_retention: context.retention,
        })
    }

    fn routes() -> OpenApiRouter<Arc<Notify>> {
        http::router()
    }

    fn subscriptions(&self) -> Vec<Subscription> {
        inbox::subscriptions(&self.recorder)
    }

    fn start_workers(&self, runtime: &Runtime, roles: &Roles) {
        let Some(outgoing) = self.outgoing.clone().filter(|_| roles.contains(Role::Dispatch)) else { return };
        let limits = workers::sender_limits(&outgoing);
        let worker = runtime.worker("notify.sender".to_owned(), SENDER_PAUSE).with_limits(limits);
        let sender = MailSender::new(runtime.db().clone(), outgoing, worker.stop.clone());
        runtime.spawn(async move { worker.run(|| workers::send(&sender)).await });
    }

    fn start_maintenance(&self, runtime: &Runtime) {
        let worker = runtime.worker("notify.retention".to_owned(), RETENTION_PAUSE);
        let (db, settings, log) = (runtime.db().clone(), self.settings.clone(), self.log_retention);
        runtime.spawn(async move { worker.run(|| maintain(db.pool(), workers::maintain(&db, &settings, log))).await });
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

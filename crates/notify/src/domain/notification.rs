//! Notifications, and what follows from an attempt to deliver one.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use runtime::backoff::Backoff;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::business_event::{BusinessEvent, EventColumns};
use super::delivery_rules::Channel;

/// After this many failures a notification is dead.
pub(crate) const ATTEMPTS_MAX: u32 = 5;
/// The longest stored error, in characters.
const ERROR_CHARS_MAX: usize = 500;

/// The status of a notification.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, strum::EnumString, strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[schema(as = NotificationStatus)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub(crate) enum NotificationStatus {
    /// It is delivered when it is due.
    Waiting,
    /// It is in the inbox, in the queue of e-mails, or an event of the hub.
    Delivered,
    /// Its attempts failed. An operator can retry it.
    Dead,
    /// It could not be delivered, or was no longer wanted.
    Skipped,
}

/// How to reach a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Contact {
    pub(crate) email: Option<String>,
    pub(crate) name: String,
    pub(crate) locale: String,
    pub(crate) tenant: Option<String>,
    /// Whether the tenant exists. Only webhooks need it; an e-mail does not read it.
    pub(crate) is_tenant_known: bool,
}

/// The columns of a [`Contact`]. Without one, all but the last are null.
#[derive(sqlx::FromRow)]
struct ContactColumns {
    email: Option<String>,
    name: Option<String>,
    locale: Option<String>,
    tenant: Option<String>,
    is_tenant_known: bool,
}

impl From<ContactColumns> for Option<Contact> {
    fn from(columns: ContactColumns) -> Option<Contact> {
        let ContactColumns { email, name, locale, tenant, is_tenant_known } = columns;
        Some(Contact { email, name: name?, locale: locale?, tenant, is_tenant_known })
    }
}

/// A notification that is to be delivered now.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct DueNotification {
    pub(crate) id: i64,
    pub(crate) user_id: Uuid,
    #[sqlx(try_from = "&'a str")]
    pub(crate) channel: Channel,
    /// The failures so far.
    #[sqlx(try_from = "i32")]
    pub(crate) attempts: u32,
    /// Whose e-mails wait in one queue; None: those of the user.
    pub(crate) sender: Option<String>,
    /// None: it was deleted after its retention, or it was not loaded because a digest only counts it.
    #[sqlx(flatten, try_from = "EventColumns")]
    pub(crate) event: Option<BusinessEvent>,
    #[sqlx(flatten, try_from = "ContactColumns")]
    pub(crate) contact: Option<Contact>,
    pub(crate) has_deleted_account: bool,
}

/// The outcome of an attempt to deliver a notification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DeliveryOutcome {
    Delivered,
    /// It cannot be delivered, or is not wanted; the reason.
    Skipped(&'static str),
    /// It is due at another time.
    Postponed(DateTime<Utc>),
    /// It failed; the reason.
    Failed(String),
}

/// Why something is not delivered now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotNow {
    /// It is not wanted; the reason.
    Skipped(&'static str),
    /// It is due at another time.
    Postponed(DateTime<Utc>),
}

impl From<NotNow> for DeliveryOutcome {
    fn from(reason: NotNow) -> DeliveryOutcome {
        match reason {
            NotNow::Skipped(reason) => DeliveryOutcome::Skipped(reason),
            NotNow::Postponed(due_at) => DeliveryOutcome::Postponed(due_at),
        }
    }
}

/// The state of a notification after an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeliveryResult {
    pub(crate) id: i64,
    pub(crate) status: NotificationStatus,
    pub(crate) due_at: Option<DateTime<Utc>>,
    pub(crate) attempts: u32,
    pub(crate) error: Option<String>,
}

impl DueNotification {
    /// The state after an attempt. `random` is uniform in 0..=1.
    pub(crate) fn after(
        &self,
        outcome: DeliveryOutcome,
        now: DateTime<Utc>,
        backoff: Backoff,
        random: f64,
    ) -> DeliveryResult {
        after(self.id, self.attempts, outcome, now, backoff, random)
    }
}

/// The state after an attempt to deliver the notification with this id and so many failures.
pub(crate) fn after(
    id: i64,
    attempts: u32,
    outcome: DeliveryOutcome,
    now: DateTime<Utc>,
    backoff: Backoff,
    random: f64,
) -> DeliveryResult {
    let result = |status, due_at, error| DeliveryResult { id, status, due_at, attempts, error };
    match outcome {
        DeliveryOutcome::Delivered => result(NotificationStatus::Delivered, None, None),
        DeliveryOutcome::Skipped(reason) => result(NotificationStatus::Skipped, None, Some(reason.to_owned())),
        DeliveryOutcome::Postponed(due_at) => result(NotificationStatus::Waiting, Some(due_at), None),
        DeliveryOutcome::Failed(error) => {
            let attempts = attempts + 1;
            let error = Some(error.chars().take(ERROR_CHARS_MAX).collect());
            let pause = time_delta(backoff.pause_with_jitter(attempts, random));
            let (status, due_at) = if attempts >= ATTEMPTS_MAX {
                (NotificationStatus::Dead, None)
            } else {
                (NotificationStatus::Waiting, Some(now + pause))
            };
            DeliveryResult { attempts, ..result(status, due_at, error) }
        }
    }
}

fn time_delta(duration: Duration) -> TimeDelta {
    TimeDelta::from_std(duration).unwrap_or(TimeDelta::days(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(60));

    fn after(attempts: u32, outcome: DeliveryOutcome) -> DeliveryResult {
        let notification = DueNotification {
            id: 1,
            user_id: Uuid::nil(),
            channel: Channel::Email,
            attempts,
            sender: None,
            event: None,
            contact: None,
            has_deleted_account: false,
        };
        notification.after(outcome, DateTime::UNIX_EPOCH, BACKOFF, 0.5)
    }

    #[test]
    fn a_failure_is_repeated_later_until_it_is_dead() {
        let failed = || DeliveryOutcome::Failed("x".repeat(1_000));
        let first = after(0, failed());
        assert_eq!((first.status, first.attempts), (NotificationStatus::Waiting, 1));
        assert_eq!(first.due_at, Some(DateTime::UNIX_EPOCH + TimeDelta::seconds(10)));
        assert_eq!(first.error.map(|error| error.len()), Some(ERROR_CHARS_MAX));
        let last = after(ATTEMPTS_MAX - 1, failed());
        assert_eq!((last.status, last.due_at), (NotificationStatus::Dead, None));
        let postponed = after(2, DeliveryOutcome::Postponed(DateTime::UNIX_EPOCH));
        assert_eq!((postponed.status, postponed.attempts), (NotificationStatus::Waiting, 2));
    }
}

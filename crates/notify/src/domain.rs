//! E-mails and their statuses, and what follows from an attempt to send one.
//!
//! The rest of the domain: [`business_event`], [`delivery_rules`], [`notification`], [`participants`] and [`policy`].

pub(crate) mod business_event;
pub(crate) mod delivery_rules;
pub(crate) mod notification;
pub(crate) mod participants;
pub(crate) mod policy;

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use runtime::backoff::Backoff;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// The longest stored error or server reply, in characters.
const ERROR_CHARS_MAX: usize = 500;

/// The status of an e-mail.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    ToSchema,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[schema(as = EmailStatus)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub(crate) enum Status {
    /// It waits for its first attempt or for a retry.
    Queued,
    /// The mail server has accepted it.
    Sent,
    /// There is no mail server: operators can read it instead.
    Captured,
    /// The mail server refused it, or its retries failed. An operator can retry it.
    Dead,
    /// It was of no use before it could be sent.
    Expired,
    /// It was rendered and recorded, but another system sends it (`mail.shadow`).
    Shadowed,
}

impl Status {
    /// Whether the row of the e-mail contains its bodies. They may contain secrets, so they exist only while they are
    /// needed.
    pub(crate) fn has_bodies(self) -> bool {
        match self {
            Status::Queued | Status::Captured | Status::Dead => true,
            Status::Sent | Status::Expired | Status::Shadowed => false,
        }
    }

    /// Whether operators may read the bodies. The others are on their way to a person, whose secrets they contain.
    pub(crate) fn shows_bodies(self) -> bool {
        self == Status::Captured
    }
}

/// An e-mail that a service requested, rendered.
#[derive(Debug, Clone)]
pub(crate) struct NewMail {
    pub(crate) message_id: Uuid,
    pub(crate) source: String,
    pub(crate) idempotency_key: String,
    pub(crate) user_id: Option<Uuid>,
    pub(crate) recipient: String,
    pub(crate) template: String,
    pub(crate) content: Content,
    /// The address of one-click unsubscribe (RFC 8058), if the recipient can unsubscribe.
    pub(crate) unsubscribe: Option<String>,
    /// Whose e-mails wait in one queue: the queues take turns. It is an account or an aggregate.
    pub(crate) sender: String,
    pub(crate) status: Status,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) give_up_at: DateTime<Utc>,
    pub(crate) expires_at: Option<DateTime<Utc>>,
}

/// A rendered template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Content {
    /// The locale of the template, which may be a fallback.
    pub(crate) locale: String,
    /// One line.
    pub(crate) subject: String,
    pub(crate) text: String,
    pub(crate) html: String,
}

/// An e-mail that this process has claimed.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct ClaimedMail {
    pub(crate) id: i64,
    pub(crate) claim: Uuid,
    pub(crate) message_id: Uuid,
    pub(crate) recipient: String,
    pub(crate) template: String,
    pub(crate) subject: String,
    pub(crate) text: String,
    pub(crate) html: String,
    pub(crate) unsubscribe: Option<String>,
    /// The attempts so far.
    #[sqlx(try_from = "i32")]
    pub(crate) attempts: u32,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) give_up_at: DateTime<Utc>,
    pub(crate) expires_at: Option<DateTime<Utc>>,
    /// The database's time of the claim.
    pub(crate) now: DateTime<Utc>,
}

/// The result of an attempt to send an e-mail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// The server accepted it; its reply.
    Accepted(String),
    /// The server refused this e-mail for now, or the connection broke during its transfer.
    Deferred(String),
    /// The server refused this e-mail for good.
    Refused(String),
    /// The server cannot be used at all: it cannot be reached, or it refuses us. No e-mail is to blame.
    ServerFailed(ServerFailure),
    /// It expired before this attempt.
    Expired,
}

/// Why the server cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServerFailure {
    /// For the log and for readiness, which are public: nothing of a reply but its codes.
    pub(crate) summary: String,
    /// For operators: with the text of the reply, which may contain addresses.
    pub(crate) detail: String,
}

impl ServerFailure {
    /// A failure without a reply of the server, such as a lost connection.
    pub(crate) fn without_reply(text: String) -> ServerFailure {
        ServerFailure { summary: text.clone(), detail: text }
    }
}

/// The state of an e-mail that is saved after an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AttemptResult {
    pub(crate) id: i64,
    pub(crate) claim: Uuid,
    pub(crate) status: Status,
    /// Whether the server has seen this e-mail.
    pub(crate) counts: bool,
    pub(crate) pause: Duration,
    pub(crate) reply: Option<String>,
    pub(crate) error: Option<String>,
}

impl ClaimedMail {
    pub(crate) fn is_expired(&self) -> bool {
        self.expires_at.is_some_and(|expires_at| expires_at <= self.now)
    }

    /// The result of an attempt. `random` is uniform in 0..=1.
    pub(crate) fn after(&self, attempt: Attempt, backoff: Backoff, random: f64) -> AttemptResult {
        let result = AttemptResult {
            id: self.id,
            claim: self.claim,
            status: Status::Queued,
            counts: true,
            pause: Duration::ZERO,
            reply: None,
            error: None,
        };
        match attempt {
            Attempt::Accepted(reply) => AttemptResult { status: Status::Sent, reply: Some(one_line(&reply)), ..result },
            Attempt::Refused(error) => AttemptResult { status: Status::Dead, error: Some(one_line(&error)), ..result },
            Attempt::Expired => AttemptResult { status: Status::Expired, counts: false, ..result },
            Attempt::Deferred(error) => {
                let pause = whole_millis(backoff.pause_with_jitter(self.attempts.saturating_add(1), random));
                let status = self.after_failure(pause);
                AttemptResult { status, pause, error: Some(one_line(&error)), ..result }
            }
            // The sender pauses as a whole, so the e-mail is due again at once.
            Attempt::ServerFailed(failure) => {
                let status = self.after_failure(Duration::ZERO);
                AttemptResult { status, counts: false, error: Some(one_line(&failure.detail)), ..result }
            }
        }
    }

    /// An e-mail whose next attempt would be too late is dead.
    fn after_failure(&self, pause: Duration) -> Status {
        let next_at = self.now + TimeDelta::from_std(pause).unwrap_or(TimeDelta::MAX);
        if next_at >= self.give_up_at { Status::Dead } else { Status::Queued }
    }
}

/// PostgreSQL's intervals have no nanoseconds.
fn whole_millis(time: Duration) -> Duration {
    Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// Replaces line breaks and control characters with blanks, and cuts the text.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(ERROR_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(900));

    fn claimed(attempts: u32, hours_left: i64) -> ClaimedMail {
        let now = DateTime::UNIX_EPOCH;
        ClaimedMail {
            id: 1,
            claim: Uuid::nil(),
            message_id: Uuid::nil(),
            recipient: "a@example.org".to_owned(),
            template: "verification".to_owned(),
            subject: "s".to_owned(),
            text: "t".to_owned(),
            html: "h".to_owned(),
            unsubscribe: None,
            attempts,
            created_at: now,
            give_up_at: now + TimeDelta::hours(hours_left),
            expires_at: None,
            now,
        }
    }

    #[test]
    fn a_deferred_mail_is_retried_later_and_later_until_its_time_is_over() {
        let deferred = |attempts, hours| claimed(attempts, hours).after(Attempt::Deferred("451".into()), BACKOFF, 0.5);
        assert_eq!((deferred(0, 72).status, deferred(0, 72).pause), (Status::Queued, Duration::from_secs(10)));
        assert_eq!(deferred(3, 72).pause, Duration::from_secs(80));
        assert_eq!(deferred(50, 72).pause, Duration::from_secs(900));
        assert_eq!(deferred(50, 0).status, Status::Dead);
        let jittered = claimed(0, 72).after(Attempt::Deferred("451".into()), BACKOFF, 0.123_456_789).pause;
        assert_eq!(jittered.subsec_nanos() % 1_000_000, 0, "PostgreSQL cannot store {jittered:?}");
    }

    #[test]
    fn a_refused_mail_is_dead_at_once_and_an_unusable_server_costs_no_attempt() {
        let refused = claimed(0, 72).after(Attempt::Refused("550 no\r\nsuch user".into()), BACKOFF, 0.5);
        assert_eq!((refused.status, refused.error.as_deref()), (Status::Dead, Some("550 no  such user")));
        let failure = Attempt::ServerFailed(ServerFailure::without_reply("refused".into()));
        let failed = claimed(500, 1).after(failure.clone(), BACKOFF, 0.5);
        assert_eq!((failed.status, failed.counts, failed.pause), (Status::Queued, false, Duration::ZERO));
        let given_up = claimed(0, 0).after(failure, BACKOFF, 0.5);
        assert_eq!(given_up.status, Status::Dead);
    }
}

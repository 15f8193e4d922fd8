//! A subscription to a paid plan, its statuses and the legal transitions between them.

use chrono::{DateTime, Utc};
use contracts::identity::{SubscriptionChanged, SubscriptionStatus};
use serde::{Deserialize, Serialize};
use strum::IntoEnumIterator;
use utoipa::ToSchema;
use uuid::Uuid;

#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    ToSchema,
    strum::Display,
    strum::EnumString,
    strum::EnumIter,
    strum::IntoStaticStr,
)]
#[serde(rename_all = "snake_case")]
#[schema(as = SubscriptionStatus)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub(crate) enum Status {
    Trialing,
    Active,
    /// A payment is overdue.
    PastDue,
    Paused,
    /// Final: the user or billing has ended it.
    Cancelled,
    /// Final: it ran out.
    Expired,
}

/// The transition that a subscription does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a subscription that is {from} cannot become {to}: {}", .from.advice())]
pub(crate) struct Refused {
    from: Status,
    to: Status,
}

impl Status {
    /// Checks a transition. Every one that is not listed is refused.
    pub(crate) fn change_to(self, to: Status) -> Result<Status, Refused> {
        match (self, to) {
            (Status::Trialing | Status::PastDue | Status::Paused, Status::Active)
            | (Status::Trialing | Status::Active, Status::PastDue)
            | (Status::Active | Status::PastDue, Status::Paused)
            | (
                Status::Trialing | Status::Active | Status::PastDue | Status::Paused,
                Status::Cancelled | Status::Expired,
            ) => Ok(to),
            (from, to) => Err(Refused { from, to }),
        }
    }

    /// Names the transitions that are allowed instead of a refused one.
    fn advice(self) -> String {
        let allowed: Vec<&str> = Status::iter().filter(|to| self.change_to(*to).is_ok()).map(<&str>::from).collect();
        match allowed.split_last() {
            Some((last, others)) => format!("it can become {} or {last}", others.join(", ")),
            None => "it has ended".to_owned(),
        }
    }

    pub(crate) fn is_final(self) -> bool {
        matches!(self, Status::Cancelled | Status::Expired)
    }
}

impl From<Status> for SubscriptionStatus {
    fn from(status: Status) -> SubscriptionStatus {
        match status {
            Status::Trialing => SubscriptionStatus::Trialing,
            Status::Active => SubscriptionStatus::Active,
            Status::PastDue => SubscriptionStatus::PastDue,
            Status::Paused => SubscriptionStatus::Paused,
            Status::Cancelled => SubscriptionStatus::Cancelled,
            Status::Expired => SubscriptionStatus::Expired,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Subscription {
    pub(crate) id: Uuid,
    pub(crate) user_id: Uuid,
    pub(crate) plan: String,
    #[sqlx(try_from = "&'a str")]
    pub(crate) status: Status,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) updated_at: DateTime<Utc>,
    pub(crate) ended_at: Option<DateTime<Utc>>,
    pub(crate) version: i64,
}

impl Subscription {
    /// A new subscription. It begins with a trial; billing decides how it continues.
    pub(crate) fn new(id: Uuid, user_id: Uuid, plan: String, now: DateTime<Utc>) -> Subscription {
        let status = Status::Trialing;
        Subscription { id, user_id, plan, status, created_at: now, updated_at: now, ended_at: None, version: 1 }
    }

    /// The subscription after a transition.
    pub(crate) fn change_to(&self, status: Status, now: DateTime<Utc>) -> Result<Subscription, Refused> {
        let status = self.status.change_to(status)?;
        let ended_at = status.is_final().then_some(now);
        Ok(Subscription { status, updated_at: now, ended_at, version: self.version + 1, ..self.clone() })
    }

    /// The message about the transition from `previous`; None for a new subscription.
    pub(crate) fn to_message(&self, previous: Option<Status>) -> SubscriptionChanged {
        SubscriptionChanged {
            user_id: self.user_id,
            subscription_id: self.id,
            plan: self.plan.clone(),
            status: self.status.into(),
            previous_status: previous.map(SubscriptionStatus::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_listed_transitions_are_legal() {
        let legal = "trialing-active trialing-past_due trialing-cancelled trialing-expired active-past_due active-paused \
            active-cancelled active-expired past_due-active past_due-paused past_due-cancelled past_due-expired \
            paused-active paused-cancelled paused-expired";
        let mut found = Vec::new();
        for from in Status::iter() {
            for to in Status::iter() {
                if from.change_to(to).is_ok() {
                    found.push(format!("{from}-{to}"));
                }
            }
        }
        let mut expected: Vec<&str> = legal.split_whitespace().collect();
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, expected);
        let refused = |from: Status, to: Status| from.change_to(to).unwrap_err().to_string();
        let text = "a subscription that is active cannot become trialing: it can become past_due, paused, cancelled or expired";
        assert_eq!(refused(Status::Active, Status::Trialing), text);
        let text = "a subscription that is expired cannot become active: it has ended";
        assert_eq!(refused(Status::Expired, Status::Active), text);
    }
}

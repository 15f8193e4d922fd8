//! The policy that the settings define for new notifications, and the limits on the e-mails that an organizer causes.
//!
//! An organizer can cause an e-mail to everyone who has joined one of their events. An e-mail above a limit is recorded as a
//! skipped notification; the inbox and webhooks get everything.

use std::collections::{BTreeMap, HashMap};

use chrono::TimeDelta;
use contracts::events;
use uuid::Uuid;

use super::business_event::NewNotification;
use super::delivery_rules::{Channel, Rules};

/// The policy that the settings define for new notifications.
#[derive(Debug, Clone)]
pub(crate) struct Policy {
    /// The rules of event types for which none were set.
    pub(crate) default_rules: Rules,
    /// How long a change of an event waits for further ones.
    pub(crate) change_delay: TimeDelta,
    /// The shortest time between two announcements of changes of one event.
    pub(crate) change_pause: TimeDelta,
    pub(crate) email_limits: EmailLimits,
}

/// Who causes the notifications about a business event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Their recipients, or an application that tells a few people.
    Direct,
    /// An application that tells many people about an aggregate.
    Announcement { aggregate: String },
    /// The organizer of an event, whom the recipients may not know.
    Organizer { organizer: Uuid, event_id: Uuid },
}

impl Cause {
    /// Whose e-mails wait in one queue; None: those of each recipient have a separate queue.
    pub(crate) fn sender(&self) -> Option<String> {
        match self {
            Cause::Direct => None,
            Cause::Announcement { aggregate } => Some(aggregate.clone()),
            Cause::Organizer { organizer, .. } => Some(organizer.to_string()),
        }
    }
}

/// The e-mails that organizers may cause within an hour; 0 means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EmailLimits {
    /// E-mails of one organizer.
    pub(crate) per_organizer: u32,
    /// E-mails to one person.
    pub(crate) per_recipient: u32,
    /// E-mails to one person about one event.
    pub(crate) per_event: u32,
}

/// A count that an e-mail adds to.
struct Counter {
    subject: String,
    max: u32,
    /// Why an e-mail beyond it is skipped.
    reason: &'static str,
}

/// The causes of notifications, by their business events, with the event types.
pub(crate) type Causes<'e> = HashMap<Uuid, (&'e str, &'e Cause)>;

impl EmailLimits {
    /// How many e-mails these notifications add to each count, in the order of the subjects.
    pub(crate) fn demands(&self, notifications: &[NewNotification], causes: &Causes<'_>) -> BTreeMap<String, i32> {
        let mut demands = BTreeMap::new();
        for counter in notifications.iter().flat_map(|one| self.counters(one, causes)) {
            *demands.entry(counter.subject).or_default() += 1;
        }
        demands
    }

    /// Skips the e-mails beyond the limits. `totals`: the counts after `demands` were added. Returns what has to be added to the
    /// counts, so that they contain no e-mail that is skipped.
    pub(crate) fn skip_excess(
        &self,
        notifications: &mut [NewNotification],
        causes: &Causes<'_>,
        demands: &BTreeMap<String, i32>,
        mut totals: HashMap<String, i32>,
    ) -> BTreeMap<String, i32> {
        let mut corrections: BTreeMap<String, i32> =
            demands.iter().map(|(subject, demand)| (subject.clone(), -demand)).collect();
        for (subject, total) in &mut totals {
            *total -= demands.get(subject).copied().unwrap_or(0);
        }
        for one in notifications {
            let counters = self.counters(one, causes);
            let exceeded = |counter: &&Counter| {
                totals
                    .get(&counter.subject)
                    .is_some_and(|count| *count >= i32::try_from(counter.max).unwrap_or(i32::MAX))
            };
            one.skipped = counters.iter().find(exceeded).map(|counter| counter.reason);
            // An e-mail that is skipped leaves its place to another one.
            if one.skipped.is_none() {
                for counter in &counters {
                    *totals.entry(counter.subject.clone()).or_default() += 1;
                    *corrections.entry(counter.subject.clone()).or_default() += 1;
                }
            }
        }
        corrections.retain(|_, correction| *correction != 0);
        corrections
    }

    fn counters(&self, one: &NewNotification, causes: &Causes<'_>) -> Vec<Counter> {
        let Some((event_type, Cause::Organizer { organizer, event_id })) = causes.get(&one.event_id) else {
            return Vec::new();
        };
        // An event is canceled once, and people must not travel to it.
        if one.channel != Channel::Email || *event_type == events::CANCELED {
            return Vec::new();
        }
        let user = one.user_id;
        let counter = |max, subject, reason| Counter { subject, max, reason };
        let all = [
            counter(
                self.per_event,
                format!("event {event_id} {user}"),
                "the limit notify.emails_per_event_max of this hour is reached",
            ),
            counter(
                self.per_recipient,
                format!("recipient {user}"),
                "the limit notify.emails_per_recipient_max of this hour is reached",
            ),
            counter(
                self.per_organizer,
                format!("organizer {organizer}"),
                "the limit notify.emails_per_organizer_max of this hour is reached",
            ),
        ];
        all.into_iter().filter(|counter| counter.max > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn email(event: u128, user: u128) -> NewNotification {
        NewNotification {
            event_id: Uuid::from_u128(event),
            user_id: Uuid::from_u128(user),
            channel: Channel::Email,
            due_at: None,
            seq: None,
            skipped: None,
        }
    }

    /// Whether each e-mail is delivered, after these counts of earlier ones.
    fn delivered(emails: &[NewNotification], causes: &Causes<'_>, limits: EmailLimits, earlier: i32) -> Vec<bool> {
        let mut emails = emails.to_vec();
        let demands = limits.demands(&emails, causes);
        let totals = demands.iter().map(|(subject, demand)| (subject.clone(), earlier + demand)).collect();
        let mut counts = demands.clone();
        for (subject, correction) in limits.skip_excess(&mut emails, causes, &demands, totals) {
            *counts.get_mut(&subject).unwrap() += correction;
        }
        let not_skipped: Vec<_> = emails.iter().filter(|one| one.skipped.is_none()).copied().collect();
        counts.retain(|_, count| *count != 0);
        assert_eq!(counts, limits.demands(&not_skipped, causes), "e-mails that are skipped are not counted");
        emails.iter().map(|one| one.skipped.is_none()).collect()
    }

    #[test]
    fn emails_of_an_organizer_are_limited_by_event_recipient_and_organizer_and_others_are_not() {
        let limits = EmailLimits { per_organizer: 4, per_recipient: 3, per_event: 2 };
        let of = |event: u128| Cause::Organizer { organizer: Uuid::from_u128(9), event_id: Uuid::from_u128(event) };
        let (one, other, direct) = (of(1), of(2), Cause::Direct);
        let causes: Causes<'_> = [(1, &one), (2, &one), (3, &one), (4, &other), (5, &other), (6, &direct)]
            .map(|(event, cause)| (Uuid::from_u128(event), (events::UPDATED, cause)))
            .into();
        let to_one = [1, 2, 3, 4, 5, 6].map(|event| email(event, 7));
        assert_eq!(delivered(&to_one, &causes, limits, 0), [true, true, false, true, false, true]);
        let to_many = [7, 8, 9, 10, 11].map(|user| email(1, user));
        assert_eq!(delivered(&to_many, &causes, limits, 0), [true, true, true, true, false]);
        assert_eq!(delivered(&to_many[..1], &causes, limits, 2), [false], "earlier transactions count");
        let unlimited = EmailLimits { per_organizer: 0, per_recipient: 0, per_event: 0 };
        assert!(delivered(&to_one, &causes, unlimited, 1_000).iter().all(|delivered| *delivered));
    }

    #[test]
    fn a_cancellation_is_not_limited() {
        let limits = EmailLimits { per_organizer: 1, per_recipient: 1, per_event: 1 };
        let cause = Cause::Organizer { organizer: Uuid::nil(), event_id: Uuid::nil() };
        let of_type = |event_type| Causes::from([(Uuid::from_u128(1), (event_type, &cause))]);
        assert_eq!(delivered(&[email(1, 1)], &of_type(events::CANCELED), limits, 1), [true]);
        assert_eq!(delivered(&[email(1, 1)], &of_type(events::UPDATED), limits, 1), [false]);
    }
}

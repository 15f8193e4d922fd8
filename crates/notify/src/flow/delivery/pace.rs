//! How many notifications one transaction delivers: fewer after a failure, until the one that makes the transaction fail is
//! alone in it. Then that one fails, and the others no longer wait for it.

use pillarbox::database::{is_data_error, is_transient};

use crate::error::DeliveryError;
use crate::store::delivery::Candidate;

/// Notifications of one transaction that are read before it is known which of them are delivered together.
pub(super) const BATCH_MAX: i64 = 200;
/// How fast the number falls and rises: two failures lead from [`BATCH_MAX`] to one.
const FACTOR: i64 = 15;

/// The number of notifications of the next transaction, and what is known about failures.
#[derive(Debug)]
pub(super) struct Pace {
    size: i64,
    /// False while a round runs, and after one that was dropped because it took too long.
    has_ended: bool,
    /// The only notification of the current transaction.
    alone: Option<Candidate>,
    /// The notification that was alone in the last transaction, which failed for a reason that may lie elsewhere.
    suspect: Option<i64>,
    /// Alternates.
    prefers_direct: bool,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { size: BATCH_MAX, has_ended: true, alone: None, suspect: None, prefers_direct: false }
    }
}

impl Pace {
    /// Begins a round. Returns the notification that two rounds in a row were dropped for.
    pub(super) fn start(&mut self) -> Option<Candidate> {
        let culprit = if self.has_ended { None } else { self.shrink(true) };
        self.has_ended = false;
        culprit
    }

    /// How many notifications the round reads.
    pub(super) fn size(&self) -> i64 {
        self.size
    }

    /// Whether the round delivers what a person may wait for: every second one does, so that neither these notifications nor
    /// announcements to many people hold up the others. After a failure the order is that of the time.
    pub(super) fn prefers_direct(&mut self) -> bool {
        self.prefers_direct = !self.prefers_direct;
        self.prefers_direct && self.size == BATCH_MAX
    }

    /// Notes what the round delivers.
    pub(super) fn delivers(&mut self, candidates: &[Candidate]) {
        self.alone = match candidates {
            [only] if self.size == 1 => Some(only.clone()),
            _ => None,
        };
    }

    pub(super) fn succeeded(&mut self) {
        (self.size, self.alone, self.suspect) = ((self.size * FACTOR).min(BATCH_MAX), None, None);
        self.has_ended = true;
    }

    /// Returns the notification that is the cause of the failure, if that is known.
    pub(super) fn failed(&mut self, error: &DeliveryError) -> Option<Candidate> {
        self.has_ended = true;
        match error {
            DeliveryError::Database(error) if is_transient(error) => self.shrink(true),
            // The statement itself is wrong, for any content.
            DeliveryError::Database(error) if !is_data_error(error) => None,
            DeliveryError::Database(_) | DeliveryError::Post(_) | DeliveryError::Rendering(_) => self.shrink(false),
        }
    }

    /// `may_be_another`: a notification that was alone is the culprit only if it fails twice in a row.
    fn shrink(&mut self, may_be_another: bool) -> Option<Candidate> {
        self.size = (self.size / FACTOR).max(1);
        let alone = self.alone.take()?;
        let is_culprit = !may_be_another || self.suspect == Some(alone.id);
        self.suspect = Some(alone.id).filter(|_| !is_culprit);
        is_culprit.then_some(alone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::delivery_rules::Channel;

    fn candidate(id: i64) -> Candidate {
        Candidate {
            id,
            due_at: chrono::DateTime::UNIX_EPOCH,
            user_id: uuid::Uuid::nil(),
            channel: Channel::Email,
            event_type: None,
            has_contact: true,
            was_tried: false,
        }
    }

    #[test]
    fn a_notification_that_fails_alone_is_the_culprit_and_after_a_lost_connection_only_if_it_fails_again() {
        let mut pace = Pace::default();
        let rendering = DeliveryError::Rendering("panic".to_owned());
        let lost = DeliveryError::Database(sqlx::Error::PoolClosed);
        for expected in [BATCH_MAX, 13] {
            assert!(pace.start().is_none());
            assert_eq!(pace.size(), expected);
            pace.delivers(&[candidate(1)]);
            assert!(pace.failed(&rendering).is_none(), "it was not alone");
        }
        assert_eq!(pace.size(), 1);
        pace.delivers(&[candidate(1)]);
        assert!(pace.failed(&lost).is_none());
        pace.delivers(&[candidate(2)]);
        assert!(pace.failed(&lost).is_none(), "another one failed before");
        pace.delivers(&[candidate(2)]);
        assert_eq!(pace.failed(&lost).map(|culprit| culprit.id), Some(2));
        pace.delivers(&[candidate(3)]);
        assert_eq!(pace.failed(&rendering).map(|culprit| culprit.id), Some(3));
        pace.succeeded();
        pace.succeeded();
        assert_eq!(pace.size(), BATCH_MAX);
    }

    #[test]
    fn a_round_that_was_dropped_is_a_failure() {
        let mut pace = Pace::default();
        assert!(pace.start().is_none());
        assert!(pace.start().is_none() && pace.start().is_none());
        assert_eq!(pace.size(), 1);
        pace.delivers(&[candidate(1)]);
        assert!(pace.start().is_none());
        pace.delivers(&[candidate(1)]);
        assert_eq!(pace.start().map(|culprit| culprit.id), Some(1));
    }
}

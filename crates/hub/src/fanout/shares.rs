//! The share of each tenant in the work of fan-out.
//!
//! One transaction creates a bounded number of hub messages for each tenant. An event that would exceed the share of its
//! tenant is deferred: its row in `deferred_event` refers to the log. From then on all events of the tenant are deferred,
//! so that they stay in order, until its backlog is empty. The tenants with a backlog are processed in turn, one part of
//! an event's matches after the other, between the batches of new events.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Hub messages (and skipped subscribers) of one tenant in one transaction, for which the events of all other tenants wait:
/// a few milliseconds. While others are active and turns take longer than [`TURN_TIME_MAX`], it is less.
const SHARE_MAX: usize = 500;
const SHARE_MIN: usize = 50;
const TURN_TIME_MAX: Duration = Duration::from_millis(10);
/// An event with at most this many matches is not the first to be deferred: its row would cost about as much as its hub
/// messages, and the events before the others in the log are as many as a tenant can post in the same time.
pub(super) const NARROW: usize = 20;
/// The time in which one transaction matches events of one tenant with its subscribers, whatever they cost. Checked after each
/// new event, and after each subscriber of an event that was deferred.
pub(super) const MATCHING_TIME_MAX: Duration = Duration::from_millis(20);
/// How long other tenants count as active after an event.
const OTHERS_ACTIVE_TIME: Duration = Duration::from_secs(1);
/// While other tenants are active, the pause after a turn is the turn multiplied by this factor: the tenants with a backlog
/// have a quarter of the time.
const PAUSE_FACTOR: u32 = 3;

/// The tenants with deferred events.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    /// All deferred events of the tenant up to this id are processed. The next turn starts there, because dead rows would
    /// make a search from the beginning slower and slower.
    done: HashMap<String, i64>,
    /// The tenants in the order of their turns.
    turns: VecDeque<String>,
}

/// How far a turn has come, once it is committed.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) tenant: String,
    pub(super) done: i64,
    /// The tenant has no more deferred events.
    pub(super) is_last: bool,
    pub(super) started_at: Instant,
    /// The log ids of events that the log no longer has.
    pub(super) lost: Vec<i64>,
}

impl Turn {
    /// Reports the events that cannot be sent. Without their content their subscribers are unknown, so they have no dead letters.
    pub(super) fn report_lost(&self) {
        for log_id in &self.lost {
            let tenant = &self.tenant;
            tracing::error!(tenant, log_id, "the log no longer has a deferred event, so it is not sent");
            metrics::counter!("pillarbox_hub_deferred_events_lost_total").increment(1);
        }
    }
}

impl Backlog {
    /// The tenants take turns in the order of their names. The first turn belongs to the tenant after `last_turn`: if it
    /// always began with the first name, a turn that fails would keep all others waiting.
    pub(super) fn new(mut tenants: Vec<String>, last_turn: Option<&str>) -> Backlog {
        tenants.sort_unstable();
        let first = tenants.partition_point(|tenant| last_turn.is_some_and(|last| tenant.as_str() <= last));
        tenants.rotate_left(first);
        let mut backlog = Backlog::default();
        tenants.iter().for_each(|tenant| backlog.add(tenant));
        backlog
    }

    pub(super) fn contains(&self, tenant: &str) -> bool {
        self.done.contains_key(tenant)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// The tenant has deferred events from now on.
    pub(super) fn add(&mut self, tenant: &str) {
        if !self.contains(tenant) {
            self.done.insert(tenant.to_owned(), 0);
            self.turns.push_back(tenant.to_owned());
        }
    }

    /// The tenant whose turn it is, and the id up to which its deferred events are processed. Tenants that wait for a check are
    /// passed over.
    pub(super) fn next(&self, is_waiting: impl Fn(&str) -> bool) -> Option<(&str, i64)> {
        let tenant = self.turns.iter().find(|tenant| !is_waiting(tenant))?;
        Some((tenant, self.done.get(tenant).copied().unwrap_or_default()))
    }

    /// The turn is committed; the next tenant follows.
    pub(super) fn finish(&mut self, turn: Turn) {
        self.turns.retain(|tenant| *tenant != turn.tenant);
        if turn.is_last {
            self.done.remove(&turn.tenant);
        } else {
            self.turns.push_back(turn.tenant.clone());
            self.done.insert(turn.tenant, turn.done);
        }
    }
}

/// The size of the turns of deferred events, and the time between them.
#[derive(Debug)]
pub(super) struct Pace {
    share: usize,
    /// A turn has begun and is not committed. Still set when the next one begins if it failed.
    is_in_turn: bool,
    next_turn_at: Option<Instant>,
    /// When there was an event of a tenant without a backlog.
    others_at: Option<Instant>,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { share: SHARE_MAX, is_in_turn: false, next_turn_at: None, others_at: None }
    }
}

impl Pace {
    /// The share of one tenant in the next transaction.
    pub(super) fn share(&self) -> usize {
        self.share
    }

    /// A turn begins. Returns its share: half of the last one's if that failed, perhaps because it takes too long.
    pub(super) fn begin_turn(&mut self) -> usize {
        if std::mem::replace(&mut self.is_in_turn, true) {
            self.share = (self.share / 2).max(1);
        }
        self.share
    }

    /// The turn had nothing to do.
    pub(super) fn cancel_turn(&mut self) {
        self.is_in_turn = false;
    }

    /// There is an event of a tenant without a backlog.
    pub(super) fn notice_others(&mut self, now: Instant) {
        self.others_at = Some(now);
    }

    pub(super) fn next_turn_at(&self) -> Option<Instant> {
        self.next_turn_at
    }

    /// A turn ends now.
    pub(super) fn finish_turn(&mut self, started_at: Instant, now: Instant) {
        self.is_in_turn = false;
        let took = now.saturating_duration_since(started_at);
        let is_shared = self.others_at.is_some_and(|at| now.saturating_duration_since(at) < OTHERS_ACTIVE_TIME);
        self.next_turn_at = is_shared.then(|| now + took * PAUSE_FACTOR);
        if !is_shared || took < TURN_TIME_MAX / 2 {
            self.share = (self.share * 2).min(SHARE_MAX);
        } else if took > TURN_TIME_MAX {
            self.share = (self.share / 2).max(SHARE_MIN.min(self.share));
        }
    }
}

/// How much of their shares the tenants have used in one batch.
#[derive(Debug)]
pub(super) struct Shares<'a> {
    share: usize,
    used: HashMap<&'a str, Used>,
}

#[derive(Debug, Default)]
struct Used {
    matches: usize,
    time: Duration,
}

impl<'a> Shares<'a> {
    pub(super) fn new(share: usize) -> Shares<'a> {
        Shares { share, used: HashMap::new() }
    }

    /// Whether an event with this many matches has to be deferred. If not, it is counted.
    pub(super) fn exceeds(&mut self, tenant: &'a str, matches: usize) -> bool {
        let used = self.used.entry(tenant).or_default();
        if used.time > MATCHING_TIME_MAX || (used.matches + matches > self.share && matches > NARROW) {
            return true;
        }
        used.matches += matches;
        false
    }

    /// Counts the time that an event has taken.
    pub(super) fn add_time(&mut self, tenant: &'a str, time: Duration) {
        self.used.entry(tenant).or_default().time += time;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(tenant: &str, done: i64, is_last: bool) -> Turn {
        Turn { tenant: tenant.to_owned(), done, is_last, started_at: Instant::now(), lost: Vec::new() }
    }

    #[test]
    fn each_tenant_has_its_turn_until_its_backlog_is_empty() {
        let mut backlog = Backlog::new(vec!["a".to_owned(), "b".to_owned()], None);
        assert_eq!(backlog.next(|_| false), Some(("a", 0)));
        backlog.finish(turn("a", 7, false));
        assert_eq!(backlog.next(|_| false), Some(("b", 0)));
        backlog.add("a");
        backlog.finish(turn("b", 9, true));
        assert_eq!(backlog.next(|_| false), Some(("a", 7)));
        assert_eq!(backlog.next(|tenant| tenant == "a"), None, "it waits for a check");
        assert!(backlog.contains("a") && !backlog.contains("b"));
        backlog.finish(turn("a", 11, true));
        assert!(backlog.is_empty());
    }

    #[test]
    fn after_a_reload_the_turns_go_on_with_the_next_tenant() {
        let first = |last_turn: Option<&str>| {
            let tenants = ["c", "a", "d"].map(str::to_owned).to_vec();
            Backlog::new(tenants, last_turn).next(|_| false).unwrap().0.to_owned()
        };
        let after = [None, Some("a"), Some("b"), Some("c"), Some("d"), Some("e")].map(first);
        assert_eq!(after, ["a", "c", "c", "d", "a", "a"]);
    }

    #[test]
    fn a_turn_that_fails_is_repeated_with_half_of_its_share() {
        let (mut pace, now) = (Pace::default(), Instant::now());
        let shares: Vec<usize> = (0..12).map(|_| pace.begin_turn()).collect();
        assert_eq!(shares, [500, 250, 125, 62, 31, 15, 7, 3, 1, 1, 1, 1]);
        pace.finish_turn(now, now);
        assert_eq!((pace.begin_turn(), pace.begin_turn()), (2, 1));
    }

    #[test]
    fn wide_events_beyond_the_share_are_deferred_and_narrow_ones_are_not() {
        let mut shares = Shares::new(SHARE_MAX);
        assert!(!shares.exceeds("a", SHARE_MAX));
        assert!(shares.exceeds("a", NARROW + 1));
        assert!(!shares.exceeds("a", NARROW));
        assert!(!shares.exceeds("b", SHARE_MAX), "every tenant has a separate share");
        assert!(shares.exceeds("c", SHARE_MAX + 1), "an event for more subscribers than a share is split");
    }

    #[test]
    fn events_that_are_slow_to_match_are_deferred_however_few_their_subscribers_are() {
        let mut shares = Shares::new(SHARE_MAX);
        for _ in 0..2 {
            assert!(!shares.exceeds("a", 1), "the time is not over before the last event");
            shares.add_time("a", MATCHING_TIME_MAX);
        }
        assert!(shares.exceeds("a", 1) && !shares.exceeds("b", 1));
    }

    #[test]
    fn turns_pause_only_while_other_tenants_are_active() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let end = start + Duration::from_millis(5);
        pace.finish_turn(start, end);
        assert_eq!(pace.next_turn_at(), None);
        pace.notice_others(start);
        pace.finish_turn(start, end);
        assert_eq!(pace.next_turn_at(), Some(end + Duration::from_millis(15)));
        pace.finish_turn(end + OTHERS_ACTIVE_TIME, end + OTHERS_ACTIVE_TIME);
        assert_eq!(pace.next_turn_at(), None);
    }

    #[test]
    fn turns_become_smaller_while_they_delay_others() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let slow = start + TURN_TIME_MAX * 2;
        pace.finish_turn(start, slow);
        assert_eq!(pace.share(), SHARE_MAX, "no other tenant waits");
        pace.notice_others(start);
        pace.finish_turn(start, slow);
        assert_eq!(pace.share(), SHARE_MAX / 2);
        (0..10).for_each(|_| pace.finish_turn(start, slow));
        assert_eq!(pace.share(), SHARE_MIN);
        pace.finish_turn(start, start);
        assert_eq!(pace.share(), SHARE_MIN * 2);
        (0..3).for_each(|_| pace.finish_turn(slow + OTHERS_ACTIVE_TIME, slow + OTHERS_ACTIVE_TIME));
        assert_eq!(pace.share(), SHARE_MAX);
    }
}

//! The queue of the replays that fan-out advances, and the pace of each.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pillarbox::consumers::LogFollower;
use uuid::Uuid;

use crate::replays::replay::Replay;

/// The time until a replay that has to wait is tried again: longer each time it cannot continue, up to the maximum.
const WAIT_MIN: Duration = Duration::from_millis(5);
const WAIT_MAX: Duration = Duration::from_secs(2);
/// Rows of the log that a turn reads for each message that it may create: more if most rows lead to none, because they
/// belong to other tenants for example.
const ROWS_PER_MESSAGE_MAX: u32 = 16;

/// The replays that fan-out advances, in turn.
#[derive(Debug, Default)]
pub(in crate::fanout) struct Replays {
    waiting: VecDeque<ActiveReplay>,
}

/// The state of a replay in the memory of fan-out.
#[derive(Debug)]
pub(super) struct ActiveReplay {
    pub(super) id: Uuid,
    due: Instant,
    wait: Duration,
    pub(super) follower: Option<LogFollower>,
    pub(super) rows_per_message: u32,
    /// Messages that its rate allows now, and when that was.
    allowed: (f64, Instant),
}

/// How far a turn has come, once it is committed.
#[derive(Debug)]
pub(in crate::fanout) struct ReplayTurn {
    pub(super) replay: ActiveReplay,
    pub(super) is_ended: bool,
    pub(super) created: usize,
    pub(in crate::fanout) started_at: Instant,
}

impl Replays {
    /// The replays take turns in the order of their ids. The first turn belongs to the one after `last_turn`: if it always
    /// began with the first id, a turn that fails would delay all others for ever.
    pub(in crate::fanout) fn new(mut ids: Vec<Uuid>, last_turn: Option<Uuid>) -> Replays {
        let now = Instant::now();
        let first = ids.partition_point(|id| last_turn.is_some_and(|last| *id <= last));
        ids.rotate_left(first);
        let active = |id| ActiveReplay {
            id,
            due: now,
            wait: WAIT_MIN,
            follower: None,
            rows_per_message: 1,
            allowed: (1.0, now),
        };
        Replays { waiting: ids.into_iter().map(active).collect() }
    }

    /// When the next replay can continue. None if there is none.
    pub(in crate::fanout) fn next_due(&self) -> Option<Instant> {
        self.waiting.iter().map(|replay| replay.due).min()
    }

    pub(super) fn pop_due(&mut self, now: Instant) -> Option<ActiveReplay> {
        let at = self.waiting.iter().position(|replay| replay.due <= now)?;
        self.waiting.remove(at)
    }

    /// The replay cannot continue now.
    pub(super) fn put_back(&mut self, replay: ActiveReplay) {
        self.waiting.push_back(replay);
    }

    /// The turn is committed; the next replay follows.
    pub(in crate::fanout) fn finish(&mut self, turn: ReplayTurn) {
        metrics::counter!("pillarbox_hub_replayed_messages_total").increment(turn.created as u64);
        if !turn.is_ended {
            self.waiting.push_back(turn.replay);
        }
    }
}

impl ActiveReplay {
    /// The number of messages that a rate allows now, at most a tenth of a second's.
    pub(super) fn allowance(&mut self, rate: Option<u32>, now: Instant) -> usize {
        let Some(rate) = rate.map(f64::from) else { return usize::MAX };
        let (allowed, since) = self.allowed;
        let size = (rate / 10.0).max(1.0);
        self.allowed = ((allowed + now.saturating_duration_since(since).as_secs_f64() * rate).min(size), now);
        self.allowed.0 as usize
    }

    /// Reads more rows for each message if few have led to one, and fewer if some were read in vain.
    pub(super) fn adapt_rows(&mut self, created: usize, share: usize, is_cut: bool) {
        if is_cut {
            self.rows_per_message = (self.rows_per_message / 2).max(1);
        } else if created < share / 4 {
            self.rows_per_message = (self.rows_per_message * 2).min(ROWS_PER_MESSAGE_MAX);
        }
    }

    /// Its rate allows the next message later.
    pub(super) fn wait_for_rate(&mut self, rate: Option<u32>, now: Instant) {
        let missing = (1.0 - self.allowed.0).max(0.0) / f64::from(rate.unwrap_or(1).max(1));
        self.due = now + Duration::from_secs_f64(missing).max(WAIT_MIN);
    }

    /// After a turn it continues at once, or when its rate or its subscriber may allow the next messages.
    pub(super) fn schedule(&mut self, replay: &Replay, created: usize, now: Instant) {
        self.allowed.0 -= created as f64;
        if created == 0 && replay.progress.waits_for.is_some() {
            return self.wait_longer(now);
        }
        let for_rate = replay.rate.map(|rate| Duration::from_secs_f64(1.0 / f64::from(rate)).max(WAIT_MIN));
        let for_subscriber = replay.progress.waits_for.map(|_| WAIT_MIN);
        let pause = for_rate.into_iter().chain(for_subscriber).max().unwrap_or_default();
        (self.due, self.wait) = (now + pause, WAIT_MIN);
    }

    /// It cannot continue now.
    pub(super) fn wait_longer(&mut self, now: Instant) {
        self.due = now + self.wait;
        self.wait = (self.wait * 3 / 2).min(WAIT_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replays_alternate_and_one_that_waits_delays_no_other() {
        let ids = [Uuid::now_v7(), Uuid::now_v7()];
        let (mut replays, now) = (Replays::new(ids.to_vec(), None), Instant::now());
        let mut first = replays.pop_due(now).unwrap();
        assert_eq!(first.id, ids[0]);
        first.wait_longer(now);
        replays.waiting.push_back(first);
        for _ in 0..2 {
            let second = replays.pop_due(now).unwrap();
            assert_eq!(second.id, ids[1], "the first one waits");
            replays.finish(ReplayTurn { replay: second, is_ended: false, created: 0, started_at: now });
        }
        assert_eq!(replays.pop_due(now + WAIT_MIN).unwrap().id, ids[0]);
        let second = replays.pop_due(now).unwrap();
        replays.finish(ReplayTurn { replay: second, is_ended: true, created: 0, started_at: now });
        assert!(replays.next_due().is_none());
        let after = |last| Replays::new(ids.to_vec(), last).pop_due(Instant::now()).unwrap().id;
        assert_eq!([None, Some(ids[0]), Some(ids[1])].map(after), [ids[0], ids[1], ids[0]], "after a turn that failed");
    }

    #[test]
    fn a_rate_allows_its_messages_and_no_more() {
        let (mut replays, start) = (Replays::new(vec![Uuid::now_v7()], None), Instant::now());
        let mut active = replays.pop_due(start + WAIT_MIN).unwrap();
        assert_eq!(active.allowance(None, start), usize::MAX);
        let mut sent = 0;
        for step in 0..=1_000 {
            let allowed = active.allowance(Some(100), start + Duration::from_millis(step * 10)).min(500);
            active.allowed.0 -= allowed as f64;
            sent += allowed;
        }
        assert!((999..=1_012).contains(&sent), "100 per second for ten seconds: {sent}");
        assert_eq!(active.allowance(Some(100), start + Duration::from_secs(60)), 10, "a tenth of a second at once");
    }
}

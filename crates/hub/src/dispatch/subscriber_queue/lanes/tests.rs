//! The order of messages in lanes, without a dispatcher.

use std::sync::Arc;

use super::*;

fn message(n: i64, lane: &str) -> HubMessage {
    HubMessage { n, lane: Some(Arc::from(lane)), seq: None, attempts_before: 0, replay: None, event: None }
}

fn key(lane: &str) -> LaneKey {
    LaneKey::Named(Arc::from(lane))
}

#[test]
fn lanes_alternate_and_each_sends_its_head_only() {
    let mut lanes = Lanes::default();
    [(1, "a"), (2, "a"), (3, "b")].iter().for_each(|(n, lane)| lanes.push(message(*n, lane)));
    let started: Vec<i64> = std::iter::from_fn(|| lanes.start_next(true)).map(|(_, message)| message.n).collect();
    assert_eq!(started, [1, 3]);
    assert_eq!(lanes.first_pending(), Some(1));
    lanes.get_mut(&key("a")).unwrap().is_in_flight = false;
    lanes.complete_head(&key("a"));
    assert_eq!(lanes.start_next(true).map(|(_, message)| message.n), Some(2));
}

#[test]
fn the_position_does_not_wait_for_a_postponed_lane() {
    let (mut lanes, now) = (Lanes::default(), DateTime::UNIX_EPOCH);
    [(1, "a"), (2, "a"), (3, "b")].iter().for_each(|(n, lane)| lanes.push(message(*n, lane)));
    lanes.start_next(true).unwrap();
    lanes.get_mut(&key("a")).unwrap().is_in_flight = false;
    lanes.schedule_at(&key("a"), 1, now);
    assert_eq!((lanes.first_pending(), lanes.queued(), lanes.is_dirty()), (Some(3), 1, true));
    lanes.wake_due(now);
    let requests = lanes.start_reads(8, 64, 3);
    assert_eq!(requests.iter().map(|read| (read.after, read.to)).collect::<Vec<_>>(), [(0, 3)]);
    lanes.finish_read(&requests[0], vec![message(1, "a"), message(2, "a")], 3);
    assert_eq!((lanes.first_pending(), lanes.queued()), (Some(3), 3));
    lanes.check_invariants();
}

//! The guarantees of a subscriber queue, one at a time.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use super::*;
use crate::deliveries::command::{OperatorCommand, PendingCommand};

const LARGE: usize = 256 * 1024;

/// A queue that has read these messages, given by their lanes.
fn queue_with(recipient: Arc<Recipient>, lanes: &[Option<&str>]) -> (Database, SubscriberQueue) {
    let messages = (1..).zip(lanes).map(|(n, lane)| (n, lane.map(Arc::from))).collect();
    let database = Database { messages, ..Database::default() };
    let mut queue = database.load(recipient, now());
    while queue.read_request().is_some() {
        database.read(&mut queue, now());
    }
    (database, queue)
}

/// A queue that has read nothing yet.
fn unread_queue(payload_bytes: usize, lanes: &[Option<&str>]) -> (Database, SubscriberQueue) {
    let messages = (1..).zip(lanes).map(|(n, lane)| (n, lane.map(Arc::from))).collect();
    let database = Database { messages, payload_bytes, ..Database::default() };
    let queue = database.load(recipient(10, OnExhausted::Skip), now());
    (database, queue)
}

fn save(queue: &mut SubscriberQueue) -> Changes {
    let mut changes = Changes::default();
    queue.drain_changes(now(), &mut changes);
    changes
}

/// Delivers all messages that may be sent now, and returns how many there were.
fn deliver_all(queue: &mut SubscriberQueue) -> usize {
    let started = start_all(queue, now());
    started.iter().for_each(|(key, _)| queue.finish_attempt(key, result(Verdict::Delivered), now(), 0.0));
    started.len()
}

#[test]
fn a_failed_message_delays_its_lane_only() {
    let (database, mut queue) = queue_with(recipient(10, OnExhausted::Skip), &[Some("a"), Some("a"), Some("b"), None]);
    let started = start_all(&mut queue, now());
    assert_eq!(numbers(&started), [1, 3, 4]);
    queue.finish_attempt(&started[0].0, result(Verdict::Retry), now(), 0.0);
    queue.finish_attempt(&started[1].0, result(Verdict::Delivered), now(), 0.0);
    database.read(&mut queue, now());
    save(&mut queue);
    assert!(queue.start_next(now()).is_none(), "2 waits for 1, which waits for its retry");
    assert_eq!(queue.next_wake(now()), Some(now() + TimeDelta::seconds(5)));
    let later = now() + TimeDelta::seconds(5);
    database.read(&mut queue, later);
    assert_eq!(queue.start_next(later).map(|(_, message)| message.n), Some(1));
}

#[test]
fn an_attempt_that_was_not_sent_is_not_counted_and_its_message_stays_the_next_one() {
    let (_, mut queue) = queue_with(recipient(10, OnExhausted::Skip), &[Some("a"), Some("a"), Some("b")]);
    let started = start_all(&mut queue, now());
    assert_eq!(numbers(&started), [1, 3]);
    queue.cancel_attempt(&started[0].0, now());
    assert_eq!((queue.in_flight(), save(&mut queue).attempts.len()), (1, 0));
    assert_eq!(numbers(&start_all(&mut queue, now())), [1], "before 2, which is of the same lane");
}

#[test]
fn an_attempt_that_is_connecting_is_not_sent_when_its_subscriber_changes() {
    let (_, mut queue) = queue_with(recipient(10, OnExhausted::Skip), &[Some("a")]);
    let is_valid = queue.validity.watch();
    let started = start_all(&mut queue, now());
    let change = |queue: &mut SubscriberQueue, version| {
        let (id, limits) = (queue.recipient.id, queue.recipient.limits.clone());
        queue.update_recipient(Arc::new(Recipient { id, version, limits, ..fixtures::recipient() }));
    };
    change(&mut queue, 1);
    assert!(is_valid.load(Ordering::SeqCst), "another subscriber has changed");
    change(&mut queue, 2);
    assert!(!is_valid.load(Ordering::SeqCst));
    queue.cancel_attempt(&started[0].0, now());
    assert!(queue.validity.watch().load(Ordering::SeqCst), "the next attempt has the new settings");
    assert_eq!(numbers(&start_all(&mut queue, now())), [1]);
}

#[test]
fn the_attempts_of_a_retried_message_are_numbered_after_the_earlier_ones_with_all_retries() {
    let mut queue = Database::default().load(recipient(10, OnExhausted::Skip), now());
    let message = HubMessage { n: 1, lane: None, seq: None, attempts_before: 4, replay: None, event: None };
    queue.receive(vec![message.clone()], Origin::Read { is_complete: true });
    let mut later = now();
    let mut found = Vec::new();
    for _ in 0..4 {
        if let [request] = &queue.start_lane_reads(later, 8)[..] {
            queue.receive_lane(request, vec![message.clone()]);
        }
        let (key, _) = queue.start_next(later).unwrap();
        queue.finish_attempt(&key, result(Verdict::Retry), later, 0.0);
        later += TimeDelta::minutes(10);
        let changes = save(&mut queue);
        found.extend(changes.attempts.iter().map(|attempt| (attempt.attempt, attempt.outcome)));
        found.extend(changes.dead_letters.iter().map(|dead| (dead.attempts, Outcome::Dead)));
    }
    let failed = |number| (number, Outcome::Failed);
    assert_eq!(found, [failed(5), failed(6), failed(7), (8, Outcome::Dead), (8, Outcome::Dead)]);
}

#[test]
fn after_twenty_failures_messages_are_probed_one_at_a_time_until_a_success() {
    let (database, mut queue) = queue_with(recipient(50, OnExhausted::Skip), &[None; 100]);
    let started = start_all(&mut queue, now());
    assert_eq!(started.len(), 50);
    for (key, _) in &started {
        queue.finish_attempt(key, result(Verdict::Retry), now(), 0.0);
    }
    let probe = queue.start_next(now()).unwrap();
    assert!(queue.start_next(now() + TimeDelta::seconds(1)).is_none(), "one at a time");
    queue.finish_attempt(&probe.0, result(Verdict::Retry), now(), 0.0);
    assert!(queue.start_next(now()).is_none(), "not at once");
    let later = now() + TimeDelta::seconds(6);
    database.read(&mut queue, later);
    let probe = queue.start_next(later).unwrap();
    queue.finish_attempt(&probe.0, result(Verdict::Delivered), later, 0.0);
    database.read(&mut queue, later);
    assert!(start_all(&mut queue, later).len() > 10);
}

#[test]
fn new_messages_are_probed_while_all_failed_ones_wait_for_their_retry() {
    let (mut database, mut queue) = queue_with(recipient(50, OnExhausted::Skip), &[None; 20]);
    for (key, _) in start_all(&mut queue, now()) {
        queue.finish_attempt(&key, result(Verdict::Retry), now(), 0.0);
    }
    database.messages.insert(21, None);
    queue.mark_has_more();
    database.read(&mut queue, now());
    let probe = queue.start_next(now()).map(|(_, message)| message.n);
    assert_eq!(probe, Some(21), "the endpoint may be well again long before the first retry is due");
}

#[test]
fn a_rate_limit_is_not_exceeded() {
    let unlimited = fixtures::recipient();
    let limits = RecipientLimits { max_in_flight: 1_000, rate: Some(100) };
    let (_, mut queue) = queue_with(Arc::new(Recipient { limits, ..unlimited }), &[None; 500]);
    let mut sent = 0;
    for millisecond in 0..1_000 {
        sent += start_all(&mut queue, now() + TimeDelta::milliseconds(millisecond)).len();
    }
    assert!((95..=111).contains(&sent), "{sent} in a second");
}

#[test]
fn a_requested_pause_applies_to_all_lanes() {
    let (_, mut queue) = queue_with(recipient(10, OnExhausted::Skip), &[None, None]);
    let (first, _) = queue.start_next(now()).unwrap();
    let busy = AttemptResult { retry_after: Some(Duration::from_secs(7)), ..result(Verdict::Retry) };
    queue.finish_attempt(&first, busy, now(), 0.0);
    assert!(queue.start_next(now() + TimeDelta::seconds(6)).is_none());
    assert_eq!(queue.start_next(now() + TimeDelta::seconds(7)).map(|(_, message)| message.n), Some(2));
}

#[test]
fn a_requested_pause_is_saved_so_that_the_next_owner_respects_it() {
    let (_, mut queue) = queue_with(recipient(10, OnExhausted::Skip), &[Some("a")]);
    let (first, _) = queue.start_next(now()).unwrap();
    let busy = AttemptResult { retry_after: Some(Duration::from_secs(60)), ..result(Verdict::Retry) };
    queue.finish_attempt(&first, busy, now(), 0.0);
    let saved: Vec<_> = save(&mut queue).saved_lanes.into_iter().map(|(_, row)| row.next_at).collect();
    assert_eq!(saved, [Some(now() + TimeDelta::seconds(60))], "longer than the backoff");
}

#[test]
fn a_queue_that_waits_for_a_response_is_not_woken_before() {
    let (_, mut queue) = queue_with(recipient(1, OnExhausted::Skip), &[None, None, None]);
    let (first, _) = queue.start_next(now()).unwrap();
    let busy = AttemptResult { retry_after: Some(Duration::from_secs(1)), ..result(Verdict::Retry) };
    queue.finish_attempt(&first, busy, now(), 0.0);
    save(&mut queue);
    let later = now() + TimeDelta::seconds(2);
    queue.start_next(later).unwrap();
    assert_eq!(queue.next_wake(later), Some(now() + TimeDelta::seconds(5)), "when the first is due, not at once");
}

#[test]
fn a_lane_with_a_long_backlog_is_detached_so_that_others_need_not_wait() {
    let mut lanes = vec![Some("busy"); 5_000];
    lanes.push(Some("calm"));
    let (database, mut queue) = queue_with(recipient(2, OnExhausted::Skip), &lanes);
    let mut rounds = 0;
    loop {
        let started = start_all(&mut queue, now());
        if numbers(&started).contains(&5_001) {
            break;
        }
        for (key, _) in started {
            queue.finish_attempt(&key, result(Verdict::Delivered), now(), 0.0);
        }
        database.read(&mut queue, now());
        rounds += 1;
        assert!(rounds < 500, "the calm lane waits for the busy one");
    }
    assert!(queue.lanes.queued() < 2_000, "{} in memory", queue.lanes.queued());
}

#[test]
fn fewer_messages_are_read_at_a_time_if_they_are_large() {
    for (payload_bytes, expected) in [(LARGE, 7), (30_000, 68), (100, 2_048)] {
        let (database, mut queue) = unread_queue(payload_bytes, &[None; 1_000]);
        let first = queue.read_request().map(|request| (request.after, request.limit));
        assert_eq!(first, Some((0, 32)), "as if they were large, as long as their size is unknown");
        let (mut queued, mut delivered) = (BTreeSet::new(), 0);
        while delivered < 1_000 {
            database.read(&mut queue, now());
            queued.insert(queue.lanes.queued());
            delivered += deliver_all(&mut queue);
            if let Some(request) = queue.read_request() {
                assert_eq!(request.limit, expected, "{payload_bytes} bytes");
            }
        }
        // A quarter of the previous read may be left.
        let most = queued.last().copied().unwrap_or_default();
        assert!(most > 0 && most <= (expected + expected / 4).max(32), "{queued:?}");
    }
}

#[test]
fn large_messages_of_a_lane_are_read_a_few_at_a_time() {
    for (payload_bytes, expected) in [(LARGE, 7), (100, 64)] {
        let (database, mut queue) = unread_queue(payload_bytes, &[Some("lane"); 40]);
        database.read(&mut queue, now());
        let (key, _) = queue.start_next(now()).unwrap();
        queue.finish_attempt(&key, result(Verdict::Retry), now(), 0.0);
        let requests = queue.start_lane_reads(now() + TimeDelta::days(1), 8);
        let limits: Vec<usize> = requests.iter().map(|request| request.limit).collect();
        assert_eq!(limits, [expected], "{payload_bytes} bytes");
    }
}

#[test]
fn messages_handed_over_to_a_full_queue_are_read_later() {
    for (payload_bytes, expected) in [(LARGE, 8), (100, 2_049)] {
        let (database, mut queue) = unread_queue(payload_bytes, &[None; 3_000]);
        queue.progress.has_more = false;
        for n in 1..=3_000 {
            queue.receive(vec![database.message(n)], Origin::HandedOver);
        }
        assert_eq!((queue.lanes.queued(), queue.progress.has_more), (expected, true), "{payload_bytes} bytes");
        let mut delivered = 0;
        while delivered < 3_000 {
            delivered += deliver_all(&mut queue);
            database.read(&mut queue, now());
        }
    }
}

#[test]
fn messages_handed_over_do_not_overtake_those_still_to_be_read() {
    let (database, mut queue) = unread_queue(0, &[Some("a"), Some("a")]);
    queue.receive(vec![database.message(2)], Origin::HandedOver);
    assert!(start_all(&mut queue, now()).is_empty(), "1 has not been read");
    database.read(&mut queue, now());
    queue.receive(vec![database.message(2)], Origin::HandedOver);
    assert_eq!((numbers(&start_all(&mut queue, now())), queue.lanes.queued()), (vec![1], 2), "each is queued once");
}

#[test]
fn a_retry_after_a_dead_letter_command_is_rejected() {
    let (database, mut queue) = queue_with(recipient(10, OnExhausted::Block), &[Some("a"), Some("a")]);
    let (head, _) = queue.start_next(now()).unwrap();
    queue.finish_attempt(&head, result(Verdict::Refused), now(), 0.0);
    save(&mut queue);
    for (id, command) in [(1, OperatorCommand::DeadLetter), (2, OperatorCommand::Retry)] {
        queue.execute(PendingCommand { id, key: head.clone(), n: 1, command, by: String::new() }, now());
    }
    let changes = save(&mut queue);
    assert_eq!(changes.executed_commands, [1, 2]);
    assert_eq!(changes.rejected_retries, [(queue.recipient.id, 1)]);
    queue.start_next(now());
    database.read(&mut queue, now());
    assert_eq!(numbers(&start_all(&mut queue, now())), [2]);
}

#[test]
fn a_message_that_is_given_up_while_in_flight_is_not_retried() {
    let (database, mut queue) = queue_with(recipient(10, OnExhausted::Skip), &[Some("a"), Some("a")]);
    let (head, message) = queue.start_next(now()).unwrap();
    let command = OperatorCommand::DeadLetter;
    queue.execute(PendingCommand { id: 1, key: head.clone(), n: message.n, command, by: "ann".to_owned() }, now());
    queue.finish_attempt(&head, result(Verdict::Retry), now(), 0.0);
    save(&mut queue);
    queue.start_next(now());
    database.read(&mut queue, now());
    let (_, again) = queue.start_next(now()).expect("it does not wait for its backoff");
    assert_eq!((again.n, queue.pop_dead_letter_request(again.n)), (message.n, Some("ann".to_owned())));
}

/// A queue with messages of a replay, each in a separate lane, and then live ones.
fn queue_with_replay(max_in_flight: usize, replayed: i64, live: i64) -> SubscriberQueue {
    let mut queue = Database::default().load(recipient(max_in_flight, OnExhausted::Skip), now());
    let message = |n| HubMessage {
        n,
        lane: None,
        seq: None,
        attempts_before: 0,
        replay: (n <= replayed).then(uuid::Uuid::nil),
        event: Some(Arc::new(event(0))),
    };
    queue.receive((1..=replayed + live).map(message).collect(), Origin::Read { is_complete: true });
    queue
}

#[test]
fn a_live_message_does_not_wait_behind_the_messages_of_a_replay() {
    let mut queue = queue_with_replay(8, 100, 0);
    assert_eq!(start_all(&mut queue, now()).len(), 6, "a quarter of the requests is reserved for live messages");
    let mut queue = queue_with_replay(20, 100, 6);
    assert_eq!(numbers(&start_all(&mut queue, now()))[..8], [101, 102, 103, 1, 104, 105, 106, 2]);
}

#[test]
fn a_replay_that_fails_opens_no_breaker_and_pauses_only_replays() {
    let mut queue = queue_with_replay(8, 60, 3);
    for _ in 0..30 {
        let mut started = start_all(&mut queue, now());
        started.retain(|(_, message)| message.replay.is_some());
        started.iter().for_each(|(key, _)| queue.finish_attempt(key, result(Verdict::Retry), now(), 0.0));
    }
    assert_eq!((queue.limits.is_breaker_open(), queue.in_flight()), (false, 3), "the live ones are in flight");
    let mut queue = queue_with_replay(8, 60, 0);
    let (key, _) = queue.start_next(now()).unwrap();
    let busy = AttemptResult { retry_after: Some(Duration::from_secs(30)), ..result(Verdict::Retry) };
    queue.finish_attempt(&key, busy, now(), 0.0);
    assert!(queue.start_next(now()).is_none());
    let live = HubMessage { n: 61, lane: None, seq: None, attempts_before: 0, replay: None, event: None };
    queue.receive(vec![live], Origin::Read { is_complete: true });
    assert_eq!(queue.start_next(now()).map(|(_, message)| message.n), Some(61));
    assert!(queue.start_next(now() + TimeDelta::seconds(30)).is_some(), "the replay continues");
}

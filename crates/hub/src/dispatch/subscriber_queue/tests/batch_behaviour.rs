//! The guarantees of batches, one at a time.

use super::*;
use crate::deliveries::command::{OperatorCommand, PendingCommand};

fn queue_with(
    batch: RecipientBatch,
    on_exhausted: OnExhausted,
    payload_bytes: usize,
    lanes: &[Option<&str>],
) -> (Database, SubscriberQueue) {
    let messages = (1..).zip(lanes).map(|(n, lane)| (n, lane.map(Arc::from))).collect();
    let database = Database { messages, payload_bytes, ..Database::default() };
    let mut queue = database.load(with_batch(recipient(10, on_exhausted), Some(batch)), now());
    while queue.read_request().is_some() {
        database.read(&mut queue, now());
    }
    (database, queue)
}

fn batch_of(max: usize) -> RecipientBatch {
    RecipientBatch { max, wait: Duration::ZERO }
}

fn start(queue: &mut SubscriberQueue, now: DateTime<Utc>) -> Option<Vec<i64>> {
    queue.start_batch(now).map(|batch| batch.messages.iter().map(|message| message.n).collect())
}

fn save(queue: &mut SubscriberQueue) -> Changes {
    let mut changes = Changes::default();
    queue.drain_changes(now(), &mut changes);
    changes
}

#[test]
fn a_batch_has_the_messages_of_several_lanes_in_their_order_and_counts_as_one_request() {
    let lanes = [Some("a"), Some("b"), Some("a"), None, Some("a")];
    let (_, mut queue) = queue_with(batch_of(4), OnExhausted::Skip, 10, &lanes);
    let first = queue.start_batch(now()).unwrap();
    assert_eq!(numbers_of(&first), [1, 2, 3, 5], "all of a lane, then those of the next one, sorted");
    assert_eq!((queue.in_flight(), start(&mut queue, now())), (1, Some(vec![4])));
    queue.finish_batch(&first.lanes, &result(Verdict::Delivered), now(), 0.0);
    let outcomes: Vec<(i64, u16, Outcome)> =
        save(&mut queue).attempts.iter().map(|attempt| (attempt.n, attempt.attempt, attempt.outcome)).collect();
    assert_eq!(outcomes, [1, 3, 5, 2].map(|n| (n, 1, Outcome::Delivered)));
    assert!(queue.start_batch(now()).is_none(), "nothing is left");
}

#[test]
fn a_lane_in_a_batch_has_no_other_request_in_flight() {
    let (_, mut queue) = queue_with(batch_of(2), OnExhausted::Skip, 10, &[Some("a"), Some("a"), Some("a")]);
    let first = queue.start_batch(now()).unwrap();
    assert!(queue.start_batch(now()).is_none());
    queue.cancel_batch(&first.lanes, now());
    let again = queue.start_batch(now()).unwrap();
    assert_eq!(numbers_of(&again), [1, 2], "it was not sent");
    queue.finish_batch(&again.lanes, &result(Verdict::Delivered), now(), 0.0);
    assert_eq!(start(&mut queue, now()), Some(vec![3]));
}

fn numbers_of(batch: &StartedBatch) -> Vec<i64> {
    batch.messages.iter().map(|message| message.n).collect()
}

#[test]
fn messages_wait_for_a_full_batch_and_no_longer_than_their_time() {
    let batch = RecipientBatch { max: 3, wait: Duration::from_millis(500) };
    let (mut database, mut queue) = queue_with(batch, OnExhausted::Skip, 10, &[None, None]);
    assert!(!queue.can_start(now()));
    let end = now() + TimeDelta::milliseconds(500);
    assert_eq!(queue.next_wake(now()), Some(end));
    assert!(start(&mut queue, end - TimeDelta::milliseconds(1)).is_none());
    database.messages.insert(3, None);
    queue.receive(vec![database.message(3)], Origin::HandedOver);
    assert_eq!(start(&mut queue, now() + TimeDelta::milliseconds(1)), Some(vec![1, 2, 3]), "it is full");
    database.messages.insert(4, None);
    queue.receive(vec![database.message(4)], Origin::HandedOver);
    assert!(start(&mut queue, end).is_none(), "the time starts anew");
    assert_eq!(start(&mut queue, end + TimeDelta::milliseconds(500)), Some(vec![4]));
}

#[test]
fn the_size_of_a_batch_is_bounded() {
    let (_, mut queue) = queue_with(batch_of(100), OnExhausted::Skip, 200 * 1024, &[None; 7]);
    let sizes: Vec<usize> = std::iter::from_fn(|| start(&mut queue, now())).map(|numbers| numbers.len()).collect();
    assert_eq!(sizes, [4, 3], "about 1 MB");
}

#[test]
fn what_failed_together_is_retried_together_and_apart_from_new_messages() {
    let lanes = [Some("a"), Some("a"), Some("b")];
    let (mut database, mut queue) = queue_with(batch_of(100), OnExhausted::Skip, 10, &lanes);
    let first = queue.start_batch(now()).unwrap();
    queue.finish_batch(&first.lanes, &result(Verdict::Retry), now(), 0.5);
    save(&mut queue);
    for (n, lane) in [(4, "a"), (5, "c")] {
        database.messages.insert(n, Some(lane.into()));
        queue.receive(vec![database.message(n)], Origin::HandedOver);
    }
    let later = now() + TimeDelta::seconds(6);
    queue.can_start(later);
    database.read(&mut queue, later);
    let mut batches = Vec::new();
    while let Some(batch) = queue.start_batch(later) {
        batches.push(numbers_of(&batch));
        queue.finish_batch(&batch.lanes, &result(Verdict::Delivered), later, 0.5);
    }
    batches.sort();
    assert_eq!(batches, [vec![1, 2, 3], vec![4], vec![5]]);
}

#[test]
fn a_batch_that_fails_for_good_is_a_dead_letter_for_each_message_or_blocks_at_the_head() {
    for (on_exhausted, dead) in [(OnExhausted::Skip, vec![1, 2]), (OnExhausted::Block, vec![1])] {
        let lanes = [Some("a"), Some("a")];
        let (database, mut queue) = queue_with(batch_of(100), on_exhausted, 10, &lanes);
        let batch = queue.start_batch(now()).unwrap();
        queue.finish_batch(&batch.lanes, &result(Verdict::Refused), now(), 0.0);
        let changes = save(&mut queue);
        let found: Vec<i64> = changes.dead_letters.iter().map(|dead| dead.message.n).collect();
        assert_eq!((found, changes.attempts.len()), (dead, 2), "{on_exhausted:?}");
        if on_exhausted == OnExhausted::Block {
            let key = batch.lanes[0].0.clone();
            let command = OperatorCommand::Retry;
            queue.execute(PendingCommand { id: 1, key, n: 1, command, by: String::new() }, now());
            queue.can_start(now());
            database.read(&mut queue, now());
            assert_eq!(start(&mut queue, now()), Some(vec![1]), "the retried head is sent alone");
        }
    }
}

#[test]
fn a_message_that_an_operator_gives_up_is_not_sent_with_others() {
    let (_, mut queue) =
        queue_with(batch_of(100), OnExhausted::Skip, 10, &[Some("a"), Some("a"), Some("a"), Some("b")]);
    let (key, command) = (LaneKey::Named("a".into()), OperatorCommand::DeadLetter);
    queue.execute(PendingCommand { id: 1, key, n: 2, command, by: "ann".to_owned() }, now());
    let mut batches = Vec::new();
    while let Some(batch) = queue.start_batch(now()) {
        batches.push(numbers_of(&batch));
        let is_given_up = queue.pop_dead_letter_request(batch.messages[0].n).is_some();
        assert_eq!(is_given_up, batch.messages[0].n == 2);
        queue.finish_batch(&batch.lanes, &result(Verdict::Delivered), now(), 0.0);
    }
    assert_eq!(batches, [vec![1, 4], vec![2], vec![3]]);
}

#[test]
fn a_batch_has_live_messages_or_those_of_one_replay_and_counts_as_one_request_of_it() {
    let lanes = [Some("a"), Some("x"), Some("y"), Some("a"), Some("x"), None, Some("b")];
    let messages = (1..).zip(lanes).map(|(n, lane)| (n, lane.map(Arc::from))).collect();
    // A backfill in lane a, and then live messages; two replays in separate lanes.
    let replays = [(1, 1), (2, 2), (3, 3), (5, 2), (6, 3)].map(|(n, replay)| (n, Uuid::from_u128(replay)));
    let database = Database { messages, replays: BTreeMap::from(replays), payload_bytes: 10, ..Database::default() };
    let mut queue = database.load(with_batch(recipient(4, OnExhausted::Skip), Some(batch_of(100))), now());
    database.read(&mut queue, now());
    let started: Vec<StartedBatch> = std::iter::from_fn(|| queue.start_batch(now())).collect();
    let numbers: Vec<Vec<i64>> = started.iter().map(numbers_of).collect();
    assert_eq!(numbers, [vec![7], vec![1], vec![2, 5], vec![3, 6]], "three of four requests belong to replays");
    assert!(!queue.replays.allow(4, now()));
    queue.finish_batch(&started[2].lanes, &result(Verdict::Delivered), now(), 0.0);
    assert!(queue.replays.allow(4, now()), "both messages were one request");
    queue.cancel_batch(&started[3].lanes, now());
    assert_eq!(start(&mut queue, now()), Some(vec![3, 6]), "what was not sent is sent again");
    queue.finish_batch(&started[1].lanes, &result(Verdict::Delivered), now(), 0.0);
    assert_eq!(start(&mut queue, now()), Some(vec![4]), "the live message follows the backfill of its lane");
    let mut changes = Changes::default();
    queue.drain_changes(now(), &mut changes);
    queue.drain_health(&mut changes);
    let delivered: i64 = changes.health.minutes.iter().map(|minute| minute.counts.delivered).sum();
    assert_eq!((delivered, changes.attempts.len()), (3, 3), "each message counts");
}

#[test]
fn a_batch_of_a_replay_that_fails_delays_no_live_message() {
    let (mut database, mut queue) = queue_with(batch_of(2), OnExhausted::Skip, 10, &[]);
    for n in 1..=60 {
        database.messages.insert(n, None);
        database.replays.insert(n, Uuid::from_u128(1));
    }
    queue.receive((1..=60).map(|n| database.message(n)).collect(), Origin::Read { is_complete: true });
    for _ in 0..29 {
        let batch = queue.start_batch(now()).unwrap();
        queue.finish_batch(&batch.lanes, &result(Verdict::Retry), now(), 0.0);
    }
    assert!(!queue.limits.is_breaker_open(), "29 requests have failed");
    let batch = queue.start_batch(now()).unwrap();
    let busy = AttemptResult { retry_after: Some(Duration::from_secs(30)), ..result(Verdict::Retry) };
    queue.finish_batch(&batch.lanes, &busy, now(), 0.0);
    database.messages.insert(61, None);
    queue.receive(vec![database.message(61)], Origin::Read { is_complete: true });
    assert_eq!(start(&mut queue, now()), Some(vec![61]));
}

#[test]
fn a_long_stored_lane_is_sent_in_full_batches_without_waiting() {
    let batch = RecipientBatch { max: 100, wait: Duration::from_secs(5) };
    let (database, mut queue) = queue_with(batch, OnExhausted::Skip, 10, &[Some("a"); 300]);
    let mut sent = 0;
    for _ in 0..300 {
        database.read(&mut queue, now());
        while let Some(batch) = queue.start_batch(now()) {
            sent += batch.messages.len();
            queue.finish_batch(&batch.lanes, &result(Verdict::Delivered), now(), 0.0);
        }
    }
    assert!(sent >= 200, "only the last part waits for more: {sent}");
}

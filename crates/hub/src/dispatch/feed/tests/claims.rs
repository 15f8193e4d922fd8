//! What a feed promises, one thing at a time.

use super::*;

fn now() -> DateTime<Utc> {
    DateTime::<Utc>::UNIX_EPOCH + TimeDelta::days(20_000)
}

fn fed(recipient: Arc<Recipient>, lanes: &[Option<&str>]) -> (World, Feed) {
    let mut world = World::default();
    for (n, lane) in (1..).zip(lanes) {
        world.messages.insert(n, lane.map(Arc::from));
    }
    let mut feed = world.load(recipient, now());
    while feed.wish().is_some() {
        world.read(&mut feed, now());
    }
    (world, feed)
}

#[test]
fn a_failing_lane_waits_alone() {
    let (world, mut feed) = fed(recipient(10, OnExhausted::Skip), &[Some("a"), Some("a"), Some("b"), None]);
    let sent: Vec<(Key, Mail)> = std::iter::from_fn(|| feed.next(now())).collect();
    assert_eq!(sent.iter().map(|(_, mail)| mail.n).collect::<Vec<_>>(), [1, 3, 4]);
    feed.finished(&sent[0].0, came(Verdict::Retry), now(), 0.0);
    feed.finished(&sent[1].0, came(Verdict::Delivered), now(), 0.0);
    world.read(&mut feed, now());
    feed.save(now(), &mut Save::default());
    assert!(feed.next(now()).is_none(), "2 waits for 1, which waits");
    assert_eq!(feed.next_look(now()), Some(now() + TimeDelta::seconds(5)));
    let later = now() + TimeDelta::seconds(5);
    world.read(&mut feed, later);
    assert_eq!(feed.next(later).map(|(_, mail)| mail.n), Some(1));
}

#[test]
fn after_twenty_failures_one_at_a_time_is_tried_and_one_success_ends_that() {
    let lanes = vec![None; 100];
    let (world, mut feed) = fed(recipient(50, OnExhausted::Skip), &lanes);
    let sent: Vec<(Key, Mail)> = std::iter::from_fn(|| feed.next(now())).collect();
    assert_eq!(sent.len(), 50);
    for (key, _) in &sent {
        feed.finished(key, came(Verdict::Retry), now(), 0.0);
    }
    let probe = feed.next(now()).unwrap();
    assert!(feed.next(now() + TimeDelta::seconds(1)).is_none(), "one at a time");
    feed.finished(&probe.0, came(Verdict::Retry), now(), 0.0);
    assert!(feed.next(now()).is_none(), "not at once");
    let later = now() + TimeDelta::seconds(6);
    world.read(&mut feed, later);
    let probe = feed.next(later).unwrap();
    feed.finished(&probe.0, came(Verdict::Delivered), later, 0.0);
    world.read(&mut feed, later);
    assert!(std::iter::from_fn(|| feed.next(later)).count() > 10);
}

#[test]
fn a_rate_limit_is_kept() {
    let unlimited = recipient(1_000, OnExhausted::Skip);
    let Ok(limited) = Arc::try_unwrap(unlimited) else { unreachable!() };
    let (_, mut feed) = fed(Arc::new(Recipient { rate: Some(100), ..limited }), &vec![None; 500]);
    let mut sent = 0;
    for millisecond in 0..1_000 {
        while feed.next(now() + TimeDelta::milliseconds(millisecond)).is_some() {
            sent += 1;
        }
    }
    assert!((95..=111).contains(&sent), "{sent} in a second");
}

#[test]
fn who_asks_to_be_left_alone_is() {
    let (_, mut feed) = fed(recipient(10, OnExhausted::Skip), &[None, None]);
    let first = feed.next(now()).unwrap();
    let busy = Came { retry_after: Some(Duration::from_secs(7)), ..came(Verdict::Retry) };
    feed.finished(&first.0, busy, now(), 0.0);
    assert!(feed.next(now() + TimeDelta::seconds(6)).is_none());
    assert_eq!(feed.next(now() + TimeDelta::seconds(7)).map(|(_, mail)| mail.n), Some(2));
}

#[test]
fn who_waits_for_an_answer_alone_is_not_looked_at_before() {
    let (_, mut feed) = fed(recipient(1, OnExhausted::Skip), &[None, None, None]);
    let first = feed.next(now()).unwrap();
    let busy = Came { retry_after: Some(Duration::from_secs(1)), ..came(Verdict::Retry) };
    feed.finished(&first.0, busy, now(), 0.0);
    feed.save(now(), &mut Save::default());
    let later = now() + TimeDelta::seconds(2);
    feed.next(later).unwrap();
    assert_eq!(feed.next_look(later), Some(now() + TimeDelta::seconds(5)), "when the first is due, not at once");
}

#[test]
fn a_lane_with_more_waiting_than_others_should_wait_for_is_put_aside() {
    let mut lanes = vec![Some("hot"); 5_000];
    lanes.push(Some("calm"));
    let (world, mut feed) = fed(recipient(2, OnExhausted::Skip), &lanes);
    let mut rounds = 0;
    loop {
        let sent: Vec<(Key, Mail)> = std::iter::from_fn(|| feed.next(now())).collect();
        if sent.iter().any(|(_, mail)| mail.n == 5_001) {
            break;
        }
        for (key, _) in sent {
            feed.finished(&key, came(Verdict::Delivered), now(), 0.0);
        }
        world.read(&mut feed, now());
        rounds += 1;
        assert!(rounds < 500, "the calm lane waits for the hot one");
    }
    assert!(feed.waiting < 2_000, "{} in memory", feed.waiting);
}

const LARGE: usize = 256 * 1024;

fn with_payloads(payload_bytes: usize, lanes: &[Option<&str>]) -> (World, Feed) {
    let messages = (1..).zip(lanes).map(|(n, lane)| (n, lane.map(Arc::from))).collect();
    let world = World { messages, payload_bytes, ..World::default() };
    let feed = world.load(recipient(10, OnExhausted::Skip), now());
    (world, feed)
}

/// Delivers what may be sent now.
fn deliver_all(feed: &mut Feed) -> usize {
    let sent: Vec<(Key, Mail)> = std::iter::from_fn(|| feed.next(now())).collect();
    sent.iter().for_each(|(key, _)| feed.finished(key, came(Verdict::Delivered), now(), 0.0));
    sent.len()
}

#[test]
fn the_larger_messages_are_the_fewer_are_read_at_a_time() {
    for (payload_bytes, most) in [(LARGE, 7), (30_000, 68), (100, 512)] {
        let (world, mut feed) = with_payloads(payload_bytes, &[None; 1_000]);
        assert_eq!(feed.wish(), Some((0, 32)), "as if they were large, as long as nothing is known of them");
        let (mut read, mut delivered) = (BTreeSet::new(), 0);
        while delivered < 1_000 {
            world.read(&mut feed, now());
            read.insert(feed.waiting);
            delivered += deliver_all(&mut feed);
            if let Some((_, wish)) = feed.wish() {
                assert_eq!(wish, most, "of {payload_bytes} bytes");
            }
        }
        // Of what was read before, a quarter may be left.
        assert!(read.last().is_some_and(|waiting| *waiting <= (most + most / 4).max(32)), "{read:?}");
    }
}

#[test]
fn large_messages_of_a_lane_are_read_a_few_at_a_time() {
    for (payload_bytes, most) in [(LARGE, 7), (100, 64)] {
        let (world, mut feed) = with_payloads(payload_bytes, &[Some("lane"); 40]);
        world.read(&mut feed, now());
        let (key, _) = feed.next(now()).unwrap();
        feed.finished(&key, came(Verdict::Retry), now(), 0.0);
        let wished: Vec<usize> = feed.lane_wishes(now() + TimeDelta::days(1), 8).iter().map(|wish| wish.most).collect();
        assert_eq!(wished, [most], "of {payload_bytes} bytes");
    }
}

#[test]
fn what_is_handed_over_is_read_later_when_much_waits() {
    for (payload_bytes, most) in [(LARGE, 8), (100, 513)] {
        let (world, mut feed) = with_payloads(payload_bytes, &[None; 2_000]);
        feed.behind = false;
        for n in 1..=2_000 {
            feed.hand_over(vec![world.mail(n)]);
        }
        assert_eq!((feed.waiting, feed.behind), (most, true), "of {payload_bytes} bytes");
        let mut delivered = 0;
        while delivered < 2_000 {
            delivered += deliver_all(&mut feed);
            world.read(&mut feed, now());
        }
    }
}

#[test]
fn a_retry_behind_a_give_up_comes_too_late() {
    let (world, mut feed) = fed(recipient(10, OnExhausted::Block), &[Some("a"), Some("a")]);
    let head = feed.next(now()).unwrap();
    feed.finished(&head.0, came(Verdict::Refused), now(), 0.0);
    feed.save(now(), &mut Save::default());
    for (id, what) in [(1, What::GiveUp), (2, What::Retry)] {
        feed.command(Command { id, key: head.0.clone(), n: 1, what, by: String::new() }, now());
    }
    let mut save = Save::default();
    feed.save(now(), &mut save);
    assert_eq!((save.done, save.unretried), (vec![1, 2], vec![(feed.recipient.id, 1)]));
    feed.next(now());
    world.read(&mut feed, now());
    assert_eq!(std::iter::from_fn(|| feed.next(now())).map(|(_, mail)| mail.n).collect::<Vec<_>>(), [2]);
}

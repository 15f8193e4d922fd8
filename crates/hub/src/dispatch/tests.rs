//! What feeds share: places and reads. There is no database here, so that nothing that is read for ever comes.

use std::collections::BTreeMap;

use chrono::TimeDelta;
use kit::health::Health;
use kit::secret::MasterKey;
use mailbox::replica::Replica;
use mailbox::runtime::Runtime;
use serde_json::Value;
use sqlx::postgres::PgPoolOptions;
use tokio_util::sync::CancellationToken;

use super::feed::LaneRow;
use super::*;
use crate::client::ClientSettings;
use crate::domain::{Format, OnExhausted};
use crate::target::Target;

pub(super) fn recipient() -> Recipient {
    Recipient {
        id: Uuid::now_v7(),
        tenant: "main".to_owned(),
        version: 1,
        is_open: true,
        target: Target::parse("http://127.0.0.1:1/", false).unwrap(),
        headers: http::HeaderMap::new(),
        secrets: Vec::new(),
        format: Format::Raw,
        timeout: Duration::from_secs(1),
        max_in_flight: 50,
        rate: None,
        backoff: vec![5, 30, 300],
        retry_statuses: Vec::new(),
        on_exhausted: OnExhausted::Skip,
        snapshot: Value::Null,
    }
}

pub(super) fn event(payload_bytes: usize) -> Event {
    let payload = vec![b'x'; payload_bytes].into();
    let (source, topic) = ("hub".to_owned(), "t".to_owned());
    Event { id: Uuid::nil(), source, topic, at: DateTime::UNIX_EPOCH, payload, traceparent: None }
}

/// One that owns its shards, with this directory's version.
async fn dispatcher() -> Dispatcher {
    let db = PgPoolOptions::new().connect_lazy("postgres://nobody@127.0.0.1:1/nothing").unwrap();
    db.close().await;
    let (clock, replica) = (Clock::system(), Replica::new("test", Duration::from_secs(60)));
    let stop = CancellationToken::new();
    let share = Runtime::start(db.clone(), clock.clone(), replica, Health::default(), stop).share("hub.dispatch");
    let client = Client::new(ClientSettings::default()).unwrap();
    let seal = Seal::new(&MasterKey::generate(), &[], "test");
    let (_, handed_over) = mpsc::channel(1);
    let mut dispatcher = Dispatcher::new(db, clock, client, seal, share, Watcher::default(), handed_over);
    dispatcher.looked_at = Some(tokio::time::Instant::now());
    (dispatcher.version, dispatcher.newest_version, dispatcher.told_to) = (7, 7, 0);
    dispatcher.shards = (0..16).collect();
    dispatcher
}

impl Dispatcher {
    /// Of a subscriber that may have so many under way and has as many messages that wait.
    fn add(&mut self, messages: i64, max_in_flight: usize) -> Uuid {
        let recipient = Recipient { max_in_flight, ..recipient() };
        let id = recipient.id;
        let mut feed = Feed::new(Arc::new(recipient), 0, Vec::new(), HashSet::new(), self.clock.now());
        let event = Arc::new(event(0));
        feed.offer(
            (1..=messages).map(|n| Mail { n, lane: None, seq: None, event: Some(event.clone()) }).collect(),
            true,
        );
        self.feeds.insert(id, feed);
        self.hot.insert(id);
        id
    }

    /// Of a subscriber with so many lanes that are due, none of which was read yet.
    fn add_with_lanes(&mut self, lanes: i64) -> Uuid {
        let (recipient, now) = (recipient(), self.clock.now());
        let id = recipient.id;
        let row = |head: i64| {
            let lane = Some(Arc::from(format!("lane {head}")));
            (LaneRow { head, lane, attempts: 0, next_at: Some(now - TimeDelta::seconds(1)), again: false }, head)
        };
        self.feeds
            .insert(id, Feed::new(Arc::new(recipient), lanes, (1..=lanes).map(row).collect(), HashSet::new(), now));
        self.hot.insert(id);
        id
    }

    /// Who is read for, by a read that fails.
    fn read_in_vain(&mut self) -> (HashSet<Uuid>, BTreeMap<Uuid, usize>) {
        self.read(self.clock.now());
        let wishes = self.reading.as_ref().map(|(wishes, _)| wishes.clone()).unwrap_or_default();
        let mut lanes = BTreeMap::new();
        wishes.lanes.iter().for_each(|(subscriber, _)| *lanes.entry(*subscriber).or_default() += 1);
        assert!(self.take_in(Ok(Err(sqlx::Error::PoolClosed))).is_err());
        (wishes.feeds.iter().map(|(subscriber, _, _)| *subscriber).collect(), lanes)
    }
}

#[tokio::test]
async fn however_many_take_all_places_they_can_some_are_left() {
    let mut dispatcher = dispatcher().await;
    let now = dispatcher.clock.now();
    for _ in 0..8 {
        dispatcher.add(1_000, 1_000);
    }
    dispatcher.send(now);
    let late = dispatcher.add(10, 10);
    dispatcher.send(now);
    assert_eq!(dispatcher.feeds[&late].in_flight(), 10, "of {}", dispatcher.in_flight);
    assert!(dispatcher.in_flight > 4_000, "{}: nor is much left unused", dispatcher.in_flight);
}

#[tokio::test]
async fn however_many_wish_to_be_read_for_each_has_its_turn() {
    let mut dispatcher = dispatcher().await;
    let all: HashSet<Uuid> = (0..150).map(|_| dispatcher.add(0, 10)).collect();
    let mut read = HashSet::new();
    for _ in 0..150 {
        let (feeds, _) = dispatcher.read_in_vain();
        assert!(feeds.len() <= 64, "{} at once", feeds.len());
        read.extend(feeds);
    }
    assert_eq!(read, all);
}

#[tokio::test]
async fn one_with_many_lanes_takes_no_reads_from_others() {
    let mut dispatcher = dispatcher().await;
    let greedy = dispatcher.add_with_lanes(500);
    let others: HashSet<Uuid> = (0..9).map(|_| dispatcher.add(0, 10)).collect();
    for _ in 0..20 {
        let (feeds, lanes) = dispatcher.read_in_vain();
        assert!(feeds.is_superset(&others), "{} of them are read for", feeds.len());
        assert_eq!(lanes, BTreeMap::from([(greedy, 8)]));
    }
}

#[tokio::test]
async fn after_shards_were_given_up_nothing_is_sent_until_it_is_known_what_is_left() {
    for gives_up in [false, true] {
        let mut dispatcher = dispatcher().await;
        dispatcher.add(5, 5);
        dispatcher.hold(if gives_up { BTreeSet::from([3]) } else { (0..16).collect() });
        let (began, mut has_sent) = (tokio::time::Instant::now(), false);
        while began.elapsed() < REFRESH_PAUSE * 3 {
            assert!(dispatcher.refresh().await.is_err());
            drop(dispatcher.round().await);
            has_sent |= dispatcher.in_flight > 0;
        }
        assert_eq!(has_sent, !gives_up);
    }
}

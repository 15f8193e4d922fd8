//! The dispatcher over many subscriber queues: fair shares of slots and reads, and ownership. There is no database here, so
//! no read ever returns messages.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use chrono::TimeDelta;
use kit::health::Health;
use kit::secret::MasterKey;
use mailbox::consumers::{Replica, Runtime};
use mailbox::database::Database;
use sqlx::postgres::PgPoolOptions;
use tokio_util::sync::CancellationToken;

use super::ownership::REFRESH_PAUSE;
use super::subscriber_queue::Origin;
use super::*;
use crate::client::{Client, ClientSettings};
use crate::delivery::fixtures::recipient;
use crate::delivery::{LaneRow, Recipient, RecipientLimits, StoredState};
use crate::hub_message::HubMessage;
use crate::hub_message::fixtures::event;

/// A dispatcher that owns all shards and has loaded its (zero) subscribers.
async fn dispatcher() -> Dispatcher {
    let db = PgPoolOptions::new().connect_lazy("postgres://nobody@127.0.0.1:1/nothing").unwrap();
    db.close().await;
    let (clock, replica) = (Clock::system(), Replica::new("test", Duration::from_secs(60)));
    let stop = CancellationToken::new();
    let assignment = Runtime::start(Database::new(db.clone()), clock.clone(), replica, Health::default(), stop)
        .shard_assignment("hub.dispatch");
    let clients = TenantClients::shared(Client::new(ClientSettings::default()).unwrap());
    let cipher = Cipher::new(&MasterKey::generate(), &[], "test");
    let (_, handed_over) = mpsc::channel(1);
    let mut dispatcher = Dispatcher::new(db, clock, clients, cipher, assignment, handed_over);
    dispatcher.ownership.assume_loaded((0..16).collect(), 7);
    dispatcher.reader.announced.load(0);
    dispatcher
}

impl Dispatcher {
    /// Adds a subscriber with this many queued messages.
    fn add(&mut self, messages: i64, max_in_flight: usize) -> Uuid {
        let limits = RecipientLimits { max_in_flight, rate: None };
        let recipient = Recipient { limits, ..recipient() };
        let id = recipient.id;
        let mut queue = SubscriberQueue::new(Arc::new(recipient), 0, StoredState::default(), self.clock.now());
        let event = Arc::new(event(0));
        let messages = (1..=messages).map(|n| HubMessage { n, lane: None, seq: None, event: Some(event.clone()) });
        queue.receive(messages.collect(), Origin::Read { is_complete: true });
        self.queues.insert(id, queue);
        self.scheduler.activate(id);
        id
    }

    /// Adds a subscriber with this many detached lanes that are due and not read yet.
    fn add_with_lanes(&mut self, lanes: i64) -> Uuid {
        let (recipient, now) = (recipient(), self.clock.now());
        let id = recipient.id;
        let row = |head: i64| {
            let (lane, next_at) = (Some(Arc::from(format!("lane {head}"))), Some(now - TimeDelta::seconds(1)));
            (LaneRow { head, lane, attempts: 0, next_at, manual_retry: false }, head)
        };
        let stored = StoredState { position: lanes, lanes: (1..=lanes).map(row).collect(), completed: HashSet::new() };
        self.queues.insert(id, SubscriberQueue::new(Arc::new(recipient), 0, stored, now));
        self.scheduler.activate(id);
        id
    }

    /// Starts a read, lets it fail, and returns the subscribers, and the number of lanes per subscriber, that it was for.
    fn fail_a_read(&mut self) -> (HashSet<Uuid>, BTreeMap<Uuid, usize>) {
        self.start_read(self.clock.now());
        let request = self.reader.read.as_ref().map(|(request, _)| request.clone()).unwrap_or_default();
        let mut lanes = BTreeMap::new();
        request.lanes.iter().for_each(|(subscriber, _)| *lanes.entry(*subscriber).or_default() += 1);
        assert!(self.finish_read(Ok(Err(sqlx::Error::PoolClosed))).is_err());
        (request.queues.iter().map(|read| read.subscriber).collect(), lanes)
    }
}

#[tokio::test]
async fn greedy_subscribers_do_not_use_all_slots() {
    let mut dispatcher = dispatcher().await;
    let now = dispatcher.clock.now();
    for _ in 0..8 {
        dispatcher.add(1_000, 1_000);
    }
    dispatcher.send(now);
    let late = dispatcher.add(10, 10);
    dispatcher.send(now);
    let in_flight = dispatcher.sender.in_flight();
    assert_eq!(dispatcher.queues[&late].in_flight(), 10, "of {in_flight}");
    assert!(in_flight > 4_000, "{in_flight}: few slots are left unused");
}

#[tokio::test]
async fn every_subscriber_gets_its_turn_to_read() {
    let mut dispatcher = dispatcher().await;
    let all: HashSet<Uuid> = (0..150).map(|_| dispatcher.add(0, 10)).collect();
    let mut read = HashSet::new();
    for _ in 0..150 {
        let (queues, _) = dispatcher.fail_a_read();
        assert!(queues.len() <= 64, "{} at once", queues.len());
        read.extend(queues);
    }
    assert_eq!(read, all);
}

#[tokio::test]
async fn a_subscriber_with_many_lanes_does_not_use_all_reads() {
    let mut dispatcher = dispatcher().await;
    let greedy = dispatcher.add_with_lanes(500);
    let others: HashSet<Uuid> = (0..9).map(|_| dispatcher.add(0, 10)).collect();
    for _ in 0..20 {
        let (queues, lanes) = dispatcher.fail_a_read();
        assert!(queues.is_superset(&others), "{} of them", queues.len());
        assert_eq!(lanes, BTreeMap::from([(greedy, 8)]));
    }
}

#[tokio::test]
async fn nothing_is_sent_between_losing_shards_and_loading_the_rest() {
    for loses_shards in [false, true] {
        let mut dispatcher = dispatcher().await;
        dispatcher.add(5, 5);
        dispatcher.ownership.set_shards(if loses_shards { BTreeSet::from([3]) } else { (0..16).collect() });
        let (started, mut has_sent) = (Instant::now(), false);
        while started.elapsed() < REFRESH_PAUSE * 3 {
            assert!(dispatcher.refresh().await.is_err());
            drop(dispatcher.round().await);
            has_sent |= dispatcher.sender.in_flight() > 0;
        }
        assert_eq!(has_sent, !loses_shards);
    }
}

//! The dispatcher over many subscriber queues: fair shares of slots and reads, and ownership. There is no database here, so
//! no read ever returns messages.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use chrono::TimeDelta;
use pillarbox::consumers::{Lease, Replica, Runtime};
use pillarbox::database::Database;
use runtime::health::Health;
use runtime::secret::MasterKey;
use sqlx::postgres::PgPoolOptions;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;
use webhook_client::{AllowedNetworks, Client, ClientSettings, Target};

use super::subscriber_queue::{Origin, SubscriberQueue};
use super::*;
use crate::deliveries::message::HubMessage;
use crate::deliveries::message::fixtures::event;
use crate::deliveries::recipient::fixtures::recipient;
use crate::deliveries::recipient::{Recipient, RecipientLimits};
use crate::directory::domain::DirectoryVersion;
use crate::dispatch::changes::LaneRow;
use crate::dispatch::reads::StoredState;
use crate::dispatch::send_permit::fixtures::permanent_lease;

const SLOTS: usize = 4_096;

/// A dispatcher that owns all shards and has loaded its (zero) subscribers. It reaches public addresses only.
async fn dispatcher() -> Dispatcher {
    dispatcher_with(ClientSettings::default()).await
}

async fn dispatcher_with(settings: ClientSettings) -> Dispatcher {
    let db = PgPoolOptions::new().connect_lazy("postgres://missing@127.0.0.1:1/nothing").unwrap();
    db.close().await;
    let (clock, replica) = (Clock::system(), Replica::new("test", Duration::from_secs(60)));
    let stop = CancellationToken::new();
    let assignment = Runtime::start(Database::new(db.clone()), clock.clone(), replica, Health::default(), stop)
        .shard_assignment("hub.dispatch");
    let clients = TenantClients::shared(Client::new(settings).unwrap());
    let cipher = Cipher::new(&MasterKey::generate(), &[], "test");
    let (_, handed_over) = mpsc::channel(1);
    let local = LocalInput {
        handed_over,
        directory: DirectorySync::new(Duration::from_secs(15)),
        totals: AttemptTotals::default(),
    };
    let mut dispatcher = Dispatcher::new(&Database::new(db), clock, clients, cipher, assignment, local, SLOTS);
    dispatcher.ownership.assume_loaded((0..16).collect(), directory_version(Uuid::nil()));
    dispatcher.reader.assume_announced(0);
    dispatcher
}

/// Version 7 of the directory in this incarnation of the database.
fn directory_version(incarnation: Uuid) -> DirectoryVersion {
    DirectoryVersion { incarnation: Some(incarnation.into()), count: 7 }
}

impl Dispatcher {
    /// Adds a subscriber of the tenant `main` with this many queued messages.
    fn add(&mut self, messages: i64, max_in_flight: usize) -> Uuid {
        self.add_to("main", messages, max_in_flight)
    }

    fn add_to(&mut self, tenant: &str, messages: i64, max_in_flight: usize) -> Uuid {
        let limits = RecipientLimits { max_in_flight, rate: None };
        self.add_recipient(Recipient { limits, tenant: tenant.into(), ..recipient() }, messages)
    }

    fn add_recipient(&mut self, recipient: Recipient, messages: i64) -> Uuid {
        let id = recipient.id;
        let mut queue = SubscriberQueue::new(Arc::new(recipient), 0, StoredState::default(), self.clock.now());
        let event = Arc::new(event(0));
        let message =
            |n| HubMessage { n, lane: None, seq: None, attempts_before: 0, replay: None, event: Some(event.clone()) };
        let messages = (1..=messages).map(message);
        queue.receive(messages.collect(), Origin::Read { is_complete: true });
        self.queues.insert(queue);
        id
    }

    /// Adds a subscriber that has answered quickly before.
    fn add_fast(&mut self, tenant: &str, messages: i64, max_in_flight: usize) -> Uuid {
        let id = self.add_to(tenant, messages, max_in_flight);
        self.queues.get_mut(id).unwrap().assume_fast();
        id
    }

    /// Sends until a round has nothing left to start.
    fn send_all(&mut self) {
        let now = self.clock.now();
        self.send(now);
        while self.sender.is_interrupted() {
            self.send(now);
        }
    }

    fn in_flight_of(&self, subscribers: &[Uuid]) -> usize {
        let of_these = self.queues.all().filter(|queue| subscribers.contains(&queue.recipient.id));
        of_these.map(SubscriberQueue::in_flight).sum()
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
        self.queues.insert(SubscriberQueue::new(Arc::new(recipient), 0, stored, now));
        id
    }

    /// Starts a read, lets it fail, and returns the subscribers, and the number of lanes per subscriber, that it was for.
    fn fail_a_read(&mut self) -> (HashSet<Uuid>, BTreeMap<Uuid, usize>) {
        self.reader.start_read(&mut self.queues, self.clock.now());
        let request = self.reader.requested();
        let mut lanes = BTreeMap::new();
        request.lanes.iter().for_each(|(subscriber, _)| *lanes.entry(*subscriber).or_default() += 1);
        assert!(self.finish_read(FinishedRead::Read(Ok(Err(sqlx::Error::PoolClosed)))).is_err());
        (request.queues.iter().map(|read| read.subscriber).collect(), lanes)
    }
}

#[tokio::test]
async fn greedy_subscribers_do_not_use_all_slots() {
    let mut dispatcher = dispatcher().await;
    for _ in 0..8 {
        dispatcher.add_fast("main", 1_000, 1_000);
    }
    dispatcher.send_all();
    let in_flight = dispatcher.sender.in_flight();
    assert_eq!(in_flight, SLOTS * 3 / 4, "one tenant uses three quarters");
    let others: Vec<Uuid> = (0..8).map(|number| dispatcher.add_fast(&format!("t-{number}"), 10, 10)).collect();
    dispatcher.send_all();
    assert_eq!(dispatcher.in_flight_of(&others), 80);
}

#[tokio::test]
async fn thousands_of_silent_subscribers_do_not_use_the_slots_of_others() {
    let mut dispatcher = dispatcher().await;
    let silent: Vec<Uuid> = (0..4_300).map(|_| dispatcher.add_to("attacker", 1, 1)).collect();
    dispatcher.send_all();
    assert_eq!(dispatcher.in_flight_of(&silent), SLOTS / 5, "a fifth");
    let (own, other) = (dispatcher.add_fast("attacker", 100, 100), dispatcher.add_to("other", 100, 100));
    dispatcher.send_all();
    assert_eq!((dispatcher.in_flight_of(&[own]), dispatcher.in_flight_of(&[other])), (100, 100));
}

#[tokio::test]
async fn rounds_do_not_visit_the_queues_that_wait_for_a_slot_or_for_an_answer() {
    let mut dispatcher = dispatcher().await;
    for _ in 0..4_300 {
        let id = dispatcher.add_to("attacker", 1, 1);
        let queue = dispatcher.queues.get_mut(id).unwrap();
        assert!(queue.start_command_read() && queue.start_read().is_some(), "nothing is left to read");
        queue.receive(Vec::new(), Origin::Read { is_complete: true });
    }
    dispatcher.send_all();
    dispatcher.queues.deactivate_idle(dispatcher.clock.now());
    assert_eq!(dispatcher.queues.active(), 0);
}

#[tokio::test]
async fn tenants_send_in_turns_whatever_the_number_of_their_subscribers() {
    let mut dispatcher = dispatcher().await;
    let many: Vec<Uuid> = (0..1_000).map(|_| dispatcher.add_fast("large", 10, 10)).collect();
    let few = dispatcher.add_fast("small", 1_000, 1_000);
    dispatcher.send(dispatcher.clock.now());
    let (large, small) = (dispatcher.in_flight_of(&many), dispatcher.in_flight_of(&[few]));
    assert!(dispatcher.sender.is_interrupted() && small > 0 && large.abs_diff(small) <= 8, "{large} and {small}");
}

#[tokio::test]
async fn the_counts_of_slots_follow_finished_attempts_and_removed_queues() {
    let mut dispatcher = dispatcher().await;
    let ids: Vec<Uuid> = (0..50).map(|_| dispatcher.add_to("attacker", 3, 2)).collect();
    dispatcher.send_all();
    assert_eq!(dispatcher.sender.in_flight(), 100);
    for id in &ids[..25] {
        let queue = dispatcher.queues.remove(*id).unwrap();
        dispatcher.sender.drop_queue(&queue);
    }
    assert_eq!(dispatcher.sender.in_flight(), 50);
    // Nothing listens at the address of the others, so that each attempt fails quickly.
    while dispatcher.sender.in_flight() > 0 {
        let finished = dispatcher.sender.finished().await.unwrap();
        dispatcher.finish_attempt(finished);
    }
    assert_eq!(dispatcher.queues.all().map(|queue| queue.slow_in_flight).sum::<usize>(), 0);
}

#[tokio::test]
async fn an_attempt_of_a_dropped_queue_is_not_sent_although_its_connection_opens() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    for is_dropped in [false, true] {
        let allowed_networks = AllowedNetworks::loopback();
        let mut dispatcher = dispatcher_with(ClientSettings { allowed_networks, ..ClientSettings::default() }).await;
        let target = Target::parse(&url, false).unwrap();
        let id = dispatcher.add_recipient(Recipient { target, ..recipient() }, 1);
        dispatcher.send(dispatcher.clock.now());
        // There is one thread, so the attempt has not begun to connect.
        if is_dropped {
            let queue = dispatcher.queues.remove(id).unwrap();
            dispatcher.sender.drop_queue(&queue);
        }
        let (mut connection, _) = listener.accept().await.unwrap();
        let mut received = [0; 4];
        let length = connection.read(&mut received).await.unwrap();
        assert_eq!(&received[..length], if is_dropped { &b""[..] } else { &b"POST"[..] });
    }
}

#[tokio::test]
async fn a_process_that_was_suspended_beyond_its_lease_writes_nothing_before_it_has_a_lease_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let allowed_networks = AllowedNetworks::loopback();
    let mut dispatcher = dispatcher_with(ClientSettings { allowed_networks, ..ClientSettings::default() }).await;
    let target = Target::parse(&url, false).unwrap();
    dispatcher.add_recipient(Recipient { target, ..recipient() }, 1);
    let lease = Lease::of_one_heartbeat(Duration::from_secs(2));
    dispatcher.ownership.assume_lease(lease.clone());
    dispatcher.send(dispatcher.clock.now());
    assert_eq!(dispatcher.sender.in_flight(), 1, "the lease is valid when the attempt starts");
    // There is one thread: while it is blocked, nothing of the process runs.
    while lease.is_valid() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let (mut connection, _) = listener.accept().await.unwrap();
    let mut received = Vec::new();
    connection.read_to_end(&mut received).await.unwrap();
    assert_eq!(String::from_utf8(received).unwrap(), "", "written after the lease had ended");

    let finished = dispatcher.sender.finished().await.unwrap();
    dispatcher.finish_attempt(finished);
    dispatcher.send(dispatcher.clock.now());
    assert_eq!(dispatcher.sender.in_flight(), 0);
    dispatcher.ownership.assume_lease(permanent_lease());
    dispatcher.send(dispatcher.clock.now());
    let (mut connection, _) = listener.accept().await.unwrap();
    let mut received = [0; 4];
    connection.read_exact(&mut received).await.unwrap();
    assert_eq!(&received, b"POST", "nothing of the message was lost");
}

#[tokio::test]
async fn after_a_failed_poll_the_dispatcher_pauses() {
    let mut dispatcher = dispatcher().await;
    assert!(dispatcher.finish_read(FinishedRead::Poll(Ok(Err(sqlx::Error::PoolClosed)))).is_err());
    assert!(dispatcher.retry_at.is_some_and(|at| at > Instant::now()));
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
        while started.elapsed() < Duration::from_millis(300) {
            assert!(dispatcher.refresh().await.is_err());
            drop(dispatcher.round().await);
            has_sent |= dispatcher.sender.in_flight() > 0;
        }
        assert_eq!(has_sent, !loses_shards);
    }
}

#[tokio::test]
async fn a_batch_from_before_a_failover_is_not_handed_over_although_its_numbers_fit() {
    let mut dispatcher = dispatcher().await;
    let batch = |incarnation: Uuid| {
        let directory_version = directory_version(incarnation);
        FannedBatch { after: 0, to: 1, messages: HashMap::new(), directory_version }
    };
    dispatcher.hand_over(batch(Uuid::max()));
    assert_eq!(dispatcher.reader.announced(), Some(0), "the message with this number is still to come");
    dispatcher.hand_over(batch(Uuid::nil()));
    assert_eq!(dispatcher.reader.announced(), Some(1));
}

//! Publishing: confirms, unroutable messages, ordering per key and faults.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use relay::{BrokerError, Outgoing, PublishOutcome, Publisher};
use testkit::{FaultProxy, TestVhost, eventually};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::amqp::{DEADLINE, Observer, broker, events_to_all, message};

#[tokio::test]
async fn confirmed_messages_are_in_the_queue_with_their_properties() {
    let vhost = TestVhost::new().await;
    let broker = broker(&vhost.amqp_url());
    events_to_all().declare(&broker).await.unwrap();
    let mut publisher = Publisher::new(broker, "events".into(), false);

    let sent = publisher.publish(&[message(1, Some("a"), "to.a"), message(2, None, "to.b")]).await.unwrap();
    assert_eq!(sent, [PublishOutcome::Confirmed, PublishOutcome::Confirmed]);

    let observer = Observer::of(&vhost).await;
    let arrived = observer.remove_all("all").await;
    assert_eq!(arrived.len(), 2);
    let (first, properties) = (&arrived[0], &arrived[0].properties);
    assert_eq!((first.exchange.as_str(), first.routing_key.as_str()), ("events", "to.a"));
    assert_eq!(first.data, br#"{"id":"1"}"#);
    assert_eq!(properties.message_id().as_ref().unwrap().as_str(), "1");
    assert_eq!(properties.kind().as_ref().unwrap().as_str(), "order.paid");
    assert_eq!(properties.content_type().as_ref().unwrap().as_str(), "application/json");
    assert_eq!((*properties.delivery_mode(), *properties.timestamp()), (Some(2), Some(1_700_000_000)));
    let headers = properties.headers().as_ref().unwrap().inner();
    assert_eq!(headers["tenant"], AMQPValue::LongString("acme".into()));
}

/// lapin attaches returned messages to the wrong confirms, above all when RabbitMQ confirms many at once, as it does
/// for a queue that does not write to disk.
#[tokio::test(flavor = "multi_thread")]
async fn exactly_the_unroutable_messages_of_a_batch_are_reported() {
    let vhost = TestVhost::new().await;
    let broker = broker(&vhost.amqp_url());
    events_to_all().declare(&broker).await.unwrap();
    let channel = Observer::of(&vhost).await.channel;
    channel.queue_declare("fast".into(), QueueDeclareOptions::default(), FieldTable::default()).await.unwrap();
    let bind = Default::default();
    channel.queue_bind("fast".into(), "events".into(), "fast".into(), bind, FieldTable::default()).await.unwrap();
    let mut publisher = Publisher::new(broker, "events".into(), false);

    for (round, routable) in ["to.a", "fast", "to.a", "fast", "fast", "fast"].into_iter().enumerate() {
        let unroutable: HashSet<u32> = (0..2_000).filter(|_| rand::random_bool(0.1)).collect();
        let to = |id| if unroutable.contains(&id) { "nowhere" } else { routable };
        let batch: Vec<_> = (0..2_000).map(|id| message(format!("{round}-{id}"), None, to(id))).collect();
        let sent = publisher.publish(&batch).await.unwrap();

        let wrong: Vec<_> = (0..2_000)
            .filter(|id| {
                let expected =
                    if unroutable.contains(id) { PublishOutcome::Unroutable } else { PublishOutcome::Confirmed };
                sent[*id as usize] != expected
            })
            .collect();
        assert!(wrong.is_empty(), "round {round}: {} of 2000 outcomes are wrong: {wrong:?}", wrong.len());
    }
}

#[tokio::test]
async fn strict_sends_no_message_after_an_unconfirmed_one_of_its_key() {
    let vhost = TestVhost::new().await;
    let broker = broker(&vhost.amqp_url());
    events_to_all().declare(&broker).await.unwrap();
    let mut publisher = Publisher::new(broker, "events".into(), true);

    let batch = [
        message("a1", Some("a"), "to.a"),
        message("b1", Some("b"), "to.b"),
        message("a2", Some("a"), "nowhere"),
        message("free", None, "to.c"),
        message("a3", Some("a"), "to.a"),
        message("b2", Some("b"), "to.b"),
        message("lost", None, "nowhere"),
        message("a4", Some("a"), "to.a"),
        message("b3", Some("b"), "to.b"),
        message("c1", Some("c"), &"k".repeat(256)),
        message("c2", Some("c"), "to.c"),
    ];
    let sent = publisher.publish(&batch).await.unwrap();
    let outcomes: HashMap<_, _> = batch.iter().map(|message| message.message_id.as_str()).zip(&sent).collect();
    for confirmed in ["a1", "b1", "free", "b2", "b3"] {
        assert_eq!(outcomes[confirmed], &PublishOutcome::Confirmed, "{confirmed}");
    }
    assert_eq!((outcomes["a2"], outcomes["lost"]), (&PublishOutcome::Unroutable, &PublishOutcome::Unroutable));
    assert!(
        matches!(outcomes["c1"], PublishOutcome::Rejected(reason) if reason.contains("routing key")),
        "{:?}",
        outcomes["c1"]
    );
    assert_eq!([outcomes["a3"], outcomes["a4"], outcomes["c2"]], [&PublishOutcome::Blocked; 3]);

    let arrived = Observer::of(&vhost).await.remove_all_ids("all").await;
    let of = |key: &str| arrived.iter().filter(|id| id.starts_with(key)).cloned().collect::<Vec<_>>();
    assert_eq!((of("a"), of("b")), (vec!["a1".to_owned()], vec!["b1".into(), "b2".into(), "b3".into()]));
    assert_eq!(arrived.len(), 5, "{arrived:?}");
    // The key is not blocked for ever: the next call may publish it again.
    assert_eq!(publisher.publish(&[message("a3", Some("a"), "to.a")]).await.unwrap(), [PublishOutcome::Confirmed]);
}

#[tokio::test]
async fn strict_blocks_a_key_after_a_full_queue_rejects() {
    let vhost = TestVhost::new().await;
    let broker = broker(&vhost.amqp_url());
    let observer = Observer::of(&vhost).await;
    let mut full = FieldTable::default();
    full.insert("x-max-length".into(), AMQPValue::LongInt(0));
    full.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    observer.channel.queue_declare("full".into(), QueueDeclareOptions::default(), full).await.unwrap();

    // The default exchange routes to the queue with the name of the routing key.
    let mut publisher = Publisher::new(broker, String::new(), true);
    let sent = publisher.publish(&[message(1, Some("a"), "full"), message(2, Some("a"), "full")]).await.unwrap();
    assert!(matches!(&sent[..], [PublishOutcome::Rejected(_), PublishOutcome::Blocked]), "{sent:?}");
}

#[tokio::test]
async fn a_missing_exchange_is_named_and_publishing_works_once_it_exists() {
    let vhost = TestVhost::new().await;
    let broker = broker(&vhost.amqp_url());
    let mut publisher = Publisher::new(broker.clone(), "events".into(), false);
    let batch = [message(1, None, "to.a")];

    let mut neighbour = Publisher::new(broker.clone(), "amq.topic".into(), false);
    neighbour.publish(&batch).await.unwrap();
    for _ in 0..3 {
        let error = publisher.publish(&large_batch()).await.unwrap_err();
        assert!(error.to_string().contains("exchange `events`"), "{error}");
        neighbour.publish(&batch).await.expect("the connection is still open");
    }
    events_to_all().declare(&broker).await.unwrap();
    assert_eq!(publisher.publish(&batch).await.unwrap(), [PublishOutcome::Confirmed]);

    // The exchange is deleted while a channel is open.
    let observer = Observer::of(&vhost).await;
    observer.channel.exchange_delete("events".into(), Default::default()).await.unwrap();
    let error = publisher.publish(&batch).await.unwrap_err();
    assert!(matches!(&error, BrokerError::NoExchange(name) if name == "events"), "{error}");
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    let topic = lapin::ExchangeKind::Topic;
    observer.channel.exchange_declare("events".into(), topic, durable, FieldTable::default()).await.unwrap();
    assert_eq!(
        publisher.publish(&batch).await.unwrap(),
        [PublishOutcome::Unroutable],
        "its bindings were deleted with it"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn cut_connections_lose_no_message_and_preserve_key_order() {
    for strict in [false, true] {
        let vhost = TestVhost::new().await;
        let proxy = FaultProxy::in_front_of(&vhost.amqp_url()).await;
        let broker = broker(&proxy.url(&vhost.amqp_url()));
        events_to_all().declare(&broker).await.unwrap();
        let mut publisher =
            Publisher::new(broker, "events".into(), strict).with_confirm_timeout(Duration::from_secs(5));

        let (progress, mut batches) = watch::channel(0);
        let publishing = tokio::spawn(async move {
            let mut failures = Vec::new();
            for batch in 0..30 {
                progress.send_replace(batch);
                let ids = (0..100).map(|at| batch * 100 + at);
                let batch: Vec<_> = ids.map(|id| message(id, Some(&format!("k{}", id % 25)), "to.a")).collect();
                loop {
                    let started = Instant::now();
                    match publisher.publish(&batch).await {
                        Ok(sent) => {
                            break assert!(
                                sent.iter().all(|outcome| *outcome == PublishOutcome::Confirmed),
                                "{sent:?}"
                            );
                        }
                        Err(error) => failures.push((started.elapsed(), error.to_string())),
                    }
                }
            }
            failures
        });
        // At most one cut per batch, at a random time; otherwise the repeated batch would never succeed.
        while batches.changed().await.is_ok() {
            tokio::time::sleep(Duration::from_micros(rand::random_range(0..20_000))).await;
            proxy.cut();
        }
        let failures = publishing.await.unwrap();
        let (slowest, reason) = failures.iter().max().expect("a publish was cut");
        assert!(*slowest < Duration::from_secs(4), "a failure took {slowest:?}: {reason}");

        let mut first_copies: HashMap<u32, Vec<u32>> = HashMap::new();
        let mut seen = HashSet::new();
        for id in Observer::of(&vhost).await.remove_all_ids("all").await {
            let id: u32 = id.parse().unwrap();
            if seen.insert(id) {
                first_copies.entry(id % 25).or_default().push(id);
            }
        }
        assert_eq!(seen.len(), 3_000);
        for (key, ids) in first_copies {
            assert!(ids.is_sorted(), "strict {strict}, k{key}: {ids:?}");
        }
    }
}

#[tokio::test]
async fn publishing_on_a_stalled_network_fails_within_the_limit() {
    let vhost = TestVhost::new().await;
    let proxy = FaultProxy::in_front_of(&vhost.amqp_url()).await;
    let broker = broker(&proxy.url(&vhost.amqp_url()));
    events_to_all().declare(&broker).await.unwrap();
    let mut publisher = Publisher::new(broker, "events".into(), false).with_confirm_timeout(Duration::from_millis(300));
    publisher.publish(&[message(1, None, "to.a")]).await.unwrap();

    proxy.stall();
    let started = Instant::now();
    let error = publisher.publish(&[message(2, None, "nowhere")]).await.unwrap_err();
    assert!(matches!(error, BrokerError::Unconfirmed(_)), "{error}");
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());

    // The response to the first attempt (unroutable) is not attributed to the second.
    proxy.pass();
    assert_eq!(publisher.publish(&[message(2, None, "to.a")]).await.unwrap(), [PublishOutcome::Confirmed]);
}

/// On the same channel RabbitMQ would answer both batches at once, and lapin would attribute the returned messages of
/// the first to the second.
#[tokio::test(flavor = "multi_thread")]
async fn late_responses_are_not_attributed_to_the_next_batch() {
    let vhost = TestVhost::new().await;
    let broker = broker(&vhost.amqp_url());
    events_to_all().declare(&broker).await.unwrap();
    let batch = |to: &str| (0..500).map(|id| message(id, None, to)).collect::<Vec<_>>();
    // Messages written to disk are confirmed late; unroutable messages are returned at once.
    let (old, new) = (batch("to.a"), batch("nowhere"));
    let mut cancelled = 0;
    // The batch ends at a different time in each round, by its own time limit or because the caller stops waiting.
    for round in 0..20 {
        let time_limit = Duration::from_millis(1 + round);
        let mut publisher = Publisher::new(broker.clone(), "events".into(), false);
        publisher.publish(&[message("first", None, "to.a")]).await.unwrap();
        if round % 2 == 0 {
            publisher = publisher.with_confirm_timeout(time_limit);
        }
        if !matches!(timeout(time_limit, Box::pin(publisher.publish(&old))).await, Ok(Ok(_))) {
            cancelled += 1;
        }
        let sent = publisher.with_confirm_timeout(DEADLINE).publish(&new).await.unwrap();
        let wrong = sent.iter().filter(|outcome| **outcome != PublishOutcome::Unroutable).count();
        assert_eq!(wrong, 0, "wrong outcomes of 500, in round {round}");
    }
    assert!(cancelled >= 5, "only {cancelled} of 20 batches were cancelled, too few for this test");
}

#[tokio::test]
async fn headers_larger_than_a_frame_are_rejected_before_sending() {
    let vhost = TestVhost::new().await;
    let proxy = FaultProxy::in_front_of(&vhost.amqp_url()).await;
    let broker = broker(&proxy.url(&vhost.amqp_url()));
    events_to_all().declare(&broker).await.unwrap();
    let with_headers = |id: &str, key: &str, bytes: usize| {
        let headers = vec![("tenant".into(), "x".repeat(bytes - "tenant".len()))];
        Outgoing { headers, ..message(id, Some(key), "to.a") }
    };
    let mut neighbour = Publisher::new(broker.clone(), "amq.topic".into(), false);
    neighbour.publish(&[message("n", None, "to.a")]).await.unwrap();
    for strict in [false, true] {
        let mut publisher = Publisher::new(broker.clone(), "events".into(), strict);
        let batch = [
            message("before", Some("a"), "to.a"),
            with_headers("largest", "b", 64 * 1024),
            with_headers("too large", "c", 64 * 1024 + 1),
            with_headers("larger than a frame", "d", 200 * 1024),
            message("after", Some("a"), "to.a"),
        ];
        let sent = publisher.publish(&batch).await.unwrap();
        assert!(
            matches!(&sent[2], PublishOutcome::Rejected(reason) if reason.contains("they have 65537")),
            "{:?}",
            sent[2]
        );
        assert!(matches!(&sent[3], PublishOutcome::Rejected(_)), "{:?}", sent[3]);
        assert_eq!([&sent[0], &sent[1], &sent[4]], [&PublishOutcome::Confirmed; 3]);
        neighbour.publish(&[message("n", None, "to.a")]).await.expect("the connection is still open");
    }
    assert_eq!(proxy.accepted(), 1, "one connection during the whole test");
    let arrived = Observer::of(&vhost).await.remove_all_ids("all").await;
    assert_eq!(arrived, ["before", "largest", "after"].repeat(2).iter().map(|id| id.to_string()).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_connection_that_dies_silently_is_detected_and_replaced() {
    let vhost = TestVhost::new().await;
    let proxy = FaultProxy::in_front_of(&vhost.amqp_url()).await;
    let broker = broker(&format!("{}?heartbeat=1", proxy.url(&vhost.amqp_url())));
    events_to_all().declare(&broker).await.unwrap();
    let mut publisher = Publisher::new(broker.clone(), "events".into(), false);

    proxy.stall();
    eventually("the dead connection is detected", DEADLINE, async || broker.check().await.is_err()).await;
    proxy.pass();
    eventually("publishing works again", DEADLINE, async || publisher.publish(&[message(1, None, "to.a")]).await).await;
}

/// Messages of an abandoned channel may not be written yet. lapin closes the channel before it writes them, and
/// RabbitMQ ends the connection when it receives a message on a closed channel.
#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_batch_does_not_end_the_connection() {
    let vhost = TestVhost::new().await;
    let proxy = FaultProxy::in_front_of(&vhost.amqp_url()).await;
    let broker = broker(&proxy.url(&vhost.amqp_url()));
    events_to_all().declare(&broker).await.unwrap();
    let mut hasty =
        Publisher::new(broker.clone(), "events".into(), false).with_confirm_timeout(Duration::from_millis(200));
    let mut patient = Publisher::new(broker, "events".into(), false);
    hasty.publish(&[message("h", None, "to.a")]).await.unwrap();
    patient.publish(&[message("p", None, "to.a")]).await.unwrap();

    let large = large_batch();
    proxy.stall();
    hasty.publish(&large).await.unwrap_err();
    let dropped = timeout(Duration::from_millis(50), Box::pin(hasty.publish(&large))).await;
    assert!(dropped.is_err(), "cancelled by the caller");
    proxy.pass();

    for id in 0..50 {
        let sent = patient.publish(&[message(format!("p{id}"), None, "to.a")]).await;
        assert_eq!(sent.expect("the connection is still open"), [PublishOutcome::Confirmed]);
    }
    assert_eq!(
        hasty.with_confirm_timeout(DEADLINE).publish(&large[..2]).await.unwrap(),
        [PublishOutcome::Confirmed, PublishOutcome::Confirmed]
    );
}

/// More than the buffers of lapin and of the sockets, so that some messages stay unwritten for a while.
fn large_batch() -> Vec<Outgoing> {
    let mut batch: Vec<_> = (0..40).map(|id| message(id, None, "to.a")).collect();
    batch.iter_mut().for_each(|message| message.body = vec![b' '; 1024 * 1024].into());
    batch
}

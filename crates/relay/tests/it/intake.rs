use std::sync::Arc;
use std::time::Duration;

use lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use pillarbox_relay::{Broker, BrokerError, Incoming, Intake, Publisher, Sent};
use testkit::{FaultProxy, TestVhost, drain};
use tokio::time::timeout;

use crate::{DEADLINE, Observer, broker, events_to_all, message};

/// Long enough for a delivery to arrive, if one was going to. There is no later event to wait for instead.
const SILENCE: Duration = Duration::from_millis(300);

#[tokio::test]
async fn batches_come_in_order_and_an_acknowledged_one_is_gone() {
    let (vhost, broker) = vhost_with(20).await;
    let observer = Observer::of(&vhost).await;
    let mut intake = Intake::new(broker, "all".into(), 100);

    let mut ids = Vec::new();
    while ids.len() < 20 {
        let batch = next(&mut intake, 7).await;
        assert!((1..=7).contains(&batch.len()), "{}", batch.len());
        intake.ack(&batch).await.unwrap();
        intake.ack(&batch).await.expect("a second time changes nothing");
        ids.extend(ids_of(&batch));
    }
    assert_eq!(ids, (0..20).collect::<Vec<_>>());
    intake.close().await;
    drain("the queue is empty", DEADLINE, async || observer.ready("all").await == 0).await;
}

#[tokio::test]
async fn a_message_arrives_with_what_it_was_sent_with() {
    let (_vhost, broker) = vhost_with(1).await;
    let one = next(&mut Intake::new(broker, "all".into(), 1), 1).await.remove(0);
    assert_eq!((one.message_id.as_deref(), one.kind.as_deref()), (Some("0"), Some("order.paid")));
    assert_eq!((one.routing_key.as_str(), one.redelivered), ("to.a", false));
    assert_eq!(one.body, br#"{"id":"0"}"#);
    assert_eq!(one.headers.into_iter().collect::<Vec<_>>(), [("tenant".to_owned(), "acme".to_owned())]);
}

#[tokio::test]
async fn no_more_than_the_prefetch_are_out_and_what_is_not_acknowledged_comes_again() {
    let (vhost, broker) = vhost_with(20).await;
    let observer = Observer::of(&vhost).await;
    let mut intake = Intake::new(broker.clone(), "all".into(), 5);
    let mut out = Vec::new();
    while out.len() < 5 {
        out.extend(next(&mut intake, 100).await);
    }
    timeout(SILENCE, intake.next(100)).await.expect_err("five are out");
    assert_eq!((out.len(), observer.ready("all").await), (5, 15));

    intake.ack(&out[..2]).await.unwrap();
    intake.close().await;
    drain("what was out is back", DEADLINE, async || match observer.ready("all").await {
        18 => Ok(()),
        other => Err(other),
    })
    .await;

    let mut intake = Intake::new(broker, "all".into(), 100);
    let mut again = Vec::new();
    while again.len() < 18 {
        again.extend(next(&mut intake, 100).await);
    }
    assert_eq!(ids_of(&again), (2..20).collect::<Vec<_>>());
    assert!(again[..3].iter().all(|it| it.redelivered));
}

#[tokio::test]
async fn an_intake_that_is_dropped_at_any_moment_gives_back_what_it_has() {
    let (vhost, broker) = vhost_with(20).await;
    let observer = Observer::of(&vhost).await;
    for patience_us in (0..20_000).step_by(500) {
        let mut intake = Intake::new(broker.clone(), "all".into(), 5);
        let _ = timeout(Duration::from_micros(patience_us), intake.next(5)).await;
    }
    drain("all are back", DEADLINE, async || match observer.ready("all").await {
        20 => Ok(()),
        other => Err(other),
    })
    .await;
}

#[tokio::test]
async fn a_rejected_message_goes_to_the_dead_letters_and_the_rest_can_be_acknowledged() {
    let vhost = TestVhost::new().await;
    let broker = broker(&vhost.amqp_url());
    let observer = Observer::of(&vhost).await;
    let fanout = lapin::ExchangeKind::Fanout;
    let exchange = ExchangeDeclareOptions::default();
    observer.channel.exchange_declare("dead".into(), fanout, exchange, FieldTable::default()).await.unwrap();
    let mut arguments = FieldTable::default();
    arguments.insert("x-dead-letter-exchange".into(), AMQPValue::LongString("dead".into()));
    let queue = QueueDeclareOptions::default();
    observer.channel.queue_declare("work".into(), queue, arguments).await.unwrap();
    observer.channel.queue_declare("letters".into(), queue, FieldTable::default()).await.unwrap();
    let bind = Default::default();
    observer.channel.queue_bind("letters".into(), "dead".into(), "".into(), bind, FieldTable::default()).await.unwrap();
    publish(&broker, "", "work", 0..10).await;

    let mut intake = Intake::new(broker, "work".into(), 100);
    let mut batch = Vec::new();
    while batch.len() < 10 {
        batch.extend(next(&mut intake, 100).await);
    }
    // The last is among them: an acknowledgement up to it would be an error to RabbitMQ.
    for at in [4, 9, 9] {
        intake.reject(&batch[at]).await.unwrap();
    }
    intake.ack(&batch[..5]).await.unwrap();
    intake.ack(&batch).await.unwrap();
    intake.ack(&batch[9..]).await.unwrap();
    intake.reject(&batch[3]).await.expect("too late, and harmless");

    drain("two are rejected", DEADLINE, async || observer.ready("letters").await == 2).await;
    assert_eq!(observer.take_all_ids("letters").await, ["4", "9"]);
    // The channel has survived all this.
    publish(&vhost_broker(&vhost), "", "work", 10..11).await;
    assert_eq!(ids_of(&next(&mut intake, 100).await), [10]);
    intake.close().await;
    drain("only the last is back", DEADLINE, async || observer.ready("work").await == 1).await;
}

#[tokio::test]
async fn a_deleted_queue_is_an_error_and_one_made_again_is_consumed() {
    let (vhost, broker) = vhost_with(1).await;
    let observer = Observer::of(&vhost).await;
    let mut intake = Intake::new(broker.clone(), "all".into(), 10);
    let old = next(&mut intake, 10).await;

    observer.channel.queue_delete("all".into(), Default::default()).await.unwrap();
    let error = timeout(DEADLINE, intake.next(10)).await.unwrap().unwrap_err();
    assert!(matches!(&error, BrokerError::Cancelled(queue) if queue == "all"), "{error}");
    let error = intake.next(10).await.unwrap_err();
    assert!(matches!(&error, BrokerError::NoQueue(queue) if queue == "all"), "{error}");

    events_to_all().declare(&broker).await.unwrap();
    publish(&broker, "events", "to.a", 1..2).await;
    let new = next(&mut intake, 10).await;
    assert_eq!(ids_of(&new), [1]);
    let stale = intake.ack(&old).await.unwrap_err();
    assert!(matches!(stale, BrokerError::Stale), "{stale}");
    assert_eq!(observer.ready("all").await, 0, "delivered");
    intake.close().await;
    drain("it was not acknowledged in the place of the old one", DEADLINE, async || observer.ready("all").await == 1)
        .await;
}

#[tokio::test]
async fn a_cut_connection_is_an_error_and_what_was_out_comes_again() {
    let (vhost, _) = vhost_with(10).await;
    let proxy = FaultProxy::in_front_of(&vhost.amqp_url()).await;
    let mut intake = Intake::new(broker(&proxy.url(&vhost.amqp_url())), "all".into(), 10);
    let mut out = Vec::new();
    while out.len() < 10 {
        out.extend(next(&mut intake, 10).await);
    }

    proxy.cut();
    timeout(DEADLINE, intake.next(10)).await.unwrap().unwrap_err();
    let mut again = Vec::new();
    while again.len() < 10 {
        again.extend(drain("it connects again", DEADLINE, async || intake.next(10).await).await);
    }
    assert_eq!(ids_of(&again), (0..10).collect::<Vec<_>>());
    assert!(matches!(intake.ack(&out).await, Err(BrokerError::Stale)));
    intake.ack(&again).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_who_stops_waiting_loses_nothing() {
    let (_vhost, broker) = vhost_with(0).await;
    let publishing = tokio::spawn({
        let broker = broker.clone();
        async move {
            for at in 0..100 {
                publish(&broker, "events", "to.a", at * 5..at * 5 + 5).await;
            }
        }
    });
    let mut intake = Intake::new(broker, "all".into(), 50);
    let (mut ids, mut given_up) = (Vec::new(), 0);
    while ids.len() < 500 {
        // Mostly short enough to fall between deliveries and between the steps of starting to consume.
        let patience_us_max = if rand::random_bool(0.1) { 500_000 } else { 2_000 };
        match timeout(Duration::from_micros(rand::random_range(1..patience_us_max)), intake.next(3)).await {
            Ok(batch) => {
                let batch = batch.unwrap();
                intake.ack(&batch).await.unwrap();
                ids.extend(ids_of(&batch));
            }
            Err(_) => given_up += 1,
        }
    }
    publishing.await.unwrap();
    assert!(given_up > 10, "{given_up}");
    assert_eq!(ids, (0..500).collect::<Vec<_>>());
}

/// A vhost whose queue `all` holds messages with the ids 0, 1, 2, ...
async fn vhost_with(messages: u32) -> (TestVhost, Arc<Broker>) {
    let vhost = TestVhost::new().await;
    let broker = vhost_broker(&vhost);
    events_to_all().declare(&broker).await.unwrap();
    publish(&broker, "events", "to.a", 0..messages).await;
    (vhost, broker)
}

fn vhost_broker(vhost: &TestVhost) -> Arc<Broker> {
    broker(&vhost.amqp_url())
}

async fn publish(broker: &Arc<Broker>, exchange: &str, routing_key: &str, ids: std::ops::Range<u32>) {
    let batch: Vec<_> = ids.map(|id| message(id, None, routing_key)).collect();
    let sent = Publisher::new(broker.clone(), exchange.into(), false).publish(&batch).await.unwrap();
    assert!(sent.iter().all(|it| *it == Sent::Confirmed), "{sent:?}");
}

async fn next(intake: &mut Intake, max: usize) -> Vec<Incoming> {
    timeout(DEADLINE, intake.next(max)).await.expect("in time").expect("a batch")
}

fn ids_of(batch: &[Incoming]) -> Vec<u32> {
    batch.iter().map(|one| one.message_id.as_ref().unwrap().parse().unwrap()).collect()
}

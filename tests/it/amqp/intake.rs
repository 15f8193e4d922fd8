//! Consuming queues: batches, acknowledgement, redelivery and faults.

use std::sync::Arc;
use std::time::Duration;

use relay::{Broker, BrokerError, Incoming, Intake, PublishOutcome, Publisher};
use testkit::{FaultProxy, TestVhost, eventually};
use tokio::time::timeout;

use crate::amqp::{DEADLINE, Observer, broker, events_to_all, message};

/// Long enough for a delivery to arrive, if RabbitMQ were to send one. There is no later event to wait for instead.
const QUIET_TIME: Duration = Duration::from_millis(300);

#[tokio::test]
async fn batches_are_in_order_and_acknowledged_ones_are_removed() {
    let (vhost, broker) = vhost_with(20).await;
    let observer = Observer::of(&vhost).await;
    let mut intake = Intake::new(broker, "all".into(), 100);

    let mut ids = Vec::new();
    while ids.len() < 20 {
        let batch = next(&mut intake, 7).await;
        assert!((1..=7).contains(&batch.len()), "{}", batch.len());
        intake.ack(&batch).await.unwrap();
        intake.ack(&batch).await.expect("a second acknowledgement has no effect");
        ids.extend(ids_of(&batch));
    }
    assert_eq!(ids, (0..20).collect::<Vec<_>>());
    intake.close().await;
    eventually("the queue is empty", DEADLINE, async || observer.ready("all").await == 0).await;
}

#[tokio::test]
async fn a_message_arrives_with_its_properties() {
    let (_vhost, broker) = vhost_with(1).await;
    let one = next(&mut Intake::new(broker, "all".into(), 1), 1).await.remove(0);
    assert_eq!((one.message_id.as_deref(), one.kind.as_deref()), (Some("0"), Some("order.paid")));
    assert_eq!((one.routing_key.as_str(), one.redelivered), ("to.a", false));
    assert_eq!(one.body, br#"{"id":"0"}"#);
    assert_eq!(one.headers.into_iter().collect::<Vec<_>>(), [("tenant".to_owned(), "acme".to_owned())]);
}

#[tokio::test]
async fn the_prefetch_is_respected_and_unacknowledged_ones_return() {
    let (vhost, broker) = vhost_with(20).await;
    let observer = Observer::of(&vhost).await;
    let mut intake = Intake::new(broker.clone(), "all".into(), 5);
    let mut unacknowledged = Vec::new();
    while unacknowledged.len() < 5 {
        unacknowledged.extend(next(&mut intake, 100).await);
    }
    timeout(QUIET_TIME, intake.next_batch(100)).await.expect_err("five are unacknowledged");
    assert_eq!((unacknowledged.len(), observer.ready("all").await), (5, 15));

    intake.ack(&unacknowledged[..2]).await.unwrap();
    intake.close().await;
    eventually("the unacknowledged messages are back in the queue", DEADLINE, async || {
        match observer.ready("all").await {
            18 => Ok(()),
            other => Err(other),
        }
    })
    .await;

    let mut intake = Intake::new(broker, "all".into(), 100);
    let mut again = Vec::new();
    while again.len() < 18 {
        again.extend(next(&mut intake, 100).await);
    }
    assert_eq!(ids_of(&again), (2..20).collect::<Vec<_>>());
    assert!(again[..3].iter().all(|message| message.redelivered));
}

#[tokio::test]
async fn an_intake_dropped_at_any_time_returns_its_messages() {
    let (vhost, broker) = vhost_with(20).await;
    let observer = Observer::of(&vhost).await;
    for wait_us in (0..20_000).step_by(500) {
        let mut intake = Intake::new(broker.clone(), "all".into(), 5);
        let _ = timeout(Duration::from_micros(wait_us), intake.next_batch(5)).await;
    }
    eventually("all messages are back in the queue", DEADLINE, async || match observer.ready("all").await {
        20 => Ok(()),
        other => Err(other),
    })
    .await;
}

#[tokio::test]
async fn a_deleted_queue_is_an_error_until_it_is_created_again() {
    let (vhost, broker) = vhost_with(1).await;
    let observer = Observer::of(&vhost).await;
    let mut intake = Intake::new(broker.clone(), "all".into(), 10);
    let old = next(&mut intake, 10).await;

    observer.channel.queue_delete("all".into(), Default::default()).await.unwrap();
    let error = timeout(DEADLINE, intake.next_batch(10)).await.unwrap().unwrap_err();
    assert!(matches!(&error, BrokerError::Cancelled(queue) if queue == "all"), "{error}");
    let error = intake.next_batch(10).await.unwrap_err();
    assert!(matches!(&error, BrokerError::NoQueue(queue) if queue == "all"), "{error}");

    events_to_all().declare(&broker).await.unwrap();
    publish(&broker, "events", "to.a", 1..2).await;
    let new = next(&mut intake, 10).await;
    assert_eq!(ids_of(&new), [1]);
    let stale = intake.ack(&old).await.unwrap_err();
    assert!(matches!(stale, BrokerError::StaleDelivery), "{stale}");
    assert_eq!(observer.ready("all").await, 0, "delivered");
    intake.close().await;
    eventually("the new message was not acknowledged instead of the old one", DEADLINE, async || {
        observer.ready("all").await == 1
    })
    .await;
}

#[tokio::test]
async fn unacknowledged_messages_return_after_a_cut_connection() {
    let (vhost, _) = vhost_with(10).await;
    let proxy = FaultProxy::in_front_of(&vhost.amqp_url()).await;
    let mut intake = Intake::new(broker(&proxy.url(&vhost.amqp_url())), "all".into(), 10);
    let mut unacknowledged = Vec::new();
    while unacknowledged.len() < 10 {
        unacknowledged.extend(next(&mut intake, 10).await);
    }

    proxy.cut();
    timeout(DEADLINE, intake.next_batch(10)).await.unwrap().unwrap_err();
    let mut again = Vec::new();
    while again.len() < 10 {
        again.extend(eventually("it connects again", DEADLINE, async || intake.next_batch(10).await).await);
    }
    assert_eq!(ids_of(&again), (0..10).collect::<Vec<_>>());
    assert!(matches!(intake.ack(&unacknowledged).await, Err(BrokerError::StaleDelivery)));
    intake.ack(&again).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_stops_waiting_loses_no_message() {
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
    let (mut ids, mut cancelled) = (Vec::new(), 0);
    while ids.len() < 500 {
        // Mostly short enough to end between deliveries and between the steps of starting to consume.
        let wait_us_max = if rand::random_bool(0.1) { 500_000 } else { 2_000 };
        match timeout(Duration::from_micros(rand::random_range(1..wait_us_max)), intake.next_batch(3)).await {
            Ok(batch) => {
                let batch = batch.unwrap();
                intake.ack(&batch).await.unwrap();
                ids.extend(ids_of(&batch));
            }
            Err(_) => cancelled += 1,
        }
    }
    publishing.await.unwrap();
    assert!(cancelled > 10, "{cancelled}");
    assert_eq!(ids, (0..500).collect::<Vec<_>>());
}

/// A vhost whose queue `all` contains messages with the ids 0, 1, 2, ...
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
    assert!(sent.iter().all(|message| *message == PublishOutcome::Confirmed), "{sent:?}");
}

async fn next(intake: &mut Intake, max: usize) -> Vec<Incoming> {
    timeout(DEADLINE, intake.next_batch(max)).await.expect("a delivery in time").expect("a batch")
}

fn ids_of(batch: &[Incoming]) -> Vec<u32> {
    batch.iter().map(|one| one.message_id.as_ref().unwrap().parse().unwrap()).collect()
}

//! Fields of messages that are not text: they become dead letters with a plain reason, and the queue continues.

use relay::IntakeQueue;
use server::migrations;
use server::settings::{Bus, Role};
use testkit::{TestApp, TestDatabase, TestVhost, eventually};
use uuid::Uuid;

use crate::joins::fixture::{new_event, post_event_update};
use crate::relay::broker_client::BrokerClient;
use crate::relay::raw_amqp::{APP_ID, HEADERS, MESSAGE_ID, RawAmqp, TYPE, long, short};
use crate::relay::support::{TIMEOUT, relay_to};

/// A type that can be posted.
const KIND: &[u8] = b"order.placed";

#[tokio::test]
async fn a_field_that_is_not_text_makes_a_dead_letter_that_names_it_and_never_stops_the_queue() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    amqp.exchange("anything", lapin::ExchangeKind::Topic).await;
    amqp.queue("orders", "anything", "#").await;
    let app = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        settings.relay.intake = vec![IntakeQueue::new("orders")];
    })
    .await;
    let mut raw = RawAmqp::connect(&vhost.amqp_url()).await;
    let to_queue = (b"".as_slice(), b"orders".as_slice());
    let key = |value: &[u8]| long(&[short(b"pillarbox-key"), b"S".to_vec(), long(value)].concat());
    let refused = [
        ("`message_id` must be UTF-8", to_queue, MESSAGE_ID | TYPE, [short(b"id \xFF\xFE"), short(KIND)].concat()),
        ("`message_id` must be UTF-8", to_queue, MESSAGE_ID | TYPE, [short(b"id \0"), short(KIND)].concat()),
        ("`type` must be UTF-8", to_queue, MESSAGE_ID | TYPE, [short(b"id 2"), short(b"order.\xC3")].concat()),
        ("`type` must be UTF-8", to_queue, MESSAGE_ID | TYPE, [short(b"id 3"), short(b"order\0")].concat()),
        ("`message_id` and `type` must", to_queue, MESSAGE_ID | TYPE, [short(b"\x80"), short(b"\x80")].concat()),
        ("`routing key` must be UTF-8", (b"anything".as_slice(), b"a.\xFF".as_slice()), TYPE, short(KIND)),
        ("`pillarbox-key` must be UTF-8", to_queue, HEADERS | TYPE, [key(b"k\xFF"), short(KIND)].concat()),
        ("`pillarbox-key` must be UTF-8", to_queue, HEADERS | TYPE, [key(b"k\0"), short(KIND)].concat()),
    ];
    for (_, target, flags, properties) in &refused {
        raw.publish(*target, (*flags, properties), b"1").await;
    }
    // What nothing reads may have any value: the application, the names of headers, and values that are nested deeper than a
    // program without care survives.
    let deep = (0..20_000).fold(Vec::new(), |inner, _| [b"A".to_vec(), long(&inner)].concat());
    let tables = [[short(b"x\xFF"), b"s\x01\x02".to_vec()].concat(), [short(b"deep"), deep].concat()];
    raw.publish(to_queue, (TYPE | APP_ID, &[short(KIND), short(b"\xFF")].concat()), b"10").await;
    for (number, table) in tables.iter().enumerate() {
        let body = (11 + number).to_string();
        raw.publish(to_queue, (HEADERS | TYPE, &[long(table), short(KIND)].concat()), body.as_bytes()).await;
    }
    raw.close().await;
    let in_log = async || -> Vec<i64> {
        let query = "select payload::text::bigint from pillarbox.log where source = 'amqp:orders' order by id";
        sqlx::query_scalar(query).fetch_all(db).await.unwrap()
    };
    eventually("the valid messages are in the log", TIMEOUT, async || match in_log().await {
        found if found == [10, 11, 12] => Ok(()),
        other => Err(other),
    })
    .await;
    let query = "select last_error from pillarbox.dead_letter where consumer = 'amqp:orders' order by id";
    let errors: Vec<String> = sqlx::query_scalar(query).fetch_all(db).await.unwrap();
    assert_eq!(errors.len(), refused.len(), "{errors:?}");
    for (error, (expected, ..)) in errors.iter().zip(&refused) {
        assert!(error.contains(expected), "{error}");
    }
    eventually("all messages are acknowledged", TIMEOUT, async || amqp.depth("orders").await == 0).await;
    app.stop().await;
}

/// The same for the queue of a service with `bus = "rabbitmq"`, which the service declares.
#[tokio::test]
async fn a_message_id_that_is_not_text_never_stops_the_queue_of_a_service() {
    const QUEUE: &str = "pillarbox.joins.events";
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    let app = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        settings.bus = Bus::Rabbitmq;
        settings.services = vec!["joins".to_owned()];
        settings.roles = vec![Role::Api, Role::Relay, Role::Consume];
    })
    .await;
    amqp.wait_for_consumer_queue("joins.events").await;
    let mut raw = RawAmqp::connect(&vhost.amqp_url()).await;
    for id in [b"id \xFF\xFE".as_slice(), b"id \0"] {
        let properties = [short(id), short(b"event.published")].concat();
        raw.publish((b"", QUEUE.as_bytes()), (MESSAGE_ID | TYPE, &properties), b"{}").await;
    }
    raw.close().await;
    let event = new_event(Uuid::now_v7(), 1);
    post_event_update(db, &event).await;
    eventually("joins knows the event that came later", TIMEOUT, async || {
        let query = "select count(*) from pillarbox_joins.event_capacity where event_id = $1";
        sqlx::query_scalar::<_, i64>(query).bind(event.event_id).fetch_one(db).await.unwrap() == 1
    })
    .await;
    let query = "select last_error from pillarbox.dead_letter where last_error like '%`message_id` must be UTF-8%'";
    let errors: Vec<String> = sqlx::query_scalar(query).fetch_all(db).await.unwrap();
    assert_eq!(errors.len(), 2, "{errors:?}");
    eventually("the queue is empty", TIMEOUT, async || amqp.depth(QUEUE).await == 0).await;
    assert_eq!(amqp.consumers(QUEUE).await, 1, "the service still reads it");
    app.stop().await;
}

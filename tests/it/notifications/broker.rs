//! Business events over RabbitMQ: each aggregate type has its queue, and listeners in another database get each event once.

use runtime::secret::Secret;
use serde_json::{Value, json};
use server::migrations;
use server::settings::{Bus, Role, Settings};
use testkit::{TestApp, TestDatabase, TestVhost, eventually};
use uuid::Uuid;

use super::fixture::{add_recipients, check_inboxes, count, in_app_count, post_event, reservation, with};
use crate::hub::fixture::test_size;
use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{TIMEOUT, installation_key, relay_to};
use crate::support::{caller, text};

/// The settings of the notify service in a database of its own.
fn listen_to(vhost: &TestVhost) -> impl Fn(&mut Settings) + use<> {
    let url = vhost.amqp_url();
    move |settings| {
        settings.secret_key = Some(Secret::new(installation_key(&url).to_base64()));
        settings.amqp_url = Some(Secret::new(url.clone()));
        settings.bus = Bus::Rabbitmq;
        settings.services = vec!["notify".to_owned()];
        settings.roles = vec![Role::Api, Role::Consume];
        settings.lease_ms = 2_000;
    }
}

#[tokio::test]
async fn each_aggregate_type_has_its_queue_and_an_added_one_gets_it_without_a_restart() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let app = TestApp::start_with(&database, relay_to(&vhost)).await;
    let (amqp, producer) = (BrokerClient::connect(&vhost).await, caller(&app, "ingest", "main").await);
    amqp.wait_for_queue("notification.admin").await;
    let added = app.admin().post("/notify/v1/aggregate-types", json!({"name": "COURIER"})).await;
    assert_eq!(added.status, 201, "{added:?}");
    let began = std::time::Instant::now();
    amqp.wait_for_queue("notification.courier").await;
    // The topology as a whole is declared once a minute.
    assert!(began.elapsed() < std::time::Duration::from_secs(40), "the queue exists after {:?}", began.elapsed());
    for (number, aggregate_type) in ["RESTAURANT", "CUSTOMER", "AGENCY", "ADMIN", "COURIER"].into_iter().enumerate() {
        let event = with(&reservation(number as i64), "aggregate_type", json!(aggregate_type));
        let event = with(&event, "event_id", json!(format!("evt-123-{number}")));
        let posted = post_event(&producer, event.clone()).await;
        assert_eq!(posted.status, 202, "{posted:?}");
        let queue = format!("notification.{}", aggregate_type.to_lowercase());
        amqp.wait_for_queue(&queue).await;
        let received = amqp.consume(&queue, 1).await.remove(0);
        assert_eq!(received.routing_key, queue);
        let mut body = received.body.clone();
        for added_by_the_envelope in ["timestamp", "trace_id", "schema_version"] {
            assert!(body.as_object_mut().unwrap().remove(added_by_the_envelope).is_some(), "{body}");
        }
        // The id of the producer is no UUID, so the event has both.
        let mut expected = with(&event, "event_id", posted.json()["event_id"].clone());
        expected["source_event_id"] = event["event_id"].clone();
        assert_eq!(body, expected, "no recipients, preferences or channels; aggregate_id is a number");
        assert!(received.persistent && received.message_id == text(&body["event_id"]));
    }
    // A UUID of the producer is the id itself.
    let id = Uuid::new_v4();
    assert_eq!(post_event(&producer, with(&reservation(5), "event_id", json!(id))).await.status, 202);
    let received = amqp.consume("notification.restaurant", 1).await.remove(0).body;
    assert_eq!((&received["event_id"], &received["source_event_id"]), (&json!(format!("evt_{id}")), &Value::Null));
    app.stop().await;
}

/// Ten aggregates of each type, one recipient for each.
const AGGREGATES: i64 = 10;
const TYPES: [&str; 4] = ["RESTAURANT", "CUSTOMER", "AGENCY", "ADMIN"];

#[tokio::test]
async fn every_event_arrives_once_and_in_order_per_aggregate_over_the_broker() {
    let (here, there) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let (vhost, db) = (TestVhost::new().await, there.pool());
    for aggregate_type in TYPES {
        for aggregate in 0..AGGREGATES {
            add_recipients(db, aggregate_type, Some(aggregate), &[Uuid::now_v7()]).await;
        }
    }
    let in_app = "insert into pillarbox_notify.event_type (name, channels) values ('A', '{in_app}')";
    sqlx::query(in_app).execute(db).await.unwrap();
    let relay = TestApp::start_with(&here, relay_to(&vhost)).await;
    let listeners =
        [TestApp::start_with(&there, listen_to(&vhost)).await, TestApp::start_with(&there, listen_to(&vhost)).await];
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.wait_for_queue("notification.agency").await;
    amqp.queue("copies", "notifications.exchange", "notification.agency").await;
    let events = test_size(1_000, 10_000) as i64;
    // Every second one with an id of the producer.
    let post = "select pillarbox.notify('A', ($2::text[])[n % 4 + 1], n / 4 % $3, to_json(n),
                    event_id => case when n % 2 = 0 then 'order-' || n end) from generate_series(0, $1 - 1) as n";
    sqlx::query(post).bind(events).bind(TYPES).bind(AGGREGATES).execute(here.pool()).await.unwrap();
    eventually("every event is a notification", TIMEOUT, async || match in_app_count(db).await {
        found if found == events => Ok(()),
        other => Err(other),
    })
    .await;
    // A repeat of a whole queue, as after a crash between the commit and the acknowledgement.
    let copies = amqp.consume("copies", events as usize / 4).await;
    for copy in &copies {
        amqp.publish_copy("notification.agency", copy).await;
    }
    sqlx::query("select pillarbox.notify('A', 'AGENCY', 0, to_json(1000000))").execute(here.pool()).await.unwrap();
    eventually("the last one has arrived", TIMEOUT, async || in_app_count(db).await > events).await;
    assert_eq!(in_app_count(db).await, events + 1, "no event makes a second notification");
    check_inboxes(db).await;
    let out_of_order = "select count(*) from (
            select payload::text::int < lag(payload::text::int) over (partition by user_id order by seq) as wrong
            from pillarbox_notify.notification join pillarbox_notify.business_event on business_event.id = event_id
        ) neighbours where wrong";
    assert_eq!(count(db, out_of_order).await, 0);
    // The id on every channel is the one that the producer knows.
    let ids: Vec<Uuid> =
        sqlx::query_scalar("select id from pillarbox_notify.business_event").fetch_all(db).await.unwrap();
    let posted = "select count(*) from pillarbox.log where source = 'notify' and message_id = any($1)";
    let posted: i64 = sqlx::query_scalar(posted).bind(&ids).fetch_one(here.pool()).await.unwrap();
    assert_eq!(posted, events + 1, "the ids of the events are those of the producer");
    let failed = "select (select count(*) from pillarbox.dead_letter) + (select count(*) from pillarbox.parked)";
    assert_eq!(count(db, failed).await, 0);
    for app in listeners {
        app.stop().await;
    }
    relay.stop().await;
}

#[tokio::test]
async fn a_type_that_is_added_over_the_broker_gets_its_listener_without_a_restart() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, user) = (database.pool(), Uuid::now_v7());
    let app = TestApp::start_with(&database, |settings| {
        listen_to(&vhost)(settings);
        settings.relay.initial_delay_ms = 0;
        settings.roles.push(Role::Relay);
    })
    .await;
    let added = app.admin().post("/notify/v1/aggregate-types", json!({"name": "COURIER"})).await;
    assert_eq!(added.status, 201, "{added:?}");
    add_recipients(db, "COURIER", None, &[user]).await;
    sqlx::query("select pillarbox.notify('SHIFT_STARTED', 'COURIER', 7, '{}')").execute(db).await.unwrap();
    super::fixture::wait_for_inbox(db, user, &["SHIFT_STARTED"]).await;
    let source: String =
        sqlx::query_scalar("select source from pillarbox.log where topic = 'SHIFT_STARTED' order by id desc limit 1")
            .fetch_one(db)
            .await
            .unwrap();
    assert_eq!(source, "amqp:notification.courier", "it came over its queue");
    app.stop().await;
}

#[tokio::test]
async fn a_message_of_another_source_in_the_queue_of_a_listener_becomes_a_dead_letter() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    let app = TestApp::start_with(&database, |settings| {
        listen_to(&vhost)(settings);
        settings.relay.initial_delay_ms = 0;
        settings.roles.push(Role::Relay);
    })
    .await;
    amqp.wait_for_queue("notification.restaurant").await;
    amqp.queue("copies", "pillarbox.events", "#").await;
    amqp.queue("events", "notifications.exchange", "notification.agency").await;
    sqlx::query("select pillarbox.post('order.paid', '{}', aggregate_type => 'RESTAURANT', aggregate_id => '7')")
        .execute(db)
        .await
        .unwrap();
    sqlx::query("select pillarbox.notify('A', 'AGENCY', 5, '{}')").execute(db).await.unwrap();
    let (of_sql, of_agency) = (amqp.consume("copies", 1).await.remove(0), amqp.consume("events", 1).await.remove(0));
    amqp.publish_copy("notification.restaurant", &of_sql).await;
    amqp.publish_copy("notification.restaurant", &of_agency).await;
    let errors =
        "select last_error from pillarbox.dead_letter where consumer = 'amqp:notification.restaurant' order by id";
    let errors: Vec<String> = eventually("both are dead letters", TIMEOUT, async || {
        let found: Vec<String> = sqlx::query_scalar(errors).fetch_all(db).await.unwrap();
        if found.len() == 2 { Ok(found) } else { Err(found) }
    })
    .await;
    assert!(errors[0].contains("from the source sql"), "{errors:?}");
    assert!(errors[1].contains("with the aggregate type AGENCY"), "{errors:?}");
    app.stop().await;
}

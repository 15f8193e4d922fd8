//! Other producers than requests: a queue of RabbitMQ and the recipients of notifications name only tenants that exist.

use relay::IntakeQueue;
use serde_json::json;
use server::migrations;
use testkit::{TestApp, TestDatabase, TestVhost, eventually};
use uuid::Uuid;

use crate::delivery::fixture::{insert_contact, insert_due, set_event_type, wait_for_state};
use crate::hub::fixture::{Fixture, error_pointers};
use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{TIMEOUT, relay_to};

#[tokio::test]
async fn a_message_from_a_queue_for_an_unknown_tenant_becomes_a_dead_letter_and_stops_nothing() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.queue("misspelled", "", "").await;
    amqp.queue("orders", "", "").await;
    let app = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        let of = |queue: &str, tenant: &str| IntakeQueue { tenant: tenant.parse().unwrap(), ..IntakeQueue::new(queue) };
        settings.relay.intake = vec![of("misspelled", "acne"), of("orders", "acme")];
    })
    .await;
    let db = database.pool();
    for n in 0..3 {
        amqp.publish("misspelled", Some(&format!("m{n}")), Some("order.placed"), None, b"1").await;
        amqp.publish("orders", Some(&format!("o{n}")), Some("order.placed"), None, b"2").await;
    }
    let count = async |query: &'static str| sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap();
    eventually("all become dead letters", TIMEOUT, async || {
        count("select count(*) from pillarbox.dead_letter where consumer = 'amqp:misspelled' and tenant = 'acne'").await
            == 3
    })
    .await;
    let error = "select last_error from pillarbox.dead_letter limit 1";
    let error: String = sqlx::query_scalar(error).fetch_one(db).await.unwrap();
    assert!(error.contains("`acne` does not exist") && error.contains("pillarbox tenants create acne"), "{error}");
    eventually("the queue is read on", TIMEOUT, async || amqp.depth("misspelled").await == 0).await;
    eventually("the other queue is read", TIMEOUT, async || {
        count("select count(*) from pillarbox.log where tenant = 'acme'").await == 3
    })
    .await;
    assert_eq!(count("select count(*) from pillarbox.log where tenant = 'acne' and source <> 'pillarbox'").await, 0);
    assert_eq!(count("select count(*) from pillarbox.tenant where name = 'acne'").await, 0);
    // The operator creates the tenant; from then on its messages are posted.
    assert_eq!(app.admin().post("/admin/v1/tenants", json!({"name": "acne"})).await.status, 201);
    amqp.publish("misspelled", Some("m9"), Some("order.placed"), None, b"1").await;
    eventually("it is posted", TIMEOUT, async || {
        count("select count(*) from pillarbox.log where tenant = 'acne' and source = 'amqp:misspelled'").await == 1
    })
    .await;
    app.stop().await;
}

#[tokio::test]
async fn a_recipient_of_an_unknown_tenant_is_refused_and_its_webhooks_are_skipped() {
    let Fixture { database, app, .. } = Fixture::start().await;
    let row = |tenant: &str| json!({"aggregate_type": "RESTAURANT", "user_id": Uuid::now_v7(), "tenant": tenant});
    let rows = json!({"recipients": [row("acme"), row("acne"), row("main")]});
    let refused = app.admin().post("/notify/v1/recipients/import", rows).await;
    assert_eq!(error_pointers(&refused), ["/recipients/1/tenant"]);
    assert!(refused.text.contains("create it with POST /admin/v1/tenants"), "{refused:?}");
    // A tenant that was deleted after the import.
    let db = database.pool();
    set_event_type(&app, "order.paid", json!({"channels": ["webhook"]})).await;
    let user = insert_contact(db, None, Some("acne")).await;
    let notification = insert_due(db, user, "webhook", "order.paid", 0).await;
    let reason = wait_for_state(db, notification, "skipped").await.unwrap();
    assert!(reason.contains("the tenant of the user does not exist"), "{reason}");
    let count = "select count(*) from pillarbox.log where tenant = 'acne'";
    assert_eq!(sqlx::query_scalar::<_, i64>(count).fetch_one(db).await.unwrap(), 0);
    app.stop().await;
}

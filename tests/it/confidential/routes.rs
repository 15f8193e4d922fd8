//! Confidential messages and routes to RabbitMQ: a route that is stuck gets the payload, and none publishes the marker.

use std::sync::Arc;

use chrono::{TimeDelta, Utc};
use lapin::ExchangeKind;
use pillarbox::operations::replays::{self, Request};
use server::migrations;
use server::settings::Role;
use testkit::{TestApp, TestDatabase, TestVhost, eventually};

use crate::confidential::support::{
    EmailHandler, blank, create_email_table, email, email_process, occurrences, post_email, recorded_emails, state,
};
use crate::consumers::support::{fast_options, wait_for_replays};
use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{TIMEOUT, numbered, parked, post_from, relay_to, relayed};

#[tokio::test]
async fn a_route_that_is_stuck_publishes_the_payload_later_and_then_it_is_blanked() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, handler) = (database.pool(), Arc::new(EmailHandler::default()));
    create_email_table(db).await;
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.exchange("smap.events", ExchangeKind::Topic).await;
    let app = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        settings.roles.push(Role::Maintain);
    })
    .await;
    // A route that is created later does not get what the others have processed by then.
    eventually("the route exists", TIMEOUT, async || relayed(db, "relay.email").await).await;
    let consumer = email_process(db, &handler, fast_options());
    let id = post_email(db, &email("u1", "s3cret-token")).await;
    eventually("the e-mail is recorded", TIMEOUT, async || recorded_emails(db).await == [id]).await;
    eventually("the route has no queue for it", TIMEOUT, async || match parked(db).await {
        (1, 1) => Ok(()),
        _ => Err((parked(db).await, state(db, "relay.email", id).await, app.anonymous().get("/readyz").await.text)),
    })
    .await;
    blank(db).await;
    assert!(occurrences(&database, "s3cret-token").await > 0, "a parked message keeps its payload");

    amqp.queue("new", "smap.events", "email.#").await;
    let published = amqp.consume("new", 1).await;
    assert_eq!(published[0].body["payload"]["data"]["variables"]["token"], "s3cret-token");
    assert!(published[0].headers.contains_key("pillarbox-confidential-until"), "{:?}", published[0].headers);
    eventually("the process blanks it", TIMEOUT, async || occurrences(&database, "s3cret-token").await == 0).await;
    assert_eq!(state(db, "relay.email", id).await.0, "sent");

    // A replay skips it, and publishes the next message.
    post_from(db, "identity", &numbered("email.code", Some("u1"), 7)).await;
    assert_eq!(amqp.consume("new", 1).await[0].body["payload"], 7);
    eventually("everything is published", TIMEOUT, async || relayed(db, "relay.email").await).await;
    let (from, to) = (Utc::now() - TimeDelta::hours(1), Utc::now() + TimeDelta::minutes(1));
    let request = Request { consumer: "relay.email".to_owned(), from, to, again: true };
    replays::request(db, &request).await.unwrap();
    wait_for_replays(db).await;
    assert_eq!(amqp.consume("new", 1).await[0].body["payload"], 7);
    assert_eq!(amqp.depth("new").await, 0, "the marker is not published");
    consumer.stop().await;
    app.stop().await;
}

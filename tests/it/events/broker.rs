//! The events service in its own database, connected to other services over the broker, and reads from a replica.

use std::time::Duration;

use http_kit::auth::TokenSigner;
use runtime::clock::Clock;
use runtime::secret::Secret;
use serde_json::json;
use server::migrations;
use server::settings::{Bus, Role, Settings};
use testkit::{Client, TestApp, TestDatabase, TestVhost, eventually};
use uuid::Uuid;

use crate::events::fixture::{
    DEADLINE, Fixture, create_event, event_id, event_path, in_hours, join_message, median_count_latency, meetup,
    meetup_with, new_user, post_action, post_messages, publish_event, second_of_this_machine,
};
use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{installation_key, relay_to};
use crate::server::process::{DataFolder, serve};

fn over_the_broker(vhost: &TestVhost) -> impl Fn(&mut Settings) + use<> {
    let configure_relay = relay_to(vhost);
    move |settings| {
        configure_relay(settings);
        settings.bus = Bus::Rabbitmq;
        settings.services = vec!["events".to_owned()];
        settings.roles = vec![Role::Api, Role::Relay, Role::Consume];
    }
}

#[tokio::test]
async fn counts_from_another_database_arrive_over_the_broker_within_a_second() {
    let vhost = TestVhost::new().await;
    let client = BrokerClient::connect(&vhost).await;
    let fixture = Fixture::start_with(over_the_broker(&vhost)).await;
    client.wait_for_consumer_queue("events.counts").await;
    client.queue("published", "pillarbox.events", "event.#").await;
    // The database of the joins service, and its relay.
    let joins_database = TestDatabase::new(&migrations()).await;
    let joins = TestApp::start_with(&joins_database, |settings| {
        relay_to(&vhost)(settings);
        settings.roles = vec![Role::Relay];
    })
    .await;
    let event = publish_event(&fixture.owner, meetup()).await;
    let received = client.consume("published", 1).await;
    assert_eq!(received[0].routing_key, "event.published");
    assert_eq!(received[0].headers["pillarbox-key"], event["id"].as_str().unwrap());
    assert_eq!(
        (
            &received[0].body["aggregate_type"],
            &received[0].body["aggregate_id"],
            &received[0].body["payload"]["version"]
        ),
        (&json!("EVENT"), &event["id"], &json!(2))
    );
    let reader = fixture.app.anonymous();
    let took = median_count_latency(joins_database.pool(), &reader, &event).await;
    let second = second_of_this_machine(&reader, &event).await;
    assert!(took < second, "{took:?} of {second:?}");
    joins.stop().await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn messages_committed_before_and_posted_during_a_crash_are_not_lost() {
    let vhost = TestVhost::new().await;
    let client = BrokerClient::connect(&vhost).await;
    client.exchange("pillarbox.events", lapin::ExchangeKind::Topic).await;
    client.queue("published", "pillarbox.events", "event.published").await;
    let (database, joins_database) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let (folder, key, amqp) = (DataFolder::new(), installation_key(&vhost.amqp_url()), vhost.amqp_url());
    let secret = key.to_base64();
    let start = |delay_ms: &str| {
        let env = [
            ("PILLARBOX_SECRET_KEY", secret.as_str()),
            ("PILLARBOX_AMQP_URL", &amqp),
            ("PILLARBOX_BUS", "rabbitmq"),
            ("PILLARBOX_SERVICES", "[\"events\"]"),
            ("PILLARBOX_LEASE_MS", "1000"),
            ("PILLARBOX_RELAY__INITIAL_DELAY_MS", delay_ms),
        ];
        serve(&folder, &database, &env)
    };
    let user = Uuid::now_v7();
    let token = TokenSigner::new(&key).sign(user, None, Clock::system().now(), Duration::from_secs(600)).unwrap();
    // The message is committed but not published, because the relay has not started.
    let mut process = start("600000");
    let owner = Client::new(&process.base_url().await).bearer(&token);
    client.wait_for_consumer_queue("events.counts").await;
    let event = create_event(&owner, meetup()).await;
    assert_eq!(post_action(&owner, &event, "publish").await.status, 200);
    process.kill9();
    let joins = TestApp::start_with(&joins_database, |settings| {
        relay_to(&vhost)(settings);
        settings.roles = vec![Role::Relay];
    })
    .await;
    post_messages(joins_database.pool(), "joins", &[join_message(event_id(&event), 2, 7)]).await;
    let mut process = start("0");
    let reader = Client::new(&process.base_url().await);
    let received = client.consume("published", 1).await;
    assert_eq!(received[0].body["payload"]["event_id"], event["id"]);
    eventually("the count is shown", DEADLINE, async || {
        reader.get(&event_path(&event)).await.json()["active_participants"] == 2
    })
    .await;
    assert!(process.terminate().await.success());
    joins.stop().await;
}

#[tokio::test]
async fn feeds_are_read_from_the_replica_and_single_events_from_the_primary() {
    // A replica that never catches up: a different database.
    let replica = TestDatabase::new(&migrations()).await;
    let url = replica.url();
    let fixture = Fixture::start_with(|settings| settings.replica_url = Some(Secret::new(url))).await;
    let replica_app = TestApp::start(&replica).await;
    let listed = publish_event(&new_user(&replica_app), meetup_with(json!({"city": "Oslo"}))).await;
    let event = publish_event(&fixture.owner, meetup()).await;
    let reader = fixture.app.anonymous();
    let feed = reader.get("/event/v1/events").await.json();
    assert_eq!(feed["items"][0]["id"], listed["id"], "{feed}");
    // The replica's state decides whether a cached page is still valid, not the primary's state.
    let (other, hours) = (new_user(&replica_app), [in_hours(1), in_hours(2)]);
    let sooner =
        publish_event(&other, meetup_with(json!({"city": "Oslo", "start_time": hours[0], "end_time": hours[1]}))).await;
    let feed = reader.get("/event/v1/events").await.json();
    assert_eq!(feed["items"][0]["id"], sooner["id"], "{feed}");
    let cities = reader.get("/event/v1/meta/cities").await.json();
    assert_eq!(cities["items"][0]["city"], "Oslo", "{cities}");
    // Users may have changed a single event or their own events just before the read, so these come from the primary.
    assert_eq!(reader.get(&event_path(&event)).await.json(), event);
    assert_eq!(fixture.owner.get("/event/v1/me/events").await.json()["items"][0]["id"], event["id"]);
    replica_app.stop().await;
    fixture.app.stop().await;
}

//! The events service with a database of its own: others hear of it, and it hears of them, over the broker.

use std::time::Duration;

use kit::auth::TokenSigner;
use kit::clock::Clock;
use kit::secret::{MasterKey, Secret};
use mailbox::database::migrations;
use pillarbox::settings::{Bus, Role, Settings};
use serde_json::json;
use testkit::{Client, TestApp, TestDatabase, TestVhost, drain};
use uuid::Uuid;

use crate::broker::Outside;
use crate::events_world::{
    PATIENCE, World, act, id, in_hours, joined, made, meetup, meetup_with, path, published, say, someone,
    time_to_show_counts,
};
use crate::instance::{DataFolder, serve};
use crate::relaying::relaying;

fn over_the_broker(vhost: &TestVhost) -> impl Fn(&mut Settings) + use<> {
    let relaying = relaying(vhost);
    move |settings| {
        relaying(settings);
        settings.bus = Bus::Rabbitmq;
        settings.services = vec!["events".to_owned()];
        settings.roles = vec![Role::Api, Role::Relay, Role::Consume];
    }
}

#[tokio::test]
async fn counts_come_over_the_broker_from_another_database_within_a_second() {
    let vhost = TestVhost::new().await;
    let outside = Outside::of(&vhost).await;
    let world = World::start_with(over_the_broker(&vhost)).await;
    outside.until_listening("events.counts").await;
    outside.queue("heard", "pillarbox.events", "event.#").await;
    // The joins service's own database, and its relay.
    let there = TestDatabase::new(&migrations()).await;
    let joins = TestApp::start_with(&there, |settings| {
        relaying(&vhost)(settings);
        settings.roles = vec![Role::Relay];
    })
    .await;
    let event = published(&world.owner, meetup()).await;
    let heard = outside.take("heard", 1).await;
    assert_eq!(heard[0].routing_key, "event.published");
    assert_eq!(heard[0].headers["pillarbox-key"], event["id"].as_str().unwrap());
    assert_eq!(
        (&heard[0].body["aggregate_type"], &heard[0].body["aggregate_id"], &heard[0].body["payload"]["version"]),
        (&json!("EVENT"), &event["id"], &json!(2))
    );
    let took = time_to_show_counts(there.pool(), &world.app.anyone(), &event).await;
    assert!(took < Duration::from_secs(1), "{took:?}");
    joins.stop().await;
    world.app.stop().await;
}

#[tokio::test]
async fn what_was_committed_before_a_kill_is_published_after_it_and_what_was_said_meanwhile_is_heard() {
    let vhost = TestVhost::new().await;
    let outside = Outside::of(&vhost).await;
    outside.exchange("pillarbox.events", lapin::ExchangeKind::Topic).await;
    outside.queue("heard", "pillarbox.events", "event.published").await;
    let (database, there) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let (folder, key, amqp) = (DataFolder::new(), MasterKey::from_bytes([5; 32]), vhost.amqp_url());
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
    // Committed, and not yet published: the relay has not begun.
    let mut process = start("600000");
    let owner = Client::new(&process.base_url().await).bearer(&token);
    outside.until_listening("events.counts").await;
    let event = made(&owner, meetup()).await;
    assert_eq!(act(&owner, &event, "publish").await.status, 200);
    process.kill9();
    let joins = TestApp::start_with(&there, |settings| {
        relaying(&vhost)(settings);
        settings.roles = vec![Role::Relay];
    })
    .await;
    say(there.pool(), "joins", &[joined(id(&event), 2, 7)]).await;
    let mut process = start("0");
    let reader = Client::new(&process.base_url().await);
    let heard = outside.take("heard", 1).await;
    assert_eq!(heard[0].body["payload"]["event_id"], event["id"]);
    drain("the count", PATIENCE, async || reader.get(&path(&event)).await.json()["active_participants"] == 2).await;
    assert!(process.terminate().await.success());
    joins.stop().await;
}

#[tokio::test]
async fn feeds_are_read_from_the_replica_and_single_events_are_not() {
    // A copy that lags behind for ever: another database.
    let replica = TestDatabase::new(&migrations()).await;
    let url = replica.url();
    let world = World::start_with(|settings| settings.replica_url = Some(Secret::new(url))).await;
    let on_the_replica = TestApp::start(&replica).await;
    let listed = published(&someone(&on_the_replica), meetup_with(json!({"city": "Oslo"}))).await;
    let event = published(&world.owner, meetup()).await;
    let reader = world.app.anyone();
    let feed = reader.get("/event/v1/events").await.json();
    assert_eq!(feed["items"][0]["id"], listed["id"], "{feed}");
    // A copy is good as long as the replica says so, not the database that it follows.
    let (other, hours) = (someone(&on_the_replica), [in_hours(1), in_hours(2)]);
    let sooner =
        published(&other, meetup_with(json!({"city": "Oslo", "start_time": hours[0], "end_time": hours[1]}))).await;
    let feed = reader.get("/event/v1/events").await.json();
    assert_eq!(feed["items"][0]["id"], sooner["id"], "{feed}");
    let cities = reader.get("/event/v1/meta/cities").await.json();
    assert_eq!(cities["items"][0]["city"], "Oslo", "{cities}");
    // What people see of one event, and of their own, they may have changed a moment before.
    assert_eq!(reader.get(&path(&event)).await.json(), event);
    assert_eq!(world.owner.get("/event/v1/me/events").await.json()["items"][0]["id"], event["id"]);
    on_the_replica.stop().await;
    world.app.stop().await;
}

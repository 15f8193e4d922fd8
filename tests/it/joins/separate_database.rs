//! The joins service in its own database, connected to the events service over the broker.

use runtime::secret::Secret;
use serde_json::json;
use server::migrations;
use server::settings::{Bus, Role};
use testkit::{TestApp, TestDatabase, TestVhost};
use uuid::Uuid;

use crate::joins::fixture::{new_event, next_version, post_event_update, post_join_action, wait_until_known};
use crate::joins::invariants::check_invariants;
use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{installation_key, relay_to};

#[tokio::test]
async fn joins_exchange_messages_over_the_broker_from_a_separate_database() {
    let (events_database, joins_database) =
        (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let vhost = TestVhost::new().await;
    let relay = TestApp::start_with(&events_database, relay_to(&vhost)).await;
    let joins = TestApp::start_with(&joins_database, |settings| {
        settings.secret_key = Some(Secret::new(installation_key(&vhost.amqp_url()).to_base64()));
        settings.amqp_url = Some(Secret::new(vhost.amqp_url()));
        settings.bus = Bus::Rabbitmq;
        settings.relay.initial_delay_ms = 0;
        settings.services = vec!["joins".to_owned()];
        settings.roles = vec![Role::Api, Role::Consume, Role::Relay, Role::Maintain];
    })
    .await;
    let client = BrokerClient::connect(&vhost).await;
    client.wait_for_consumer_queue("joins.events").await;
    client.queue("listening", "pillarbox.events", "join.#").await;
    let owner = Uuid::now_v7();
    let event = new_event(owner, 1);
    post_event_update(events_database.pool(), &event).await;
    wait_until_known(joins_database.pool(), &event).await;
    let users = [Uuid::now_v7(), Uuid::now_v7()];
    for user in users {
        assert_eq!(post_join_action(&joins.user(user, None), event.event_id, "join").await.status, 201);
    }
    assert_eq!(post_join_action(&joins.user(users[0], None), event.event_id, "cancel").await.status, 200);
    let received = client.consume("listening", 4).await;
    let published_counts: Vec<_> = received
        .iter()
        .map(|message| (message.routing_key.as_str(), message.body["payload"]["counts"].clone()))
        .collect();
    let counts = |active, waitlisted, version| json!({"active": active, "waitlisted": waitlisted, "version": version});
    assert_eq!(
        published_counts,
        [
            ("join.confirmed", counts(1, 0, 1)),
            ("join.waitlisted", counts(1, 1, 2)),
            ("join.canceled", counts(0, 1, 3)),
            ("join.promoted", counts(1, 0, 4))
        ]
    );
    for message in &received {
        assert_eq!(message.body["trace_id"], message.body["payload"]["trace_id"], "one trace");
        assert_eq!(message.headers["pillarbox-key"], event.event_id.to_string());
    }
    let more = next_version(&event, |event| event.capacity = 5);
    post_event_update(events_database.pool(), &more).await;
    wait_until_known(joins_database.pool(), &more).await;
    check_invariants(joins_database.pool(), &[]).await;
    joins.stop().await;
    relay.stop().await;
}

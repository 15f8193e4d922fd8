//! Kill -9 of the joins service while users join.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_kit::auth::TokenSigner;
use hyper::Method;
use runtime::clock::Clock;
use runtime::secret::MasterKey;
use serde_json::json;
use server::migrations;
use server::settings::{Bus, Role};
use testkit::{Client, TestApp, TestDatabase, TestVhost, eventually};
use uuid::Uuid;

use crate::events::fixture::{event_id, event_path, meetup_with, publish_event};
use crate::joins::fixture::{new_event, post_event_update, post_join_action_with_key, wait_until_known};
use crate::joins::invariants::check_invariants;
use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{installation_key, relay_to};
use crate::server::process::{DataFolder, serve};
use crate::support::DEADLINE;

/// The body of the 201 response to each user; `None` while there is none.
type Answered = Arc<Mutex<BTreeMap<Uuid, Option<String>>>>;

/// Lets new users join one after the other until the server is down.
async fn join_until_server_stops(base: Client, signer: Arc<TokenSigner>, event: Uuid, answered: Answered) {
    loop {
        let user = Uuid::now_v7();
        answered.lock().unwrap().insert(user, None);
        let token = signer.sign(user, None, Clock::system().now(), Duration::from_secs(600)).unwrap();
        let client = base.bearer(&token).with_header("idempotency-key", "mine");
        let path = format!("/join/v1/events/{event}/join");
        match client.try_send(Method::POST, &path, None).await {
            Ok(answer) if answer.status == 201 => drop(answered.lock().unwrap().insert(user, Some(answer.text))),
            Ok(answer) => assert_eq!(answer.status, 503, "{answer:?}"),
            Err(_) => return,
        }
    }
}

#[tokio::test]
async fn registrations_survive_kill_9_and_repeats_return_the_same_response() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let master = MasterKey::generate();
    let (secret, signer) = (master.to_base64(), Arc::new(TokenSigner::new(&master)));
    let env = [("PILLARBOX_SECRET_KEY", secret.as_str())];
    let event = new_event(Uuid::now_v7(), 40);
    post_event_update(database.pool(), &event).await;
    let answered = Answered::default();
    for _ in 0..3 {
        let mut process = serve(&folder, &database, &env);
        let base = Client::new(&process.base_url().await);
        wait_until_known(database.pool(), &event).await;
        let joiner = || join_until_server_stops(base.clone(), signer.clone(), event.event_id, answered.clone());
        let joiners: Vec<_> = (0..8).map(|_| tokio::spawn(joiner())).collect();
        let before = answered.lock().unwrap().len();
        let enough = before + 40 + Uuid::new_v4().as_u128() as usize % 60;
        eventually("users have joined", DEADLINE, async || answered.lock().unwrap().len() >= enough).await;
        process.kill9();
        for joiner in joiners {
            joiner.await.unwrap();
        }
    }
    let mut process = serve(&folder, &database, &env);
    let base = Client::new(&process.base_url().await);
    let all = answered.lock().unwrap().clone();
    assert!(all.values().flatten().count() > 100, "enough users got a response");
    for (user, first) in &all {
        let token = signer.sign(*user, None, Clock::system().now(), Duration::from_secs(600)).unwrap();
        let again = post_join_action_with_key(&base.bearer(&token), event.event_id, "join", "mine").await;
        assert_eq!(again.status, 201, "{again:?}");
        if let Some(first) = first {
            assert_eq!((&again.text, again.header("idempotent-replayed")), (first, "true"));
        }
    }
    let joined: i64 =
        sqlx::query_scalar("select count(*) from pillarbox_joins.joins").fetch_one(database.pool()).await.unwrap();
    assert_eq!(joined, all.len() as i64);
    check_invariants(database.pool(), &[]).await;
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn counts_catch_up_after_joins_is_killed_before_publishing() {
    let (vhost, folder) = (TestVhost::new().await, DataFolder::new());
    let (events_database, joins_database) =
        (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let events = TestApp::start_with(&events_database, |settings| {
        relay_to(&vhost)(settings);
        settings.bus = Bus::Rabbitmq;
        settings.services = vec!["events".to_owned()];
        settings.roles = vec![Role::Api, Role::Relay, Role::Consume];
    })
    .await;
    let master = installation_key(&vhost.amqp_url());
    let (secret, signer, amqp) = (master.to_base64(), Arc::new(TokenSigner::new(&master)), vhost.amqp_url());
    let start = |delay_ms: &str| {
        let env = [
            ("PILLARBOX_SECRET_KEY", secret.as_str()),
            ("PILLARBOX_AMQP_URL", &amqp),
            ("PILLARBOX_BUS", "rabbitmq"),
            ("PILLARBOX_SERVICES", "[\"joins\"]"),
            ("PILLARBOX_LEASE_MS", "1000"),
            ("PILLARBOX_RELAY__INITIAL_DELAY_MS", delay_ms),
        ];
        serve(&folder, &joins_database, &env)
    };
    let (outside, mut event, answered) = (BrokerClient::connect(&vhost).await, None, Answered::default());
    // In the first round the relay publishes nothing, so all registrations are still in the log at the kill; in the later
    // rounds the kill hits the relay in the middle of its work.
    for delay_ms in ["600000", "0", "0"] {
        let mut process = start(delay_ms);
        let base = Client::new(&process.base_url().await);
        outside.wait_for_consumer_queue("joins.events").await;
        if event.is_none() {
            let owner = events.user(Uuid::now_v7(), None);
            let published = publish_event(&owner, meetup_with(json!({"capacity": 0}))).await;
            eventually("the joins service knows the event", DEADLINE, async || {
                let known = "select count(*) from pillarbox_joins.event_capacity where status = 'published'";
                sqlx::query_scalar::<_, i64>(known).fetch_one(joins_database.pool()).await.unwrap() == 1
            })
            .await;
            event = Some(published);
        }
        let id = event_id(event.as_ref().unwrap());
        let joiner = || join_until_server_stops(base.clone(), signer.clone(), id, answered.clone());
        let joiners: Vec<_> = (0..4).map(|_| tokio::spawn(joiner())).collect();
        let enough = answered.lock().unwrap().len() + 40;
        eventually("users have joined", DEADLINE, async || answered.lock().unwrap().len() >= enough).await;
        process.kill9();
        for joiner in joiners {
            joiner.await.unwrap();
        }
    }
    let event = event.unwrap();
    let shown =
        async || events.anonymous().get(&event_path(&event)).await.json()["active_participants"].as_i64().unwrap();
    let joined: i64 = sqlx::query_scalar("select count(*) from pillarbox_joins.joins where status = 'active'")
        .fetch_one(joins_database.pool())
        .await
        .unwrap();
    assert!(joined >= answered.lock().unwrap().values().flatten().count() as i64);
    let mut process = start("0");
    process.base_url().await;
    eventually("the event shows every registration", DEADLINE, async || match shown().await {
        count if count == joined => Ok(()),
        other => Err((other, joined)),
    })
    .await;
    check_invariants(joins_database.pool(), &[]).await;
    assert!(process.terminate().await.success());
    events.stop().await;
}

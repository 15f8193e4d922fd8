//! The relay during faults of the servers and kills of its processes.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lapin::ExchangeKind;
use runtime::secret::Secret;
use server::migrations;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use testkit::{FaultProxy, Pillarbox, PrivateServers, Server, TestApp, TestDatabase, TestVhost, eventually, program};

use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{
    TIMEOUT, distinct, first_copies, one_route, one_route_to, post, relayed, wait_until_registered,
};
use crate::server::process::DataFolder;

#[tokio::test]
async fn connection_faults_lose_no_message_and_preserve_the_order() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (broker, postgres) =
        (FaultProxy::in_front_of(&vhost.amqp_url()).await, FaultProxy::in_front_of(&database.url()).await);
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.exchange("test.exchange", ExchangeKind::Topic).await;
    amqp.queue("all", "test.exchange", "test.#").await;
    let app = TestApp::start_with(&database, |settings| {
        one_route(&vhost)(settings);
        settings.amqp_url = Some(Secret::new(broker.url(&vhost.amqp_url())));
        settings.database_url = Some(Secret::new(postgres.url(&database.url())));
        settings.relay.batch_size = 20;
    })
    .await;
    let (keys, rounds) = (5, 200);
    let db = database.pool();
    let posting = async {
        for number in 0..rounds {
            for key in 0..keys {
                post(db, "test.posted", Some(&format!("key{key}")), number).await;
            }
        }
    };
    let is_done = AtomicBool::new(false);
    let breaking = async {
        let mut round = 0;
        while !is_done.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(150)).await; // the interval between two faults
            match round % 4 {
                0 => broker.cut(),
                1 => postgres.cut(),
                2 => broker.refuse(),
                _ => broker.pass(),
            }
            round += 1;
        }
        broker.pass();
    };
    let (received, ()) = tokio::join!(
        async {
            posting.await;
            is_done.store(true, Ordering::SeqCst);
            let mut received = Vec::new();
            amqp.consume_until("all", &mut received, |received| distinct(received) == keys * rounds).await;
            received
        },
        breaking
    );
    let by_key = first_copies(&received);
    assert_eq!(by_key.len(), keys);
    let expected: Vec<u64> = (0..rounds as u64).collect();
    assert!(by_key.values().all(|numbers| *numbers == expected), "the first copies are in order");
    app.stop().await;
}

/// Starts a relay as a separate process.
fn relay_process(database_url: &str, amqp_url: &str, folder: &DataFolder) -> Pillarbox {
    let routes = r#"[{"name": "test", "exchange": "test.exchange", "topics": ["test.#"]}]"#;
    let env = [
        ("PILLARBOX_ROLES", r#"["relay"]"#),
        ("PILLARBOX_DATABASE_URL", database_url),
        ("PILLARBOX_AMQP_URL", amqp_url),
        ("PILLARBOX_RELAY__ROUTES", routes),
        ("PILLARBOX_RELAY__INITIAL_DELAY_MS", "0"),
        ("PILLARBOX_RELAY__WORKERS", "1"),
        ("PILLARBOX_LEASE_MS", "1000"),
        ("PILLARBOX_POOL_MIN", "0"),
        ("PILLARBOX_POOL_MAX", "6"),
    ];
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text()];
    Pillarbox::start(program(), &args, &env)
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_replicas_killed_at_random_lose_no_message() {
    let (database, vhost, folder) = (TestDatabase::new(&migrations()).await, TestVhost::new().await, DataFolder::new());
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.exchange("test.exchange", ExchangeKind::Topic).await;
    amqp.queue("all", "test.exchange", "test.#").await;
    let mut replicas: Vec<Pillarbox> =
        (0..8).map(|_| relay_process(&database.url(), &vhost.amqp_url(), &folder)).collect();
    let (keys, rounds) = (20, if std::env::var_os("PBX_SOAK").is_some() { 500 } else { 100 });
    let db = database.pool().clone();
    wait_until_registered(&db, "relay.test").await;
    let posting = tokio::spawn(async move {
        for number in 0..rounds {
            for key in 0..keys {
                post(&db, "test.posted", Some(&format!("key{key}")), number).await;
            }
        }
    });
    let mut kills = 0;
    while !posting.is_finished() {
        tokio::time::sleep(Duration::from_millis(400)).await; // the interval between two kills
        let victim = (uuid::Uuid::new_v4().as_u128() % 8) as usize;
        replicas[victim].kill9();
        replicas[victim] = relay_process(&database.url(), &vhost.amqp_url(), &folder);
        kills += 1;
    }
    posting.await.unwrap();
    assert!(kills >= 3, "only {kills} replicas were killed");
    let mut received = Vec::new();
    amqp.consume_until("all", &mut received, |received| distinct(received) == keys * rounds).await;
    let by_key = first_copies(&received);
    let expected: Vec<u64> = (0..rounds as u64).collect();
    assert_eq!(by_key.len(), keys);
    for (key, numbers) in by_key {
        assert_eq!(numbers, expected, "{key}: all messages, and the first copies in order");
    }
    eventually("the leases of the killed ones have ended", TIMEOUT, async || {
        let live = "select count(*) from pillarbox.replica where until > now()";
        let live: i64 = sqlx::query_scalar(live).fetch_one(database.pool()).await.unwrap();
        if live == 8 { Ok(()) } else { Err(live) }
    })
    .await;
    for mut replica in replicas {
        assert!(replica.terminate().await.success(), "{}", replica.logs());
    }
    let leases: i64 = sqlx::query_scalar(
        "select count(*) from pillarbox.shard_worker join pillarbox.replica on replica.id = shard_worker.replica where until > now()",
    )
    .fetch_one(database.pool())
    .await
    .unwrap();
    assert_eq!(leases, 0, "a replica releases its leases when it stops");
}

/// Posts a number. An error means that the message may not be committed, so the producer repeats it.
async fn post_number(db: &sqlx::PgPool, key: &str, number: i64) {
    let query = "select pillarbox.post('test.posted', to_json($1::bigint), key => $2)";
    while sqlx::query(query).bind(number).bind(key).execute(db).await.is_err() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_broker_and_a_killed_database_lose_no_message() {
    let (servers, folder) = (PrivateServers::start(&[Server::Postgres, Server::RabbitMq]).await, DataFolder::new());
    let options: PgConnectOptions = servers.postgres_url().parse().unwrap();
    pillarbox::database::migrate_all(&options, &server::migrations()).await.unwrap();
    let db = PgPoolOptions::new().acquire_timeout(Duration::from_secs(5)).connect_lazy_with(options);
    let amqp = BrokerClient::connect_to(servers.amqp_url()).await;
    amqp.exchange("test.exchange", ExchangeKind::Topic).await;
    amqp.quorum_queue("all", "test.exchange", "test.#").await;
    // After a kill, this RabbitMQ confirms nothing for a quorum queue that is the only one.
    amqp.quorum_queue("another", "test.exchange", "another.#").await;
    drop(amqp);
    let mut relay = relay_process(servers.postgres_url(), servers.amqp_url(), &folder);
    relay.base_url().await;
    let rounds = 60;
    let posting = async {
        for number in 0..rounds {
            for key in 0..5 {
                let key = format!("key{key}");
                post_number(&db, &key, number as i64).await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await; // so that posting continues during the restarts
        }
    };
    let restarting = async {
        servers.restart_postgres().await;
        servers.restart_broker().await;
    };
    tokio::join!(posting, restarting);
    // The confirms show that the restarted quorum queue has a leader again.
    eventually("all messages are sent", TIMEOUT, async || relayed(&db, "relay.test").await).await;
    let amqp = BrokerClient::connect_to(servers.amqp_url()).await;
    let mut received = Vec::new();
    let all: HashSet<(String, u64)> =
        (0..5).flat_map(|key| (0..rounds).map(move |n| (format!("key{key}"), n))).collect();
    amqp.consume_until("all", &mut received, |received| {
        let seen: HashSet<(String, u64)> = received
            .iter()
            .map(|message| (message.headers["pillarbox-key"].clone(), message.body["payload"].as_u64().unwrap()))
            .collect();
        seen == all
    })
    .await;
    for (key, mut numbers) in first_copies(&received) {
        // A post whose response was lost in the crash is repeated by the producer with a new id.
        numbers.dedup();
        assert_eq!(numbers, (0..rounds).collect::<Vec<_>>(), "{key}");
    }
    assert!(relay.terminate().await.success());
}

/// The number of messages that a route has published according to the metrics.
async fn published(app: &TestApp, route: &str) -> u64 {
    let metrics = app.anonymous().get("/metrics").await.text;
    let of_route = format!("pillarbox_relay_published_total{{route=\"{route}\"}} ");
    let count = metrics.lines().find_map(|line| line.strip_prefix(&of_route)).map(|count| count.parse().unwrap());
    count.unwrap_or(0)
}

#[tokio::test]
async fn a_message_is_not_sent_before_it_is_confirmed() {
    for (name, is_cut) in [("answered-late", false), ("not-answered", true)] {
        let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
        let db = database.pool();
        let broker = FaultProxy::in_front_of(&vhost.amqp_url()).await;
        let amqp = BrokerClient::connect(&vhost).await;
        amqp.exchange("test.exchange", ExchangeKind::Topic).await;
        amqp.queue("all", "test.exchange", "test.#").await;
        let app = TestApp::start_with(&database, |settings| {
            one_route_to(broker.url(&vhost.amqp_url()))(settings);
            settings.relay.routes[0].name = name.to_owned();
        })
        .await;
        let consumer = format!("relay.{name}");
        post(db, "test.posted", Some("k"), 1).await;
        amqp.consume("all", 1).await;
        eventually("the first message is sent", TIMEOUT, async || relayed(db, &consumer).await).await;

        broker.mute();
        post(db, "test.posted", Some("k"), 2).await;
        eventually("the second message is in the queue", TIMEOUT, async || amqp.depth("all").await == 1).await;
        // There is no later event to wait for. A relay that ignores confirms would mark it as sent within this time.
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert_eq!(relayed(db, &consumer).await, Err(1));
        }
        assert_eq!(published(&app, name).await, 1);

        match is_cut {
            true => broker.cut(),
            false => broker.pass(),
        }
        eventually("the second message is sent", TIMEOUT, async || relayed(db, &consumer).await).await;
        assert_eq!(published(&app, name).await, 2);
        let copies = amqp.consume("all", amqp.depth("all").await as usize).await;
        assert_eq!(
            (copies.len(), distinct(&copies)),
            (if is_cut { 2 } else { 1 }, 1),
            "published again only after a cut"
        );
        app.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_waits_while_the_broker_has_a_memory_alarm() {
    let (servers, database) =
        (PrivateServers::start(&[Server::RabbitMq]).await, TestDatabase::new(&migrations()).await);
    let db = database.pool();
    let amqp = BrokerClient::connect_to(servers.amqp_url()).await;
    amqp.exchange("test.exchange", ExchangeKind::Topic).await;
    amqp.quorum_queue("all", "test.exchange", "test.#").await;
    let app = TestApp::start_with(&database, |settings| {
        one_route_to(servers.amqp_url().to_owned())(settings);
        settings.relay.routes[0].name = "blocked-route".to_owned();
        settings.relay.workers = 1;
    })
    .await;
    post(db, "test.posted", Some("k"), 0).await;
    amqp.consume("all", 1).await;
    eventually("the first message is sent", TIMEOUT, async || relayed(db, "relay.blocked-route").await).await;

    servers.raise_memory_alarm().await;
    for number in 1..=20 {
        post(db, "test.posted", Some("k"), number).await;
    }
    eventually("the connection is blocked", TIMEOUT, async || {
        servers.connection_states().await.contains(&"blocked".to_owned())
    })
    .await;
    assert_eq!(amqp.depth("all").await, 0);
    assert_eq!(relayed(db, "relay.blocked-route").await, Err(20), "no message has the status sent");
    assert_eq!(published(&app, "blocked-route").await, 1);

    servers.clear_memory_alarm().await;
    let mut received = Vec::new();
    amqp.consume_until("all", &mut received, |received| distinct(received) == 20).await;
    assert_eq!(first_copies(&received)["k"], (1..=20).collect::<Vec<_>>());
    eventually("all messages are sent", TIMEOUT, async || relayed(db, "relay.blocked-route").await).await;
    app.stop().await;
}

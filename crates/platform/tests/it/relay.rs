//! The log to RabbitMQ and back.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kit::clock::Clock;
use kit::health::Health;
use kit::secret::Secret;
use lapin::ExchangeKind;
use mailbox::cursor::Start;
use mailbox::database::migrations;
use mailbox::filter::Matching;
use mailbox::handler::{Handler, Handling};
use mailbox::log::Message;
use mailbox::replica::Replica;
use mailbox::runtime::{Rhythm, Runtime, Subscription};
use pillarbox::settings::{Role, Settings};
use relay::{Broker, IntakeQueue, Route};
use serde_json::json;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{PgPool, Postgres, Transaction};
use testkit::{FaultProxy, OwnServers, Pillarbox, TestApp, TestDatabase, TestVhost, drain};
use tokio_util::sync::CancellationToken;

use crate::broker::{Outside, Received};
use crate::instance::{BINARY, DataFolder};

const PATIENCE: Duration = Duration::from_secs(60);

/// Relays to the vhost, and begins at once.
fn relaying(vhost: &TestVhost) -> impl Fn(&mut Settings) + '_ {
    move |settings| {
        settings.amqp_url = Some(Secret::new(vhost.amqp_url()));
        settings.relay.initial_delay_ms = 0;
        settings.roles = vec![Role::Api, Role::Relay];
        settings.pool_max = 12;
        settings.lease_ms = 2_000;
    }
}

/// One route for everything under `test`.
fn one_route(vhost: &TestVhost) -> impl Fn(&mut Settings) + '_ {
    move |settings| {
        relaying(vhost)(settings);
        settings.relay.routes =
            vec![Route { topics: vec!["test.#".to_owned()], ..Route::new("test", "test.exchange") }];
    }
}

async fn post(db: &PgPool, topic: &str, key: Option<&str>, number: usize) {
    sqlx::query("select pillarbox.post($1, to_json($2::bigint), key => $3)")
        .bind(topic)
        .bind(number as i64)
        .bind(key)
        .execute(db)
        .await
        .unwrap();
}

/// The numbers of each key in the order of their first appearance.
fn firsts(received: &[Received]) -> HashMap<String, Vec<u64>> {
    let mut seen = HashSet::new();
    let mut by_key: HashMap<String, Vec<u64>> = HashMap::new();
    for message in received.iter().filter(|message| seen.insert(&message.message_id)) {
        let key = message.headers.get("pillarbox-key").cloned().unwrap_or_default();
        by_key.entry(key).or_default().push(message.body["payload"].as_u64().unwrap());
    }
    by_key
}

fn distinct(received: &[Received]) -> usize {
    received.iter().map(|message| &message.message_id).collect::<HashSet<_>>().len()
}

#[tokio::test]
async fn ten_thousand_events_reach_the_queue_of_their_aggregate_type_once() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let app = TestApp::start_with(&database, relaying(&vhost)).await;
    sqlx::query(
        "select pillarbox.post('RESERVATION_REQUESTED', json_build_object('n', n), key => 'r' || n % 100,
             aggregate_type => (array['RESTAURANT', 'CUSTOMER', 'AGENCY', 'ADMIN'])[n % 4 + 1], aggregate_id => (n % 7)::text)
         from generate_series(0, 9999) as n",
    )
    .execute(database.pool())
    .await
    .unwrap();
    let outside = Outside::of(&vhost).await;
    drain("the queues are there", PATIENCE, async || relayed(database.pool(), "relay.notifications").await).await;
    let mut all = HashSet::new();
    for (at, kind) in ["RESTAURANT", "CUSTOMER", "AGENCY", "ADMIN"].iter().enumerate() {
        let queue = format!("notification.{}", kind.to_lowercase());
        let received = outside.take(&queue, 2_500).await;
        assert_eq!(outside.depth(&queue).await, 0, "nothing twice");
        for message in &received {
            let number = message.body["payload"]["n"].as_u64().unwrap();
            assert_eq!(number as usize % 4, at, "the right queue");
            assert_eq!(message.body["aggregate_type"], *kind);
            assert_eq!(message.body["aggregate_id"], number % 7, "a number stays a number");
            assert_eq!(message.body["event_type"], "RESERVATION_REQUESTED");
            assert_eq!(message.body["event_id"], message.message_id);
            assert_eq!((message.routing_key.as_str(), message.persistent), (queue.as_str(), true));
            let fields: Vec<&str> = message.body.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(
                fields,
                [
                    "event_id",
                    "event_type",
                    "timestamp",
                    "aggregate_type",
                    "aggregate_id",
                    "trace_id",
                    "schema_version",
                    "payload"
                ]
                .into_iter()
                .collect::<std::collections::BTreeSet<_>>()
                .into_iter()
                .collect::<Vec<_>>(),
                "no recipients, preferences or channels"
            );
            all.insert(number);
        }
    }
    assert_eq!(all.len(), 10_000);
    let pending: i64 =
        sqlx::query_scalar("select count(*) from pillarbox.outbox_status where status <> 'sent' or sent_at is null")
            .fetch_one(database.pool())
            .await
            .unwrap();
    assert_eq!(pending, 0);
    let metrics = app.anyone().get("/metrics").await.text;
    assert!(metrics.contains("pillarbox_relay_published_total{route=\"notifications\"}"), "{metrics}");
    assert!(metrics.contains("event_publish_duration_seconds"), "{metrics}");
    app.stop().await;
}

/// Whether everything that was posted for this consumer is sent.
async fn relayed(db: &PgPool, consumer: &str) -> Result<(), i64> {
    let waiting: i64 =
        sqlx::query_scalar("select count(*) from pillarbox.outbox_status where consumer = $1 and status <> 'sent'")
            .bind(consumer)
            .fetch_one(db)
            .await
            .unwrap();
    let known: bool = sqlx::query_scalar("select exists (select from pillarbox.position where consumer = $1)")
        .bind(consumer)
        .fetch_one(db)
        .await
        .unwrap();
    if waiting == 0 && known { Ok(()) } else { Err(waiting) }
}

#[tokio::test]
async fn unroutable_among_routable_waits_with_its_key_and_the_others_go() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let outside = Outside::of(&vhost).await;
    outside.exchange("test.exchange", ExchangeKind::Topic).await;
    outside.queue("good", "test.exchange", "test.good").await;
    let db = database.pool();
    // In one pipeline: of each key, a routable one, one that nobody wants, and another routable one.
    for number in 0..50 {
        let key = format!("key{number}");
        post(db, "test.good", Some(&key), 1).await;
        post(db, if number % 5 == 0 { "test.lost" } else { "test.good" }, Some(&key), 2).await;
        post(db, "test.good", Some(&key), 3).await;
    }
    let app = TestApp::start_with(&database, |settings| {
        one_route(&vhost)(settings);
        settings.relay.routes[0].required = true;
    })
    .await;
    let received = outside.take("good", 130).await;
    drain("the others are parked", PATIENCE, async || parked(db).await == (10, 20)).await;
    assert_eq!(outside.depth("good").await, 0);
    for (key, numbers) in firsts(&received) {
        let number: usize = key[3..].parse().unwrap();
        let expected: &[u64] = if number.is_multiple_of(5) { &[1] } else { &[1, 2, 3] };
        assert_eq!(numbers, expected, "{key}");
    }
    // Once there is a queue for it, it goes, and what waited behind it follows.
    outside.queue("found", "test.exchange", "test.lost").await;
    assert_eq!(outside.take("found", 10).await.len(), 10);
    assert_eq!(outside.take("good", 10).await.len(), 10);
    drain("nothing is parked", PATIENCE, async || parked(db).await == (0, 0)).await;
    app.stop().await;
}

/// How many have failed, and how many are parked in all.
async fn parked(db: &PgPool) -> (i64, i64) {
    sqlx::query_as("select count(*) filter (where attempts > 0), count(*) from pillarbox.parked")
        .fetch_one(db)
        .await
        .unwrap()
}

#[tokio::test]
async fn what_nobody_wants_on_a_route_that_is_not_required_is_counted_and_passed() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let app = TestApp::start_with(&database, one_route(&vhost)).await;
    post(database.pool(), "test.lost", None, 1).await;
    drain("it is counted", PATIENCE, async || {
        app.anyone()
            .get("/metrics")
            .await
            .text
            .contains("pillarbox_consumer_messages_total{consumer=\"relay.test\",outcome=\"unrouted\"}")
    })
    .await;
    assert_eq!(parked(database.pool()).await, (0, 0));
    app.stop().await;
}

#[tokio::test]
async fn a_broker_and_a_database_that_come_and_go_lose_nothing_and_keep_the_order() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (broker, postgres) =
        (FaultProxy::in_front_of(&vhost.amqp_url()).await, FaultProxy::in_front_of(&database.url()).await);
    let outside = Outside::of(&vhost).await;
    outside.exchange("test.exchange", ExchangeKind::Topic).await;
    outside.queue("all", "test.exchange", "test.#").await;
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
    let is_over = AtomicBool::new(false);
    let breaking = async {
        let mut round = 0;
        while !is_over.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(150)).await; // the rhythm of the faults, not a hope
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
            is_over.store(true, Ordering::SeqCst);
            let mut received = Vec::new();
            outside.take_until("all", &mut received, |received| distinct(received) == keys * rounds).await;
            received
        },
        breaking
    );
    let by_key = firsts(&received);
    assert_eq!(by_key.len(), keys);
    let expected: Vec<u64> = (0..rounds as u64).collect();
    assert!(by_key.values().all(|numbers| *numbers == expected), "first sight is in order");
    app.stop().await;
}

#[tokio::test]
async fn dual_publish_with_its_exchange_missing_holds_up_nobody_and_catches_up() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let outside = Outside::of(&vhost).await;
    outside.exchange("smap.events", ExchangeKind::Topic).await;
    outside.queue("smtp_send_email_v2", "smap.events", "email.#").await;
    let app = TestApp::start_with(&database, |settings| {
        relaying(&vhost)(settings);
        settings.relay.enable_dual_publish = true;
    })
    .await;
    let db = database.pool();
    drain("the legacy route is known", PATIENCE, async || relayed(db, "relay.legacy").await).await;
    post(db, "email.verification.requested", Some("u1"), 1).await;
    post(db, "subscription.created", Some("u1"), 2).await;
    post(db, "email.verification.requested", Some("u1"), 3).await;
    let new = outside.take("smtp_send_email_v2", 2).await;
    assert_eq!(firsts(&new)["u1"], [1, 3]);
    let readiness = app.anyone().get("/readyz").await.text;
    drain("readiness names the exchange", PATIENCE, async || {
        app.anyone().get("/readyz").await.text.contains("smtp_send_email_exc")
    })
    .await;
    assert!(!readiness.contains("unready"));

    outside.exchange("smtp_send_email_exc", ExchangeKind::Fanout).await;
    outside.queue("smtp_send_email", "smtp_send_email_exc", "").await;
    let old = outside.take("smtp_send_email", 2).await;
    assert_eq!(
        old.iter().map(|message| message.body.clone()).collect::<Vec<_>>(),
        [json!(1), json!(3)],
        "bare payloads"
    );
    assert_eq!(
        old.iter().map(|message| &message.message_id).collect::<Vec<_>>(),
        new.iter().map(|message| &message.message_id).collect::<Vec<_>>()
    );
    app.stop().await;

    // Off for a while, and on again: what was missed comes.
    let off = TestApp::start_with(&database, relaying(&vhost)).await;
    post(db, "email.verification.requested", Some("u1"), 4).await;
    outside.take("smtp_send_email_v2", 1).await;
    off.stop().await;
    assert_eq!(outside.depth("smtp_send_email").await, 0);
    let on = TestApp::start_with(&database, |settings| {
        relaying(&vhost)(settings);
        settings.relay.enable_dual_publish = true;
    })
    .await;
    assert_eq!(outside.take("smtp_send_email", 1).await[0].body, json!(4));
    on.stop().await;
}

#[tokio::test]
async fn a_queue_of_the_users_is_read_into_the_log_once_and_not_sent_back() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let outside = Outside::of(&vhost).await;
    outside.queue("orders", "", "").await;
    outside.exchange("pillarbox.events", ExchangeKind::Topic).await;
    outside.queue("back", "pillarbox.events", "#").await;
    let app = TestApp::start_with(&database, |settings| {
        relaying(&vhost)(settings);
        settings.relay.intake = vec![IntakeQueue::new("orders")];
    })
    .await;
    let db = database.pool();
    for number in 0..30 {
        let (id, body) = (format!("any id {number}"), number.to_string());
        outside.publish("orders", Some(&id), Some("order.placed"), Some("k"), body.as_bytes()).await;
        outside.publish("orders", Some(&id), Some("order.placed"), Some("k"), body.as_bytes()).await;
    }
    let in_log = async || -> Vec<i64> {
        sqlx::query_scalar("select payload::text::bigint from pillarbox.log where source = 'amqp:orders' order by id")
            .fetch_all(db)
            .await
            .unwrap()
    };
    drain("all are in the log", PATIENCE, async || in_log().await.len() >= 30).await;
    // A repeat after midnight: as if the first had come yesterday.
    sqlx::query("update pillarbox.inbox_foreign set at = at - interval '1 day'").execute(db).await.unwrap();
    outside.publish("orders", Some("any id 7"), Some("order.placed"), Some("k"), b"7").await;
    // What cannot be posted is kept, and holds up nothing: no JSON, no topic, NUL, and nested beyond measure.
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    outside.publish("orders", Some("bad 1"), Some("order.placed"), None, b"not json").await;
    outside.publish("orders", Some("bad 2"), Some("no topic"), None, b"1").await;
    outside.publish("orders", Some("bad 3\0"), Some("order.placed"), None, b"1").await;
    outside.publish("orders", Some("bad 4"), Some("order.placed"), None, deep.as_bytes()).await;
    outside.publish("orders", None, Some("order.placed"), Some("k"), b"30").await;
    drain("the last is in the log", PATIENCE, async || in_log().await.len() >= 31).await;
    assert_eq!(in_log().await, (0..31).collect::<Vec<_>>(), "each once, in order");
    let dead: Vec<(String, String)> = sqlx::query_as(
        "select payload::text, last_error from pillarbox.dead_letter where consumer = 'amqp:orders' order by id",
    )
    .fetch_all(db)
    .await
    .unwrap();
    assert_eq!(dead.len(), 4, "{dead:?}");
    assert_eq!(dead[0].0, "\"not json\"");
    drain("all is acknowledged", PATIENCE, async || outside.depth("orders").await == 0).await;
    post(db, "order.placed", None, 99).await;
    let back = outside.take("back", 1).await;
    assert_eq!(
        (back[0].body["payload"].clone(), outside.depth("back").await),
        (json!(99), 0),
        "only what was posted here"
    );
    app.stop().await;
}

#[tokio::test]
async fn a_database_that_goes_away_costs_a_queue_nothing() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let postgres = FaultProxy::in_front_of(&database.url()).await;
    let outside = Outside::of(&vhost).await;
    outside.queue("orders", "", "").await;
    let app = TestApp::start_with(&database, |settings| {
        relaying(&vhost)(settings);
        settings.database_url = Some(Secret::new(postgres.url(&database.url())));
        settings.relay.intake = vec![IntakeQueue::new("orders")];
    })
    .await;
    for number in 0..60 {
        match number % 20 {
            5 => postgres.refuse(),
            15 => postgres.pass(),
            _ => {}
        }
        let (id, body) = (format!("id {number}"), number.to_string());
        outside.publish("orders", Some(&id), Some("order.placed"), Some("k"), body.as_bytes()).await;
        tokio::time::sleep(Duration::from_millis(20)).await; // so that some are delivered while it is away
    }
    postgres.pass();
    let query = "select payload::text::bigint from pillarbox.log where source = 'amqp:orders' order by id";
    drain("all are in the log", PATIENCE, async || {
        let found: Vec<i64> = sqlx::query_scalar(query).fetch_all(database.pool()).await.unwrap();
        if found == (0..60).collect::<Vec<_>>() { Ok(()) } else { Err(found) }
    })
    .await;
    app.stop().await;
}

/// A relay as a process of its own.
fn relay_process(database_url: &str, amqp_url: &str, folder: &DataFolder) -> Pillarbox {
    let routes = r#"[{name="test", exchange="test.exchange", topics=["test.#"]}]"#;
    let env = [
        ("PILLARBOX_ROLES", r#"["relay"]"#),
        ("PILLARBOX_DATABASE_URL", database_url),
        ("PILLARBOX_AMQP_URL", amqp_url),
        ("PILLARBOX_RELAY__ROUTES", routes),
        ("PILLARBOX_RELAY__INITIAL_DELAY_MS", "0"),
        ("PILLARBOX_RELAY__LANES", "1"),
        ("PILLARBOX_LEASE_MS", "1000"),
        ("PILLARBOX_POOL_MIN", "0"),
        ("PILLARBOX_POOL_MAX", "6"),
    ];
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text()];
    Pillarbox::start(BINARY, &args, &env)
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_replicas_killed_at_random_lose_nothing_and_keep_the_order_of_each_key() {
    let (database, vhost, folder) = (TestDatabase::new(&migrations()).await, TestVhost::new().await, DataFolder::new());
    let outside = Outside::of(&vhost).await;
    outside.exchange("test.exchange", ExchangeKind::Topic).await;
    outside.queue("all", "test.exchange", "test.#").await;
    let mut replicas: Vec<Pillarbox> =
        (0..8).map(|_| relay_process(&database.url(), &vhost.amqp_url(), &folder)).collect();
    let (keys, rounds) = (20, if std::env::var_os("PBX_SOAK").is_some() { 500 } else { 100 });
    let db = database.pool().clone();
    let posting = tokio::spawn(async move {
        for number in 0..rounds {
            for key in 0..keys {
                post(&db, "test.posted", Some(&format!("key{key}")), number).await;
            }
        }
    });
    let mut kills = 0;
    while !posting.is_finished() {
        tokio::time::sleep(Duration::from_millis(400)).await; // the rhythm of the kills
        let victim = (uuid::Uuid::new_v4().as_u128() % 8) as usize;
        replicas[victim].kill9();
        replicas[victim] = relay_process(&database.url(), &vhost.amqp_url(), &folder);
        kills += 1;
    }
    posting.await.unwrap();
    assert!(kills >= 3, "{kills} kills prove little");
    let mut received = Vec::new();
    outside.take_until("all", &mut received, |received| distinct(received) == keys * rounds).await;
    let by_key = firsts(&received);
    let expected: Vec<u64> = (0..rounds as u64).collect();
    assert_eq!(by_key.len(), keys);
    for (key, numbers) in by_key {
        assert_eq!(numbers, expected, "{key}: all, and at first sight in order");
    }
    for mut replica in replicas {
        assert!(replica.terminate().await.success(), "{}", replica.logs());
    }
    let left: i64 = sqlx::query_scalar(
        "select count(*) from pillarbox.lane join pillarbox.replica on replica.id = lane.replica where until > now()",
    )
    .fetch_one(database.pool())
    .await
    .unwrap();
    assert_eq!(left, 0, "who is asked to stop gives up its leases");
}

#[tokio::test]
async fn a_producer_and_a_consumer_in_python_need_nothing_of_ours() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let app = TestApp::start_with(&database, relaying(&vhost)).await;
    let db = database.pool();
    sqlx::raw_sql("create table reservation (id int, seats int); grant insert on reservation to pillarbox_producer")
        .execute(db)
        .await
        .unwrap();
    Outside::of(&vhost).await.until_there("notification.restaurant").await;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/python/producer_and_consumer.py");
    // The distribution's own Python: that is where its packages are.
    let output = tokio::process::Command::new("/usr/bin/python3")
        .arg(script)
        .env("POSTGRES_URL", database.url())
        .env("AMQP_URL", vhost.amqp_url())
        .env("QUEUE", "notification.restaurant")
        .output()
        .await
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let envelope: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(envelope["payload"], json!({"seats": 2}));
    assert_eq!((&envelope["event_type"], &envelope["aggregate_id"]), (&json!("RESERVATION_REQUESTED"), &json!(5)));
    app.stop().await;
}

/// The same handler on both buses.
struct Doubled;

impl Handler for Doubled {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> Handling<'t> {
        Box::pin(async move {
            let number: i64 = message.payload.get().parse()?;
            if number < 0 {
                return Err("negative".into());
            }
            let insert = "insert into doubled (key, number) values ($1, $2)";
            sqlx::query(insert).bind(message.key.as_deref()).bind(number * 2).execute(&mut **tx).await?;
            Ok(())
        })
    }
}

fn doubling() -> Subscription {
    let matching = Matching { sources: vec!["sql".to_owned()], ..Matching::topic("test.#") };
    Subscription { consumer: "doubling", matching, start: Start::Beginning, handler: Arc::new(Doubled) }
}

#[tokio::test]
async fn the_same_handler_works_over_the_broker_with_a_database_of_its_own() {
    let (here, there) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let vhost = TestVhost::new().await;
    let app = TestApp::start_with(&here, relaying(&vhost)).await;
    let mut rhythm = Rhythm::default();
    rhythm.lane.retry.first = Duration::from_millis(20);
    let mut consumers = Vec::new();
    for (database, over_the_broker) in [(&here, false), (&there, true), (&there, true)] {
        sqlx::query(
            "create table if not exists doubled (n bigint generated always as identity, key text, number bigint)",
        )
        .execute(database.pool())
        .await
        .unwrap();
        let (stop, replica) = (CancellationToken::new(), Replica::new("test", Duration::from_secs(2)));
        let runtime =
            Runtime::start(database.pool().clone(), Clock::system(), replica, Health::default(), stop.clone());
        match over_the_broker {
            false => runtime.subscribe(&doubling(), rhythm),
            true => {
                let broker = Arc::new(Broker::new(Secret::new(vhost.amqp_url())).unwrap());
                relay::bus::subscribe(&runtime, &app.settings.relay, &broker, doubling(), rhythm);
            }
        }
        consumers.push((runtime, stop));
    }
    let outside = Outside::of(&vhost).await;
    outside.until_there("pillarbox.doubling").await;
    outside.until_there("pillarbox.doubling.dlq").await;
    for number in 0..100 {
        post(here.pool(), "test.posted", Some(&format!("key{}", number % 5)), number).await;
    }
    sqlx::query("select pillarbox.post('test.posted', '-1', key => 'bad')").execute(here.pool()).await.unwrap();
    let found = async |database: &TestDatabase| -> Vec<(String, i64)> {
        let query = "select key, number from doubled order by key, n";
        sqlx::query_as(query).fetch_all(database.pool()).await.unwrap()
    };
    for database in [&here, &there] {
        drain("all effects", PATIENCE, async || match found(database).await.len() {
            100 => Ok(()),
            other => Err(other),
        })
        .await;
        drain("the dead letter", PATIENCE, async || {
            let query = "select count(*) from pillarbox.dead_letter where consumer = 'doubling'";
            sqlx::query_scalar::<_, i64>(query).fetch_one(database.pool()).await.unwrap() == 1
        })
        .await;
    }
    assert_eq!(found(&here).await, found(&there).await, "the same, in the same order for each key");
    // What died here is mirrored to the broker; there, nothing relays.
    let dead = outside.take("pillarbox.doubling.dlq", 1).await;
    assert_eq!(
        (&dead[0].body["payload"]["payload"], &dead[0].body["payload"]["error"]),
        (&json!(-1), &json!("negative"))
    );

    // The broker delivers it all again, as it may: nothing happens.
    let again: Vec<(uuid::Uuid, String, String)> = sqlx::query_as(
        "select message_id, key, payload::text from pillarbox.log where source = 'sql' and topic = 'test.posted'",
    )
    .fetch_all(here.pool())
    .await
    .unwrap();
    for (id, key, payload) in &again {
        let body = json!({"event_id": format!("evt_{id}"), "event_type": "test.posted", "timestamp": "2026-01-01T00:00:00Z",
            "schema_version": 1, "payload": payload.parse::<i64>().unwrap()});
        // Under another message id, so that only the event's own can tell.
        outside
            .publish("pillarbox.doubling", Some(&format!("other {id}")), None, Some(key), body.to_string().as_bytes())
            .await;
    }
    post(here.pool(), "test.posted", Some("last"), 1_000).await;
    drain("the last", PATIENCE, async || found(&there).await.iter().any(|(key, _)| key == "last")).await;
    assert_eq!(found(&there).await.len(), 101, "each once");
    for (runtime, stop) in consumers {
        stop.cancel();
        runtime.ended().await;
    }
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_and_a_database_that_are_killed_and_started_again_lose_nothing() {
    let (servers, folder) = (OwnServers::start().await, DataFolder::new());
    let options: PgConnectOptions = servers.postgres_url().parse().unwrap();
    mailbox::database::migrate(&options).await.unwrap();
    let db = PgPoolOptions::new().acquire_timeout(Duration::from_secs(5)).connect_lazy_with(options);
    let outside = Outside::at(servers.amqp_url()).await;
    outside.exchange("test.exchange", ExchangeKind::Topic).await;
    outside.quorum_queue("all", "test.exchange", "test.#").await;
    drop(outside);
    let mut relay = relay_process(servers.postgres_url(), servers.amqp_url(), &folder);
    relay.base_url().await;
    let rounds = 60;
    let posting = async {
        for number in 0..rounds {
            for key in 0..5 {
                let key = format!("key{key}");
                // A database that is away says so, and then it was not committed.
                while sqlx::query("select pillarbox.post('test.posted', to_json($1::bigint), key => $2)")
                    .bind(number as i64)
                    .bind(&key)
                    .execute(&db)
                    .await
                    .is_err()
                {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await; // so that it goes on during the restarts
        }
    };
    let restarting = async {
        servers.restart_postgres().await;
        servers.restart_broker().await;
    };
    tokio::join!(posting, restarting);
    let outside = Outside::at(servers.amqp_url()).await;
    let mut received = Vec::new();
    let all: HashSet<(String, u64)> =
        (0..5).flat_map(|key| (0..rounds).map(move |n| (format!("key{key}"), n))).collect();
    outside
        .take_until("all", &mut received, |received| {
            let seen: HashSet<(String, u64)> = received
                .iter()
                .map(|message| (message.headers["pillarbox-key"].clone(), message.body["payload"].as_u64().unwrap()))
                .collect();
            seen == all
        })
        .await;
    for (key, mut numbers) in firsts(&received) {
        // A post whose answer was lost with the server was repeated by the producer, under a new id.
        numbers.dedup();
        assert_eq!(numbers, (0..rounds).collect::<Vec<_>>(), "{key}");
    }
    assert!(relay.terminate().await.success());
}

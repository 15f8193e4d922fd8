//! A relay whose process is suspended for longer than its lease, in the middle of a batch: when it resumes, it publishes
//! nothing that its successor has already published.

use std::time::Duration;

use lapin::ExchangeKind;
use server::migrations;
use testkit::{FaultProxy, Pillarbox, TestDatabase, TestVhost, eventually, program};

use crate::relay::broker_client::{BrokerClient, Received};
use crate::relay::support::{TIMEOUT, post, relayed, wait_until_registered};
use crate::server::process::DataFolder;

/// The messages of the batch that is interrupted, all of one key.
const BATCH: std::ops::Range<u64> = 3..33;

/// Starts a relay as a separate process. At most one message of a key is unconfirmed at a time, because the route is
/// required.
fn relay_process(database_url: &str, amqp_url: &str, folder: &DataFolder) -> Pillarbox {
    let routes = r#"[{"name": "test", "exchange": "test.exchange", "topics": ["test.#"], "required": true}]"#;
    let env = [
        ("PILLARBOX_ROLES", r#"["relay"]"#),
        ("PILLARBOX_DATABASE_URL", database_url),
        ("PILLARBOX_AMQP_URL", amqp_url),
        ("PILLARBOX_RELAY__ROUTES", routes),
        ("PILLARBOX_RELAY__INITIAL_DELAY_MS", "0"),
        ("PILLARBOX_RELAY__WORKERS", "1"),
        ("PILLARBOX_LEASE_MS", "2000"),
        ("PILLARBOX_POOL_MIN", "0"),
        ("PILLARBOX_POOL_MAX", "6"),
    ];
    Pillarbox::start(program(), &["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text()], &env)
}

/// The numbers that were received, in order, from the messages themselves.
fn numbers(received: &[Received]) -> Vec<u64> {
    received.iter().map(|message| message.body["payload"].as_u64().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_resumes_after_its_lease_publishes_nothing_out_of_order() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let broker = FaultProxy::in_front_of(&vhost.amqp_url()).await;
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.exchange("test.exchange", ExchangeKind::Topic).await;
    amqp.queue("all", "test.exchange", "test.#").await;
    // Both processes must have the same secret key.
    let folder = DataFolder::new();
    let mut suspended = relay_process(&database.url(), &broker.url(&vhost.amqp_url()), &folder);
    let (db, mut received) = (database.pool(), Vec::new());
    wait_until_registered(db, "relay.test").await;
    for number in 0..BATCH.start {
        post(db, "test.posted", Some("k"), number as usize).await;
    }
    amqp.consume_until("all", &mut received, |received| received.len() as u64 == BATCH.start).await;

    eventually("their confirms have arrived", TIMEOUT, async || relayed(db, "relay.test").await).await;

    // The first message of the batch is published, and its confirm does not arrive.
    broker.mute();
    sqlx::query(
        "select pillarbox.post('test.posted', to_json(n), key => 'k') from generate_series($1::bigint, $2) as n",
    )
    .bind(BATCH.start as i64)
    .bind(BATCH.end as i64 - 1)
    .execute(db)
    .await
    .unwrap();
    amqp.consume_until("all", &mut received, |received| numbers(received).contains(&BATCH.start)).await;
    suspended.suspend();
    let mut successor = relay_process(&database.url(), &vhost.amqp_url(), &folder);
    amqp.consume_until("all", &mut received, |received| numbers(received).contains(&(BATCH.end - 1))).await;

    // The confirm arrives while the process resumes: now it would publish the second message of its batch.
    broker.pass();
    suspended.resume();
    suspended
        .wait_for_line(|line| line.contains("WARN") && line.contains("lost the lease"), Duration::from_secs(30))
        .await;
    post(db, "test.posted", Some("k"), BATCH.end as usize).await;
    amqp.consume_until("all", &mut received, |received| numbers(received).contains(&BATCH.end)).await;
    eventually("the position is saved", TIMEOUT, async || relayed(db, "relay.test").await).await;

    let mut expected: Vec<u64> = (0..=BATCH.start).collect();
    // The first one of the batch was published by both, because its confirm had not arrived.
    expected.extend(BATCH.start..=BATCH.end);
    assert_eq!(numbers(&received), expected);
    for process in [&mut suspended, &mut successor] {
        assert!(process.terminate().await.success(), "{}", process.logs());
    }
}

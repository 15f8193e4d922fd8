//! Messages that are larger than the log accepts: the memory of the process stays flat, and the queue continues.

use serde_json::Value;
use sha2::{Digest, Sha256};
use testkit::{Pillarbox, TestDatabase, TestVhost, eventually, program};

use crate::relay::broker_client::BrokerClient;
use crate::relay::support::TIMEOUT;
use crate::server::process::DataFolder;

const MIB: usize = 1024 * 1024;
/// A debug build that is idle uses up to 80 MiB.
const PEAK_BYTES_MAX: u64 = 160 * MIB as u64;

#[tokio::test]
async fn huge_messages_become_dead_letters_and_memory_stays_flat() {
    let (database, vhost) = (TestDatabase::new(&server::migrations()).await, TestVhost::new().await);
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.queue("orders", "", "").await;
    // RabbitMQ delivers all of them at once: the default prefetch is 10.
    let text = format!("\"{}\"", "x".repeat(64 * MIB - 2)).into_bytes();
    let huge = [text, vec![0xFF; 64 * MIB], vec![b'['; 16 * MIB], vec![b'\n'; 16 * MIB]];
    let mut number = 0_i64;
    let mut numbers = async |count| {
        for _ in 0..count {
            amqp.publish("orders", None, Some("order.placed"), Some("k"), number.to_string().as_bytes()).await;
            number += 1;
        }
    };
    for (at, body) in huge.iter().enumerate() {
        numbers(2).await;
        amqp.publish("orders", Some(&format!("huge {at}")), Some("order.placed"), Some("k"), body).await;
    }
    numbers(20).await;

    let (folder, database_url, amqp_url) = (DataFolder::new(), database.url(), vhost.amqp_url());
    let env = [
        ("PILLARBOX_DATABASE_URL", database_url.as_str()),
        ("PILLARBOX_AMQP_URL", &amqp_url),
        ("PILLARBOX_ROLES", "[\"relay\"]"),
        ("PILLARBOX_RELAY__INTAKE", "[{queue=\"orders\"}]"),
    ];
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text()];
    let mut process = Pillarbox::start(program(), &args, &env);
    let in_log = async || -> Vec<i64> {
        let query = "select payload::text::bigint from pillarbox.log where source = 'amqp:orders' order by id";
        sqlx::query_scalar(query).fetch_all(database.pool()).await.unwrap()
    };
    eventually("all normal messages are in the log", TIMEOUT, async || match in_log().await.len() {
        28 => Ok(()),
        other => Err(other),
    })
    .await;
    assert_eq!(in_log().await, (0..28).collect::<Vec<_>>(), "each once, in order");
    let query = "select headers, length(payload::text), last_error from pillarbox.dead_letter order by id";
    let dead: Vec<(Value, i32, String)> = sqlx::query_as(query).fetch_all(database.pool()).await.unwrap();
    assert_eq!(dead.len(), huge.len());
    for ((headers, stored, error), body) in dead.iter().zip(&huge) {
        let digest: String = Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(headers["pillarbox-body-bytes"], body.len().to_string());
        assert_eq!(headers["pillarbox-body-sha256"], digest);
        assert!((80_000..=262_144).contains(stored), "{stored} characters are stored");
        assert!(error.contains(&body.len().to_string()) && error.contains("524288"), "{error}");
    }
    eventually("all messages are acknowledged", TIMEOUT, async || amqp.depth("orders").await == 0).await;
    let peak = process.rss_peak_bytes();
    assert!(peak < PEAK_BYTES_MAX, "the process used {} MiB", peak / MIB as u64);
    assert!(process.terminate().await.success());
}

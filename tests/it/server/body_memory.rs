//! The memory for request bodies is bounded for all requests together.

use std::time::Duration;

use serde_json::json;
use server::migrations;
use testkit::{Client, Pillarbox, TestDatabase, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::server::process::{ADMIN_KEY, DataFolder, admin_of, serve};
use crate::support::text;

const MIB: u64 = 1024 * 1024;
/// The limit of this test. Half of it is the share of one caller.
const BODY_BYTES_TOTAL_MAX: u64 = 8 * MIB;
const UPLOADS: usize = 150;
/// The server sends no response while it reads a body.
const NO_RESPONSE_WITHIN: Duration = Duration::from_secs(2);
/// The bytes that each upload sends before it stops. All together exceed the limit many times.
const SENT_BYTES: usize = 900_000;

/// The credential of a new producer.
async fn producer(admin: &Client, tenant: &str) -> String {
    let made = admin.post("/admin/v1/keys", json!({"name": "test", "role": "ingest", "tenant": tenant})).await;
    assert_eq!(made.status, 201, "{made:?}");
    text(&made.json()["key"]).to_owned()
}

/// Sends most of a body, but not its end. Returns the connection, and the response if there already is one.
async fn slow_upload(address: &str, credential: &str) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /hub/v1/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {credential}\r\n\
         content-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
    );
    let mut answer = vec![0; 4_096];
    let (mut reading, mut writing) = stream.split();
    let sending = async {
        // A server that refuses the body stops reading it.
        if writing.write_all(head.as_bytes()).await.is_ok() {
            let _ = writing.write_all(&vec![b' '; SENT_BYTES]).await;
        }
        tokio::time::sleep(NO_RESPONSE_WITHIN).await;
    };
    let length = tokio::select! {
        () = sending => 0,
        read = reading.read(&mut answer) => read.unwrap_or(0),
    };
    (stream, String::from_utf8_lossy(&answer[..length]).into_owned())
}

async fn start(database: &TestDatabase, folder: &DataFolder) -> Pillarbox {
    let limit = BODY_BYTES_TOTAL_MAX.to_string();
    let env = [
        ("PILLARBOX_ADMIN_KEY", ADMIN_KEY),
        ("PILLARBOX_BODY_BYTES_TOTAL_MAX", limit.as_str()),
        ("PILLARBOX_BODY_TIMEOUT_MS", "60000"),
        ("PILLARBOX_REQUEST_TIMEOUT_MS", "60000"),
        ("PILLARBOX_POOL_MIN", "0"),
    ];
    serve(folder, database, &env)
}

#[tokio::test]
async fn many_slow_uploads_use_bounded_memory_and_other_callers_go_on() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let process = start(&database, &folder).await;
    let (base, admin) = (process.base_url().await, admin_of(&process).await);
    let (slow, other) = (producer(&admin, "slow").await, producer(&admin, "other").await);
    let event = json!({"event_type": "order.paid", "payload": {"text": "x".repeat(50_000)}});
    let post =
        async |credential: &str| Client::new(&base).bearer(credential).post("/hub/v1/events", event.clone()).await;
    assert_eq!((post(&slow).await.status, post(&other).await.status), (202, 202));
    let rss_before = process.rss_bytes();

    let address = base.trim_start_matches("http://");
    let uploads = (0..UPLOADS).map(|_| slow_upload(address, &slow));
    let (open, answers): (Vec<TcpStream>, Vec<String>) =
        futures_util::future::join_all(uploads).await.into_iter().unzip();
    let refused = answers.iter().filter(|answer| answer.starts_with("HTTP/1.1 503")).collect::<Vec<_>>();
    let waiting = answers.iter().filter(|answer| answer.is_empty()).count();
    assert_eq!(refused.len() + waiting, UPLOADS, "{answers:?}");
    let fit = (BODY_BYTES_TOTAL_MAX / 2) as usize / SENT_BYTES;
    assert!((1..=fit).contains(&waiting), "{waiting} bodies of {SENT_BYTES} bytes are buffered");
    for answer in refused {
        assert!(answer.contains("retry-after: 1") && answer.contains("body_bytes_total_max"), "{answer}");
    }
    let grown = process.rss_bytes().saturating_sub(rss_before);
    // Half of what was sent: beside the bodies there are the read buffers of the connections.
    let limit = (UPLOADS * SENT_BYTES / 2) as u64;
    assert!(grown < limit, "{UPLOADS} slow uploads occupy {} MiB", grown / MIB);

    for _ in 0..20 {
        let answer = post(&other).await;
        assert_eq!(answer.status, 202, "another caller is not affected: {answer:?}");
    }
    assert_eq!(Client::new(&base).get("/readyz").await.status, 200);
    drop(open);
    eventually("the memory of ended uploads is free again", Duration::from_secs(10), async || {
        let large = json!({"event_type": "order.paid", "payload": {"text": "x".repeat(200_000)}});
        let client = Client::new(&base).bearer(&slow);
        let answers = (0..10).map(|_| client.post("/hub/v1/events", large.clone()));
        futures_util::future::join_all(answers).await.iter().all(|answer| answer.status == 202)
    })
    .await;
}

//! What idle streams cost. `pillarbox-bench inbox` measures it for a release build.

use std::time::Duration;

use http_kit::auth::TokenSigner;
use runtime::clock::Clock;
use runtime::secret::MasterKey;
use server::migrations;
use testkit::{TestDatabase, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uuid::Uuid;

use crate::server::process::{DataFolder, serve};
use crate::support::DEADLINE;

const STREAMS: usize = 500;
/// 1,000 streams have less than 20 MB.
const BYTES_PER_STREAM_MAX: u64 = 20_000;

/// Opens streams of as many users, and waits until they are answered.
async fn open(address: &str, signer: &TokenSigner, count: usize) -> Vec<TcpStream> {
    let mut streams = Vec::with_capacity(count);
    for _ in 0..count {
        let token = signer.sign(Uuid::now_v7(), None, Clock::system().now(), Duration::from_secs(600)).unwrap();
        let head = format!("GET /notify/v1/inbox/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\r\n");
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        assert!(answer.ends_with(b"200"), "{}", String::from_utf8_lossy(&answer));
        streams.push(stream);
    }
    streams
}

#[tokio::test]
async fn idle_streams_use_less_than_20_kb_each() {
    let (database, folder, key) = (TestDatabase::new(&migrations()).await, DataFolder::new(), MasterKey::generate());
    let secret_key = key.to_base64();
    let settings = [
        ("PILLARBOX_SECRET_KEY", secret_key.as_str()),
        ("PILLARBOX_SERVICES", "[\"notify\"]"),
        ("PILLARBOX_ROLES", "[\"api\", \"dispatch\"]"),
        ("PILLARBOX_RATE_LIMIT_PER_SECOND", "0"),
    ];
    let mut process = serve(&folder, &database, &settings);
    let (base, signer) = (process.base_url().await, TokenSigner::new(&key));
    let address = base.strip_prefix("http://").unwrap();
    // The first requests warm the server up.
    drop(open(address, &signer, 20).await);
    let before = process.allocated_bytes();
    let streams = open(address, &signer, STREAMS).await;
    eventually("the memory of requests is released", DEADLINE, async || {
        let per_stream = process.allocated_bytes().saturating_sub(before) / STREAMS as u64;
        if per_stream < BYTES_PER_STREAM_MAX { Ok(()) } else { Err(per_stream) }
    })
    .await;
    drop(streams);
    assert!(process.terminate().await.success());
}

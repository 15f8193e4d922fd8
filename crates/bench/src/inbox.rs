//! Idle streams of the inbox: the memory and the CPU time of the server while nothing happens.

use std::path::Path;
use std::time::Duration;

use http_kit::auth::TokenSigner;
use runtime::clock::Clock;
use runtime::secret::MasterKey;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uuid::Uuid;

use crate::Outcome;
use crate::installation::Installation;
use crate::report::Report;

const TOKEN_TIME: Duration = Duration::from_secs(3600);
const MIB: f64 = 1024.0 * 1024.0;

/// Opens `connections` streams of as many users, and measures the server for `seconds` before and while they are open.
pub(crate) async fn measure(pillarbox: &Path, connections: usize, seconds: u64) -> Outcome<Report> {
    let key = MasterKey::generate();
    let settings = format!("secret_key = \"{}\"\nrate_limit_per_second = 0\n", key.to_base64());
    let args = ["--services", "notify", "--roles", "api,dispatch"];
    let installation = Installation::start(pillarbox, &settings, &args).await?;
    let outcome = measure_idle(&installation, &TokenSigner::new(&key), connections, Duration::from_secs(seconds)).await;
    installation.end().await?;
    outcome
}

async fn measure_idle(
    installation: &Installation,
    signer: &TokenSigner,
    connections: usize,
    time: Duration,
) -> Outcome<Report> {
    let server = &installation.server;
    // The first requests warm the server up.
    drop(open(&server.address, signer, 20).await?);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let without = cpu_over(installation, time).await?;
    let before = server.rss_bytes()? as f64 / MIB;
    let streams = open(&server.address, signer, connections).await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let with = cpu_over(installation, time).await?;
    let after = server.rss_bytes()? as f64 / MIB;
    drop(streams);
    let mut report = Report::default();
    report.add(&format!("memory of {connections} idle streams"), "MiB", vec![after - before]);
    let seconds = time.as_secs();
    report.add(&format!("CPU in {seconds} s without streams"), "s", vec![without]);
    report.add(&format!("CPU in {seconds} s with {connections} streams"), "s", vec![with]);
    Ok(report)
}

/// The CPU seconds of the server during this time.
async fn cpu_over(installation: &Installation, time: Duration) -> Outcome<f64> {
    let before = installation.server.cpu_seconds()?;
    tokio::time::sleep(time).await;
    Ok(installation.server.cpu_seconds()? - before)
}

async fn open(address: &str, signer: &TokenSigner, count: usize) -> Outcome<Vec<TcpStream>> {
    let mut streams = Vec::with_capacity(count);
    for _ in 0..count {
        let token = signer.sign(Uuid::now_v7(), None, Clock::system().now(), TOKEN_TIME)?;
        let mut stream = TcpStream::connect(address).await?;
        let head = format!("GET /notify/v1/inbox/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\r\n");
        stream.write_all(head.as_bytes()).await?;
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await?;
        if !answer.ends_with(b"200") {
            return Err(format!("the stream was refused: {}", String::from_utf8_lossy(&answer)).into());
        }
        streams.push(stream);
    }
    Ok(streams)
}

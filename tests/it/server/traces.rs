//! Traces, as exported to a collector and as written to the log.

use std::time::Duration;

use server::migrations;
use testkit::{Client, FaultProxy, Pillarbox, TestDatabase, eventually, program};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::server::process::{DataFolder, serve};

/// Accepts OTLP exports and passes on the raw requests.
async fn collector() -> (String, mpsc::UnboundedReceiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (received, requests) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let received = received.clone();
            tokio::spawn(async move {
                let mut buffer = vec![0; 65_536];
                while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                    received.send(buffer[..count].to_vec()).unwrap();
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
                }
            });
        }
    });
    (address, requests)
}

#[tokio::test]
async fn a_request_becomes_a_span_of_the_trace_of_its_caller() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let (address, mut requests) = collector().await;
    let mut process = serve(&folder, &database, &[("PILLARBOX_OTLP_ENDPOINT", &address)]);
    let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let client = Client::new(&process.base_url().await).with_header("traceparent", traceparent);
    assert_eq!(client.get("/healthz").await.status, 200);
    assert!(process.terminate().await.success());

    let trace_id = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736_u128.to_be_bytes();
    let mut exported = Vec::new();
    eventually("the span is exported", Duration::from_secs(10), async || {
        while let Ok(bytes) = requests.try_recv() {
            exported.extend(bytes);
        }
        exported.windows(16).any(|window| window == trace_id)
    })
    .await;
    assert!(exported.starts_with(b"POST /v1/traces"));
}

#[tokio::test]
async fn the_log_contains_the_cause_with_the_trace_id_of_the_response() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let url = proxy.url(&database.url());
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text(), "--database-url", &url];
    for format in ["pretty", "json"] {
        cause_in_the_log(&proxy, &args, format).await;
    }
}

async fn cause_in_the_log(proxy: &FaultProxy, args: &[&str], format: &str) {
    let mut process = Pillarbox::start(program(), args, &[("PILLARBOX_LOG_FORMAT", format)]);
    let client = Client::new(&process.base_url().await).bearer("pbx_some_key_of_a_customer_01");
    proxy.refuse();
    let problem = eventually("the request fails with 503", Duration::from_secs(10), async || {
        let answer = client.get("/admin/v1/keys").await;
        if answer.status == 503 { Ok(answer.json()) } else { Err(answer) }
    })
    .await;
    let trace_id = problem["trace_id"].as_str().unwrap();
    let is_cause = |line: &str| line.contains("dependency unavailable") && line.contains(trace_id);
    let line = process.wait_for_line(is_cause, Duration::from_secs(5)).await;
    if format == "json" {
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(line["trace_id"], problem["trace_id"], "{line}");
    }
    proxy.pass();
    assert!(process.terminate().await.success());
}

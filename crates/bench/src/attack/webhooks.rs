//! Attacks by the endpoints of a tenant.

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

use super::client::Request;
use super::finding::Finding;
use super::lab::{ATTACKER_IP, Lab, Setting};
use crate::Outcome;

const ENDPOINTS: usize = 4;
/// Header fields of a provisional response.
const FIELDS: usize = 90;

/// Four endpoints answer each webhook with provisional responses (103 with 90 header fields), over and over, and never with a
/// final one.
pub(super) async fn provisional_responses(setting: Setting<'_>) -> Outcome<Finding> {
    let lab = Lab::start(setting, "[hub]\nallowed_networks = [\"127.0.0.0/8\"]\n").await?;
    let attacker = lab.client(&lab.create_tenant("attacker").await?, ATTACKER_IP);
    let mut endpoints = Vec::new();
    for number in 0..ENDPOINTS {
        let (url, endpoint) = start_endpoint().await?;
        endpoints.push(endpoint);
        let subscriber = json!({"name": format!("endpoint-{number}"), "url": url, "event_types": ["*"]});
        attacker.expect(&Request::post("/hub/v1/subscribers", subscriber)).await?;
    }
    let neighbour = lab.neighbour().await?;
    lab.measure("provisional-responses", &neighbour, async |_, running| {
        let event = json!({"event_type": "flood.posted", "payload": {}});
        let batch = Request::post("/hub/v1/events/batch", json!({"events": vec![event; 500]}));
        running.answers.add_answer(&attacker.send(&batch).await);
        tokio::time::sleep_until(running.until.into()).await;
        drop(endpoints);
        Ok(Vec::new())
    })
    .await
}

/// An endpoint that runs until its handle is dropped, and its URL.
async fn start_endpoint() -> Outcome<(String, AbortOnDropHandle<()>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    let serving = tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            connections.spawn(flood(stream));
        }
    });
    Ok((url, AbortOnDropHandle::new(serving)))
}

async fn flood(mut stream: TcpStream) -> Outcome<()> {
    let fields: String = (0..FIELDS).map(|n| format!("x-field-{n}: {}\r\n", "v".repeat(40))).collect();
    let provisional = format!("HTTP/1.1 103 Early Hints\r\n{fields}\r\n").repeat(10);
    let mut request = [0; 16 * 1024];
    if stream.read(&mut request).await? == 0 {
        return Ok(());
    }
    loop {
        stream.write_all(provisional.as_bytes()).await?;
    }
}

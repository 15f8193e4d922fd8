//! The CloudEvents SDKs of other languages read the webhooks of the format `cloudevents`. `scripts/setup test` installs them.

use std::process::Stdio;

use serde_json::{Value, json};
use testkit::{Received, Receiver};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::hub::fixture::{Fixture, post, subscribe, wait_for_webhooks};

const PYTHON: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/python/bin/python");
const NODE_PACKAGES: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/node/node_modules");
const SCRIPTS: &str = env!("CARGO_MANIFEST_DIR");

#[tokio::test]
async fn the_sdks_of_python_and_node_read_single_events_and_batches() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let (single, batch) = (Receiver::start().await, Receiver::start().await);
    subscribe(manager, &single.url(), json!({"format": "cloudevents"})).await;
    // They wait for each other.
    let fields = json!({"format": "cloudevents", "batch": {"max": 2, "wait_ms": 5_000}});
    subscribe(manager, &batch.url(), fields).await;
    let first = post(manager, "order.paid", json!({"n": 1.5, "text": "Zoë ☂"}), Some("order 17")).await;
    let second = post(manager, "order.sent", json!([null]), None).await;
    wait_for_webhooks(&single, 2).await;
    wait_for_webhooks(&batch, 1).await;
    fixture.app.stop().await;

    let event = |id: &str, kind: &str, data: Value, lane: Option<&str>| {
        let seq = lane.map(|_| "1");
        json!({"id": id, "type": kind, "source": "/pillarbox/hub", "has_time": true, "data": data, "lane": lane, "seq": seq})
    };
    let (paid, sent) = (json!({"n": 1.5, "text": "Zoë ☂"}), json!([null]));
    let all =
        json!([event(&first, "order.paid", paid.clone(), Some("order 17")), event(&second, "order.sent", sent, None)]);
    let received = single.received().into_iter().find(|one| one.header("webhook-id") == first).unwrap();
    for language in [python, node] {
        // The lane of a single event is in its headers.
        assert_eq!(read_by(language(), &received).await, json!([event(&first, "order.paid", paid.clone(), None)]));
        assert_eq!(read_by(language(), &batch.received()[0]).await, all);
    }
}

fn python() -> Command {
    let mut python = Command::new(PYTHON);
    python.arg(format!("{SCRIPTS}/python/parse_cloudevents.py"));
    python
}

fn node() -> Command {
    let mut node = Command::new("node");
    node.arg(format!("{SCRIPTS}/node/parse_cloudevents.js")).env("NODE_PATH", NODE_PACKAGES);
    node
}

/// The events that the script finds in the request.
async fn read_by(mut script: Command, received: &Received) -> Value {
    let headers: serde_json::Map<String, Value> = received
        .headers
        .iter()
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into()))
        .collect();
    let request = json!({"headers": headers, "body": String::from_utf8_lossy(&received.body)}).to_string();
    let mut child =
        script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    child.stdin.take().unwrap().write_all(request.as_bytes()).await.unwrap();
    let output = child.wait_with_output().await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}\n(`scripts/setup test` installs the libraries)");
    serde_json::from_slice(&output.stdout).unwrap()
}

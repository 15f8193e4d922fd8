//! Checks that the Standard Webhooks libraries of other languages verify our signatures. `scripts/setup test` installs
//! them.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::process::Stdio;

use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use webhook_client::signature::{SecretKind, SigningSecret, sign};

const PYTHON: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/python/bin/python");
const NODE_PACKAGES: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/node/node_modules");
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests");

#[tokio::test]
async fn python_verifies_a_delivery_with_the_old_and_the_new_secret() {
    let mut python = Command::new(PYTHON);
    python.arg(format!("{SCRIPTS}/python/verify_webhook.py"));
    assert_eq!(verified_by(python).await, "verified with 2 secrets\n");
}

#[tokio::test]
async fn node_verifies_a_delivery_with_the_old_and_the_new_secret() {
    let mut node = Command::new("node");
    node.arg(format!("{SCRIPTS}/node/verify_webhook.js")).env("NODE_PATH", NODE_PACKAGES);
    assert_eq!(verified_by(node).await, "verified with 2 secrets\n");
}

/// Signs a delivery as during a rotation, with two symmetric secrets and a key pair, and runs the script that verifies
/// it.
async fn verified_by(mut script: Command) -> String {
    let generate = SigningSecret::generate;
    let secrets = [generate(SecretKind::Symmetric), generate(SecretKind::Ed25519), generate(SecretKind::Symmetric)];
    let (id, now) = ("msg_2KWPBgLlAfxdpx2AI54pPJ85f4W", chrono::Utc::now().timestamp());
    let body = json!({"type": "order.paid", "data": {"name": "Zoë ☂", "n": 1.5}}).to_string();
    let signature = sign(&secrets, id, now, body.as_bytes());
    let signed = json!({
        "secrets": [secrets[0].to_text(), secrets[2].to_text()],
        "stranger": generate(SecretKind::Symmetric).to_text(),
        "headers": {
            "webhook-id": id,
            "webhook-timestamp": now.to_string(),
            "webhook-signature": signature.to_str().unwrap(),
        },
        "body": body,
    });
    let mut child =
        script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    child.stdin.take().unwrap().write_all(signed.to_string().as_bytes()).await.unwrap();
    let output = child.wait_with_output().await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}\n(`scripts/setup test` installs the libraries)");
    String::from_utf8(output.stdout).unwrap()
}

//! A payload stays byte for byte the same from `pillarbox send` to the receiver, the API and `pillarbox listen`.

use serde_json::{Value, json};
use server::migrations;
use testkit::{Pillarbox, Receiver, TestDatabase};

use crate::hub::fixture::{post, subscribe, wait_for_dead_letters, wait_for_webhooks};
use crate::hub::process::Replica;
use crate::server::process::{ADMIN_KEY, run};
use crate::support::{DEADLINE, text};

/// Numbers that no machine type represents, a repeated key, white space, and an escaped letter.
const PAYLOAD: &str =
    r#"{"amount": 12345678901234567890.123,  "a":1.0,"a":2, "list":[1e400 ,-0, 1E+2], "\u0061":"\/"}"#;

/// `whsec_` and 32 bytes in base64.
const SECRET: &str = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";

#[tokio::test]
async fn a_payload_stays_the_same_from_send_to_listen() {
    let database = TestDatabase::new(&migrations()).await;
    let mut replica = Replica::start(&database.url());
    let admin = replica.admin().await;
    let listening =
        Pillarbox::start(testkit::program(), &["listen", "--port", "0"], &[("PILLARBOX_WEBHOOK_SECRET", SECRET)]);
    let line = listening.wait_for_line(|line| line.starts_with("Listening on "), DEADLINE).await;
    let url = line.split_whitespace().nth(2).unwrap().trim_end_matches('.');
    let (receiver, refusing) = (Receiver::start().await, Receiver::with_reply(|_| testkit::Reply::status(400)).await);
    for url in [url, &receiver.url()] {
        subscribe(&admin, url, json!({"secret": SECRET})).await;
    }
    let refused = subscribe(&admin, &refusing.url(), json!({})).await;

    let base = replica.process.base_url().await;
    let args = ["send", "order.paid", PAYLOAD, "--key", "k", "--server", &base];
    let (code, sent, error) = run(&args, &[("PILLARBOX_API_KEY", ADMIN_KEY)]);
    assert_eq!(code, Some(0), "{error}");
    let event_id: Value = serde_json::from_str(&sent).unwrap();
    wait_for_webhooks(&receiver, 1).await;
    assert_eq!(String::from_utf8_lossy(&receiver.received()[0].body), PAYLOAD);
    let printed = listening.wait_for_line(|line| line.starts_with('{'), DEADLINE).await;
    assert!(printed.contains(r#""signature":"good""#), "{printed}");
    assert!(printed.contains(r#""type":"order.paid""#), "{printed}");
    assert!(printed.contains(r#""order":"first of its lane here","status":200"#), "{printed}");
    assert!(printed.ends_with(&format!(r#""body":{PAYLOAD}}}"#)), "{printed}");
    let shown = admin.get(&format!("/hub/v1/events/{}", text(&event_id["event_id"]))).await.text;
    assert!(shown.contains(&format!(r#""payload":{PAYLOAD}"#)), "{shown}");
    let dead = wait_for_dead_letters(&admin, &refused, 1).await.remove(0);
    let shown = admin.get(&format!("/hub/v1/dead-letters/{}", text(&dead["id"]))).await.text;
    assert!(shown.contains(&format!(r#""payload":{PAYLOAD}"#)), "{shown}");
    assert!(replica.process.terminate().await.success());
}

#[tokio::test]
async fn listen_forwards_webhooks_unchanged_and_responds_like_the_program_behind_it() {
    let database = TestDatabase::new(&migrations()).await;
    let mut replica = Replica::start(&database.url());
    let admin = replica.admin().await;
    let program =
        Receiver::with_reply(|request| testkit::Reply::status(if request.body.as_ref() == b"2" { 410 } else { 204 }))
            .await;
    let args = ["listen", "--port", "0", "--forward", &program.url()];
    let listening = Pillarbox::start(testkit::program(), &args, &[("PILLARBOX_WEBHOOK_SECRET", SECRET)]);
    let line = listening.wait_for_line(|line| line.starts_with("Listening on "), DEADLINE).await;
    let url = line.split_whitespace().nth(2).unwrap().trim_end_matches('.');
    subscribe(&admin, url, json!({"secret": SECRET})).await;
    for payload in [1, 2] {
        post(&admin, "order.paid", json!(payload), Some("k")).await;
    }
    wait_for_webhooks(&program, 2).await;
    let received = program.received();
    let verifier = webhook_client::signature::Verifier::parse(SECRET).unwrap();
    for (webhook, body) in received.iter().zip([b"1", b"2"]) {
        assert_eq!((webhook.body.as_ref(), webhook.path.as_str()), (body.as_slice(), "/hook"));
        verifier.verify(&webhook.headers, &webhook.body, chrono::Utc::now().timestamp()).unwrap();
    }
    for (order, status) in [("first of its lane here", 204), ("good", 410)] {
        let expected = format!(r#""order":"{order}","status":{status}"#);
        listening.wait_for_line(|line| line.contains(&expected), DEADLINE).await;
    }
    assert!(replica.process.terminate().await.success());
}

//! SIGKILL while the server writes.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper::Method;
use serde_json::json;
use testkit::{Client, Receiver};

use crate::server::process::{ADMIN_KEY, DataFolder, admin_of, up};

const WRITERS: usize = 8;

/// Creates keys until the server does not respond, and records the ids of the acknowledged ones.
async fn write_until_killed(client: Client, acknowledged: Arc<Mutex<HashSet<String>>>) {
    let body = json!({"name": "written during a crash", "role": "ingest"});
    while let Ok(answer) = client.try_send(Method::POST, "/admin/v1/keys", Some(body.clone())).await {
        if answer.status == 201 {
            let id = answer.json()["id"].as_str().unwrap().to_owned();
            acknowledged.lock().unwrap().insert(id);
        }
    }
}

async fn all_keys(client: &Client) -> HashSet<String> {
    let mut ids = HashSet::new();
    let mut path = "/admin/v1/keys?limit=100".to_owned();
    loop {
        let page = client.get(&path).await.json();
        ids.extend(page["items"].as_array().unwrap().iter().map(|key| key["id"].as_str().unwrap().to_owned()));
        match page["next_cursor"].as_str() {
            Some(cursor) => path = format!("/admin/v1/keys?limit=100&cursor={cursor}"),
            None => return ids,
        }
    }
}

#[tokio::test]
async fn acknowledged_writes_survive_kill_9() {
    let folder = DataFolder::new();
    let acknowledged = Arc::new(Mutex::new(HashSet::new()));
    let rounds = if std::env::var_os("PBX_SOAK").is_some() { 20 } else { 3 };
    for round in 0..rounds {
        let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
        let client = admin_of(&process).await;
        let before = acknowledged.lock().unwrap().clone();
        let stored = all_keys(&client).await;
        assert!(before.is_subset(&stored), "round {round}: lost {:?}", before.difference(&stored).collect::<Vec<_>>());
        let writers: Vec<_> =
            (0..WRITERS).map(|_| tokio::spawn(write_until_killed(client.clone(), acknowledged.clone()))).collect();
        let enough = before.len() + 50 + uuid::Uuid::new_v4().as_u128() as usize % 200;
        testkit::eventually("enough writes are acknowledged", Duration::from_secs(30), async || {
            acknowledged.lock().unwrap().len() >= enough
        })
        .await;
        process.kill9();
        for writer in writers {
            writer.await.unwrap();
        }
    }
    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let stored = all_keys(&admin_of(&process).await).await;
    let acknowledged = acknowledged.lock().unwrap().clone();
    assert!(acknowledged.is_subset(&stored));
    assert!(
        stored.len() <= acknowledged.len() + WRITERS * rounds,
        "only requests in flight may be stored without an acknowledgement"
    );
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn work_continues_at_once_after_kill_9() {
    let (folder, receiver) = (DataFolder::new(), Receiver::start().await);
    let subscriber = json!({"name": "me", "url": receiver.url(), "event_types": ["*"]});
    for round in 0..2 {
        let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY), ("PILLARBOX_LEASE_MS", "600000")]);
        let client = admin_of(&process).await;
        if round == 0 {
            assert_eq!(client.post("/hub/v1/subscribers", subscriber.clone()).await.status, 201);
        }
        let sent = client.post("/hub/v1/events", json!({"event_type": "order.paid", "payload": round})).await;
        assert_eq!(sent.status, 202, "{sent:?}");
        // Far shorter than the lease of the killed process. The webhook before may be repeated: its outcome was perhaps not
        // saved before the kill.
        let arrived = async || receiver.received().iter().any(|received| received.json() == json!(round));
        testkit::eventually("the webhook arrives", Duration::from_secs(30), arrived).await;
        process.kill9();
    }
}

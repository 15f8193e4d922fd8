//! SIGKILL to all processes of the embedded PostgreSQL while events are posted and delivered.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hyper::Method;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use testkit::{Client, eventually};
use tokio_util::sync::CancellationToken;

use crate::hub::fixture::{numbered_events, subscribe, test_size};
use crate::hub::recorder::RequestRecorder;
use crate::server::process::{ADMIN_KEY, DataFolder, admin_of, up};

const LANES: usize = 5;

/// Kills the server of a data folder and all its children, the server first, so that it starts no new ones.
fn kill_postgres(folder: &Path) {
    let pid_file = std::fs::read_to_string(folder.join("postgres/postmaster.pid")).unwrap();
    let server: i32 = pid_file.lines().next().unwrap().parse().unwrap();
    let children = children_of(server);
    assert!(children.len() > 2, "background processes and sessions: {children:?}");
    for pid in [vec![server], children].concat() {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL); // a session may have just ended
    }
}

fn children_of(parent: i32) -> Vec<i32> {
    let threads = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    threads.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// Posts one round of events after the other. A round that is not acknowledged is posted again with the same key.
async fn post_rounds(admin: Client, acknowledged: Arc<AtomicUsize>, stop: CancellationToken) {
    while !stop.is_cancelled() {
        let round = acknowledged.load(Ordering::SeqCst) + 1;
        let client = admin.with_header("idempotency-key", &format!("round-{round}"));
        let body = json!({"events": numbered_events(LANES, [round])});
        match client.send(Method::POST, "/hub/v1/events/batch", Some(body)).await.status {
            202 => acknowledged.fetch_add(1, Ordering::SeqCst),
            503 => 0,
            other => panic!("answered {other}"),
        };
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_events_survive_when_the_embedded_postgresql_is_killed() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let admin = admin_of(&process).await;
    let recorder = RequestRecorder::start(|_, _, _, _| (200, Duration::ZERO)).await;
    subscribe(&admin, &recorder.url("s"), json!({})).await;
    let (acknowledged, stop) = (Arc::<AtomicUsize>::default(), CancellationToken::new());
    let posting = tokio::spawn(post_rounds(admin.clone(), acknowledged.clone(), stop.clone()));
    let until_acknowledged = async |count: usize| {
        eventually("rounds are acknowledged", Duration::from_secs(40), async || {
            match acknowledged.load(Ordering::SeqCst) {
                rounds if rounds >= count => Ok(()),
                other => Err(other),
            }
        })
        .await;
    };
    until_acknowledged(20).await;
    for _ in 0..test_size(1, 10) {
        let before = acknowledged.load(Ordering::SeqCst);
        kill_postgres(folder.path());
        until_acknowledged(before + 20).await;
    }
    stop.cancel();
    posting.await.unwrap();

    let all = acknowledged.load(Ordering::SeqCst) * LANES;
    recorder.wait_until_accepted(all, Duration::from_secs(40)).await;
    let repeats = recorder.check_lane_order();
    println!("{repeats} of {all} were redelivered");
    let ready = async || match admin.get("/readyz").await {
        answer if answer.json()["status"] == "ready" => Ok(()),
        other => Err(other.text),
    };
    eventually("the process is ready", Duration::from_secs(20), ready).await;
    assert!(process.logs().contains("PostgreSQL exited unexpectedly"), "{}", process.logs());
    assert!(process.terminate().await.success(), "{}", process.logs());
}

//! Processes that share the queue, and one that is killed while it sends.

use serde_json::json;
use server::migrations;
use testkit::{CapturedLog, TestApp, TestDatabase, eventually};

use super::fixture::{SmtpServer, addresses, request, send_to, statuses, verification, wait_for_status};
use crate::hub::fixture::test_size;
use crate::server::process::{DataFolder, serve};
use crate::support::DEADLINE;

const CONCURRENCY: usize = 10;

#[tokio::test]
async fn a_killed_process_repeats_only_the_mails_in_flight() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let (db, folder) = (database.pool(), DataFolder::new());
    let count = test_size(200, 1_000);
    server.set_rules(&json!({"delay": 0.05}));
    let (url, concurrency) = (server.url(), CONCURRENCY.to_string());
    let environment = [
        ("PILLARBOX_SMTP_URL", url.as_str()),
        ("PILLARBOX_LEASE_MS", "1000"),
        ("PILLARBOX_MAIL__TIMEOUT_MS", "1000"),
        ("PILLARBOX_MAIL__RETRY_FIRST_MS", "100"),
        ("PILLARBOX_MAIL__CONCURRENCY", &concurrency),
    ];
    let requests: Vec<_> = addresses(count).iter().map(|address| verification(address)).collect();
    request(db, &requests).await;
    let mut process = serve(&folder, &database, &environment);
    eventually("a part is sent", DEADLINE, async || server.mails().len() >= count / 4).await;
    process.kill9();
    let sent_before: i64 = sqlx::query_scalar("select count(*) from pillarbox_notify.mail where status = 'sent'")
        .fetch_one(db)
        .await
        .unwrap();
    assert!(sent_before < count as i64, "the process was killed too late");

    let mut process = serve(&folder, &database, &environment);
    wait_for_status(db, "sent", count as i64).await;
    let arrivals = server.arrivals();
    assert_eq!(arrivals.len(), count, "every e-mail arrives");
    let repeated = arrivals.values().sum::<usize>() - count;
    assert!(repeated <= 2 * CONCURRENCY, "{repeated} e-mails were repeated");
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn a_process_stops_although_the_mail_server_does_not_answer() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    server.set_rules(&json!({"delay": 60}));
    let app = TestApp::start_with(&database, send_to(&server)).await;
    request(db, &[verification("ada@example.org")]).await;
    eventually("the transfer waits for its answer", DEADLINE, async || server.mails().len() == 1).await;
    // A worker that does not stop within 5 s is left behind, with a warning. The sender waits for 3 s.
    let log = CapturedLog::start();
    app.stop().await;
    assert!(!log.has("WARN", "did not stop in time"), "{}", log.text());
    assert_eq!(statuses(db).await.get("queued"), Some(&1), "another process sends it when the lease expires");
}

#[tokio::test]
async fn processes_that_share_the_queue_send_each_mail_once() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    let requests: Vec<_> = addresses(300).iter().map(|address| verification(address)).collect();
    let mut apps = Vec::new();
    for _ in 0..3 {
        apps.push(TestApp::start_with(&database, send_to(&server)).await);
    }
    for some in requests.chunks(50) {
        request(db, some).await;
    }
    wait_for_status(db, "sent", 300).await;
    let mut arrivals = server.arrivals();
    assert_eq!(arrivals.len(), 300);
    arrivals.retain(|_, count| *count > 1);
    let attempts: i64 =
        sqlx::query_scalar("select sum(attempts) from pillarbox_notify.mail").fetch_one(db).await.unwrap();
    assert!(arrivals.is_empty(), "repeated: {arrivals:?}; {attempts} attempts were saved");
    let rate = "select count(*) / extract(epoch from max(sent_at) - min(sent_at))::float8 from pillarbox_notify.mail";
    println!("{} e-mails per second", sqlx::query_scalar::<_, f64>(rate).fetch_one(db).await.unwrap().round());
    for app in apps {
        app.stop().await;
    }
}

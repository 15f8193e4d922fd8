//! A mail server that is down, dies before its answer, or answers too late.

use std::time::Duration;

use serde_json::json;
use server::migrations;
use testkit::{Client, FaultProxy, TestApp, TestDatabase, eventually};

use super::fixture::{SmtpServer, addresses, request, send_to, statuses, verification, wait_for_status};
use crate::hub::fixture::test_size;
use crate::support::DEADLINE;

/// Waits until readiness reports the sender with this text.
pub(super) async fn wait_for_report(client: &Client, text: &str) {
    eventually(text, DEADLINE, async || {
        let report = client.get("/readyz").await;
        let checks = report.json()["checks"].as_array().unwrap().clone();
        let sender = checks.into_iter().find(|check| check["name"] == "notify.sender");
        match sender {
            Some(sender) if sender["error"].as_str().is_some_and(|error| error.contains(text)) => Ok(()),
            other => Err(other),
        }
    })
    .await;
}

#[tokio::test]
async fn every_mail_is_sent_once_after_the_mail_server_was_down() {
    let (database, mut server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    let app = TestApp::start_with(&database, send_to(&server)).await;
    request(db, &[verification("first@example.org")]).await;
    wait_for_status(db, "sent", 1).await;

    server.kill();
    let requests: Vec<_> = addresses(40).iter().map(|address| verification(address)).collect();
    request(db, &requests).await;
    wait_for_report(&app.anonymous(), "the mail server cannot be used").await;
    tokio::time::sleep(Duration::from_secs(test_size(3, 60) as u64)).await;
    assert_eq!(statuses(db).await.get("queued"), Some(&40));
    assert_eq!(app.anonymous().get("/readyz").await.status, 200, "the rest of the service works");

    server.resume().await;
    wait_for_status(db, "sent", 41).await;
    let arrivals = server.arrivals();
    assert!(arrivals.len() == 41 && arrivals.values().all(|count| *count == 1), "{arrivals:?}");
    eventually("readiness recovers", DEADLINE, async || {
        let report = app.anonymous().get("/readyz").await.json();
        let checks = report["checks"].as_array().unwrap().clone();
        checks.iter().any(|check| check["name"] == "notify.sender" && check["error"].is_null())
    })
    .await;
    app.stop().await;
}

#[tokio::test]
async fn a_mail_without_an_answer_is_repeated_with_the_same_message_id() {
    let (database, mut server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    server.set_rules(&json!({"die": true}));
    let app = TestApp::start_with(&database, send_to(&server)).await;
    request(db, &[verification("ada@example.org")]).await;
    server.wait_for_end().await;
    server.set_rules(&json!({}));
    server.resume().await;
    wait_for_status(db, "sent", 1).await;
    assert_eq!(server.arrivals().into_values().collect::<Vec<_>>(), [2]);
    assert_eq!(statuses(db).await.values().sum::<i64>(), 1);
    app.stop().await;
}

#[tokio::test]
async fn a_late_answer_never_counts_as_the_answer_to_another_mail() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    let app = TestApp::start_with(&database, |settings| {
        send_to(&server)(settings);
        settings.mail.timeout_ms = 500;
        settings.mail.concurrency = 1;
    })
    .await;
    server.set_rules(&json!({"delay": 1.2}));
    request(db, &[verification("slow@example.org")]).await;
    eventually("the transfer was abandoned twice", DEADLINE, async || server.mails().len() >= 2).await;
    // The answers to the abandoned transfers are still on their way.
    server.set_rules(&json!({"data": "550 5.7.1 refused"}));
    request(db, &addresses(3).iter().map(|address| verification(address)).collect::<Vec<_>>()).await;
    wait_for_status(db, "dead", 4).await;
    assert_eq!(statuses(db).await.len(), 1, "an answer to another e-mail was counted as its own");
    app.stop().await;
}

#[tokio::test]
async fn an_outage_of_the_database_repeats_no_mail() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let (db, proxy) = (database.pool(), FaultProxy::in_front_of(&database.url()).await);
    server.set_rules(&json!({"delay": 1.5}));
    let app = TestApp::start_on(&proxy.url(&database.url()), |settings| {
        send_to(&server)(settings);
        // A claim whose answer was lost ends before the deadline of the test.
        settings.mail.timeout_ms = 5_000;
        settings.lease_ms = 2_000;
    })
    .await;
    request(db, &addresses(30).iter().map(|address| verification(address)).collect::<Vec<_>>()).await;
    eventually("transfers have begun", DEADLINE, async || server.mails().len() >= 5).await;
    // The server answers while the results cannot be saved.
    proxy.refuse();
    let are_answered = async || server.replies() >= server.mails().len();
    eventually("all transfers are answered", DEADLINE, are_answered).await;
    assert!(statuses(db).await.contains_key("queued"));
    proxy.pass();
    wait_for_status(db, "sent", 30).await;
    let mut arrivals = server.arrivals();
    assert_eq!(arrivals.len(), 30);
    arrivals.retain(|_, count| *count > 1);
    assert!(arrivals.is_empty(), "repeated: {arrivals:?}");
    app.stop().await;
}

#[tokio::test]
async fn a_copy_of_the_database_sends_nothing_until_an_operator_decides() {
    let (database, mut server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    server.kill();
    let app = TestApp::start_with(&database, send_to(&server)).await;
    request(db, &[verification("ada@example.org")]).await;
    wait_for_status(db, "queued", 1).await;
    app.stop().await;
    let set_restored = async |time: &str| {
        let update = format!("update pillarbox.cluster_identity set restored_at = {time}");
        sqlx::query(sqlx::AssertSqlSafe(update)).execute(db).await.unwrap();
    };
    set_restored("now()").await;

    server.resume().await;
    let app = TestApp::start_with(&database, send_to(&server)).await;
    // Several rounds of the sender.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!((statuses(db).await.get("queued"), server.mails().len()), (Some(&1), 0));
    set_restored("null").await;
    wait_for_status(db, "sent", 1).await;
    app.stop().await;
}

#[tokio::test]
async fn readiness_reports_mails_that_were_queued_for_a_mail_server_that_is_no_longer_configured() {
    let (database, mut server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    server.kill();
    let app = TestApp::start_with(&database, send_to(&server)).await;
    request(db, &[verification("ada@example.org")]).await;
    wait_for_status(db, "queued", 1).await;
    app.stop().await;
    let overdue =
        "update pillarbox_notify.mail set next_attempt_at = clock_timestamp() - interval '61 s', claim = null";
    sqlx::query(overdue).execute(db).await.unwrap();

    let app = TestApp::start(&database).await;
    wait_for_report(&app.anonymous(), "no mail server is configured: set smtp_url").await;
    assert_eq!(app.anonymous().get("/readyz").await.json()["status"], "degraded");
    app.stop().await;
    let app = TestApp::start_with(&database, |settings| settings.mail.shadow = true).await;
    wait_for_report(&app.anonymous(), "no process sends them while mail.shadow is set").await;
    app.stop().await;
}

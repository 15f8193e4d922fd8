//! The stages of a transfer: the server refuses the sender of all e-mails, or a recipient.

use serde_json::json;
use server::migrations;
use sqlx::PgPool;
use testkit::{CapturedLog, TestApp, TestDatabase, eventually};

use super::fixture::{SmtpServer, addresses, request, send_to, statuses, verification, wait_for_status};
use super::outages::wait_for_report;
use crate::support::DEADLINE;

/// The attempts and the last error of the e-mail to this address; none if it is not recorded yet.
async fn attempts(db: &PgPool, recipient: &str) -> (i32, String) {
    let query = "select attempts, coalesce(last_error, '') from pillarbox_notify.mail where recipient = $1";
    sqlx::query_as(query).bind(recipient).fetch_optional(db).await.unwrap().unwrap_or_default()
}

#[tokio::test]
async fn a_refused_sender_costs_no_mail_and_the_text_of_a_reply_is_only_for_operators() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let (db, log) = (database.pool(), CapturedLog::start());
    server.set_rules(&json!({"mail": "550 5.7.1 <ada@example.org>: Sender address rejected"}));
    let app = TestApp::start_with(&database, send_to(&server)).await;
    let recipients = ["ada@example.org", "bob@example.org", "eve@example.org"];
    request(db, &recipients.map(verification)).await;
    wait_for_report(&app.anonymous(), "550 5.7.1").await;
    let permanent = app.anonymous().get("/readyz").await.text;
    server.set_rules(&json!({"mail": "454 4.7.1 <ada@example.org>: Relay access denied"}));
    wait_for_report(&app.anonymous(), "454 4.7.1").await;
    let temporary = app.anonymous().get("/readyz").await.text;
    assert_eq!(statuses(db).await.into_iter().collect::<Vec<_>>(), [("queued".to_owned(), 3)]);
    let query = "select count(*) from pillarbox_notify.mail where last_error like '%<ada@example.org>: %'";
    assert!(sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap() > 0, "operators see the reply");

    server.set_rules(&json!({"rcpt": {"ada@example.org": "550 5.1.1 <ada@example.org>: no such user"}}));
    wait_for_status(db, "sent", 2).await;
    wait_for_status(db, "dead", 1).await;
    for recipient in recipients {
        assert_eq!(attempts(db, recipient).await.0, 1, "{recipient}");
    }
    assert!(attempts(db, "ada@example.org").await.1.contains("<ada@example.org>: no such user"));
    app.stop().await;
    assert!(log.has("WARN", "550 5.7.1") || log.has("ERROR", "550 5.7.1"), "{}", log.text());
    for shown in [permanent, temporary, log.text()] {
        assert!(!shown.contains("example.org") && !shown.contains("denied") && !shown.contains("rejected"), "{shown}");
    }
}

#[tokio::test]
async fn a_recipient_that_is_always_deferred_does_not_slow_others() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let (db, log) = (database.pool(), CapturedLog::start());
    let deferred = ["relay@example.org", "closing@example.org"];
    server.set_rules(&json!({"rcpt": {
        "relay@example.org": "454 4.7.1 <relay@example.org>: Relay access denied",
        "closing@example.org": "421 4.3.2 <closing@example.org>: closing",
    }}));
    let app = TestApp::start_with(&database, send_to(&server)).await;
    request(db, &deferred.map(verification)).await;
    for recipient in deferred {
        eventually("the e-mail is tried again", DEADLINE, async || {
            let (attempts, error) = attempts(db, recipient).await;
            if attempts >= 3 { Ok(()) } else { Err((attempts, error)) }
        })
        .await;
        assert!(attempts(db, recipient).await.1.contains(recipient), "operators see the reply");
    }
    request(db, &addresses(20).iter().map(|address| verification(address)).collect::<Vec<_>>()).await;
    wait_for_status(db, "sent", 20).await;
    assert_eq!(statuses(db).await.get("queued"), Some(&2));
    assert!(!log.text().contains("the mail server cannot be used"), "the sender paused: {}", log.text());
    server.set_rules(&json!({}));
    wait_for_status(db, "sent", 22).await;
    let shown = app.anonymous().get("/readyz").await.text;
    app.stop().await;
    assert!(!shown.contains("example.org") && !log.text().contains("example.org"), "{shown} {}", log.text());
}

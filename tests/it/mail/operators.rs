//! Dead e-mails are retried in bulk, and the sender finds what its own process has recorded at once.

use std::time::{Duration, Instant};

use serde_json::json;
use server::migrations;
use testkit::{TestApp, TestDatabase, eventually};

use super::fixture::{SmtpServer, addresses, request, send_to, verification, wait_for_status};
use crate::operator::commands::Cli;
use crate::support::DEADLINE;

#[tokio::test]
async fn dead_mails_are_retried_by_filter_or_all_of_them() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    server.set_rules(&json!({"data": "554 5.7.1 spam"}));
    let app = TestApp::start_with(&database, send_to(&server)).await;
    let mut reset = verification("eve@example.org");
    reset.data.template = "password_reset".to_owned();
    let others = ["ada@example.org", "bob@bücher.example", "cat@example.org", "dan@example.org"];
    request(db, &others.map(verification)).await;
    request(db, &[reset]).await;
    wait_for_status(db, "dead", 5).await;
    let erase = "update pillarbox_notify.mail set text = null, html = null where recipient like 'dan%'";
    sqlx::query(erase).execute(db).await.unwrap();

    let retry = async |body| app.admin().post("/admin/v1/mail/retry", body).await;
    for (body, field) in [(json!({}), ""), (json!({"all": true, "to": "ada@example.org"}), "/all")] {
        let refused = retry(body).await;
        refused.assert_problem(422, "validation-failed");
        assert_eq!(refused.json()["errors"][0]["pointer"], field, "{refused:?}");
    }
    server.set_rules(&json!({}));
    assert_eq!(retry(json!({"to": "unknown@example.org"})).await.json(), json!({"count": 0, "more": false}));
    assert_eq!(retry(json!({"to": "ADA@example.org"})).await.json(), json!({"count": 1, "more": false}));
    wait_for_status(db, "sent", 1).await;
    let cli = Cli::with_server(&database, &app);
    assert!(cli.ok("mail retry --template password_reset").await.contains("1 e-mail is queued again"));
    wait_for_status(db, "sent", 2).await;
    assert!(cli.ok("mail retry --to bob@bücher.example").await.contains("1 e-mail is queued again"));
    wait_for_status(db, "sent", 3).await;
    cli.refused("mail retry").await;
    assert_eq!(retry(json!({"all": true})).await.json(), json!({"count": 1, "more": false}), "not the erased one");
    wait_for_status(db, "sent", 4).await;
    wait_for_status(db, "dead", 1).await;
    app.stop().await;
}

#[tokio::test]
async fn a_mail_that_is_recorded_or_retried_wakes_the_sender_of_its_process() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    let app = TestApp::start_with(&database, send_to(&server)).await;
    let sent = async |count: usize| {
        eventually("the e-mail arrives", DEADLINE, async || server.mails().len() == count).await;
        wait_for_status(db, "sent", 1).await;
    };
    let mut times = Vec::new();
    for address in addresses(6) {
        sqlx::query("delete from pillarbox_notify.mail").execute(db).await.unwrap();
        let began = Instant::now();
        request(db, &[verification(&address)]).await;
        sent(times.len() + 1).await;
        times.push(began.elapsed());
    }
    // The sender has just become idle each time, so without a wake-up it would poll half a second later. The fastest one counts:
    // other tests slow some of them down.
    let fastest = times.iter().min().unwrap();
    assert!(*fastest < Duration::from_millis(300), "{times:?}");

    let mut times = Vec::new();
    for number in 0..6 {
        let dead = "update pillarbox_notify.mail set status = 'dead', text = 'again', html = 'again', sent_at = null";
        sqlx::query(dead).execute(db).await.unwrap();
        let began = Instant::now();
        assert_eq!(app.admin().post("/admin/v1/mail/retry", json!({"all": true})).await.json()["count"], 1);
        sent(7 + number).await;
        times.push(began.elapsed());
    }
    assert!(*times.iter().min().unwrap() < Duration::from_millis(300), "{times:?}");
    app.stop().await;
}

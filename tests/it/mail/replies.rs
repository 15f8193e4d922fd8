//! What the replies of the mail server mean, and requests that cannot become an e-mail.

use contracts::identity;
use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{CapturedLog, Client, TestApp, TestDatabase, eventually};

use super::fixture::{SmtpServer, post_raw, request, send_to, verification, wait_for_status};
use crate::hub::process::Replica;
use crate::support::{DEADLINE, text};

async fn the_mail(admin: &Client, query: &str) -> Value {
    let page = admin.get(&format!("/admin/v1/mail?{query}")).await.json();
    assert_eq!(page["items"].as_array().unwrap().len(), 1, "{page}");
    page["items"][0].clone()
}

async fn retry(client: &Client, mail: &Value) -> testkit::Response {
    client.send(Method::POST, &format!("/admin/v1/mail/{}/retry", mail["id"]), None).await
}

#[tokio::test]
async fn deferred_mails_are_retried_and_refused_ones_are_dead_until_an_operator_retries_them() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    let log = CapturedLog::start();
    let refused = json!({"gone@example.org": "550 5.1.1 no such user: gone@example.org"});
    server.set_rules(&json!({"rcpt": refused, "data": "451 4.3.0 try later"}));
    let app = TestApp::start_with(&database, send_to(&server)).await;
    let admin = app.admin();
    request(db, &[verification("gone@example.org"), verification("busy@example.org")]).await;

    wait_for_status(db, "dead", 1).await;
    let dead = the_mail(&admin, "status=dead").await;
    assert_eq!((text(&dead["to"]), &dead["attempts"]), ("gone@example.org", &json!(1)));
    assert!(text(&dead["last_error"]).contains("550") && dead["text"].is_null() && dead["html"].is_null(), "{dead}");
    eventually("the dead e-mail is logged", DEADLINE, async || log.has("WARN", "an e-mail is dead")).await;
    eventually("the deferred e-mail is tried three times", DEADLINE, async || {
        let arrivals = server.arrivals();
        if arrivals.len() == 1 && arrivals.values().sum::<usize>() >= 3 { Ok(()) } else { Err(arrivals) }
    })
    .await;
    let deferred = the_mail(&admin, "to=busy@example.org").await;
    assert_eq!(text(&deferred["status"]), "queued");
    assert!(text(&deferred["last_error"]).contains("451") && deferred["next_attempt_at"].is_string(), "{deferred}");

    server.set_rules(&json!({"rcpt": refused}));
    wait_for_status(db, "sent", 1).await;
    let sent = the_mail(&admin, "status=sent").await;
    assert!(sent["sent_at"].is_string() && text(&sent["smtp_reply"]).starts_with("250") && sent["text"].is_null());
    let bodies = "select count(*) from pillarbox_notify.mail where status = 'sent' and (text, html) is not null";
    assert_eq!(sqlx::query_scalar::<_, i64>(bodies).fetch_one(db).await.unwrap(), 0);

    server.set_rules(&json!({}));
    assert_eq!(retry(&admin, &dead).await.status, 202);
    wait_for_status(db, "sent", 2).await;
    let mail = server.mails().into_iter().find(|mail| mail.to == ["gone@example.org"]).unwrap();
    assert!(mail.text.contains("\r\n0123456789\r\n"), "{mail:?}");
    retry(&admin, &dead).await.assert_problem(409, "mail-not-dead");
    retry(&admin, &json!({"id": 1_000_000})).await.assert_problem(404, "mail-not-found");
    let metrics = app.anonymous().get("/metrics").await.text;
    for name in [
        "pillarbox_mail_sent_total ",
        "pillarbox_mail_dead_total ",
        "pillarbox_mail_failures_total{kind=\"deferred\"} ",
    ] {
        assert!(metrics.lines().any(|line| line.starts_with(name)), "{name}: {metrics}");
    }
    app.stop().await;
    assert!(!log.text().contains("example.org") && !log.text().contains("0123456789"), "{}", log.text());
}

#[tokio::test]
async fn a_dead_mail_is_erased_when_it_expires() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    server.set_rules(&json!({"data": "554 5.7.1 spam"}));
    let app = TestApp::start_with(&database, send_to(&server)).await;
    let addresses = ["ada@example.org", "bob@example.org", "eve@example.org"];
    request(db, &addresses.map(verification)).await;
    wait_for_status(db, "dead", 3).await;
    app.stop().await;
    let update = "update pillarbox_notify.mail set expires_at = clock_timestamp() where recipient like 'ada%';
                  update pillarbox_notify.mail set status = 'queued', next_attempt_at = now() + interval '1 hour',
                      created_at = now() - interval '100 s' where recipient like 'eve%'";
    sqlx::raw_sql(update).execute(db).await.unwrap();

    // The first round of maintenance is at the start.
    let app = TestApp::start_with(&database, send_to(&server)).await;
    let text_of = async |recipient: &str| {
        let query = "select text from pillarbox_notify.mail where recipient = $1";
        sqlx::query_scalar::<_, Option<String>>(query).bind(recipient).fetch_one(db).await.unwrap()
    };
    eventually("the text is erased", DEADLINE, async || text_of("ada@example.org").await.is_none()).await;
    let dead = the_mail(&app.admin(), "to=ada@example.org").await;
    assert_eq!(text(&dead["status"]), "dead");
    retry(&app.admin(), &dead).await.assert_problem(409, "mail-erased");
    assert!(text_of("bob@example.org").await.is_some());
    let mut measuring = Replica::start_beside(&app.settings, "maintain");
    let value = async |name: &str| measuring.metric(&format!("pillarbox_mail_{name}")).await;
    eventually("the queue is measured", DEADLINE, async || value("oldest_seconds").await.is_some()).await;
    assert_eq!((value("dead").await, value("queued").await), (Some(2.0), Some(1.0)));
    assert!((100.0..200.0).contains(&value("oldest_seconds").await.unwrap()));
    assert!(measuring.process.terminate().await.success());
    app.stop().await;
}

#[tokio::test]
async fn requests_that_cannot_be_rendered_become_dead_letters_and_others_go_on() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    let app = TestApp::start_with(&database, send_to(&server)).await;
    let mut unknown = verification("ada@example.org");
    unknown.data.template = "no_such_template".to_owned();
    let mut incomplete = verification("ada@example.org");
    incomplete.data.variables.remove("token");
    let invalid = verification("ada@example.org, bob@example.org");
    request(db, &[unknown, incomplete, invalid]).await;
    post_raw(db, identity::EMAIL_VERIFICATION_REQUESTED, r#"{"idempotency_key": "hunter2", "data": "hunter2"}"#).await;
    post_raw(db, identity::EMAIL_VERIFICATION_REQUESTED, "{}").await;
    request(db, &[verification("bob@example.org")]).await;
    wait_for_status(db, "sent", 1).await;

    // An operator need not wait for the retries.
    let admin = app.admin();
    let dead = eventually("all five are dead letters", DEADLINE, async || {
        let parked = admin.get("/admin/v1/parked?consumer=notify.mail").await.json();
        for message in parked["items"].as_array().unwrap() {
            admin.send(Method::POST, &format!("/admin/v1/parked/{}/retry", message["place"]), None).await;
        }
        let dead = admin.get("/admin/v1/dead-letters?consumer=notify.mail").await.json();
        if dead["items"].as_array().unwrap().len() == 5 { Ok(dead) } else { Err(dead) }
    })
    .await;
    let errors: Vec<&str> = dead["items"].as_array().unwrap().iter().map(|dead| text(&dead["last_error"])).collect();
    // What an error has in common with the payload is hidden, also a word such as `template`.
    for error in [
        "does not exist",
        ".en.txt, line 9: undefined value",
        "not a valid e-mail address",
        "not a request for an e-mail",
    ] {
        assert!(errors.iter().any(|found| found.contains(error)), "{error}: {errors:?}");
    }
    assert!(!errors.iter().any(|error| error.contains("hunter2") || error.contains("example.org")), "{errors:?}");
    let recipients: Vec<String> = server.mails().into_iter().flat_map(|mail| mail.to).collect();
    assert_eq!(recipients, ["bob@example.org"]);
    app.stop().await;
}

#[tokio::test]
async fn a_repeated_request_makes_one_mail() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    let app = TestApp::start_with(&database, send_to(&server)).await;
    let mut repeated = verification("ada@example.org");
    request(db, &[repeated.clone(), repeated.clone()]).await;
    repeated.data.to = "ada@example.net".to_owned();
    request(db, &[repeated, verification("ada@example.org")]).await;
    wait_for_status(db, "sent", 2).await;
    // A replay processes all of them again.
    let replay = json!({"consumer": "notify.mail", "from": "2026-01-01T00:00:00Z", "again": true});
    assert_eq!(app.admin().post("/admin/v1/replays", replay).await.status, 202);
    eventually("the replay has processed all four", DEADLINE, async || {
        let query = "select count(*) from pillarbox.inbox where consumer = 'notify.mail'";
        sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap() == 8
    })
    .await;
    request(db, &[verification("last@example.org")]).await;
    wait_for_status(db, "sent", 3).await;
    assert_eq!(server.mails().len(), 3);
    app.stop().await;
}

//! Variables and addresses that try to add headers, recipients or markup.

use serde_json::json;
use server::migrations;
use testkit::{TestApp, TestDatabase};

use super::fixture::{SmtpServer, request, send_to, verification, wait_for_status, with_variable};
use crate::support::text;

#[tokio::test]
async fn variables_add_no_header_no_recipient_and_no_markup() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    let folder = server.folder().join("templates");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("verification.en.subject"), "Hello {{ name }}: {{ token }}").unwrap();
    let app = TestApp::start_with(&database, |settings| {
        send_to(&server)(settings);
        settings.mail.templates_dir = Some(folder);
    })
    .await;
    let hostile = [
        "Ada\r\nBcc: eve@example.org\r\n\r\nbody",
        "Ada\nBcc: eve@example.org",
        "Ada\r\n.\r\nMAIL FROM:<eve@example.org>\r\n",
        "=?utf-8?q?Ada=0D=0ABcc:_eve@example.org?=",
        "<script>alert(1)</script><a href='https://evil.example'>x</a>",
        "\u{202e}\u{2028}Ада Лавлейс 🎉",
    ];
    let large = "x".repeat(100_000);
    let requests: Vec<_> = hostile
        .iter()
        .chain([&large.as_str()])
        .map(|value| with_variable(with_variable(verification("ada@example.org"), "name", value), "token", value))
        .collect();
    request(db, &requests).await;
    wait_for_status(db, "sent", requests.len() as i64).await;
    let mails = server.mails();
    assert_eq!(mails.len(), requests.len());
    for mail in &mails {
        assert_eq!(
            (mail.to.as_slice(), mail.from.as_str()),
            (&["ada@example.org".to_owned()][..], "no-reply@pillarbox.example")
        );
        assert_eq!((mail.header("To"), mail.headers("Bcc").len()), ("ada@example.org", 0), "{mail:?}");
        assert_eq!(mail.header("From"), "Pillarbox <no-reply@pillarbox.example>");
        assert_eq!(mail.header("Auto-Submitted"), "auto-generated");
        assert!(!mail.header("Subject").contains(['\r', '\n']), "{}", mail.header("Subject"));
        assert!(!mail.html.contains("<script") && !mail.html.contains("<a href='https://evil"), "{}", mail.html);
        assert!(!mail.text.lines().any(|line| line.starts_with("Bcc") || line.starts_with("MAIL")), "{}", mail.text);
        assert!(mail.text.contains("valid for 24 hours"), "the text ends where it should: {}", mail.text);
    }
    let long = mails.iter().find(|mail| mail.text.contains(&large)).expect("a large variable arrives unchanged");
    assert!(long.html.contains(&large));
    let unicode = mails.iter().find(|mail| mail.text.contains("Ада Лавлейс 🎉")).expect("unicode arrives unchanged");
    assert!(unicode.header("Subject").contains("Ада Лавлейс 🎉"), "{unicode:?}");
    app.stop().await;
}

#[tokio::test]
async fn unicode_addresses_are_sent_if_the_server_accepts_them() {
    let database = TestDatabase::new(&migrations()).await;
    let (plain, extended) = (SmtpServer::start().await, SmtpServer::start_with(&["--smtputf8"]).await);
    let db = database.pool();
    let app = TestApp::start_with(&database, send_to(&plain)).await;
    request(db, &[verification("ada@bücher.example"), verification("jürgen@example.org")]).await;
    wait_for_status(db, "sent", 1).await;
    assert_eq!(plain.mails()[0].to, ["ada@xn--bcher-kva.example"]);
    wait_for_status(db, "dead", 1).await;
    let dead = app.admin().get("/admin/v1/mail?status=dead").await.json()["items"][0].clone();
    assert!(text(&dead["last_error"]).contains("SMTPUTF8"), "{dead}");
    app.stop().await;

    let app = TestApp::start_with(&database, send_to(&extended)).await;
    assert_eq!(app.admin().post(&format!("/admin/v1/mail/{}/retry", dead["id"]), json!({})).await.status, 202);
    wait_for_status(db, "sent", 2).await;
    let mail = extended.mails().remove(0);
    assert_eq!(mail.to, ["jürgen@example.org"]);
    assert!(mail.options.iter().any(|option| option == "SMTPUTF8"), "the server may refuse it otherwise: {mail:?}");
    app.stop().await;
}

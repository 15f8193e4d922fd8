//! Encryption and login. A server that cannot be used is reported, and costs no e-mail.

use std::path::Path;
use std::process::Command;

use notify::Starttls;
use runtime::secret::Secret;
use server::migrations;
use server::settings::Settings;
use testkit::{TestApp, TestDatabase};

use super::fixture::{SmtpServer, request, send_to, statuses, verification, wait_for_status};
use super::outages::wait_for_report;

/// Creates a certificate for 127.0.0.1 that no authority has signed, and its key.
fn create_certificate(folder: &Path) -> (String, String) {
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let (certificate, key) = (path("certificate.pem"), path("key.pem"));
    let output = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"])
        .args(["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"])
        .args(["-addext", "basicConstraints=critical,CA:FALSE", "-keyout", &key, "-out", &certificate])
        .output()
        .expect("openssl is installed");
    assert!(output.status.success(), "{output:?}");
    (certificate, key)
}

/// Runs a process with these settings until readiness reports the text. Nothing may have been sent.
async fn assert_reported(
    database: &TestDatabase,
    server: &SmtpServer,
    change: impl FnOnce(&mut Settings),
    report: &str,
) {
    let app = TestApp::start_with(database, |settings| {
        send_to(server)(settings);
        change(settings);
    })
    .await;
    wait_for_report(&app.anonymous(), report).await;
    app.stop().await;
    assert_eq!(server.mails().len(), 0);
    assert_eq!(statuses(database.pool()).await.get("queued"), Some(&1));
}

#[tokio::test]
async fn required_encryption_is_used_and_an_unknown_certificate_is_refused() {
    let database = TestDatabase::new(&migrations()).await;
    let files = SmtpServer::prepare();
    let (certificate, key) = create_certificate(files.folder());
    let encrypted = SmtpServer::start_with(&["--starttls", &certificate, &key]).await;
    let from_the_first_byte = SmtpServer::start_with(&["--tls", &certificate, &key]).await;
    let plain = SmtpServer::start().await;
    request(database.pool(), &[verification("ada@example.org")]).await;
    let app = TestApp::start_with(&database, |settings| {
        send_to(&plain)(settings);
        settings.mail.starttls = Starttls::Required;
    })
    .await;
    wait_for_report(&app.anonymous(), "STARTTLS is not supported").await;
    app.stop().await;
    let require = |settings: &mut Settings| settings.mail.starttls = Starttls::Required;
    assert_reported(&database, &encrypted, require, "certificate").await;

    for (sent, server) in [(1, &encrypted), (2, &from_the_first_byte)] {
        let app = TestApp::start_with(&database, |settings| {
            send_to(server)(settings);
            settings.mail.starttls = Starttls::Required;
            settings.mail.ca_file = Some(certificate.clone().into());
        })
        .await;
        wait_for_status(database.pool(), "sent", sent).await;
        assert!(server.mails()[0].is_encrypted);
        app.stop().await;
        request(database.pool(), &[verification("bob@example.org")]).await;
    }
    assert_eq!(plain.mails().len(), 0);
}

#[tokio::test]
async fn a_wrong_login_is_reported_and_no_mail_is_dead() {
    let database = TestDatabase::new(&migrations()).await;
    let server = SmtpServer::start_with(&["--login", "ada@example.org", "correct horse"]).await;
    request(database.pool(), &[verification("ada@example.org")]).await;
    let with_login = |login: &str| {
        let url = server.url().replace("smtp://", &format!("smtp://{login}@"));
        move |settings: &mut Settings| settings.smtp_url = Some(Secret::new(url))
    };
    assert_reported(&database, &server, with_login("ada%40example.org:hunter2"), "535").await;
    assert_reported(&database, &server, |_| {}, "530").await;
    let app = TestApp::start_with(&database, |settings| {
        send_to(&server)(settings);
        with_login("ada%40example.org:correct%20horse")(settings);
    })
    .await;
    wait_for_status(database.pool(), "sent", 1).await;
    assert!(server.mails()[0].has_login);
    app.stop().await;
}

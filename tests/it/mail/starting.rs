//! Templates from a folder, and settings that stop the start.

use std::path::{Path, PathBuf};

use server::migrations;
use testkit::{TestApp, TestDatabase};
use uuid::Uuid;

use super::fixture::{request, verification, wait_for_status};
use crate::server::process::{DataFolder, run};
use crate::support::text;

/// A folder with files, which is removed when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn with(files: &[(&str, &str)]) -> Folder {
        let path = std::env::temp_dir().join(format!("pillarbox-templates-{}", Uuid::new_v4()));
        std::fs::create_dir(&path).unwrap();
        for (name, source) in files {
            std::fs::write(path.join(name), source).unwrap();
        }
        Folder(path)
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[tokio::test]
async fn templates_of_a_folder_replace_the_built_in_ones() {
    let database = TestDatabase::new(&migrations()).await;
    let folder = Folder::with(&[
        ("verification.en.subject", "Welcome to the club"),
        ("verification.pt.subject", "Confirme o seu e-mail"),
        ("verification.pt.txt", "Olá {{ name }}: {{ token }}"),
        ("verification.pt.html", "{% extends 'layout.html' %}{% block content %}<p>Olá {{ name }}</p>{% endblock %}"),
        ("layout.html", "<body class=club>{% block content %}{% endblock %}</body>"),
    ]);
    let path = folder.path().to_owned();
    let app = TestApp::start_with(&database, |settings| settings.mail.templates_dir = Some(path)).await;
    let (english, mut portuguese) = (verification("ada@example.org"), verification("ana@example.org"));
    portuguese.data.locale = "pt-BR".to_owned();
    request(database.pool(), &[english, portuguese]).await;
    wait_for_status(database.pool(), "captured", 2).await;
    let mail = async |to: &str| app.admin().get(&format!("/admin/v1/mail?to={to}")).await.json()["items"][0].clone();
    let english = mail("ada@example.org").await;
    assert_eq!((text(&english["subject"]), text(&english["locale"])), ("Welcome to the club", "en"));
    assert!(
        text(&english["text"]).contains("please confirm") && text(&english["html"]).starts_with("<body class=club>")
    );
    let portuguese = mail("ana@example.org").await;
    assert_eq!((text(&portuguese["locale"]), text(&portuguese["text"])), ("pt", "Olá Ada: 0123456789"));
    assert_eq!(text(&portuguese["html"]), "<body class=club><p>Olá Ada</p></body>");
    app.stop().await;
}

#[tokio::test]
async fn an_invalid_template_or_certificate_stops_the_start_and_is_named() {
    let (database, data) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let url = database.url();
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", data.text(), "--database-url", &url];
    let refused = |settings: &[(&str, &str)]| {
        let (code, output, errors) = run(&args, settings);
        assert_ne!(code, Some(0), "{output}");
        format!("{output}{errors}")
    };
    let folder = Folder::with(&[("verification.en.html", "<p>\n\n{{ colour }}")]);
    let text = refused(&[("PILLARBOX_MAIL__TEMPLATES_DIR", folder.path().to_str().unwrap())]);
    assert!(text.contains("mail.templates_dir") && text.contains("verification.en.html, line 3"), "{text}");
    let file = Folder::with(&[("ca.pem", "no certificate")]);
    let file = file.path().join("ca.pem");
    let text =
        refused(&[("PILLARBOX_SMTP_URL", "smtps://127.0.0.1"), ("PILLARBOX_MAIL__CA_FILE", file.to_str().unwrap())]);
    assert!(text.contains("mail.ca_file"), "{text}");
    let text = refused(&[("PILLARBOX_MAIL__FROM", "no-at-sign")]);
    assert!(text.contains("mail.from") && text.contains("no-reply@example.org"), "{text}");
}

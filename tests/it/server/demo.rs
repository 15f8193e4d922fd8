//! `pillarbox demo` on a real installation: everything moves, and nothing of it remains.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use sqlx::PgPool;
use testkit::Client;

use crate::server::process::{ADMIN_KEY, DataFolder, admin_of, run, up};
use crate::support::collect_pages;

/// Fails if something that the demo creates still exists.
async fn assert_removed(admin: &Client, db: &PgPool) {
    let names = async |path: &str| -> Vec<String> {
        let items = collect_pages(admin, path).await;
        let is_valid = |item: &&Value| item["revoked_at"].is_null();
        items.iter().filter(is_valid).map(|item| item["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names("/admin/v1/tenants").await, ["main"]);
    assert_eq!(names("/hub/v1/subscribers").await, [""; 0]);
    assert!(names("/admin/v1/keys").await.iter().all(|name| !name.starts_with("demo-")));
    let published = "select count(*) from pillarbox_events.event where status = 'published'";
    assert_eq!(sqlx::query_scalar::<_, i64>(published).fetch_one(db).await.unwrap(), 0, "gatherings are canceled");
    for table in ["pillarbox_notify.recipient", "pillarbox_identity.account", "pillarbox_notify.event_type"] {
        let count = sqlx::query_scalar::<_, i64>(sqlx::AssertSqlSafe(format!("select count(*) from {table}")));
        assert_eq!(count.fetch_one(db).await.unwrap(), 0, "{table}");
    }
}

#[tokio::test]
async fn the_demo_moves_everything_and_removes_what_it_has_created() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let admin = admin_of(&process).await;
    let args = ["demo", "--minutes", "0.2", "--rate", "60", "--data-dir", folder.text()];
    let (code, out, error) = run(&args, &[]);
    assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
    assert!(out.contains(&format!("Watch it at {}/console/", admin.base())), "{out}");
    let db = folder.database().await;
    for topic in
        ["order.created", "order.shipped", "invoice.paid", "event.published", "join.confirmed", "RESERVATION_REQUESTED"]
    {
        let query = "select count(*) from pillarbox.log where topic = $1";
        let posted: i64 = sqlx::query_scalar(query).bind(topic).fetch_one(&db).await.unwrap();
        assert!(posted > 0, "no {topic} was posted: {out}");
    }
    for (what, query) in [
        ("items", "select count(*) from pillarbox_progress.project"),
        ("notifications", "select count(*) from pillarbox_notify.notification"),
        ("webhooks", "select count(*) from pillarbox_hub.attempt where outcome = 'delivered'"),
        ("failed webhooks", "select count(*) from pillarbox_hub.attempt where outcome = 'failed'"),
        ("streams", "select count(*) from pillarbox_hub.stream_message"),
    ] {
        assert!(sqlx::query_scalar::<_, i64>(query).fetch_one(&db).await.unwrap() > 0, "no {what}: {out}");
    }
    assert!(out.contains(" 0 requests refused"), "{out}");
    assert_removed(&admin, &db).await;
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn a_demo_that_is_interrupted_removes_what_it_has_created() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let admin = admin_of(&process).await;
    let mut demo = testkit::command(testkit::program(), &["demo", "--rate", "60", "--data-dir", folder.text()], &[])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(demo.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("Watch it at"));
    let db = folder.database().await;
    // One e-mail of the registration, and those of urgent business events, which wait for no digest.
    testkit::eventually("there are e-mails", crate::support::DEADLINE, async || {
        let mails = admin.get("/admin/v1/mail?status=captured").await.json()["items"].as_array().unwrap().clone();
        let has = |template: &str| mails.iter().any(|mail| mail["template"].as_str().unwrap().starts_with(template));
        if has("verification") && has("notification") { Ok(()) } else { Err(mails.len()) }
    })
    .await;
    testkit::eventually("the demo posts orders", crate::support::DEADLINE, async || {
        let query = "select count(*) from pillarbox.log where topic = 'order.created'";
        sqlx::query_scalar::<_, i64>(query).fetch_one(&db).await.unwrap() > 3
    })
    .await;
    kill(Pid::from_raw(demo.id().try_into().unwrap()), Signal::SIGINT).unwrap();
    let last = tokio::task::spawn_blocking(move || lines.last().unwrap().unwrap()).await.unwrap();
    assert!(demo.wait().unwrap().success());
    assert!(last.starts_with("The demo has ended"), "{last}");
    assert_removed(&admin, &db).await;
    assert!(process.terminate().await.success());
}

#[test]
fn the_demo_refuses_an_installation_that_is_not_the_embedded_default() {
    let url = "postgres://pillarbox@127.0.0.1:1/pillarbox";
    let folder = DataFolder::new();
    let (code, _, error) = run(&["demo", "--database-url", url, "--data-dir", folder.text()], &[]);
    assert_eq!(code, Some(1));
    assert!(error.contains("embedded PostgreSQL") && error.contains("--force"), "{error}");
    let (code, _, error) = run(&["demo", "--data-dir", folder.text()], &[]);
    assert!(code == Some(1) && error.contains("Is it running?"), "{error}");
}

#[tokio::test]
async fn the_demo_refuses_an_installation_whose_server_sends_its_messages_elsewhere() {
    let refused = |folder: &DataFolder| {
        let (code, _, error) = run(&["demo", "--minutes", "0.05", "--data-dir", folder.text()], &[]);
        assert_eq!(code, Some(1), "{error}");
        assert!(error.contains("--force"), "{error}");
        error
    };
    // Nothing listens there: it is the server's settings that count.
    for (variable, url, says) in [
        ("PILLARBOX_AMQP_URL", "amqp://127.0.0.1:1/%2f", "RabbitMQ"),
        ("PILLARBOX_SMTP_URL", "smtp://127.0.0.1:1", "e-mails"),
    ] {
        let folder = DataFolder::new();
        let mut process = up(&folder, &[(variable, url)]);
        process.base_url().await;
        assert!(refused(&folder).contains(says));
        assert!(process.terminate().await.success());
    }
    let folder = DataFolder::new();
    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let admin = admin_of(&process).await;
    // The first one is on the second page.
    for (name, url) in [("outside", "https://example.org/hook".to_owned())]
        .into_iter()
        .chain((0..100).map(|_| ("local", "http://127.0.0.1:1/".to_owned())))
    {
        let subscriber = serde_json::json!({"name": name, "url": url, "event_types": ["*"]});
        assert_eq!(admin.post("/hub/v1/subscribers", subscriber).await.status, 201);
    }
    assert!(refused(&folder).contains("the subscriber outside"));
    assert!(process.terminate().await.success());
}

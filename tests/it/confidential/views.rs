//! No view, no command, no log line and no copy on RabbitMQ shows a confidential payload.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use contracts::EventId;
use lapin::ExchangeKind;
use pillarbox::log::Post;
use runtime::secret::MasterKey;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use server::migrations;
use testkit::{CapturedLog, Client, Pillarbox, TestDatabase, TestVhost, eventually, program};
use uuid::Uuid;

use crate::confidential::support::{
    EmailHandler, create_email_table, email, email_process, in_an_hour, occurrences, post_email,
};
use crate::consumers::support::{TIMEOUT, fast_options, wait_for_count};
use crate::operator::commands::Cli;
use crate::relay::broker_client::BrokerClient;
use crate::server::process::{ADMIN_KEY, DataFolder};

/// Parts of everything that must not be shown.
const SECRET: &str = "s3cret";

#[tokio::test]
async fn no_view_and_no_log_shows_a_confidential_payload() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, captured) = (database.pool(), CapturedLog::start());
    create_email_table(db).await;
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.exchange("pillarbox.dead_letters", ExchangeKind::Topic).await;
    amqp.queue("dead", "pillarbox.dead_letters", "dead_letter.#").await;
    // It relays, and has no role that would blank the payloads.
    let (folder, url, amqp_url) = (DataFolder::new(), database.url(), vhost.amqp_url());
    let secret_key = MasterKey::from_bytes([7; 32]).to_base64();
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text(), "--services", "hub"];
    let env = [
        ("PILLARBOX_LOG", "trace"),
        ("PILLARBOX_ADMIN_KEY", ADMIN_KEY),
        ("PILLARBOX_SECRET_KEY", secret_key.as_str()),
        ("PILLARBOX_DATABASE_URL", url.as_str()),
        ("PILLARBOX_AMQP_URL", amqp_url.as_str()),
        ("PILLARBOX_ROLES", "api,relay"),
        ("PILLARBOX_RELAY__INITIAL_DELAY_MS", "0"),
        ("PILLARBOX_RELAY__ENABLE_ROUTES", "email"),
    ];
    let mut process = Pillarbox::start(program(), &args, &env);
    let admin = Client::new(&process.base_url().await).bearer(ADMIN_KEY);

    // No queue is bound for it, so its route parks it; and the consumer of e-mails gives it up, with an error that quotes it.
    let handler = Arc::new(EmailHandler::default());
    handler.is_failing.store(true, Ordering::SeqCst);
    let mut options = fast_options();
    options.worker.retry.retries = Some(0);
    let consumer = email_process(db, &handler, options);
    let ids = post_secrets(&database).await;
    wait_for_count(db, "dead_letter", 1).await;
    let parked =
        "select count(*) from pillarbox.parked where consumer = 'relay.email' and last_error like 'unroutable%'";
    eventually("the route has parked it", TIMEOUT, async || {
        sqlx::query_scalar::<_, i64>(parked).fetch_one(db).await.unwrap() == 1
    })
    .await;
    let announced = amqp.consume("dead", 1).await;
    consumer.stop().await;
    assert!(occurrences(&database, SECRET).await > 0, "the payloads are in the database");

    let mut shown = vec![("the notice of the dead letter".to_owned(), announced[0].body.to_string())];
    assert_eq!(announced[0].body["payload"]["payload"], json!({"redacted": true}));
    shown.extend(http_views(&admin, &ids).await);
    shown.extend(command_output(&database, &admin).await);
    let status = "select coalesce(string_agg(outbox_status::text, ' '), '') from pillarbox.outbox_status";
    shown.push(("outbox_status".to_owned(), sqlx::query_scalar(status).fetch_one(db).await.unwrap()));
    let stored = "select string_agg(last_error, ' ') from pillarbox.dead_letter";
    let error: String = sqlx::query_scalar(stored).fetch_one(db).await.unwrap();
    assert!(error.starts_with("cannot render") && error.contains("***"), "the rest of the error stays: {error}");
    shown.push(("the stored error".to_owned(), error));
    assert!(process.terminate().await.success());
    assert!(captured.has("WARN", "a message failed"), "{}", captured.text());
    shown.push(("the log of the consumer".to_owned(), captured.text()));
    shown.push(("the log of the process".to_owned(), process.logs()));
    // The same as a list of bytes, as some libraries print them.
    let bytes = format!("{:?}", SECRET.as_bytes()).trim_matches(['[', ']']).to_owned();
    for (what, text) in shown {
        let found = text.lines().find(|line| line.contains(SECRET) || line.contains(&bytes));
        assert!(found.is_none(), "{what} shows it: {}", found.unwrap());
    }
}

/// Posts an e-mail, another confidential message, and an e-mail in SQL without an expiry.
async fn post_secrets(database: &TestDatabase) -> Vec<Uuid> {
    let db = database.pool();
    let mut ids = vec![post_email(db, &email("u1", "s3cret-token")).await];
    let payload = to_raw_value(&json!({"code": "s3cret-code"})).unwrap();
    ids.push(post_email(db, &Post::new("account.code", payload).confidential_until(in_an_hour())).await);
    let in_sql = "select pillarbox.post('email.code', '{\"code\": \"s3cret-sql\"}')";
    ids.push(sqlx::query_scalar(in_sql).fetch_one(db).await.unwrap());
    ids
}

async fn http_views(admin: &Client, ids: &[Uuid]) -> Vec<(String, String)> {
    let mut paths: Vec<String> = [
        "/admin/v1/log",
        "/admin/v1/parked",
        "/admin/v1/dead-letters",
        "/admin/v1/consumers",
        "/hub/v1/events",
        "/readyz",
        "/metrics",
    ]
    .map(str::to_owned)
    .to_vec();
    paths.extend(ids.iter().map(|id| format!("/hub/v1/events/{}", EventId(*id))));
    let dead = admin.get("/admin/v1/dead-letters").await.json();
    paths.push(format!("/admin/v1/dead-letters/{}", dead["items"][0]["id"]));
    let mut shown = Vec::new();
    for id in ids {
        let path = format!("/admin/v1/log/{}", EventId(*id));
        let message = admin.get(&path).await;
        assert_eq!(message.json()["payload"], json!({"redacted": true}), "{}", message.text);
        shown.push((path, message.text));
    }
    for path in paths {
        let response = admin.get(&path).await;
        shown.push((path, response.text));
    }
    shown
}

async fn command_output(database: &TestDatabase, admin: &Client) -> Vec<(String, String)> {
    let cli = Cli::with_client(database, admin);
    let dead: Value = serde_json::from_str(cli.ok("dead-letters list --json").await.lines().next().unwrap()).unwrap();
    let mut shown = Vec::new();
    for command in [
        "tail --from-beginning --once".to_owned(),
        "dead-letters list".to_owned(),
        "dead-letters list --json".to_owned(),
        format!("dead-letters show {}", dead["id"]),
        "parked list".to_owned(),
        "parked list --json".to_owned(),
        "cursors".to_owned(),
        "parity".to_owned(),
    ] {
        let (_, out, error) = cli.run(&command).await;
        assert!(!out.is_empty(), "{command}: {error}");
        shown.push((command, format!("{out}{error}")));
    }
    shown
}

#[tokio::test]
async fn a_stalled_consumer_does_not_log_what_its_messages_contain() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, captured) = (database.pool(), CapturedLog::start());
    create_email_table(db).await;
    for number in 0..20 {
        post_email(db, &email(&format!("u{number}"), &format!("s3cret-{number:04}"))).await;
    }
    let handler = Arc::new(EmailHandler::default());
    handler.is_failing.store(true, Ordering::SeqCst);
    let consumer = email_process(db, &handler, fast_options());
    let has_stalled = || format!("{:?}", consumer.health.report()).contains("so the consumer stalls");
    eventually("the consumer stalls", Duration::from_secs(30), async || has_stalled()).await;
    let report = format!("{:?}", consumer.health.report());
    consumer.stop().await;
    for (what, text) in [("health", report), ("log", captured.text())] {
        assert!(!text.contains(SECRET), "{what}: {text}");
    }
}

//! The commands of the binary, with and without a running instance.

use std::process::Stdio;

use serde_json::Value;
use testkit::Client;
use uuid::Uuid;

use crate::server::process::{BINARY, DataFolder, run, up};

#[tokio::test]
async fn keys_and_tokens_are_created_beside_a_running_instance() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[]);
    let client = Client::new(&process.base_url().await);
    let command = |args: &[&str]| run(&[args, &["--data-dir", folder.text()]].concat(), &[]);

    let (code, token, error) = command(&["token", "--user", &Uuid::now_v7().to_string(), "--role", "admin"]);
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(client.bearer(token.trim()).get("/admin/v1/keys").await.status, 200);
    let (_, token, _) = command(&["token", "--user", &Uuid::now_v7().to_string()]);
    client.bearer(token.trim()).get("/admin/v1/keys").await.assert_problem(403, "forbidden");

    let create = ["key", "create", "--role", "admin", "--tenant", "acme", "--name", "test"];
    let (code, _, error) = command(&create);
    assert!(code == Some(1) && error.contains("`pillarbox tenants create acme`"), "{error}");
    let (code, _, error) = command(&["tenants", "create", "acme"]);
    assert_eq!(code, Some(0), "{error}");
    let (code, key, error) = command(&create);
    assert_eq!(code, Some(0), "{error}");
    let key = key.trim();
    let keys = client.bearer(key).get("/admin/v1/keys").await.json();
    let id = keys["items"][0]["id"].as_str().unwrap();
    let (_, listed, _) = command(&["key", "list", "--tenant", "acme"]);
    assert!(listed.contains(id) && listed.contains("valid") && !listed.contains(key), "{listed}");

    let (code, _, error) = command(&["key", "revoke", id]);
    assert_eq!(code, Some(0), "{error}");
    let refused = async || client.bearer(key).get("/admin/v1/keys").await.status == 401;
    testkit::eventually("the key is refused", std::time::Duration::from_secs(5), refused).await;
    let (_, listed, _) = command(&["key", "list"]);
    assert!(listed.contains("revoked"), "{listed}");
    let (_, listed, _) = command(&["key", "list", "--tenant", "acme", "--json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!((listed["id"].as_str(), listed["revoked_at"].is_string()), (Some(id), true));

    let (code, status, _) = command(&["status"]);
    assert_eq!(code, Some(0), "{status}");
    assert!(status.contains("postgres  up") && status.contains("schema    up to date"), "{status}");
    assert!(process.terminate().await.success());

    let (code, status, _) = command(&["status"]);
    assert_eq!(code, Some(1), "{status}");
    assert!(status.contains("Is it running?") && status.contains("--data-dir"), "{status}");
    let (code, _, error) = command(&["key", "list"]);
    assert_eq!(code, Some(1));
    for part in ["Is it running?", "pillarbox up", "--data-dir", folder.text()] {
        assert!(error.contains(part), "{error}");
    }
}

#[tokio::test]
async fn status_reports_the_health_of_the_server() {
    let folder = DataFolder::new();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let amqp = format!("amqp://me:hunter2@{free}/%2f");
    let mut process = up(&folder, &[("PILLARBOX_AMQP_URL", &amqp), ("PILLARBOX_RELAY__INITIAL_DELAY_MS", "0")]);
    let base = process.base_url().await;
    let (db, posted) = (folder.database().await, "select pillarbox.post('order.created', '{}')");
    sqlx::query(posted).execute(&db).await.unwrap();

    // The command does not connect to RabbitMQ; the report of the server contains its state.
    let command = |args: &[&str]| run(&[args, &["--data-dir", folder.text()]].concat(), &[]);
    let stalled = |status: &Value| status["consumers"].as_array().unwrap().iter().any(|one| one["state"] == "stalled");
    let status = testkit::eventually("a route has failed", std::time::Duration::from_secs(20), async || {
        let (code, status, error) = command(&["status", "--json"]);
        let status: Value = serde_json::from_str(&status).unwrap_or_else(|_| panic!("{status}{error}"));
        if stalled(&status) && code == Some(1) { Ok(status) } else { Err(status) }
    })
    .await;
    let rabbitmq = status["checks"].as_array().unwrap().iter().find(|check| check["name"] == "rabbitmq").unwrap();
    let why = rabbitmq["error"].as_str().unwrap();
    assert!(why.contains(&free.to_string()) && why.contains("refused") && !why.contains("hunter2"), "{why}");
    let (_, text, _) = command(&["status"]);
    assert!(text.contains(&base) && text.contains(&format!("rabbitmq  RabbitMQ at {free}")), "{text}");
    // The shard may move to the other shard worker of the route, which has not failed yet.
    testkit::eventually("`cursors` shows the failure, too", std::time::Duration::from_secs(20), async || {
        let (_, cursors, _) = command(&["cursors"]);
        if cursors.contains("stalled") && cursors.contains("good") { Ok(()) } else { Err(cursors) }
    })
    .await;
    let of_the_route = |line: &str| line.contains("down name=\"relay.default/");
    process.wait_for_line(of_the_route, std::time::Duration::from_secs(20)).await;
    let logged = process.logs().lines().filter(|line| of_the_route(line)).count();
    assert!(logged <= 2, "logged once a minute per shard worker, however often it fails:\n{}", process.logs());

    // For another database, `status` does not use the server of this data folder.
    let other = testkit::TestDatabase::new(&mailbox::database::migrations()).await;
    let (code, text, _) = command(&["status", "--database-url", &other.url()]);
    assert_eq!(code, Some(0), "{text}");
    assert!(!text.contains("server") && !text.contains("rabbitmq"), "{text}");
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn a_closed_pipe_is_not_an_error() {
    let database = testkit::TestDatabase::new(&mailbox::database::migrations()).await;
    for (args, env) in [(&["openapi"][..], &[][..]), (&["status"], &[("PILLARBOX_DATABASE_URL", &*database.url())])] {
        let mut command = testkit::command(BINARY, args, env);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let ended = child.wait_with_output().unwrap();
        assert!(ended.status.success() && ended.stderr.is_empty(), "{args:?}: {ended:?}");
    }
}

#[test]
fn a_usage_error_names_the_accepted_arguments() {
    let folder = DataFolder::new();
    for (line, says) in [
        ("token --user bob", "must be a UUID such as"),
        ("listen --secret whpk_AAAA", "whpk_"),
        ("send order.paid {} --server http://127.0.0.1:1 --api-key k", "--server URL"),
        (
            "replay --consumer c --from 10m --to 20m --database-url postgres://127.0.0.1:1/x",
            "--to must be a time after",
        ),
        ("dead-letters retry --database-url postgres://127.0.0.1:1/x", "an ID, a filter such as --consumer"),
    ] {
        let line = format!("{line} --data-dir {}", folder.text());
        let (code, _, error) = run(&line.split_whitespace().collect::<Vec<_>>(), &[]);
        assert!(
            code.is_some_and(|code| code != 0) && error.contains(says) && !error.contains("whsk_"),
            "{line}: {error}"
        );
    }
}

#[test]
fn an_invalid_setting_stops_the_start_with_its_name() {
    let refused = |args: &[&str], env: &[(&str, &str)], name: &str| {
        let (code, _, error) = run(args, env);
        assert_eq!(code, Some(1), "{args:?}: {error}");
        assert!(error.contains(name), "{args:?}: {error}");
    };
    refused(&["up", "--set", "pool_max=many"], &[], "pool_max");
    refused(&["up", "--set", "colour=red"], &[], "colour");
    refused(
        &["up", "--set", r#"hub.export=["event.*", "*"]"#],
        &[],
        "setting `hub.export` (in the environment or --set): `*` would export e-mails",
    );
    refused(&["up", "--set", "hub.export=event.*,*"], &[], "hub.export");
    refused(&["up"], &[("PILLARBOX_HUB__EXPORT", r#"["event*"]"#)], "`event*` is no event type");
    refused(
        &["up", "--set", r#"hub.sql_events=["order.*", "email.*"]"#],
        &[],
        "setting `hub.sql_events` (in the environment or --set): `email.*` matches e-mails",
    );
    let above = "setting `notify.retention_days`: must be a number above behind_days, which is 14";
    refused(&["up", "--set", "notify.retention_days=14"], &[], above);
    refused(&["up", "--set", "notify.retention_days=7"], &[], "notify.retention_days");
    refused(&["up"], &[("PILLARBOX_STATEMENT_TIMEOUT_MS", "-1")], "statement_timeout_ms");
    let unsigned_until = "relay.accept_unsigned_until` (in the environment or --set): must be a time such as";
    refused(&["up"], &[("PILLARBOX_RELAY__ACCEPT_UNSIGNED_UNTIL", "soon")], unsigned_until);
    refused(&["up", "--roles", "api,king"], &[], "roles");
    refused(&["up", "--services", "nope"], &[], "services");
    refused(&["up", "--roles", "api,king"], &[], "must be one of api, relay");
    refused(&["serve"], &[], "database_url");
    refused(&["up", "--config", "absent.toml"], &[], "absent.toml");
}

#[test]
fn an_invalid_url_is_refused_without_its_password() {
    let folder = DataFolder::new();
    for flag in ["--database-url", "--amqp-url", "--redis-url", "--smtp-url"] {
        let (code, out, error) =
            run(&["status", "--data-dir", folder.text(), flag, "mysql://me:hunter2@host:99999/x"], &[]);
        assert_eq!(code, Some(1), "{flag}: {error}");
        assert!(error.contains(&flag[2..].replace('-', "_")), "{flag}: {error}");
        assert!(!error.contains("hunter2") && !out.contains("hunter2"), "{flag}: {error}");
    }
}

#[test]
fn an_unreachable_database_is_reported_with_the_cause() {
    let folder = DataFolder::new();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("postgres://me:hunter2@{free}/x");
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text(), "--database-url", &url];
    let (code, _, error) = run(&args, &[]);
    assert_eq!(code, Some(1));
    assert!(error.contains(&free.to_string()) && error.contains("refused") && !error.contains("hunter2"), "{error}");
}

#[test]
fn the_openapi_description_needs_no_server() {
    let (code, text, _) = run(&["openapi"], &[]);
    assert_eq!(code, Some(0));
    let description: Value = serde_json::from_str(&text).unwrap();
    assert!(description["paths"]["/admin/v1/keys"]["post"].is_object());
}

#[tokio::test]
async fn tail_shows_messages_posted_in_sql() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[]);
    process.base_url().await;
    let db = folder.database().await;
    sqlx::query("select pillarbox.post('order.created', '{\"total\": 1.50}', key => 'o1')").execute(&db).await.unwrap();
    sqlx::query("select pillarbox.post('user.left', '{}')").execute(&db).await.unwrap();

    let args = ["tail", "--from-beginning", "--topic", "order", "--data-dir", folder.text()];
    let following = testkit::Pillarbox::start(BINARY, &args, &[]);
    let soon = std::time::Duration::from_secs(10);
    let line = following.wait_for_line(|line| line.contains("order.created"), soon).await;
    let message: Value = serde_json::from_str(&line).unwrap();
    assert_eq!((message["source"].as_str(), message["key"].as_str()), (Some("sql"), Some("o1")));
    assert!(line.contains(r#""payload":{"total": 1.50}"#), "the payload is unchanged: {line}");

    sqlx::query("select pillarbox.post('order.paid', '{}')").execute(&db).await.unwrap();
    following.wait_for_line(|line| line.contains("order.paid"), soon).await;
    assert!(!following.logs().contains("user.left"));
    let (code, out, error) = run(&["tail", "--from-beginning", "--once", "--data-dir", folder.text()], &[]);
    assert_eq!((code, out.lines().count()), (Some(0), 3), "{error}");
    // A role named like the schema must not make an operator's table part of the schema.
    sqlx::query("create table orders (id int)").execute(&db).await.unwrap();
    let schema: String =
        sqlx::query_scalar("select schemaname from pg_tables where tablename = 'orders'").fetch_one(&db).await.unwrap();
    assert_eq!(schema, "public");
    db.close().await;
    assert!(process.terminate().await.success());
}

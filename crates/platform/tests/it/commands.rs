//! The commands, beside a running instance and without one.

use std::process::Stdio;

use serde_json::Value;
use testkit::Client;
use uuid::Uuid;

use crate::instance::{BINARY, DataFolder, run, up};

#[tokio::test]
async fn keys_and_tokens_are_made_beside_a_running_instance() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[]);
    let client = Client::new(&process.base_url().await);
    let command = |args: &[&str]| run(&[args, &["--data-dir", folder.text()]].concat(), &[]);

    let (code, token, error) = command(&["token", "--user", &Uuid::now_v7().to_string(), "--role", "admin"]);
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(client.bearer(token.trim()).get("/admin/v1/keys").await.status, 200);
    let (_, token, _) = command(&["token", "--user", &Uuid::now_v7().to_string()]);
    client.bearer(token.trim()).get("/admin/v1/keys").await.assert_problem(403, "forbidden");

    let (code, key, error) = command(&["key", "create", "--role", "admin", "--tenant", "acme", "--name", "test"]);
    assert_eq!(code, Some(0), "{error}");
    let key = key.trim();
    let keys = client.bearer(key).get("/admin/v1/keys").await.json();
    let id = keys["items"][0]["id"].as_str().unwrap();
    let (_, listed, _) = command(&["key", "list", "--tenant", "acme"]);
    assert!(listed.contains(id) && listed.contains("good") && !listed.contains(key), "{listed}");

    let (code, _, error) = command(&["key", "revoke", id]);
    assert_eq!(code, Some(0), "{error}");
    let refused = async || client.bearer(key).get("/admin/v1/keys").await.status == 401;
    testkit::drain("the key is refused", std::time::Duration::from_secs(5), refused).await;
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
    let (code, _, error) = command(&["key", "list"]);
    assert_eq!(code, Some(1));
    assert!(error.contains("pillarbox up"), "{error}");
}

#[tokio::test]
async fn status_tells_what_the_server_says_of_itself() {
    let folder = DataFolder::new();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let amqp = format!("amqp://me:hunter2@{free}/%2f");
    let mut process = up(&folder, &[("PILLARBOX_AMQP_URL", &amqp), ("PILLARBOX_RELAY__INITIAL_DELAY_MS", "0")]);
    let base = process.base_url().await;
    let (db, posted) = (folder.database().await, "select pillarbox.post('order.created', '{}')");
    sqlx::query(posted).execute(&db).await.unwrap();

    // The command knows nothing of RabbitMQ; the server does.
    let command = |args: &[&str]| run(&[args, &["--data-dir", folder.text()]].concat(), &[]);
    let stalled = |status: &Value| status["consumers"].as_array().unwrap().iter().any(|one| one["state"] == "stalled");
    let status = testkit::drain("a route has failed", std::time::Duration::from_secs(20), async || {
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
    // The shard may go to the route's other lane after that, which has yet to fail.
    testkit::drain("the cursors tell it, too", std::time::Duration::from_secs(20), async || {
        let (_, cursors, _) = command(&["cursors"]);
        if cursors.contains("stalled") && cursors.contains("good") { Ok(()) } else { Err(cursors) }
    })
    .await;
    let of_the_route = |line: &str| line.contains("down name=\"relay.default/");
    process.wait_for_line(of_the_route, std::time::Duration::from_secs(20)).await;
    let told = process.logs().lines().filter(|line| of_the_route(line)).count();
    assert!(told <= 2, "once a minute for each lane, however often it fails:\n{}", process.logs());

    // Of another database, the server of this folder is none.
    let other = testkit::TestDatabase::new(&mailbox::database::migrations()).await;
    let (code, text, _) = command(&["status", "--database-url", &other.url()]);
    assert_eq!(code, Some(0), "{text}");
    assert!(!text.contains("server") && !text.contains("rabbitmq"), "{text}");
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn a_reader_that_has_enough_is_no_error() {
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
fn a_mistake_is_answered_with_what_it_takes() {
    let folder = DataFolder::new();
    for (line, says) in [
        ("token --user bob", "takes a UUID such as"),
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
fn a_bad_setting_stops_the_start_by_name() {
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
        "setting `hub.export` (in the environment or --set): `*` would take mails",
    );
    refused(&["up", "--set", "hub.export=event.*"], &[], "hub.export");
    refused(&["up"], &[("PILLARBOX_HUB__EXPORT", r#"["event*"]"#)], "`event*` is no event type");
    refused(&["up"], &[("PILLARBOX_STATEMENT_TIMEOUT_MS", "-1")], "statement_timeout_ms");
    refused(&["up", "--roles", "api,king"], &[], "roles");
    refused(&["up", "--services", "nope"], &[], "services");
    refused(&["up", "--roles", "api,king"], &[], "takes api, relay");
    refused(&["serve"], &[], "database_url");
    refused(&["up", "--config", "absent.toml"], &[], "absent.toml");
}

#[test]
fn a_bad_address_is_refused_without_showing_its_password() {
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
fn a_database_that_is_not_there_is_named_with_the_cause() {
    let folder = DataFolder::new();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("postgres://me:hunter2@{free}/x");
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text(), "--database-url", &url];
    let (code, _, error) = run(&args, &[]);
    assert_eq!(code, Some(1));
    assert!(error.contains(&free.to_string()) && error.contains("refused") && !error.contains("hunter2"), "{error}");
}

#[test]
fn the_description_is_printed_without_any_server() {
    let (code, text, _) = run(&["openapi"], &[]);
    assert_eq!(code, Some(0));
    let description: Value = serde_json::from_str(&text).unwrap();
    assert!(description["paths"]["/admin/v1/keys"]["post"].is_object());
}

#[tokio::test]
async fn the_tail_follows_what_is_posted_by_sql() {
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
    assert!(line.contains(r#""payload":{"total": 1.50}"#), "as it was posted: {line}");

    sqlx::query("select pillarbox.post('order.paid', '{}')").execute(&db).await.unwrap();
    following.wait_for_line(|line| line.contains("order.paid"), soon).await;
    assert!(!following.logs().contains("user.left"));
    let (code, out, error) = run(&["tail", "--from-beginning", "--once", "--data-dir", folder.text()], &[]);
    assert_eq!((code, out.lines().count()), (Some(0), 3), "{error}");
    // An operator's table is not among ours, although the role has our schema's name.
    sqlx::query("create table orders (id int)").execute(&db).await.unwrap();
    let schema: String =
        sqlx::query_scalar("select schemaname from pg_tables where tablename = 'orders'").fetch_one(&db).await.unwrap();
    assert_eq!(schema, "public");
    db.close().await;
    assert!(process.terminate().await.success());
}

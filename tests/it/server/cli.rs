//! The commands of the binary, with and without a running instance.

use std::process::Stdio;

use serde_json::Value;
use testkit::Client;
use uuid::Uuid;

use crate::server::process::{DataFolder, run, up};

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
    let (code, _, error) = command(&["parked", "list"]);
    assert_eq!(code, Some(1));
    assert!(error.contains("Is it running?") && error.contains("--server"), "{error}");
    let (code, _, error) = command(&["parity"]);
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
    assert!(text.contains("off       relay.notifications, relay.email: no service reads their queues"), "{text}");
    // The shard may move to the other shard worker of the route, which has not failed yet.
    testkit::eventually("`cursors` also shows the failure", std::time::Duration::from_secs(20), async || {
        let (_, cursors, _) = command(&["cursors"]);
        if cursors.contains("stalled") && cursors.contains("healthy") { Ok(()) } else { Err(cursors) }
    })
    .await;
    let of_the_route = |line: &str| line.contains("down name=\"relay.default/");
    process.wait_for_line(of_the_route, std::time::Duration::from_secs(20)).await;
    let logged = process.logs().lines().filter(|line| of_the_route(line)).count();
    assert!(logged <= 2, "logged once a minute per shard worker, however often it fails:\n{}", process.logs());

    // For another database, `status` does not use the server of this data folder.
    let other = testkit::TestDatabase::new(&server::migrations()).await;
    let (code, text, _) = command(&["status", "--database-url", &other.url()]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("servers   none runs on this database") && !text.contains("rabbitmq"), "{text}");
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn status_shows_the_servers_of_a_database() {
    let (folder, database) = (DataFolder::new(), testkit::TestDatabase::new(&server::migrations()).await);
    let url = database.url();
    let mut process = up(&folder, &[("PILLARBOX_DATABASE_URL", &url)]);
    process.base_url().await;
    let status = || run(&["status", "--json", "--database-url", &url], &[]);
    testkit::eventually("the server is shown", std::time::Duration::from_secs(20), async || {
        let (code, text, error) = status();
        let status: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}{error}"));
        let servers = status["processes"].as_array().map_or(0, Vec::len);
        if (code, servers) == (Some(0), 1) { Ok(()) } else { Err(status) }
    })
    .await;
    assert!(process.terminate().await.success());
    let (code, text, _) = status();
    let status: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &status["processes"]), (Some(1), &serde_json::json!([])), "{status}");
}

#[tokio::test]
async fn a_closed_pipe_is_not_an_error() {
    let database = testkit::TestDatabase::new(&server::migrations()).await;
    for (args, env) in [(&["openapi"][..], &[][..]), (&["status"], &[("PILLARBOX_DATABASE_URL", &*database.url())])] {
        let mut command = testkit::command(testkit::program(), args, env);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let ended = child.wait_with_output().unwrap();
        let errors = String::from_utf8(ended.stderr).unwrap();
        let is_expected = |line: &str| line.starts_with("target: ");
        assert!(ended.status.success() && errors.lines().all(is_expected), "{args:?}: {errors}");
    }
}

#[tokio::test]
async fn with_a_database_url_commands_say_which_database_or_server_they_act_on() {
    let database = testkit::TestDatabase::new(&server::migrations()).await;
    let (url, folder) = (database.url(), DataFolder::new());
    let name = url.rsplit_once('/').unwrap().1.split('?').next().unwrap();
    let on_database = format!("target: database {name} on ");
    for (args, target) in [
        (&["parity"][..], &*on_database),
        (&["reconcile"], &on_database),
        (&["cursors"], "target: server http://127.0.0.1:9\n"),
        (&["key", "list"], "target: server http://127.0.0.1:9\n"),
        (&["status"], &on_database),
        (&["subscribers", "list"], "target: server http://127.0.0.1:9\n"),
        (&["send", "order.paid", "{}"], "target: server http://127.0.0.1:9\n"),
    ] {
        let env = [
            ("PILLARBOX_DATABASE_URL", &*url),
            ("PILLARBOX_LISTEN", "127.0.0.1:9"),
            ("PILLARBOX_ADMIN_KEY", "pbx_tour_0123456789abcdefghij"),
        ];
        let (_, _, errors) = run(&[args, &["--data-dir", folder.text()]].concat(), &env);
        assert!(errors.starts_with(target), "{args:?}: {errors}");
        let (_, _, errors) = run(&[args, &["--data-dir", folder.text()]].concat(), &env[1..]);
        assert!(!errors.contains("target: "), "{args:?}: {errors}");
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
        // `listen` has no data folder.
        let data_dir =
            if line.starts_with("listen") { String::new() } else { format!(" --data-dir {}", folder.text()) };
        let line = line.to_owned() + &data_dir;
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
        "setting `hub.export` (set with --set): `*` would export e-mails",
    );
    refused(&["up", "--set", "hub.export=event.*,*"], &[], "hub.export");
    refused(&["up"], &[("PILLARBOX_HUB__EXPORT", r#"["event*"]"#)], "`event*` is not a valid event type");
    refused(
        &["up", "--set", r#"hub.sql_events=["order.*", "email.*"]"#],
        &[],
        "setting `hub.sql_events` (set with --set): `email.*` matches e-mails",
    );
    let above = "setting `notify.retention_days` (set with --set): must be 15 or more: above behind_days, which is 14 (the \
                 default)";
    refused(&["up", "--set", "notify.retention_days=14"], &[], above);
    refused(&["up", "--set", "notify.retention_days=7"], &[], "notify.retention_days");
    refused(&["up"], &[("PILLARBOX_STATEMENT_TIMEOUT_MS", "-1")], "statement_timeout_ms");
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
fn an_option_that_would_have_no_effect_is_refused() {
    for args in [&["listen", "--listen", "127.0.0.1:9000"][..], &["--data-dir", "/d", "openapi"]] {
        let (code, out, error) = run(args, &[]);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{args:?}: {error}");
        assert!(error.contains(args.iter().find(|arg| arg.starts_with("--")).unwrap()), "{args:?}: {error}");
    }
}

#[test]
fn the_openapi_description_needs_no_server() {
    let (code, text, _) = run(&["openapi"], &[]);
    assert_eq!(code, Some(0));
    let description: Value = serde_json::from_str(&text).unwrap();
    assert!(description["paths"]["/admin/v1/keys"]["post"].is_object());
}

/// U+009B begins a sequence that acts on a terminal, as ESC [ does.
#[tokio::test]
async fn what_acts_on_a_terminal_is_escaped() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[]);
    process.base_url().await;
    let db = folder.database().await;
    let (code, _, error) =
        run(&["key", "create", "--role", "ingest", "--name", "shop", "--data-dir", folder.text()], &[]);
    assert_eq!(code, Some(0), "{error}");
    sqlx::query("select pillarbox.post('order.created', jsonb_build_object('text', E'\\u009b31m'))")
        .execute(&db)
        .await
        .unwrap();
    let renamed = "update pillarbox_admin.api_key set name = E'shop\\u009b2J' where name = 'shop'";
    assert_eq!(sqlx::query(renamed).execute(&db).await.unwrap().rows_affected(), 1);
    for (args, escaped) in [
        (&["tail", "--from-beginning", "--once"][..], r"\u009b31m"),
        (&["key", "list"], r"shop\u009b2J"),
        (&["key", "list", "--json"], r"shop\u009b2J"),
        (&["key", "revoke", "\u{9b}2J"], r"\u009b2J"),
    ] {
        let (_, out, error) = run(&[args, &["--data-dir", folder.text()]].concat(), &[]);
        let printed = format!("{out}{error}");
        assert!(printed.contains(escaped) && !printed.contains('\u{9b}'), "{args:?}: {printed:?}");
    }
    db.close().await;
    assert!(process.terminate().await.success());
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
    let following = testkit::Pillarbox::start(testkit::program(), &args, &[]);
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
    // A log of more than one chunk is printed in its order, from the time on.
    let began = chrono::Utc::now();
    sqlx::query("select pillarbox.post('many.posted', '{}', key => 'k' || n % 7) from generate_series(1, 3000) as n")
        .execute(&db)
        .await
        .unwrap();
    let args = ["tail", "--from", &began.to_rfc3339(), "--once", "--data-dir", folder.text()];
    let (code, out, error) = run(&args, &[]);
    assert_eq!((code, error.as_str()), (Some(0), ""));
    let printed = out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["event_id"].to_string());
    let ids: Vec<uuid::Uuid> =
        sqlx::query_scalar("select message_id from pillarbox.log where topic = 'many.posted' order by id")
            .fetch_all(&db)
            .await
            .unwrap();
    assert!(printed.eq(ids.iter().map(|id| format!("\"evt_{id}\""))), "{out}");
    // A role named like the schema must not make an operator's table part of the schema.
    sqlx::query("create table orders (id int)").execute(&db).await.unwrap();
    let schema: String =
        sqlx::query_scalar("select schemaname from pg_tables where tablename = 'orders'").fetch_one(&db).await.unwrap();
    assert_eq!(schema, "public");
    db.close().await;
    assert!(process.terminate().await.success());
}

//! Secrets do not appear in logs.

use hyper::Method;
use serde_json::json;
use server::migrations;
use testkit::{Client, Pillarbox, TestDatabase, TestRedis, TestVhost, program};
use uuid::Uuid;

use crate::server::process::{ADMIN_KEY, DataFolder, run};

#[tokio::test]
async fn no_secret_reaches_the_log_at_any_level() {
    let (database, vhost, redis) = (TestDatabase::new(&migrations()).await, TestVhost::new().await, TestRedis::new());
    for format in ["pretty", "json"] {
        let folder = DataFolder::new();
        let secret_key = runtime::secret::MasterKey::from_bytes([7; 32]).to_base64();
        let (database_url, amqp_url) = (database.url(), vhost.amqp_url());
        let redis_url = redis.url().replace("redis://", "redis://:redis-password-1@");
        let args = [
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--data-dir",
            folder.text(),
            "--database-url",
            &database_url,
            "--amqp-url",
            &amqp_url,
            "--redis-url",
            &redis_url,
            "--smtp-url",
            "smtp://me:smtp-password-1@127.0.0.1:1",
        ];
        let env = [
            ("PILLARBOX_LOG", "trace"),
            ("PILLARBOX_LOG_FORMAT", format),
            ("PILLARBOX_ADMIN_KEY", ADMIN_KEY),
            ("PILLARBOX_SECRET_KEY", &secret_key),
        ];
        let mut process = Pillarbox::start(program(), &args, &env);
        let base = process.base_url().await;
        let admin = Client::new(&base).bearer(ADMIN_KEY);

        let made = admin.post("/admin/v1/keys", json!({"name": "x", "role": "admin"})).await.json();
        let api_key = made["key"].as_str().unwrap();
        assert_eq!(Client::new(&base).bearer(api_key).get("/admin/v1/keys").await.status, 200);
        let (_, token, _) = run(
            &["token", "--user", &Uuid::now_v7().to_string(), "--role", "admin"],
            &[("PILLARBOX_SECRET_KEY", &secret_key)],
        );
        let token = token.trim();
        assert_eq!(Client::new(&base).bearer(token).get("/admin/v1/keys").await.status, 200);
        let wrong = "pbx_a_key_that_was_never_issued";
        Client::new(&base).bearer(wrong).get("/admin/v1/keys").await.assert_problem(401, "unauthorized");
        // Secrets in unexpected places.
        admin.get("/admin/v1/keys?password=hunter2-in-query").await.assert_problem(400, "malformed-query");
        admin
            .post("/admin/v1/keys", json!({"password": "hunter2-in-body"}))
            .await
            .assert_problem(422, "validation-failed");
        admin.send(Method::DELETE, "/admin/v1/keys/hunter2-in-path", None).await.assert_problem(400, "malformed-path");

        assert!(process.terminate().await.success());
        let logs = process.logs();
        assert!(logs.contains("answered"), "requests are logged:\n{logs}");
        for flag in ["--database-url", "--amqp-url", "--redis-url", "--smtp-url"] {
            let warning = format!("{flag} contains a secret");
            assert!(logs.contains(&warning), "the secret in the arguments is reported: {flag}\n{logs}");
        }
        assert!(logs.contains("set PILLARBOX_DATABASE_URL instead"), "{logs}");
        let password_of = |url: &str| {
            url.split_once("://").unwrap().1.split_once('@').unwrap().0.split_once(':').unwrap().1.to_owned()
        };
        let (database_password, amqp_password) = (password_of(&database_url), password_of(&amqp_url));
        for (what, secret) in [
            ("the admin key", ADMIN_KEY),
            ("the secret key", secret_key.as_str()),
            ("an API key", api_key),
            ("a token", token),
            ("an unknown key", wrong),
            ("the database's password", &database_password),
            ("the broker's password", &amqp_password),
            ("Redis's password", "redis-password-1"),
            ("the mail server's password", "smtp-password-1"),
            ("a query", "hunter2-in-query"),
            ("a body", "hunter2-in-body"),
            ("a path", "hunter2-in-path"),
        ] {
            let found = logs.lines().find(|line| line.contains(secret));
            assert!(found.is_none(), "{what} is in the {format} log: {}", found.unwrap());
        }
    }
}

#[test]
fn a_secret_in_a_flag_is_reported_and_one_in_the_environment_is_not() {
    let folder = DataFolder::new();
    let (url, variable) = ("postgres://me:hunter2@127.0.0.1:1/x", "PILLARBOX_DATABASE_URL");
    let (_, _, error) = run(&["status", "--data-dir", folder.text(), "--database-url", url], &[]);
    let names = ["warning: --database-url contains a secret", "ps", variable, "--config FILE"];
    assert!(names.iter().all(|name| error.contains(name)) && !error.contains("hunter2"), "{error}");
    let (_, _, error) = run(&["status", "--data-dir", folder.text()], &[(variable, url)]);
    assert!(!error.contains("contains a secret"), "{error}");
    let (_, _, error) = run(&["serve"], &[]);
    assert!(
        error.contains(variable) && !error.contains("--database-url"),
        "the error recommends the variable: {error}"
    );
    let (_, help, _) = run(&["--help"], &[]);
    assert!(help.contains(variable), "{help}");
}

//! The operator's commands, run as typed.

use pillarbox::database::cluster_identity;
use serde_json::Value;
use server::settings::Role;
use testkit::{Client, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::consumers::support::{
    FailingConsumer, Process, TIMEOUT, copy_database, count, database, numbers, post_numbers, recorder, wait_for_count,
    wait_for_effects,
};
use crate::server::process::{DataFolder, run};
use crate::support::text;

pub(crate) struct Cli {
    folder: DataFolder,
    url: String,
    /// The address of the server and the key of an operator.
    server: Option<(String, String)>,
}

impl Cli {
    /// For commands that need the database alone.
    pub(crate) fn new(database: &TestDatabase) -> Cli {
        Cli { folder: DataFolder::new(), url: database.url(), server: None }
    }

    /// Also for commands that call a server.
    pub(crate) fn with_server(database: &TestDatabase, app: &TestApp) -> Cli {
        Cli::with_client(database, &app.admin())
    }

    /// As [`Cli::with_server`], for the server and the credential of a client.
    pub(crate) fn with_client(database: &TestDatabase, admin: &Client) -> Cli {
        let address = admin.base().trim_start_matches("http://").to_owned();
        Cli { server: Some((address, admin.credential().to_owned())), ..Cli::new(database) }
    }

    /// As [`Cli::with_server`], with a server that answers requests and runs no consumer.
    pub(crate) async fn with_api(database: &TestDatabase) -> (Cli, TestApp) {
        let app = TestApp::start_with(database, |settings| settings.roles = vec![Role::Api]).await;
        (Cli::with_server(database, &app), app)
    }

    /// Runs a command line. It runs on a thread, so that the consumers of the test continue.
    pub(crate) async fn run(&self, line: &str) -> (Option<i32>, String, String) {
        let line = format!("{line} --data-dir {} --database-url {}", self.folder.text(), self.url);
        let server = self.server.clone();
        let typed = move || {
            let (address, key) = server.unwrap_or_default();
            let env = [("PILLARBOX_LISTEN", address.as_str()), ("PILLARBOX_API_KEY", key.as_str())];
            let env = if address.is_empty() { &[][..] } else { &env };
            run(&line.split_whitespace().collect::<Vec<_>>(), env)
        };
        tokio::task::spawn_blocking(typed).await.unwrap()
    }

    /// Runs a command that must succeed. Returns its standard output.
    pub(crate) async fn ok(&self, line: &str) -> String {
        let (code, out, error) = self.run(line).await;
        assert_eq!(code, Some(0), "{line}: {out}{error}");
        out
    }

    /// Runs a command that must fail. Returns its output.
    pub(crate) async fn refused(&self, line: &str) -> String {
        let (code, out, error) = self.run(line).await;
        assert!(code.is_some_and(|code| code != 0), "{line}: {out}{error}");
        error
    }

    /// Runs `status` on a database that no process uses, which it reports as a failure. Returns its standard output.
    pub(crate) async fn status_without_process(&self, options: &str) -> String {
        let (code, out, error) = self.run(&format!("status {options}")).await;
        assert_eq!(code, Some(1), "{out}{error}");
        out
    }

    async fn json_lines(&self, line: &str) -> Vec<Value> {
        self.ok(line).await.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

#[tokio::test]
async fn fan_out_is_a_separate_kind_of_consumer() {
    let database = database().await;
    let insert = "insert into pillarbox.cursor (consumer, kind, included)
                  values ('hub.fanout', 'handler', '.*'), ('notify.mail', 'handler', '.*'), ('relay.default', 'relay', '.*')";
    sqlx::query(insert).execute(database.pool()).await.unwrap();
    let (cli, app) = Cli::with_api(&database).await;
    let of_api = app.admin().get("/admin/v1/consumers").await.json()["items"].as_array().unwrap().clone();
    for listed in [cli.json_lines("cursors --json").await, of_api] {
        let kinds: Vec<_> = listed.iter().map(|one| (text(&one["consumer"]), text(&one["kind"]))).collect();
        let expected = [("hub.fanout", "fan-out"), ("notify.mail", "handler"), ("relay.default", "relay")];
        assert_eq!(kinds, expected);
    }
    assert!(cli.ok("cursors").await.lines().any(|line| line.starts_with("hub.fanout") && line.contains(" fan-out ")));
    app.stop().await;
}

#[tokio::test]
async fn cursors_are_listed_reset_and_dropped() {
    let database = database().await;
    let (db, (cli, app)) = (database.pool(), Cli::with_api(&database).await);
    assert!(cli.ok("cursors").await.starts_with("CONSUMER"));
    let process = Process::start(db, recorder());
    post_numbers(db, Some("k"), 1..=3).await;
    wait_for_effects(db, 3).await;
    for list in ["cursors", "cursors list"] {
        let table = cli.ok(list).await;
        assert!(table.contains("effects") && table.contains("test (16)") && table.contains("healthy"), "{table}");
    }
    for list in ["cursors --json", "cursors list --json"] {
        let listed = cli.json_lines(list).await;
        assert_eq!((&listed[0]["consumer"], &listed[0]["state"]), (&"effects".into(), &"healthy".into()), "{list}");
    }
    assert!(cli.refused("cursors drop effects").await.contains("consumer effects is in use"));
    assert!(cli.ok("cursors reset effects --from 2h").await.contains("reads again"));
    process.stop().await;
    assert!(cli.ok("cursors reset effects").await.contains("0 messages of the log are skipped"));
    post_numbers(db, Some("k"), 4..=7).await;
    assert!(cli.ok("cursors").await.contains("no_worker"));
    let refused = cli.refused("cursors reset effects").await;
    assert!(refused.contains("last 4 messages") && refused.contains("--yes"), "{refused}");
    assert!(cli.ok("cursors reset effects --yes").await.contains("4 messages of the log are skipped"));
    assert!(cli.refused("cursors reset effects --from lately").await.contains("2h"));
    assert!(cli.refused("cursors reset effects --from 2999-01-01T00:00:00Z").await.contains("past"));
    assert!(cli.refused("cursors reset missing").await.contains("no consumer"));
    assert_eq!(cli.ok("parked list").await, "Nothing is parked.\n");
    assert_eq!(cli.ok("cursors drop effects").await, "effects is dropped.\n");
    assert!(cli.refused("cursors drop effects").await.contains("no consumer"));
    app.stop().await;
}

#[tokio::test]
async fn parked_messages_are_listed_retried_and_discarded() {
    let database = database().await;
    let (db, (cli, app)) = (database.pool(), Cli::with_api(&database).await);
    let consumer = FailingConsumer::with_slow_retries(db);
    post_numbers(db, None, [1]).await;
    post_numbers(db, Some("k"), [-1, -2, 3]).await;
    wait_for_count(db, "parked", 3).await;
    let table = cli.ok("parked list --consumer effects").await;
    assert!(
        table.contains("negative") && table.contains("blocked by its key") && table.contains("test.posted"),
        "{table}"
    );
    let places: Vec<i64> =
        cli.json_lines("parked list --json").await.iter().map(|one| one["place"].as_i64().unwrap()).collect();
    let [first, second, _] = places[..] else { panic!("{places:?}") };
    assert!(cli.refused(&format!("parked retry {second}")).await.contains(&format!("place {first}")));
    assert!(cli.ok(&format!("parked discard {first}")).await.contains("is discarded"));
    wait_for_count(db, "parked", 2).await;
    consumer.stop_failing();
    eventually("the second message is the first of its key", TIMEOUT, async || {
        let (code, ..) = cli.run(&format!("parked retry {second}")).await;
        code == Some(0) || count(db, "parked").await == 0
    })
    .await;
    wait_for_count(db, "parked", 0).await;
    consumer.process.stop().await;
    assert_eq!(numbers(db).await, [1, -2, 3]);
    assert!(cli.refused("parked retry 1000000").await.contains("nothing is parked"));
    assert!(cli.refused("parked discard 1000000").await.contains("nothing is parked"));
    app.stop().await;
}

#[tokio::test]
async fn dead_letters_are_listed_shown_retried_and_discarded() {
    let database = database().await;
    let (db, (cli, app)) = (database.pool(), Cli::with_api(&database).await);
    let consumer = FailingConsumer::without_retries(db);
    for number in 1..=4 {
        post_numbers(db, None, [number * 10, -number, number * 100]).await;
    }
    wait_for_count(db, "dead_letter", 4).await;
    let table = cli.ok("dead-letters list --consumer effects --topic test --tenant main --from 1h").await;
    assert_eq!(table.lines().count(), 5, "{table}");
    assert!(table.contains("negative") && table.contains("evt_"), "{table}");
    assert!(cli.ok("dead-letters list --to 1h").await.contains("/hub/v1/dead-letters"));
    let dead = cli.json_lines("dead-letters list --json").await;
    let id = |at: usize| dead[at]["id"].as_i64().unwrap();
    let shown: Value = serde_json::from_str(&cli.ok(&format!("dead-letters show {}", id(0))).await).unwrap();
    assert!(shown["message"]["payload"].as_i64().unwrap() < 0);
    consumer.stop_failing();
    assert!(cli.ok(&format!("dead-letters retry {}", id(0))).await.contains("due now"));
    assert!(cli.ok(&format!("dead-letters discard {}", id(1))).await.contains("is discarded"));
    assert!(cli.refused(&format!("dead-letters show {}", id(1))).await.contains("no such dead letter"));
    for wrong in [
        "dead-letters retry",
        "dead-letters discard",
        "dead-letters retry 1 --all",
        "dead-letters retry 1 --consumer effects",
        "dead-letters retry --all --topic test",
        "dead-letters discard --all",
    ] {
        cli.refused(wrong).await;
    }
    assert!(cli.refused("dead-letters discard --all").await.contains("--yes"));
    assert!(cli.ok("dead-letters retry --consumer missing --from 1h").await.contains("0 dead letters"));
    assert!(cli.ok("dead-letters retry --consumer effects --topic test --from 1h").await.contains("2 dead letters"));
    wait_for_effects(db, 11).await;
    assert!(cli.ok("dead-letters retry --all").await.contains("0 dead letters"));
    assert!(cli.ok("dead-letters discard --all --yes").await.contains("0 dead letters"));
    consumer.process.stop().await;
    // A dead letter of an intake queue has no consumer that could retry it.
    sqlx::query(
        "insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, log_id, message_id, source, tenant,
             topic, headers, payload, at)
         values ('amqp:orders', 0, 0, 1, 'x', 0, pillarbox.uuid_v7(), 'amqp:orders', 'main', 'x', '{}', '1', now())",
    )
    .execute(db)
    .await
    .unwrap();
    assert!(cli.ok("dead-letters retry --all").await.contains("1 of amqp:orders cannot be retried"));
    app.stop().await;
    let status = cli.status_without_process("").await;
    assert!(status.contains("dead      1 of amqp:orders") && status.contains("none runs on this database"), "{status}");
}

#[tokio::test]
async fn the_replay_command_waits_for_the_end() {
    let database = database().await;
    let (db, (cli, app)) = (database.pool(), Cli::with_api(&database).await);
    let process = Process::start(db, recorder());
    post_numbers(db, Some("k"), 1..=3).await;
    wait_for_effects(db, 3).await;
    let output = cli.ok("replay --consumer effects --from 1h --again --wait").await;
    assert!(output.contains("16 of 16 shards done"), "{output}");
    assert_eq!(numbers(db).await, [1, 2, 3, 1, 2, 3]);
    assert!(cli.ok("replay --consumer effects --from 2h --to 1h").await.contains("Replay"));
    process.stop().await;
    assert_eq!(numbers(db).await.len(), 6);
    assert!(
        cli.refused("replay --consumer effects --from 1h --to 2h").await.contains("--to must be a time after --from")
    );
    assert!(cli.refused("replay --consumer missing --from 1h").await.contains("no consumer"));
    assert!(cli.refused("replay --consumer effects").await.contains("--from"));
    app.stop().await;
}

#[tokio::test]
async fn status_reports_a_restored_database_and_recover_resumes() {
    let original = database().await;
    cluster_identity::check(original.pool()).await.unwrap();
    let process = Process::start(original.pool(), recorder());
    post_numbers(original.pool(), Some("k"), 1..=2).await;
    wait_for_effects(original.pool(), 2).await;
    process.stop().await;
    let cli = Cli::new(&original);
    for way in ["recover --skip", "recover --from 1h"] {
        assert!(cli.ok(way).await.contains("was not restored"));
    }
    let status = cli.status_without_process("").await;
    assert!(status.contains("schema    up to date") && status.contains("effects"), "{status}");

    let copy = TestDatabase::empty().await;
    copy_database(&original, &copy);
    let cli = Cli::new(&copy);
    let status = cli.status_without_process("").await;
    assert!(status.contains("pillarbox recover"), "{status}");
    for wrong in ["recover", "recover --skip --from 1h", "recover --from soon"] {
        cli.refused(wrong).await;
    }
    let output = cli.ok("recover --from 1h").await;
    assert!(output.contains("reads again") && output.contains("effects"), "{output}");
    assert!(!cli.status_without_process("").await.contains("pillarbox recover"));
    assert!(cli.ok("recover --skip").await.contains("nothing is changed"));

    sqlx::query("update pillarbox.cursor set lapsed_at = now()").execute(copy.pool()).await.unwrap();
    let status = cli.status_without_process("").await;
    assert!(status.contains("pillarbox cursors reset effects"), "{status}");
    let (client, app) = Cli::with_api(&copy).await;
    client.ok("cursors reset effects --yes").await;
    app.stop().await;
    assert!(!cli.status_without_process("").await.contains("pillarbox cursors reset effects"));
}

/// The databases of the tests are copies of one, which keep its id.
async fn new_installation(database: &TestDatabase) -> Uuid {
    let query = "update pillarbox_admin.installation set id = gen_random_uuid() returning id";
    sqlx::query_scalar(query).fetch_one(database.pool()).await.unwrap()
}

#[tokio::test]
async fn a_command_refuses_a_server_and_a_database_of_two_installations() {
    let (database, other) = (database().await, database().await);
    let (id, id_of_other) = (new_installation(&database).await, new_installation(&other).await);
    let (cli, app) = Cli::with_api(&database).await;
    assert_eq!(app.anonymous().get("/healthz").await.json()["installation"], id.to_string());
    let mixed = Cli::with_server(&other, &app);
    for command in ["cursors", "tail --once", "key list", "subscribers list", "send order.paid {}"] {
        let refused = mixed.refused(command).await;
        assert!(
            refused.contains(&id.to_string()) && refused.contains(&id_of_other.to_string()),
            "{command}: {refused}"
        );
        cli.ok(command).await;
    }
    // A command that needs only one of them does not ask the other.
    let unreachable = Cli { url: "postgres://127.0.0.1:1/x".to_owned(), ..Cli::with_server(&database, &app) };
    let (code, _, note) = unreachable.run("cursors").await;
    assert!(code == Some(0) && note.contains("is not compared with the server"), "{note}");
    app.stop().await;
}

//! The API does what its OpenAPI description says: schemathesis generates requests from the description, valid and invalid
//! ones, and checks every response. `scripts/setup test` installs it; `tests/schemathesis` has its settings and our checks.

use std::process::Output;
use std::time::Duration;

use futures_util::future::join_all;
use server::migrations;
use testkit::{Client, TestApp, TestDatabase};
use tokio::process::Command;
use uuid::Uuid;

use crate::hub::fixture::test_size;
use crate::identity::fixture::{person, unlimited};
use crate::support::caller;

const SCHEMATHESIS: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/python/bin/schemathesis");
const SETTINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/schemathesis");
/// The same requests in every run. `PBX_SEED` is for a search with other ones.
const SEED: &str = "16";
/// The runs take about 25 s of CPU time together.
const TIME_MAX: Duration = Duration::from_secs(200);

/// The routes of users. A stream does not end, so it is not among them.
const USER_PATHS: &str = "^/((event|join)/|progress/v1/projects(?!.*/events$)|notify/(?!.*inbox/events))";

/// One run of schemathesis: the caller, the operations, and how many requests are generated for each.
struct Run {
    name: &'static str,
    caller: Client,
    paths: &'static str,
    phases: &'static str,
    examples: usize,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_api_and_its_description_agree_for_every_caller() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, unlimited).await;
    let member = person(&app, database.pool(), "member").await;
    let (all, random) = ("coverage,fuzzing", "fuzzing");
    let run = |name, caller, paths, phases, examples| Run { name, caller, paths, phases, examples };
    let runs = [
        run("an admin", app.admin(), "^/(admin|events|healthz|readyz|metrics)", all, test_size(5, 300)),
        run("a manager", caller(&app, "manage", "acme").await, "^/hub/", all, test_size(5, 300)),
        run("a user", app.user(Uuid::now_v7(), None), USER_PATHS, all, test_size(5, 300)),
        // Without the routes that end the session of the caller.
        run("a member", member.client, r"^/(identity/v1/(?!logout|sessions)|\.well-known)", all, test_size(5, 300)),
        run("an anonymous caller", app.anonymous(), "^/", random, test_size(2, 100)),
    ];
    let seed = std::env::var("PBX_SEED").unwrap_or_else(|_| SEED.to_owned());
    let outputs = join_all(runs.iter().map(|run| schemathesis(run, &seed))).await;
    for (run, output) in runs.iter().zip(outputs) {
        let text = String::from_utf8_lossy(&output.stdout);
        println!("{}: seed {seed}, {}", run.name, text.lines().find(|line| line.contains(" generated")).unwrap_or("?"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "the description is wrong for {}, seed {seed}:\n{text}\n{errors}", run.name);
    }
    app.stop().await;
}

async fn schemathesis(run: &Run, seed: &str) -> Output {
    let mut command = Command::new(SCHEMATHESIS);
    command
        .args(["--config-file", &format!("{SETTINGS}/schemathesis.toml"), "run"])
        .arg(format!("{}/openapi.json", run.caller.base()))
        .args(["--include-path-regex", run.paths, "--phases", run.phases, "--seed", seed])
        .args(["--max-examples", &run.examples.to_string(), "--checks", "all", "--workers", "1"])
        .env("SCHEMATHESIS_HOOKS", format!("{SETTINGS}/hooks.py"))
        .env("NO_COLOR", "1")
        .current_dir(env!("CARGO_TARGET_TMPDIR"))
        .kill_on_drop(true);
    if let Some(credential) = run.caller.credential_if_any() {
        command.args(["--header", &format!("Authorization:Bearer {credential}")]);
    }
    let ended = tokio::time::timeout(TIME_MAX, command.output()).await;
    ended.expect("schemathesis ends in time").expect("`scripts/setup test` installs schemathesis")
}

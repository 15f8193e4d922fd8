//! The programs of docs/sql-clients.md: five clients of PostgreSQL post a message each.

use std::os::unix::fs::symlink;

use serde_json::json;
use server::migrations;
use sqlx::AssertSqlSafe;
use testkit::TestDatabase;
use tokio::process::Command;
use uuid::Uuid;

use crate::guides::{code_blocks, python::PYTHON};
use crate::server::process::DataFolder;
use crate::support::DEADLINE;

const PAGE: &str = "docs/sql-clients.md";
/// `scripts/setup test` installs them.
const NODE_PACKAGES: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/node/node_modules");
/// `scripts/setup test` builds it.
const RUST_PROGRAM: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/rust/debug/tokio-postgres-post");
/// What runs a program, the program, and its table.
const PROGRAMS: [(&str, &str, &str); 5] = [
    (PYTHON, "psycopg_post.py", "psycopg_orders"),
    (PYTHON, "asyncpg_post.py", "asyncpg_orders"),
    ("node", "node_postgres.mjs", "node_orders"),
    ("node", "postgres_js.mjs", "postgres_js_orders"),
    (RUST_PROGRAM, "tokio_postgres.rs", "tokio_orders"),
];

#[tokio::test]
async fn programs_of_five_clients_that_run_twice_post_one_message_each() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    std::fs::create_dir(folder.path()).unwrap();
    // An ECMAScript module finds its packages in a folder above it only.
    symlink(NODE_PACKAGES, folder.path().join("node_modules")).unwrap();
    let blocks = code_blocks(PAGE, None);
    let programs: Vec<_> = blocks.iter().filter_map(|(info, code)| Some((program_name(info)?, code))).collect();
    assert_eq!(programs.iter().map(|(name, _)| *name).collect::<Vec<_>>(), PROGRAMS.map(|(_, name, _)| name));
    for (name, code) in programs {
        std::fs::write(folder.path().join(name), code).unwrap();
    }

    for (runs_it, name, table) in PROGRAMS {
        let message_id = Uuid::new_v4();
        for _ in 0..2 {
            let mut program = Command::new(runs_it);
            program.arg(name).current_dir(folder.path()).kill_on_drop(true);
            program.env("DATABASE_URL", database.url()).env("MESSAGE_ID", message_id.to_string());
            let output = tokio::time::timeout(DEADLINE, program.output()).await.expect("the program ends").unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{name}: {stderr}\n(`scripts/setup test` installs its packages)");
            assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{message_id}\n"), "{name}: {stderr}");
        }
        assert_eq!(messages(&database, message_id).await, [expected_message()], "{name}");
        assert_eq!(count(&database, table).await, 1, "{name}");
    }
    assert_eq!(count(&database, "pillarbox.log").await, 5, "no program has posted another message");
}

#[test]
fn the_program_for_tokio_postgres_is_the_one_that_setup_builds() {
    let blocks = code_blocks(PAGE, None);
    let (_, code) =
        blocks.iter().find(|(info, _)| info == "rust tokio_postgres.rs").expect("the page has this program");
    assert_eq!(code, include_str!("../../rust/src/main.rs").trim_end());
}

/// The file name behind the language, if the block is a program.
fn program_name(info: &str) -> Option<&str> {
    ["python ", "js ", "rust "].iter().find_map(|language| info.strip_prefix(language))
}

/// What each program posts.
fn expected_message() -> serde_json::Value {
    json!({
        "topic": "order.created",
        "key": "5",
        "aggregate_type": "ORDER",
        "aggregate_id": 5,
        "headers": {"team": "blue"},
        "payload": {"id": 5},
    })
}

/// The messages with this id, as JSON with the fields of `expected_message`.
async fn messages(database: &TestDatabase, message_id: Uuid) -> Vec<serde_json::Value> {
    let query = "select jsonb_build_object('topic', topic, 'key', key, 'aggregate_type', aggregate_type,
                     'aggregate_id', aggregate_id, 'headers', headers, 'payload', payload)
                 from pillarbox.log where message_id = $1";
    sqlx::query_scalar(query).bind(message_id).fetch_all(database.pool()).await.unwrap()
}

async fn count(database: &TestDatabase, table: &str) -> i64 {
    let query = AssertSqlSafe(format!("select count(*) from {table}"));
    sqlx::query_scalar(query).fetch_one(database.pool()).await.unwrap()
}

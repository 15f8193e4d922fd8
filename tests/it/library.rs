//! The library alone: a program outside of the workspace, typed handlers, and the support for tests.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use pillarbox::database::Migrations;
use pillarbox::{Message, Pillarbox, Received, StartError, Tx, post, testing};
use serde::{Deserialize, Serialize};
use testkit::TestDatabase;

/// The crates that a program pulls in with the library, itself included. The program builds and trusts each of them.
const CRATES_MAX: usize = 140;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct OrderPaid {
    order: i64,
}

impl Message for OrderPaid {
    const TOPIC: &str = "order.paid";

    fn key(&self) -> Option<String> {
        Some(self.order.to_string())
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct InvoiceWritten {
    order: i64,
}

impl Message for InvoiceWritten {
    const TOPIC: &str = "invoice.written";
}

async fn write_invoice(tx: &mut Tx, paid: Received<OrderPaid>) -> Result<(), pillarbox::HandlerError> {
    let insert = sqlx::query("insert into public.invoice (order_id, message_id) values ($1, $2)");
    insert.bind(paid.message.order).bind(paid.id).execute(&mut **tx).await?;
    post(tx, &InvoiceWritten { order: paid.message.order }).await?;
    Ok(())
}

async fn database() -> TestDatabase {
    let database = TestDatabase::new(&Migrations::default()).await;
    let table = "create table public.invoice (order_id bigint primary key, message_id uuid not null)";
    sqlx::query(table).execute(database.pool()).await.unwrap();
    database
}

#[tokio::test]
async fn a_typed_handler_processes_what_was_committed() {
    let database = database().await;
    let db = database.pool();
    let running = Pillarbox::new(db.clone()).handler("invoices", write_invoice).start().await.unwrap();
    let mut rolled_back = db.begin().await.unwrap();
    post(&mut rolled_back, &OrderPaid { order: 1 }).await.unwrap();
    rolled_back.rollback().await.unwrap();
    let mut tx = db.begin().await.unwrap();
    let id = post(&mut tx, &OrderPaid { order: 2 }).await.unwrap();
    tx.commit().await.unwrap();
    // Another source may post any payload under the topic of the type.
    sqlx::query("select pillarbox.post('order.paid', '{\"order\": 3}')").execute(db).await.unwrap();
    assert!(testing::wait_until_processed(db, "invoices", Duration::from_secs(30)).await.unwrap());
    let invoices: Vec<(i64, uuid::Uuid)> =
        sqlx::query_as("select order_id, message_id from public.invoice").fetch_all(db).await.unwrap();
    assert_eq!(invoices, [(2, id)]);
    let down: Vec<_> = running.health().into_iter().filter(|state| !state.up).collect();
    assert!(down.is_empty(), "{down:?}");
    running.stop().await;
    let workers: i64 = sqlx::query_scalar("select count(*) from pillarbox.replica").fetch_one(db).await.unwrap();
    assert_eq!(workers, 0, "a process that stops hands its work over");
}

#[tokio::test]
async fn a_handler_is_tested_without_a_running_process() {
    let database = database().await;
    let mut tx = database.pool().begin().await.unwrap();
    testing::handle(&write_invoice, &mut tx, &OrderPaid { order: 7 }).await.unwrap();
    assert_eq!(testing::posted::<InvoiceWritten>(&mut tx).await.unwrap(), [InvoiceWritten { order: 7 }]);
    assert_eq!(testing::posted::<OrderPaid>(&mut tx).await.unwrap(), []);
    let again = testing::handle(&write_invoice, &mut tx, &OrderPaid { order: 7 }).await;
    assert!(again.is_err(), "the invoice exists");
}

#[tokio::test]
async fn a_start_without_migrations_says_what_to_do() {
    let database = TestDatabase::empty().await;
    let error = Pillarbox::new(database.pool().clone()).start().await.err().unwrap();
    assert!(matches!(error, StartError::NotMigrated(_)), "{error}");
    assert!(error.to_string().contains("pillarbox::database::migrate"), "{error}");
}

/// The program has only the files that another company would have: its manifest and its source. It is built with the versions
/// of this workspace.
#[tokio::test]
async fn a_program_outside_of_the_workspace_runs() {
    let folder = repository().join("crates/pillarbox/outside");
    std::fs::copy(repository().join("Cargo.lock"), folder.join("Cargo.lock")).unwrap();
    let target = target().join("outside");
    cargo(&folder, &["build", "--offline", "--target-dir", target.to_str().unwrap()]);
    // Only now, because the time of a test that uses servers is limited.
    let database = TestDatabase::empty().await;
    let run = Command::new(target.join("debug/outside")).env("DATABASE_URL", database.url()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&run.stdout), "invoices: [2]\n", "{}", String::from_utf8_lossy(&run.stderr));
    let tree = cargo(&folder, &["tree", "--offline", "--edges", "normal", "--prefix", "none", "--no-dedupe"]);
    let mut crates: Vec<&[u8]> = tree.stdout.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).collect();
    crates.sort_unstable();
    crates.dedup();
    assert!(crates.len() <= CRATES_MAX, "{} crates", crates.len());
}

fn cargo(folder: &Path, arguments: &[&str]) -> Output {
    let done = Command::new(env!("CARGO")).args(arguments).current_dir(folder).output().unwrap();
    assert!(done.status.success(), "cargo {arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    done
}

/// The target folder of the build that this test belongs to.
fn target() -> PathBuf {
    std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned()
}

fn repository() -> PathBuf {
    crate::guides::repository()
}

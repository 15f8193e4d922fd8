//! Warnings that operators depend on: each is logged, with its level, when its cause occurs. A tidy test compares the lines of
//! the runbook with the tests that read them.

use std::sync::Arc;

use pillarbox::consumers::StartAt;
use pillarbox::database::cluster_identity;
use pillarbox::log::Message;
use pillarbox::operations::maintenance::{self, Retention};
use testkit::{CapturedLog, Pillarbox, eventually, program};

use crate::consumers::support::{
    Process, Recorder, TIMEOUT, database, fast_options, post_numbers, recorder, wait_for_count, wait_for_effects,
};
use crate::server::process::{ADMIN_KEY, DataFolder, serve};

async fn until_logged(log: &CapturedLog, level: &str, text: &str) {
    eventually(&format!("{level} {text}"), TIMEOUT, async || match log.has(level, text) {
        true => Ok(()),
        false => Err(log.text()),
    })
    .await;
}

#[tokio::test]
async fn what_happens_to_a_consumer_is_logged() {
    let (log, database) = (CapturedLog::start(), database().await);
    let db = database.pool();
    let handler = Recorder(|_: &Message, number| if number < 0 { Err("negative".into()) } else { Ok(()) });
    let process = Process::start_with(db, Arc::new(handler), StartAt::Beginning, fast_options());
    post_numbers(db, Some("bad"), [-1]).await;
    until_logged(&log, "WARN", "a message failed").await;
    wait_for_count(db, "dead_letter", 1).await;

    // A worker of a process that was killed.
    let killed = "insert into pillarbox.shard_worker (consumer, owner, replica)
                  values ('effects', gen_random_uuid(), gen_random_uuid())";
    sqlx::query(killed).execute(db).await.unwrap();
    until_logged(&log, "WARN", "the lease of another process expired; its shards are taken over").await;

    // What a failover does to the unlogged tables.
    sqlx::raw_sql("begin; delete from pillarbox.incarnation; delete from pillarbox.shard_worker; commit")
        .execute(db)
        .await
        .unwrap();
    let failed_over = "the database was restarted after a crash, or has failed over; all state is loaded again";
    until_logged(&log, "WARN", failed_over).await;
    process.stop().await;
}

#[tokio::test]
async fn a_consumer_that_lapses_and_a_restored_database_are_logged() {
    let (log, database) = (CapturedLog::start(), database().await);
    let db = database.pool();
    let process = Process::start(db, recorder());
    post_numbers(db, None, [1]).await;
    wait_for_effects(db, 1).await;
    process.stop().await;
    post_numbers(db, None, [2]).await;
    let old = "update pillarbox.cursor set since = since - interval '15 days';
               update pillarbox.position set old_at = old_at - interval '15 days'";
    sqlx::raw_sql(old).execute(db).await.unwrap();
    maintenance::run_once(db, Retention::default(), maintenance::CATCH_UP_TIME).await.unwrap();
    assert!(log.has("ERROR", "a consumer lapsed because it was too far behind"), "{}", log.text());
    assert!(log.text().contains("consumer=\"effects\""), "{}", log.text());

    let restored = "this database was restored or copied: nothing is sent until an operator runs `pillarbox recover`";
    cluster_identity::check(db).await.unwrap();
    assert!(!log.has("WARN", restored));
    sqlx::query("update pillarbox.cluster_identity set log_oid = 1").execute(db).await.unwrap();
    cluster_identity::check(db).await.unwrap();
    assert!(log.has("WARN", restored), "{}", log.text());
}

#[tokio::test]
async fn a_secret_on_the_command_line_is_logged_without_its_value() {
    let (folder, database) = (DataFolder::new(), database().await);
    let url = database.url();
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text(), "--database-url", &url];
    let secret = format!("admin_key={ADMIN_KEY}");
    let args = [&args[..], &["--set", &secret]].concat();
    let process = Pillarbox::start(program(), &args, &[]);
    let says = "contains a secret, and every user of this machine can see the arguments of a process";
    let warns = |line: &str| line.contains("WARN") && line.contains(says) && line.contains("admin_key");
    let line = process.wait_for_line(warns, TIMEOUT).await;
    assert!(line.contains("set PILLARBOX_ADMIN_KEY instead") && !process.logs().contains(ADMIN_KEY), "{line}");
    drop(process);

    // From the environment it is no warning.
    let mut quiet = serve(&folder, &database, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    quiet.base_url().await;
    assert!(!quiet.logs().contains("admin_key contains a secret"), "{}", quiet.logs());
    assert!(quiet.terminate().await.success());
}

//! The command `parity`: its output, and with `--check` its exit code, for scripts. `relay/dual_publish.rs` proves that it is exact.

use mailbox::consumers::{StartAt, Subscription};
use mailbox::log::MessagePattern;

use crate::consumers::removal::register;
use crate::consumers::support::{Process, database, fast_options, post_numbers, recorder, wait_for_effects};
use crate::operator::commands::Cli;

#[tokio::test]
async fn parity_check_reports_what_one_side_lacks() {
    let database = database().await;
    let (db, cli) = (database.pool(), Cli::new(&database));
    let check = async || {
        let (code, out, error) = cli.run("parity --check").await;
        (code, format!("{out}{error}"))
    };
    let (code, output) = check().await;
    assert!(code == Some(1) && output.contains("relay.legacy is not registered"), "{code:?} {output}");
    assert!(cli.ok("parity").await.contains("relay.legacy is not registered"));
    register(db, "relay.legacy", StartAt::Beginning).await;
    let (code, output) = check().await;
    assert!(code == Some(1) && output.contains("relay.email is not registered"), "{code:?} {output}");
    register(db, "relay.email", StartAt::Beginning).await;
    post_numbers(db, None, 1..=3).await;
    let (code, output) = check().await;
    assert!(code == Some(0) && output.contains("3  pending  pending"), "on their way to both: {output}");
    assert!(output.contains("No process runs relay.legacy"), "{output}");

    let process = Process::idle(db);
    let read = |consumer: &'static str| {
        let matching = MessagePattern { sources: vec!["test".to_owned()], ..MessagePattern::default() };
        let (start, handler, options) = (StartAt::Beginning, recorder(), fast_options());
        process.runtime.subscribe(&Subscription { consumer, matching, start, handler, options });
    };
    read("relay.email");
    wait_for_effects(db, 3).await;
    let (code, output) = check().await;
    assert!(code == Some(1) && output.contains("error: 3 events are missing on one side"), "{code:?} {output}");
    assert!(output.contains("new: sent  legacy: pending"), "{output}");
    read("relay.legacy");
    wait_for_effects(db, 6).await;
    let (code, output) = check().await;
    assert!(code == Some(0) && output.contains("has received everything that the new one has"), "{code:?} {output}");
    sqlx::query(
        "insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, log_id, message_id, source, tenant,
             topic, headers, payload, at)
         select 'relay.legacy', 0, 0, 1, 'x', id, message_id, source, tenant, topic, headers, payload, at
         from pillarbox.log limit 1",
    )
    .execute(db)
    .await
    .unwrap();
    let (code, output) = check().await;
    assert!(code == Some(1) && output.contains("new: sent  legacy: dead"), "{code:?} {output}");
    assert!(cli.ok("parity").await.contains("1 events are missing on one side"));

    // The records of the service notify are compared, too, if they are in this database.
    let records = "create schema if not exists pillarbox_notify;
                   create table if not exists pillarbox_notify.mail (message_id uuid)";
    sqlx::raw_sql(records).execute(db).await.unwrap();
    assert!(cli.ok("parity").await.contains("no"), "nothing is recorded");
    process.stop().await;
}

#[tokio::test]
async fn a_consumer_continues_where_another_one_has_stopped() {
    let database = database().await;
    let (db, cli) = (database.pool(), Cli::new(&database));
    register(db, "relay.legacy", StartAt::Beginning).await;
    let process = Process::start(db, recorder());
    post_numbers(db, Some("k"), 1..=3).await;
    wait_for_effects(db, 3).await;
    let refused = cli.refused("cursors reset relay.legacy --like effects").await;
    assert!(refused.contains("effects is in use"), "{refused}");
    process.stop().await;
    assert!(cli.refused("cursors reset relay.legacy --like nobody").await.contains("no consumer nobody"));
    let refused = cli.refused("cursors reset effects --like relay.legacy").await;
    assert!(refused.contains("has read 3 messages"), "nobody would process them: {refused}");
    post_numbers(db, Some("k"), 4..=5).await;
    assert!(cli.ok("cursors reset relay.legacy --like effects").await.contains("where effects has stopped"));
    let pending = "select count(*) from pillarbox.outbox_status where consumer = 'relay.legacy' and status = 'pending'";
    assert_eq!(
        sqlx::query_scalar::<_, i64>(pending).fetch_one(db).await.unwrap(),
        2,
        "what the other one has not read"
    );
    let park = "insert into pillarbox.parked (consumer, shard, run, attempts, log_id, message_id, source, tenant, topic, headers,
                    payload, at)
                select 'effects', 0, 0, 1, id, message_id, source, tenant, topic, headers, payload, at from pillarbox.log limit 1";
    sqlx::query(park).execute(db).await.unwrap();
    let refused = cli.refused("cursors reset relay.legacy --like effects").await;
    assert!(refused.contains("1 messages of effects are parked"), "{refused}");
}

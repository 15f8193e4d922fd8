//! The command `parity`: its output, and with `--check` its exit code, for scripts. `relay/dual_publish.rs` proves that it is exact.

use std::sync::Arc;

use pillarbox::consumers::{Handler, StartAt, Subscription};
use pillarbox::log::{Message, MessagePattern};
use serde_json::Value;

use crate::consumers::removal::register;
use crate::consumers::support::{
    Process, Recorder, database, fast_options, post_numbers, recorder, wait_for_count, wait_for_effects,
};
use crate::operator::commands::Cli;

#[tokio::test]
async fn parity_check_reports_what_one_side_lacks() {
    let database = database().await;
    let (db, cli) = (database.pool(), Cli::new(&database));
    let run = async |command: &str| {
        let (code, out, error) = cli.run(command).await;
        (code, format!("{out}{error}"))
    };
    let check = async || run("parity --check --exchanges-only").await;
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
        process.runtime.subscribe(&Subscription { consumer: consumer.into(), matching, start, handler, options });
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
    assert!(cli.ok("parity").await.contains("1 event is missing on one side"));

    process.stop().await;
}

#[tokio::test]
async fn parity_check_requires_the_record_of_the_new_consumer() {
    let database = database().await;
    let (db, cli) = (database.pool(), Cli::new(&database));
    let process = Process::idle(db);
    let read = |consumer: &'static str, handler: Arc<dyn Handler>| {
        let matching = MessagePattern { sources: vec!["test".to_owned()], ..MessagePattern::default() };
        let mut options = fast_options();
        options.worker.retry.retries = Some(0);
        process.runtime.subscribe(&Subscription {
            consumer: consumer.into(),
            matching,
            start: StartAt::Beginning,
            handler,
            options,
        });
    };
    read("relay.email", recorder());
    read("relay.legacy", recorder());
    post_numbers(db, None, 1..=3).await;
    wait_for_effects(db, 6).await;
    let check = async || cli.run("parity --check").await;
    let (code, _, error) = check().await;
    assert!(code == Some(1) && error.contains("notify.mail has never run on this database"), "{code:?} {error}");
    let output = cli.ok("parity").await;
    assert!(output.contains("has received everything") && output.contains("notify.mail has never run"), "{output}");

    // It renders all of them but one.
    let fails_once = Recorder(|_: &Message, number| if number == 2 { Err("no such template".into()) } else { Ok(()) });
    read("notify.mail", Arc::new(fails_once));
    wait_for_effects(db, 8).await;
    wait_for_count(db, "dead_letter", 1).await;
    let (code, _, error) = check().await;
    assert!(code == Some(1) && error.contains("1 event is missing on one side"), "{code:?} {error}");
    assert!(error.contains("new: sent  legacy: sent  recorded: no"), "{error}");
    let (_, lines, _) = cli.run("parity --json").await;
    let missing: Value = serde_json::from_str(&lines).unwrap();
    assert_eq!(missing["recorded"], false);
    assert_eq!(cli.run("parity --check --exchanges-only").await.0, Some(0));
    sqlx::query(
        "insert into pillarbox.inbox (consumer, message_id) select consumer, message_id from pillarbox.dead_letter",
    )
    .execute(db)
    .await
    .unwrap();
    let output = cli.ok("parity --check").await;
    assert!(output.contains("notify.mail has a record of all of it"), "{output}");
    process.stop().await;
}

#[tokio::test]
async fn parity_requires_a_record_only_of_messages_for_the_new_consumer_in_either_table() {
    let database = database().await;
    let (db, cli) = (database.pool(), Cli::new(&database));
    let process = Process::idle(db);
    let read = |consumer: &'static str, source: &str| {
        let matching = MessagePattern { sources: vec![source.to_owned()], ..MessagePattern::default() };
        let (start, handler, options) = (StartAt::Beginning, recorder(), fast_options());
        process.runtime.subscribe(&Subscription { consumer: consumer.into(), matching, start, handler, options });
    };
    read("relay.email", "test");
    read("relay.legacy", "test");
    read("notify.mail", "other");
    post_numbers(db, None, 1..=3).await;
    wait_for_effects(db, 6).await;
    let output = cli.ok("parity --check").await;
    assert!(output.contains("has received everything"), "none of them is for notify.mail: {output}");
    process.stop().await;
    let all = "update pillarbox.cursor set (included, excluded) =
                   (select included, excluded from pillarbox.cursor where consumer = 'relay.email') where consumer = 'notify.mail'";
    sqlx::query(all).execute(db).await.unwrap();
    let (code, _, error) = cli.run("parity --check").await;
    assert!(code == Some(1) && error.contains("3 events are missing"), "{code:?} {error}");
    let record = "insert into pillarbox.inbox_foreign (consumer, message_id)
                  select 'notify.mail', message_id || '/0' from pillarbox.log where source = 'test'";
    sqlx::query(record).execute(db).await.unwrap();
    assert!(cli.ok("parity --check").await.contains("has a record of all of it"));
}

#[tokio::test]
async fn a_consumer_continues_where_another_one_has_stopped() {
    let database = database().await;
    let (db, (cli, app)) = (database.pool(), Cli::with_api(&database).await);
    register(db, "relay.legacy", StartAt::Beginning).await;
    let process = Process::start(db, recorder());
    post_numbers(db, Some("k"), 1..=3).await;
    wait_for_effects(db, 3).await;
    let refused = cli.refused("cursors reset relay.legacy --like effects").await;
    assert!(refused.contains("effects is in use"), "{refused}");
    process.stop().await;
    assert!(cli.refused("cursors reset relay.legacy --like missing").await.contains("no consumer missing"));
    let refused = cli.refused("cursors reset effects --like relay.legacy").await;
    assert!(refused.contains("has read 3 messages"), "neither would process them: {refused}");
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
    assert!(refused.contains("1 message of effects is parked"), "{refused}");
    app.stop().await;
}

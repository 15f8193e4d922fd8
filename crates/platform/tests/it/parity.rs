//! The command `parity --check`: its exit code and its output for scripts.

use mailbox::consumers::StartAt;
use mailbox::operations::cursors;

use crate::consumers::removal::register;
use crate::consumers::support::{database, post_numbers};
use crate::operator::commands::Cli;

#[tokio::test]
async fn parity_check_reports_whether_the_legacy_exchange_has_everything() {
    let database = database().await;
    let (db, desk) = (database.pool(), Cli::new(&database));
    let check = async || {
        let (code, out, error) = desk.run("parity --check").await;
        (code, format!("{out}{error}"))
    };
    let (code, output) = check().await;
    assert!(code == Some(1) && output.contains("relay.legacy is not registered"), "{code:?} {output}");
    register(db, "relay.legacy", StartAt::Beginning).await;
    let (code, output) = check().await;
    assert!(code == Some(1) && output.contains("relay.email is not registered"), "{code:?} {output}");
    post_numbers(db, None, 1..=3).await;
    register(db, "relay.email", StartAt::Now).await;
    let (code, output) = check().await;
    assert!(
        code == Some(1) && output.contains("error: The legacy exchange is behind by 3 messages"),
        "{code:?} {output}"
    );
    cursors::reset(db, "relay.legacy", None).await.unwrap();
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
    assert!(code == Some(1) && output.contains("1 of its messages are parked or dead"), "{code:?} {output}");
    desk.ok("parity").await;
}

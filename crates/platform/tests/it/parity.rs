//! What `parity` answers a script.

use mailbox::cursor::{self, Start};

use crate::consuming::{database, post_numbers};
use crate::cursors::register;
use crate::operator_commands::Desk;

#[tokio::test]
async fn a_script_is_told_by_parity_whether_the_legacy_exchange_has_all() {
    let database = database().await;
    let (db, desk) = (database.pool(), Desk::at(&database));
    let check = async || {
        let (code, out, error) = desk.type_in("parity --check").await;
        (code, format!("{out}{error}"))
    };
    let (code, told) = check().await;
    assert!(code == Some(1) && told.contains("relay.legacy is not registered"), "{code:?} {told}");
    register(db, "relay.legacy", Start::Beginning).await;
    let (code, told) = check().await;
    assert!(code == Some(1) && told.contains("relay.email is not registered"), "{code:?} {told}");
    post_numbers(db, None, 1..=3).await;
    register(db, "relay.email", Start::Now).await;
    let (code, told) = check().await;
    assert!(code == Some(1) && told.contains("error: The legacy exchange is behind by 3 messages"), "{code:?} {told}");
    cursor::reset(db, "relay.legacy", None).await.unwrap();
    let (code, told) = check().await;
    assert!(code == Some(0) && told.contains("has all that the new one has"), "{code:?} {told}");
    sqlx::query(
        "insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, log_id, message_id, source, tenant,
             topic, headers, payload, at)
         select 'relay.legacy', 0, 0, 1, 'x', id, message_id, source, tenant, topic, headers, payload, at
         from pillarbox.log limit 1",
    )
    .execute(db)
    .await
    .unwrap();
    let (code, told) = check().await;
    assert!(code == Some(1) && told.contains("1 of its messages are parked or dead"), "{code:?} {told}");
    desk.ok("parity").await;
}

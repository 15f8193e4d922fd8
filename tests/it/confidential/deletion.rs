//! All confidential messages of a key are blanked at once, as when an account is deleted.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pillarbox::log::Tenant;
use pillarbox::log::{blank_key, post_all};

use crate::confidential::support::{
    EmailHandler, IDENTITY, blank, create_email_table, email, email_process, occurrences, post_email, state,
};
use crate::consumers::support::{count, database, fast_options, post_numbers, wait_for_count};

#[tokio::test]
async fn deleting_an_account_blanks_all_confidential_messages_of_its_key() {
    let database = database().await;
    let (db, handler) = (database.pool(), Arc::new(EmailHandler::default()));
    create_email_table(db).await;
    handler.is_failing.store(true, Ordering::SeqCst);
    let mut options = fast_options();
    options.worker.retry.retries = Some(0);
    let process = email_process(db, &handler, options);
    post_email(db, &email("ann", "s3cret-dead")).await;
    wait_for_count(db, "dead_letter", 1).await;
    process.stop().await;
    let mut tx = db.begin().await.unwrap();
    post_all(&mut tx, &IDENTITY, &[email("ann", "s3cret-ann"), email("bob", "s3cret-bob")]).await.unwrap();
    tx.commit().await.unwrap();
    let pending = post_email(db, &email("ann", "s3cret-pending")).await;
    post_numbers(db, Some("ann"), [1]).await;
    assert_eq!(count(db, "confidential").await, 4, "an ordinary message has no row");

    let mut tx = db.begin().await.unwrap();
    assert_eq!(blank_key(&mut tx, &Tenant::main(), "ann", "the account was deleted").await.unwrap(), 3);
    tx.rollback().await.unwrap();
    assert!(occurrences(&database, "s3cret-dead").await > 0, "only with the transaction");
    let mut tx = db.begin().await.unwrap();
    blank_key(&mut tx, &Tenant::main(), "ann", "the account was deleted").await.unwrap();
    tx.commit().await.unwrap();
    for secret in ["s3cret-dead", "s3cret-ann", "s3cret-pending"] {
        assert_eq!(occurrences(&database, secret).await, 0, "{secret}");
    }
    assert!(occurrences(&database, "s3cret-bob").await > 0, "the messages of others stay");
    let (status, error) = state(db, "notify.mail", pending).await;
    assert_eq!((status.as_str(), error.as_deref()), ("discarded", Some("the account was deleted")));
    blank(db).await;
    assert_eq!(count(db, "confidential").await, 3, "the dead letter needs no further care");
}

//! A process that is killed while it delivers: each notification leads to one e-mail.

use server::migrations;
use sqlx::PgPool;
use testkit::{TestDatabase, eventually};

use super::fixture::{insert_many, insert_person, statuses};
use crate::hub::fixture::test_size;
use crate::server::process::{DataFolder, serve};
use crate::support::DEADLINE;

async fn count(db: &PgPool, query: &'static str) -> i64 {
    sqlx::query_scalar(query).fetch_one(db).await.unwrap()
}

#[tokio::test]
async fn a_killed_process_delivers_nothing_twice_and_loses_nothing() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, folder) = (database.pool(), DataFolder::new());
    let size = test_size(3_000, 30_000);
    let user = insert_person(db, "ada@example.org").await;
    insert_many(db, &vec![user; size], "order.paid").await;
    let size = size as i64;
    let environment = [("PILLARBOX_MAIL__CAPTURE_MAX", "100000")];
    let mut killed_during_delivery = 0;
    let mut process = serve(&folder, &database, &environment);
    for _ in 0..test_size(2, 20) {
        let before = count(db, "select count(*) from pillarbox_notify.mail").await;
        eventually("some are delivered", DEADLINE, async || {
            count(db, "select count(*) from pillarbox_notify.mail").await > before.min(size - 1)
        })
        .await;
        process.kill9();
        let waiting = statuses(db).await.get("waiting").copied().unwrap_or(0);
        killed_during_delivery += i64::from(waiting > 0);
        assert_eq!(
            count(db, "select count(*) from pillarbox_notify.mail").await,
            size - waiting,
            "together or not at all"
        );
        process = serve(&folder, &database, &environment);
    }
    assert!(killed_during_delivery > 0, "the process was killed too late");
    eventually("all are delivered", DEADLINE, async || match statuses(db).await {
        found if found.get("delivered") == Some(&size) => Ok(()),
        other => Err(other),
    })
    .await;
    assert_eq!(count(db, "select count(*) from pillarbox_notify.mail").await, size);
    let keys =
        "select count(distinct idempotency_key) from pillarbox_notify.mail where idempotency_key like 'notification:%'";
    assert_eq!(count(db, keys).await, size);
    assert!(process.terminate().await.success());
}
